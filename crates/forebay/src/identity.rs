//! Which model something was recorded with.

use std::io;
use std::path::Path;

use forebay_engine::Engine;
use sha2::{Digest, Sha256};

use crate::bundled::hex;

/// A hash of the config, and of the names and sizes of the weight files: what makes a model this one and no other.
pub fn of(dir: &Path, engine: &Engine) -> io::Result<String> {
    let mut digest = Sha256::new();
    digest.update(std::fs::read(dir.join("config.json"))?);
    digest.update(engine.fingerprint());
    Ok(hex(&digest.finalize()))
}
