//! What a hub says that a repository holds: read from an answer that is not trusted.

use forebay_store::json::parse_object;
use serde_json::{Map, Value};

use crate::digest::{Digest, FileDigest, is_hex};

use super::error::GetError;
use super::name::{self, RepoId};

/// Most files of a repository.
const MAX_FILES: usize = 100_000;
/// Most bytes of a file; no disk has more.
const MAX_SIZE: u64 = 1 << 60;

/// One file as the hub lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its path within the repository, with `/`. It leads nowhere else on any system.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// What proves it.
    pub digest: Digest,
}

impl RemoteFile {
    /// Size and digest.
    pub fn proof(&self) -> FileDigest {
        FileDigest { size: self.size, digest: self.digest.clone() }
    }
}

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The repository.
    pub repo: RepoId,
    /// The revision that was asked for.
    pub revision: String,
    /// The commit that it stood for, in hex. Files are fetched from it, whatever the branch does meanwhile.
    pub commit: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

impl Listing {
    /// The file of that name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// The files that match one of the patterns, or all if there is none ([`name::matches`]).
    ///
    /// # Errors
    /// A pattern that matches nothing.
    pub fn select(&self, include: &[String]) -> Result<Vec<RemoteFile>, GetError> {
        let chosen = |pattern: &str| self.files.iter().any(|file| name::matches(pattern, &file.name));
        if let Some(pattern) = include.iter().find(|pattern| !chosen(pattern)) {
            let example = self.files.first().map(|file| file.name.clone()).unwrap_or_default();
            return Err(GetError::NoMatch { repo: self.repo.to_string(), pattern: pattern.clone(), example });
        }
        let wanted = |file: &&RemoteFile| {
            include.is_empty() || include.iter().any(|pattern| name::matches(pattern, &file.name))
        };
        Ok(self.files.iter().filter(wanted).cloned().collect())
    }

    /// Reads the answer to `GET /api/models/REPO/revision/REV?blobs=true`.
    ///
    /// # Errors
    /// Anything that is missing, malformed or hostile: commits, sizes, digests, names.
    pub fn parse(repo: &RepoId, revision: &str, bytes: &[u8]) -> Result<Self, GetError> {
        let answer = |what: &str, found: String, expected| GetError::Answer {
            repo: repo.to_string(),
            what: what.to_owned(),
            found,
            expected,
        };
        let root = parse_object(bytes)
            .map_err(|error| answer("the text", format!("not JSON ({error})"), "a JSON object"))?;
        let commit = root.get("sha").and_then(Value::as_str).map(str::to_ascii_lowercase);
        let is_commit = |text: &String| is_hex(text, 40) || is_hex(text, 64);
        let commit = commit
            .filter(is_commit)
            .ok_or_else(|| answer("the commit (sha)", shown(root.get("sha")), "40 hex digits"))?;
        if is_commit(&revision.to_ascii_lowercase()) && !revision.eq_ignore_ascii_case(&commit) {
            return Err(answer("the commit (sha)", commit, "the commit that was asked for"));
        }
        let list = root.get("siblings").and_then(Value::as_array);
        let list = list
            .ok_or_else(|| answer("the list of files (siblings)", shown(root.get("siblings")), "a list"))?;
        if list.len() > MAX_FILES {
            return Err(answer(
                "the list of files (siblings)",
                format!("{} long", list.len()),
                "at most 100000 files",
            ));
        }
        let files: Vec<RemoteFile> = list.iter().map(|entry| file(repo, entry)).collect::<Result<_, _>>()?;
        if let Some((name, why)) = name::clash(files.iter().map(|file| file.name.as_str())) {
            return Err(GetError::Name { repo: repo.to_string(), name: name.to_owned(), why });
        }
        let total = files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.size));
        total.ok_or_else(|| {
            answer("the size of all files", "beyond 64 bits".to_owned(), "what a disk can hold")
        })?;
        Ok(Self { repo: repo.clone(), revision: revision.to_owned(), commit, files })
    }
}

