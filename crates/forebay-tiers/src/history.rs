//! What a model used in earlier runs: a small file that outlives the process.
//!
//! The file is text, one layer a line, with a version, the model's identity and a
//! checksum. It is replaced as a whole or not at all, under a lock, after adding what
//! other processes wrote meanwhile. Where it lies is the caller's business; a model
//! folder is not ours to write to. Only tokens that were accepted belong in it.

mod file;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Layers that a history may have.
pub const MAX_LAYERS: usize = 4096;
/// Experts that a layer of a history may have.
pub const MAX_EXPERTS: usize = 65_536;
/// Tokens after which a use counts half: a few long
/// texts, so that yesterday's topic fades and what the model always likes stays.
pub const DEFAULT_HALF_LIFE: u64 = 50_000;

/// How often each expert of a model was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    identity: String,
    half_life: u64,
    /// As the file had it when it was last read or written.
    saved: Layers,
    /// What came since.
    fresh: Layers,
}

type Layers = BTreeMap<u32, Layer>;

/// One layer's counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Layer {
    counts: Vec<u64>,
    /// Tokens since the counts were last halved.
    tokens: u64,
}

/// Why a history could not be read or written. None of these is a reason not to run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The file cannot be read.
    #[error("cannot read the usage history {}: {source}; it is not used, and may be deleted", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not what was written: cut off, edited, of a later version.
    #[error(
        "the usage history {} is damaged (line {line}: {what}); it is ignored, and the next save moves it to {}",
        path.display(), aside.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
        /// Where the next save puts it.
        aside: PathBuf,
    },
    /// The file belongs to another model.
    #[error(
        "the usage history {} belongs to another model ({found}, not {expected}); choose another file",
        path.display()
    )]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The model at hand.
        expected: String,
        /// The model in the file.
        found: String,
    },
    /// The identity cannot be written into the file.
    #[error(
        "a model identity has 1 to 128 letters, digits or any of -_.:+, not {found:?}; \
         please report this as a bug"
    )]
    Identity {
        /// What was given.
        found: String,
    },
    /// Another process holds the lock.
    #[error(
        "another process is writing the usage history {}; what is new is kept and written with the next save",
        path.display()
    )]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be written: a full disk, no permission. The old one is as it was.
    #[error(
        "cannot write the usage history {}: {source}; the old one is unchanged; free some space there or choose \
         another folder",
        path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl History {
    /// An empty history of the model that the caller calls `identity` (a hash of its
    /// config and tensors).
    pub fn new(identity: &str) -> Result<Self, HistoryError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:+".contains(c);
        if identity.is_empty() || identity.len() > 128 || !identity.chars().all(allowed) {
            return Err(HistoryError::Identity { found: identity.chars().take(200).collect() });
        }
        let identity = identity.to_owned();
        Ok(Self { identity, half_life: DEFAULT_HALF_LIFE, saved: Layers::new(), fresh: Layers::new() })
    }

    /// The history in `path`, empty if there is no such file.
    ///
    /// After an error [`new`](Self::new) is the way on.
    pub fn load(path: &Path, identity: &str) -> Result<Self, HistoryError> {
        let mut history = Self::new(identity)?;
        history.saved = file::read(path, identity)?.unwrap_or_default();
        Ok(history)
    }

    /// Counts what `tokens` accepted tokens used of a layer, expert by expert. Numbers beyond [`MAX_EXPERTS`] and
    /// [`MAX_LAYERS`] are no model's and not counted.
    pub fn observe(&mut self, layer: u32, tokens: u64, counts: &[u64]) {
        if layer as usize >= MAX_LAYERS {
            return;
        }
        let layer = self.fresh.entry(layer).or_default();
        layer.tokens = layer.tokens.saturating_add(tokens);
        for (expert, uses) in counts.iter().take(MAX_EXPERTS).enumerate().filter(|(_, uses)| **uses > 0) {
            layer.add(expert, *uses);
        }
    }

    /// Uses of each expert of a layer; shorter than the layer if the last were never used.
    pub fn counts(&self, layer: u32) -> Vec<u64> {
        let mut sum = self.saved.get(&layer).cloned().unwrap_or_default();
        if let Some(fresh) = self.fresh.get(&layer) {
            sum.merge(fresh);
        }
        sum.counts
    }

    /// Adds what is new to the file, whatever others have added to it, and replaces it in
    /// one step. A damaged file is moved aside first. After an error the file is as it was
    /// and what is new is still here.
    pub fn save(&mut self, path: &Path) -> Result<(), HistoryError> {
        let _lock = file::lock(path)?;
        let mut merged = match file::read(path, &self.identity) {
            Ok(found) => found.unwrap_or_default(),
            Err(HistoryError::Damaged { path, aside, .. }) => {
                std::fs::rename(&path, &aside).map_err(|source| HistoryError::Write { path, source })?;
                Layers::new()
            }
            Err(other) => return Err(other),
        };
        for (layer, fresh) in &self.fresh {
            let layer = merged.entry(*layer).or_default();
            layer.merge(fresh);
            layer.age(self.half_life);
        }
        file::replace(path, &file::text(&self.identity, &merged))?;
        self.saved = merged;
        self.fresh.clear();
        Ok(())
    }
}

impl Layer {
    fn add(&mut self, expert: usize, uses: u64) {
        if self.counts.len() <= expert {
            self.counts.resize(expert + 1, 0);
        }
        self.counts[expert] = self.counts[expert].saturating_add(uses);
    }

    fn merge(&mut self, other: &Self) {
        self.tokens = self.tokens.saturating_add(other.tokens);
        for (expert, uses) in other.counts.iter().enumerate() {
            self.add(expert, *uses);
        }
    }

    /// Halves once for each half-life that has passed.
    fn age(&mut self, half_life: u64) {
        if let Some(halvings) = self.tokens.checked_div(half_life) {
            self.tokens -= halvings * half_life;
            let halvings = u32::try_from(halvings).unwrap_or(u32::MAX);
            self.counts.iter_mut().for_each(|count| *count = count.checked_shr(halvings).unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests;
