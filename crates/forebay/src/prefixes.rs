//! What was computed of earlier prompts and answers, kept on disk between runs (docs/sessions.md).

use std::path::{Path, PathBuf};

use forebay_core::ByteSize;
use forebay_engine::{Engine, PrefixConfig};

use crate::console;
use crate::dirs;
use crate::identity;

/// Where prefixes are kept unless a folder is named.
pub fn usual_folder() -> Option<PathBuf> {
    dirs::state().map(|state| state.join("prefixes"))
}

/// Keeps prefixes, or does nothing where none are kept.
pub struct Keeper {
    keeps: bool,
    /// What went wrong is said once.
    said: bool,
}

impl Keeper {
    /// Goes on from what is in `folder` about the model of `dir` and keeps more of it there, up to `limit` bytes; nothing without a folder. What
    /// is wrong with it is said and no reason not to answer.
    pub fn begin(dir: &Path, engine: &mut Engine, folder: Option<&Path>, limit: ByteSize) -> Self {
        let Some(folder) = folder else { return Self { keeps: false, said: false } };
        let config = PrefixConfig { dir: folder.to_owned(), limit: limit.0 };
        let opened = identity::of_content(dir, engine)
            .map_err(|error| {
                format!("prefixes are not kept: the model's files cannot be read again: {error}")
            })
            .and_then(|model_hash| {
                engine.keep_prefixes(config, model_hash).map_err(|error| error.to_string())
            });
        if let Err(error) = &opened {
            console::note(error);
        }
        Self { keeps: opened.is_ok(), said: false }
    }

    /// Writes what is new. Called when an answer is out, so that nobody waits for it.
    pub fn keep(&mut self, engine: &mut Engine) {
        if !self.keeps {
            return;
        }
        let trouble = match engine.save_prefixes() {
            Ok(saved) if saved.full => Some(
                "this conversation is longer than --prefix-store-size allows to keep; its beginning is kept"
                    .to_owned(),
            ),
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(trouble) = trouble.filter(|_| !std::mem::replace(&mut self.said, true)) {
            console::note(&trouble);
        }
    }
}