fn file(repo: &RepoId, entry: &Value) -> Result<RemoteFile, GetError> {
    let answer = |what: String, found: String, expected| GetError::Answer {
        repo: repo.to_string(),
        what,
        found,
        expected,
    };
    let name = entry.get("rfilename").and_then(Value::as_str);
    let name = name.ok_or_else(|| {
        answer("a file's name (rfilename)".to_owned(), shown(entry.get("rfilename")), "text")
    })?;
    if let Some(why) = name::fault(name) {
        return Err(GetError::Name { repo: repo.to_string(), name: name.to_owned(), why });
    }
    let lfs = match entry.get("lfs") {
        None | Some(Value::Null) => None,
        Some(Value::Object(lfs)) => Some(lfs),
        other => return Err(answer(format!("lfs of {name:?}"), shown(other), "an object")),
    };
    let size = |field: Option<&Value>| match field {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().filter(|size| *size <= MAX_SIZE) {
            Some(size) => Ok(Some(size)),
            None => Err(answer(format!("the size of {name:?}"), shown(field), "a number of bytes")),
        },
    };
    let (plain, large) = (size(entry.get("size"))?, size(lfs.and_then(|lfs| lfs.get("size")))?);
    let size = match (plain, large) {
        (Some(a), Some(b)) if a != b => {
            return Err(answer(format!("the size of {name:?}"), format!("both {a} and {b}"), "one number"));
        }
        (a, b) => a.or(b).ok_or_else(|| {
            answer(format!("the size of {name:?}"), "missing".to_owned(), "a number of bytes")
        })?,
    };
    let digest = match lfs {
        Some(lfs) => large_digest(name, lfs)?,
        None => {
            let field = entry.get("blobId");
            field.and_then(Value::as_str).and_then(Digest::git_blob).ok_or_else(|| GetError::Digest {
                file: name.to_owned(),
                field: "blobId",
                found: shown(field),
                expected: "40 hex digits",
            })?
        }
    };
    Ok(RemoteFile { name: name.to_owned(), size, digest })
}

/// The digest of a large file, which hubs write as `sha256` or as `oid`.
fn large_digest(name: &str, lfs: &Map<String, Value>) -> Result<Digest, GetError> {
    let failed = |field, found, expected| GetError::Digest { file: name.to_owned(), field, found, expected };
    let read = |field: &'static str| match lfs.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_str().and_then(Digest::sha256) {
            Some(digest) => Ok(Some(digest)),
            None => Err(failed(field, shown(Some(value)), "64 hex digits")),
        },
    };
    match (read("sha256")?, read("oid")?) {
        (Some(a), Some(b)) if a != b => Err(failed("lfs.sha256", a.hex().to_owned(), "the same as lfs.oid")),
        (a, b) => a.or(b).ok_or_else(|| failed("lfs.sha256", "missing".to_owned(), "64 hex digits")),
    }
}

