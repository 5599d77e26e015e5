//! What tells one model from another, and what is known of where it came from.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use forebay_io::file::{open_regular, read_regular};
use forebay_store::catalog::Catalog;
use forebay_store::native::header::{SideFile, Source, SourceFile};
use sha2::{Digest, Sha256};

use super::error::PackError;

/// The files beside the weights that belong to a model.
pub const SIDE_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
];
/// The longest of them: real ones have 20 MB.
pub const MAX_SIDE_BYTES: u64 = 256 << 20;
/// Pages of each weight file that go into the identity.
pub const SAMPLES: u64 = 16;
/// Bytes of a page.
const SAMPLE_BYTES: u64 = 4096;

/// The configuration files of `dir`.
pub fn side_files(dir: &Path) -> Result<Vec<SideFile>, PackError> {
    let there = SIDE_FILES.into_iter().filter(|name| dir.join(name).exists());
    let describe = |name: &str| {
        let path = dir.join(name);
        let bytes = read_regular(&path, MAX_SIDE_BYTES);
        Ok(side_file(name, &bytes.map_err(|cause| PackError::at("read", &path, cause))?))
    };
    there.map(describe).collect()
}

/// A configuration file with these bytes.
pub fn side_file(name: &str, bytes: &[u8]) -> SideFile {
    let (size, crc, sha256) = (bytes.len() as u64, crc32c::crc32c(bytes), Sha256::digest(bytes).into());
    SideFile { name: name.to_owned(), size, crc, sha256 }
}

/// Reads a regular file in pieces.
pub fn read_all(path: &Path, each: &mut dyn FnMut(&[u8])) -> std::io::Result<()> {
    let (mut file, mut piece) = (open_regular(path)?, vec![0; 1 << 16]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(()),
            n => each(&piece[..n]),
        }
    }
}

/// A digest over the configuration files, and the name, size, header and some pages of every weight file.
pub fn identity(catalog: &Catalog, side_files: &[SideFile]) -> Result<[u8; 32], PackError> {
    let mut sha = begin(side_files);
    for shard in catalog.shards() {
        add_name(&mut sha, &shard.name(), shard.size);
        sample(&shard.path, shard.size, &mut sha)
            .map_err(|cause| PackError::at("read", &shard.path, cause))?;
    }
    Ok(sha.finalize().into())
}

/// The digest after the configuration files.
pub fn begin(side_files: &[SideFile]) -> Sha256 {
    let mut sha = Sha256::new_with_prefix(b"forebay pack 1\0");
    for file in side_files {
        sha.update(file.name.as_bytes());
        sha.update(file.sha256);
    }
    sha
}

/// Adds the name and the size of a weight file. What comes next is its header, the length in front of it included, and
/// its [samples](sample_of).
pub fn add_name(sha: &mut Sha256, name: &str, size: u64) {
    sha.update(name.as_bytes());
    sha.update(size.to_le_bytes());
}

/// The place of one of the [`SAMPLES`] pages of a file of `size` bytes.
pub fn sample_of(size: u64, sample: u64) -> Range<u64> {
    let first = size / SAMPLES * sample;
    first..size.min(first + SAMPLE_BYTES)
}

/// The header's length and header, and pages all over the file: fine-tunes of one model have equal headers.
fn sample(path: &Path, size: u64, sha: &mut Sha256) -> std::io::Result<()> {
    let mut file = open_regular(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let mut take = |offset: u64, len: u64| {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(offset))?;
        (&mut file).take(len).read_to_end(&mut bytes)?;
        sha.update(&bytes);
        Ok(())
    };
    take(0, u64::from_le_bytes(length).saturating_add(8).min(size))?;
    (0..SAMPLES)
        .map(|sample| sample_of(size, sample))
        .try_for_each(|page| take(page.start, page.end - page.start))
}

/// Repository, revision and digests, where the folder is one of the hub's cache: that one is named after the
/// revision, and its files are links to files that are named after their digests.
pub fn source(catalog: &Catalog, dir: &Path) -> Source {
    let (repository, revision) = cached_as(dir).unwrap_or_default();
    let file = |shard: &forebay_store::catalog::Shard| {
        let target = shard.path.canonicalize().ok();
        let in_blobs = last_name(target.as_deref().and_then(Path::parent)) == "blobs";
        let sha256 = from_hex(&last_name(target.as_deref())).filter(|_| in_blobs);
        SourceFile { name: shard.name(), size: shard.size, sha256 }
    };
    Source { repository, revision, files: catalog.shards().iter().map(file).collect() }
}

/// Repository and revision that the folder `dir` is of, if it is one of the hub's cache.
pub fn cached_as(dir: &Path) -> Option<(String, String)> {
    let real = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let (revision, above) = (last_name(Some(&real)), real.parent());
    let repository = last_name(above.and_then(Path::parent));
    let repository = repository.strip_prefix("models--")?.replacen("--", "/", 1);
    let cached = last_name(above) == "snapshots" && digits(&revision, 40);
    cached.then_some((repository, revision))
}

fn last_name(path: Option<&Path>) -> String {
    path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn digits(text: &str, count: usize) -> bool {
    text.len() == count && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    if !digits(text, 64) {
        return None;
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}
