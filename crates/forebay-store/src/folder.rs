//! What to tell somebody whose path is not a model folder.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::json;

/// Names a file that is in a folder while a model is being packed into it.
pub const UNFINISHED_PACK: &str = "pack.progress.json";

/// Names a file that is in a folder from the begin of a conversion on.
pub const BEGUN_CONVERSION: &str = "forebay-convert.json";

/// Guesses what `path` is instead of a model folder, and what to do about it.
///
/// The result finishes a sentence and never fails: what cannot be looked at is passed over.
pub fn advice(path: &Path) -> String {
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(error) => return unreachable_path(path, error.kind()).to_owned(),
    };
    if meta.is_dir() {
        return inside(path);
    }
    let name = path.to_string_lossy();
    if name.ends_with(".gguf") {
        "it is a GGUF file; `forebay convert FILE DIR --tokenizer DIR` makes a model folder of it".to_owned()
    } else if name.ends_with(".safetensors") || name.ends_with(".json") {
        "it is a file; give the folder that holds it".to_owned()
    } else {
        "it is a file; give the folder that holds config.json and the .safetensors files".to_owned()
    }
}

fn unreachable_path(path: &Path, kind: ErrorKind) -> &'static str {
    let is_link = fs::symlink_metadata(path).is_ok();
    match kind {
        ErrorKind::NotFound if is_link => {
            "it is a link to something that is gone; restore the target or give the real folder"
        }
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            "there is nothing at that path; check the spelling, or download the model there"
        }
        ErrorKind::PermissionDenied => "you have no permission to look at it",
        _ => "it cannot be looked at; check the disk",
    }
}

fn inside(dir: &Path) -> String {
    let names = entry_names(dir);
    let some = |suffix: &str| names.iter().find(|name| name.ends_with(suffix));
    if let Some(name) = some(".gguf") {
        return format!(
            "it holds a GGUF file ({name}); `forebay convert {name} DIR --tokenizer DIR` makes a model folder of it"
        );
    }
    if names.iter().any(|name| name == UNFINISHED_PACK) {
        return "packing into it did not finish; give the same forebay pack command again".to_owned();
    }
    if names.iter().any(|name| name == BEGUN_CONVERSION) {
        return "converting into it did not finish; give the same forebay convert command again".to_owned();
    }
    if let Some(name) = [".incomplete", ".part", ".aria2", ".crdownload"].into_iter().find_map(some) {
        return format!(
            "it looks like an unfinished download ({name}); let the download finish or resume it"
        );
    }
    if let Some(name) = names.iter().find(|name| name.ends_with(".bin") || name.ends_with(".pt")) {
        return format!("it holds PyTorch weights ({name}); get the model in safetensors form");
    }
    if let Some(found) = nested_model(dir, &names) {
        return format!("the model seems to lie deeper; try {found}");
    }
    if names.is_empty() {
        return "the folder is empty; download the model into it".to_owned();
    }
    "the folder needs config.json and the .safetensors files; if this is the right one, the download is incomplete"
        .to_owned()
}

/// A folder one level down (or two, under `snapshots/`) that holds safetensors files.
fn nested_model(dir: &Path, names: &[String]) -> Option<String> {
    let holds_shards = |path: &Path| entry_names(path).iter().any(|name| name.ends_with(".safetensors"));
    for name in names {
        let below = dir.join(name);
        if holds_shards(&below) {
            return Some(below.display().to_string());
        }
        if name == "snapshots" {
            let revisions = entry_names(&below);
            if let Some(revision) = revisions.iter().map(|r| below.join(r)).find(|r| holds_shards(r)) {
                return Some(revision.display().to_string());
            }
        }
    }
    None
}

/// The names in `dir`, sorted; empty if it cannot be listed.
fn entry_names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).take(100_000).collect();
    names.sort_unstable();
    names
}

/// What the first bytes of a file that should be safetensors or JSON give away.
pub(crate) fn disguise(first: &[u8]) -> Option<&'static str> {
    const KNOWN: [(&[u8], &str); 6] = [
        (b"version ", "a git-lfs pointer instead of the data; run `git lfs pull`"),
        (b"GGUF", "a GGUF file under another name"),
        (b"PK\x03\x04", "a zip archive, perhaps PyTorch weights; get the safetensors files"),
        (b"<", "a web page instead of the data; download it again"),
        (b"{", "JSON text without the length in front; download it again"),
        (b"\0\0\0\0\0\0\0\0", "zeros where the length should be; the download did not finish"),
    ];
    KNOWN.iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, meaning)| *meaning)
}

/// Shards that somebody promised and the folder lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingShards {
    /// How many there should be.
    pub named: usize,
    /// Those that are absent, sorted.
    pub absent: Vec<String>,
    /// Where the promise stands: a file name, or the numbering of the shards themselves.
    pub source: &'static str,
}

const INDEX: &str = "model.safetensors.index.json";

/// Compares the shards of `dir` with those that its index, or their own numbering, promises.
///
/// `present` holds the file names of the shards. `None` when nothing is missing, or when
/// nothing can be said: the index is for information only and may describe other files.
pub fn missing_shards(dir: &Path, present: &[String]) -> Option<MissingShards> {
    let (named, source) = match shards_of_index(dir) {
        Some(named) if present.is_empty() || named.iter().any(|name| present.contains(name)) => {
            (named, INDEX)
        }
        _ => (numbered(present)?, "their own numbering"),
    };
    let held: std::collections::HashSet<&str> = present.iter().map(String::as_str).collect();
    let total = named.len();
    let absent: Vec<_> = named.into_iter().filter(|name| !held.contains(name.as_str())).collect();
    (!absent.is_empty()).then_some(MissingShards { named: total, absent, source })
}

fn shards_of_index(dir: &Path) -> Option<Vec<String>> {
    const LIMIT: u64 = 256 << 20;
    let bytes = crate::config::read_limited(&dir.join(INDEX), LIMIT).ok()?;
    let mut named = std::collections::BTreeSet::new();
    let mut reader = json::Reader::new(&bytes).ok()?;
    let read = reader.object(|reader, key| {
        if key != "weight_map" || reader.kind()? != json::Kind::Object {
            return reader.skip();
        }
        reader.object(|reader, _| {
            let file = reader.string()?;
            if !named.contains(file.as_ref()) {
                named.insert(file.into_owned());
            }
            Ok(())
        })
    });
    read.ok()?;
    Some(named.into_iter().collect())
}

/// All names of the family `<stem>-00001-of-00144.safetensors` to which the shards of `present` belong.
fn numbered(present: &[String]) -> Option<Vec<String>> {
    let parts = |name: &str| {
        let (front, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, _) = front.rsplit_once('-')?;
        let total: u32 = count.parse().ok().filter(|&n| n <= 100_000)?;
        Some((stem.to_owned(), count.to_owned(), total))
    };
    let mut families: Vec<_> = present.iter().filter_map(|name| parts(name)).collect();
    families.sort();
    families.dedup();
    let [(stem, count, total)] = families.as_slice() else { return None };
    let width = count.len();
    Some((1..=*total).map(|i| format!("{stem}-{i:0width$}-of-{count}.safetensors")).collect())
}

impl std::fmt::Display for MissingShards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 5;
        let Self { named, absent, source } = self;
        let verb = if absent.len() == 1 { "is" } else { "are" };
        write!(f, "{} of {named} shards named by {source} {verb} absent: ", absent.len())?;
        write!(f, "{}", absent[..absent.len().min(SHOWN)].join(", "))?;
        if absent.len() > SHOWN {
            write!(f, " and {} more", absent.len() - SHOWN)?;
        }
        Ok(())
    }
}