/// A value of the answer in an error, not too long.
fn shown(value: Option<&Value>) -> String {
    let text = value.map_or("missing".to_owned(), Value::to_string);
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const COMMIT: &str = "3cc8db99b1b13fc79325d987ba3c1c430766b3b8";

    fn parse(value: &Value) -> Result<Listing, GetError> {
        Listing::parse(&"a/b".parse().unwrap(), "main", value.to_string().as_bytes())
    }

    fn with(file: Value) -> Value {
        json!({"id": "a/b", "sha": COMMIT, "siblings": [file]})
    }

    fn message(value: &Value) -> String {
        parse(value).expect_err(&value.to_string()).to_string()
    }

    #[test]
    fn both_spellings_of_a_digest_are_read() {
        let hex = "dc020ddbb87347f7e6711c9e8cd2715ac79a2a9f2b4599ff11b7980a35e3cf88";
        for lfs in [
            json!({"sha256": hex, "size": 7, "pointerSize": 135}),
            json!({"oid": hex}),
            json!({"oid": hex, "sha256": hex, "size": 7}),
            json!({"sha256": null, "oid": hex}),
        ] {
            let found =
                parse(&with(json!({"rfilename": "x", "size": 7, "blobId": "?", "lfs": lfs}))).unwrap();
            assert_eq!(found.files[0].digest, Digest::Sha256(hex.to_owned()));
            assert_eq!((found.commit.as_str(), found.files[0].size), (COMMIT, 7));
        }
        let small =
            parse(&with(json!({"rfilename": "x", "size": 0, "blobId": COMMIT, "lfs": null}))).unwrap();
        assert_eq!(small.files[0].digest, Digest::GitBlob(COMMIT.to_owned()));
    }

    #[test]
    fn a_missing_or_malformed_digest_is_an_error() {
        let other = "172b49be499a1070505cd13718c47c82165c663d6422e537b1335aae28c331bf";
        let hex = "dc020ddbb87347f7e6711c9e8cd2715ac79a2a9f2b4599ff11b7980a35e3cf88";
        for lfs in [
            json!({}),
            json!({"sha256": "sha256:xyz"}),
            json!({"sha256": format!("sha256:{hex}")}),
            json!({"sha256": &hex[1..]}),
            json!({"oid": 7}),
            json!({"sha256": hex, "oid": other}),
            json!({"sha256": hex, "oid": "x"}),
        ] {
            let message = message(&with(json!({"rfilename": "w.safetensors", "size": 7, "lfs": lfs})));
            assert!(message.contains("w.safetensors") && message.contains("cannot be verified"), "{message}");
        }
        for blob in [json!(null), json!("abc"), json!(hex)] {
            let message = message(&with(json!({"rfilename": "c.json", "size": 7, "blobId": blob})));
            assert!(message.contains("c.json") && message.contains("blobId"), "{message}");
        }
        assert!(message(&with(json!({"rfilename": "c.json", "size": 7}))).contains("blobId is missing"));
    }

    #[test]
    fn hostile_names_and_sizes_are_refused_by_name() {
        let file = |name: &str, size: Value| json!({"rfilename": name, "size": size, "blobId": COMMIT});
        for name in ["../x", "/etc/x", "a\\b", "a\0", "NUL"] {
            let message = message(&with(file(name, json!(1))));
            assert!(message.contains(&format!("{name:?}")) && message.contains("refused"), "{message}");
        }
        for size in [json!(-1), json!(1.5), json!("7"), json!(u64::MAX), json!(null)] {
            let message = message(&with(file("big", size)));
            assert!(message.contains("the size of \"big\""), "{message}");
        }
        let twice = json!({"sha": COMMIT, "siblings": [file("a", json!(1)), file("a", json!(1))]});
        assert!(message(&twice).contains("same name"));
        let disagree = json!({"rfilename": "x", "size": 7, "lfs": {"sha256": "0".repeat(64), "size": 8}});
        assert!(message(&with(disagree)).contains("both 7 and 8"));
    }

    #[test]
    fn an_answer_for_something_else_is_refused() {
        for bad in [
            json!({}),
            json!({"sha": "main", "siblings": []}),
            json!({"sha": COMMIT}),
            json!({"sha": COMMIT, "siblings": {}}),
        ] {
            assert!(message(&bad).contains("a/b"), "{bad}");
        }
        let asked = "0".repeat(40);
        let text = with(json!({"rfilename": "x", "size": 1, "blobId": COMMIT})).to_string();
        let repo = "a/b".parse().unwrap();
        assert!(Listing::parse(&repo, &asked, text.as_bytes()).is_err());
        assert!(Listing::parse(&repo, COMMIT, text.as_bytes()).is_ok());
        assert!(Listing::parse(&repo, "main", b"<html>Sign in</html>").is_err());
    }

    #[test]
    fn patterns_choose_files_and_say_when_they_choose_none() {
        let file = |name: &str| json!({"rfilename": name, "size": 1, "blobId": COMMIT});
        let all =
            parse(&json!({"sha": COMMIT, "siblings": [file("a.json"), file("x/b.bin"), file("c.txt")]}))
                .unwrap();
        let names = |include: &[&str]| {
            let include: Vec<String> = include.iter().map(|text| (*text).to_owned()).collect();
            all.select(&include).map(|files| files.into_iter().map(|file| file.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap(), ["a.json", "x/b.bin", "c.txt"]);
        assert_eq!(names(&["x/", "*.txt"]).unwrap(), ["x/b.bin", "c.txt"]);
        assert!(names(&["*.json", "*.gguf"]).unwrap_err().to_string().contains("*.gguf"));
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let word = prop::sample::select(vec![
            "sha",
            "siblings",
            "rfilename",
            "size",
            "lfs",
            "sha256",
            "oid",
            "blobId",
            "x",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
            "[0-9a-f]{40}".prop_map(Value::from),
            "[0-9a-f]{64}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((word.clone(), inner), 0..6).prop_map(|pairs| pairs
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value))
                    .collect::<Map<_, _>>()
                    .into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_answer_is_a_panic(value in any_json(), bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse(&value);
            let _ = parse(&json!({"sha": COMMIT, "siblings": value}));
            let _ = parse(&with(value));
            let _ = Listing::parse(&"a/b".parse().unwrap(), "main", &bytes);
        }

        #[test]
        fn what_is_accepted_is_complete(name in "[a-z./]{1,8}", size in any::<u64>(), digits in 38usize..42) {
            let value = with(json!({"rfilename": name, "size": size, "blobId": "a".repeat(digits)}));
            if let Ok(listing) = parse(&value) {
                prop_assert_eq!(digits, 40);
                prop_assert!(listing.files[0].size <= MAX_SIZE && name::fault(&listing.files[0].name).is_none());
            }
        }
    }
}
