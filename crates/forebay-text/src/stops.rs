//! The stop set: which tokens end a turn (decode spec section 2).
//!
//! Armed in this order, without duplicates and without a cap: `eos_token_id` of config.json, then of
//! generation_config.json, then the added token `<|endoftext|>`, then every control token by id. Added tokens
//! that are content (`<think>`, `<tool_call>`) never stop.

use crate::Tokenizer;
use crate::limits::{self, ReadError};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The end-of-text token, armed even where the file forgets to mark it as control.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Why the stop set could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// A configuration file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A configuration file is larger than any real one.
    #[error("{origin} is larger than {limit} bytes; check that it is the right file")]
    TooLarge {
        /// Which file.
        origin: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// A configuration file is not JSON.
    #[error("{origin} is not valid JSON: {source}; fetch it again")]
    Json {
        /// Which file.
        origin: String,
        /// Position and reason.
        source: serde_json::Error,
    },
    /// `eos_token_id` is neither a token id nor a list of token ids.
    #[error("{origin}: eos_token_id holds {found}, expected an integer token id or a list of them")]
    NotAnId {
        /// Which file.
        origin: String,
        /// The offending value.
        found: String,
    },
}

/// The tokens that end a turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopSet {
    /// In the order they were armed.
    ordered: Vec<u32>,
    /// Ascending, for look-up.
    sorted: Vec<u32>,
}

impl StopSet {
    /// Reads config.json and, if it exists, generation_config.json of a model folder.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Self, StopError> {
        let config = read_eos(&dir.join("config.json"))?;
        let generation = match read_eos(&dir.join("generation_config.json")) {
            Err(StopError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Vec::new(),
            other => other?,
        };
        Ok(Self::new(config.into_iter().chain(generation), tokenizer))
    }

    /// The set for these ids (config.json's, then generation_config.json's) and this tokenizer.
    pub fn new(configured: impl IntoIterator<Item = u32>, tokenizer: &Tokenizer) -> Self {
        let end_of_text = tokenizer.added_id(END_OF_TEXT);
        let all = configured.into_iter().chain(end_of_text).chain(tokenizer.special_ids());
        all.collect()
    }

    /// Whether this token ends the turn.
    pub fn contains(&self, id: u32) -> bool {
        self.sorted.binary_search(&id).is_ok()
    }

    /// The ids in the order they were armed; the first is the model's end-of-text token.
    pub fn ids(&self) -> &[u32] {
        &self.ordered
    }
}

impl FromIterator<u32> for StopSet {
    /// A set of exactly these ids, first occurrence first. The empty set stops nothing (token-id validation).
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut set = Self::default();
        for id in ids {
            if let Err(at) = set.sorted.binary_search(&id) {
                set.sorted.insert(at, id);
                set.ordered.push(id);
            }
        }
        set
    }
}

/// The `eos_token_id` of a parsed config.json or generation_config.json: an id, a list of ids, or none (absent
/// or null). `origin` names the file in errors.
pub fn eos_ids(config: &Value, origin: &str) -> Result<Vec<u32>, StopError> {
    let one = |value: &Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| StopError::NotAnId { origin: origin.to_owned(), found: value.to_string() })
    };
    match &config["eos_token_id"] {
        Value::Null => Ok(Vec::new()),
        Value::Array(ids) => ids.iter().map(one).collect(),
        single => Ok(vec![one(single)?]),
    }
}

fn read_eos(path: &Path) -> Result<Vec<u32>, StopError> {
    let origin = path.display().to_string();
    let bytes = limits::read_capped(path, limits::CONFIG_JSON).map_err(|error| match error {
        ReadError::Io(source) => StopError::Io { path: path.to_owned(), source },
        ReadError::TooLarge => StopError::TooLarge { origin: origin.clone(), limit: limits::CONFIG_JSON },
    })?;
    match serde_json::from_slice(&bytes) {
        Ok(config) => eos_ids(&config, &origin),
        Err(source) => Err(StopError::Json { origin, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn v10_eos_values() {
        let ids = |config: Value| eos_ids(&config, "config.json");
        assert_eq!(ids(json!({"eos_token_id": [100, 101, 102]})).unwrap(), [100, 101, 102]);
        assert_eq!(ids(json!({"eos_token_id": 7})).unwrap(), [7]);
        assert!(ids(json!({})).unwrap().is_empty());
        assert!(ids(json!({"eos_token_id": null})).unwrap().is_empty());
        for wrong in [json!([1, null]), json!(-1), json!(1.0), json!("7"), json!(true), json!(4294967296_u64)]
        {
            let error = ids(json!({"eos_token_id": wrong})).unwrap_err();
            assert!(
                matches!(&error, StopError::NotAnId { origin, .. } if origin == "config.json"),
                "{error}"
            );
        }
    }

    #[test]
    fn more_than_eight_are_kept_in_order() {
        let set: StopSet = (0..100).rev().chain(50..60).collect();
        assert_eq!(set.ids(), (0..100).rev().collect::<Vec<_>>());
        assert!((0..100).all(|id| set.contains(id)));
        assert!(!set.contains(100));
        assert!(!StopSet::default().contains(0));
    }
}
