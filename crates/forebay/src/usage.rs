//! What a model used in earlier runs, for the cache of this one: a file in the cache folder.

use std::path::{Path, PathBuf};

use forebay_engine::Engine;
use forebay_tiers::history::{History, HistoryError};

use crate::console;
use crate::dirs;
use crate::identity;

/// The history of one model on this machine.
pub struct Usage {
    path: PathBuf,
    history: History,
}

impl Usage {
    /// Reads what is known of the model in `dir` and tells the engine's caches. `None` where that cannot help: every
    /// expert fits into memory. What is wrong with the file is said and no reason not to run.
    pub fn begin(dir: &Path, engine: &mut Engine) -> Option<Self> {
        if engine.plan().holds_everything() {
            return None;
        }
        let identity = identity::of(dir, engine).ok()?;
        let folder = dirs::cache().unwrap_or_else(dirs::temporary_cache).join("usage");
        let path = folder.join(format!("{}.txt", &identity[..32]));
        let history = match History::load(&path, &identity) {
            Ok(history) => history,
            Err(error) => {
                console::note(&error.to_string());
                History::new(&identity).ok()?
            }
        };
        let top_k = engine.spec().moe.top_k;
        engine.store().seed(top_k, &|layer| history.counts(layer));
        Some(Self { path, history })
    }

    /// Adds what was used since the engine was opened.
    pub fn end(mut self, engine: &mut Engine) {
        for (layer, uses) in engine.uses().layers() {
            self.history.observe(layer as u32, uses.tokens, &uses.counts);
        }
        if let Err(error) = self.save() {
            console::note(&error.to_string());
        }
    }

    fn save(&mut self) -> Result<(), HistoryError> {
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|source| HistoryError::Write { path: folder.to_owned(), source })?;
        }
        self.history.save(&self.path)
    }
}
