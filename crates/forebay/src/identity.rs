//! Which model something was recorded with.

use std::io;
use std::path::Path;

use forebay_engine::Engine;
use forebay_io::file::read_regular;
use forebay_store::config::MAX_CONFIG_BYTES;
use sha2::{Digest, Sha256};

use crate::bundled::hex;

/// A hash of the config, and of the names and sizes of the weight files: what makes a model this one and no other.
pub fn of(dir: &Path, engine: &Engine) -> io::Result<String> {
    let mut digest = Sha256::new();
    digest.update(read_regular(&dir.join("config.json"), MAX_CONFIG_BYTES)?);
    digest.update(engine.fingerprint());
    Ok(hex(&digest.finalize()))
}
