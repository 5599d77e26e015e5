//! Which model something was recorded with.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::SystemTime;

use forebay_engine::Engine;
use forebay_io::file::{open_regular, read_regular};
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

/// Bytes from the beginning of a weight file that count: its header, or most of it.
const BEGINNING: u64 = 1 << 20;
/// Places in a weight file that are looked at besides.
const SAMPLES: u64 = 16;
/// Bytes at each.
const SAMPLE: u64 = 4096;

/// The same for what must never be used with another model: also the times, the beginnings and some bytes from all over
/// the weight files. Files that were copied or changed make another model.
pub fn of_content(dir: &Path, engine: &Engine) -> io::Result<[u8; 32]> {
    let mut digest = Sha256::new();
    digest.update(of(dir, engine)?);
    for path in engine.weight_files() {
        let mut file = open_regular(&path)?;
        let found = file.metadata()?;
        let time = found.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        digest.update(format!("{} {:?}", found.len(), time));
        sample(&mut file, 0, BEGINNING, &mut digest)?;
        for at in 1..=SAMPLES {
            sample(&mut file, found.len() / (SAMPLES + 1) * at, SAMPLE, &mut digest)?;
        }
    }
    Ok(digest.finalize().into())
}

fn sample(file: &mut File, at: u64, len: u64, digest: &mut Sha256) -> io::Result<()> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(len).read_to_end(&mut bytes)?;
    digest.update(&bytes);
    Ok(())
}
