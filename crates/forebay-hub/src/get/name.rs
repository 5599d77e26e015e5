//! Names that come from outside: repositories, revisions and paths within them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::error::GetError;

/// Bytes in one part of a path; file systems take 255, and a suffix is added while a file is incomplete.
const MAX_PART: usize = 200;
/// Bytes in a path.
const MAX_PATH: usize = 1000;
/// Marks Forebay's own files beside those of a model.
pub(super) const OURS: &str = ".forebay";

/// A repository: `owner/name`, or `name` alone as some old ones have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId(String);

impl RepoId {
    /// Its name as the hub writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RepoId {
    type Err = GetError;

    fn from_str(given: &str) -> Result<Self, GetError> {
        let word = |part: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            (1..=96).contains(&part.len())
                && part.chars().all(plain)
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                // The cache's folder names stand for `/` with it.
                && !part.contains("--")
                && !part.contains("..")
        };
        let parts: Vec<&str> = given.split('/').collect();
        match parts.len() <= 2 && parts.iter().all(|part| word(part)) {
            true => Ok(Self(given.to_owned())),
            false => Err(GetError::Repo { given: given.to_owned() }),
        }
    }
}

/// Splits `REPO@REV`; without `@` the revision is `main`.
///
/// # Errors
/// Names that no hub has.
pub fn parse_reference(given: &str) -> Result<(RepoId, String), GetError> {
    let (repo, revision) = given.split_once('@').unwrap_or((given, "main"));
    let repo = repo.parse().map_err(|_| GetError::Repo { given: given.to_owned() })?;
    match fault(revision) {
        None => Ok((repo, revision.to_owned())),
        Some(why) => Err(GetError::Revision { given: revision.to_owned(), why }),
    }
}

/// What is wrong with a path from outside, if anything: it must name a file below the folder, the same one on
/// every system.
pub(super) fn fault(path: &str) -> Option<&'static str> {
    if path.len() > MAX_PATH {
        return Some("it is too long");
    }
    if path.starts_with('/') {
        return Some("it is absolute");
    }
    if path.contains(|c: char| c.is_control()) {
        return Some("it holds control characters");
    }
    if path.contains(['\\', ':']) {
        return Some("it holds \\ or :, which lead elsewhere on Windows");
    }
    path.split('/').find_map(part_fault)
}

fn part_fault(part: &str) -> Option<&'static str> {
    if part.is_empty() {
        return Some("a part of it is empty");
    }
    if part == "." || part == ".." {
        return Some("it leads out of the folder");
    }
    if part.len() > MAX_PART {
        return Some("a part of it is too long");
    }
    if part.ends_with(['.', ' ']) {
        return Some("a part of it ends with a dot or a space, which Windows drops");
    }
    let lower = part.to_ascii_lowercase();
    if lower == ".git" {
        return Some("it would change a git repository");
    }
    if lower == OURS || lower.contains(".forebay.") {
        return Some("Forebay keeps its own files under such names");
    }
    let stem = lower.split('.').next().unwrap_or_default().trim_end();
    let numbered = |device: &str| {
        let number =
            |rest: &str| rest.chars().all(|c| matches!(c, '1'..='9' | '\u{b9}' | '\u{b2}' | '\u{b3}'));
        stem.strip_prefix(device).is_some_and(|rest| rest.chars().count() == 1 && number(rest))
    };
    let device = matches!(stem, "con" | "prn" | "aux" | "nul" | "conin$" | "conout$");
    if device || numbered("com") || numbered("lpt") {
        return Some("a part of it is the name of a Windows device");
    }
    None
}

/// What is wrong with a set of paths as a whole: the name of the first that cannot stand beside the others.
pub(super) fn clash<'a>(paths: impl Iterator<Item = &'a str> + Clone) -> Option<(&'a str, &'static str)> {
    let mut files = BTreeSet::new();
    for path in paths.clone() {
        if !files.insert(path.to_lowercase()) {
            return Some((path, "another file has the same name, or one that differs only in case"));
        }
    }
    let below = |path: &str| {
        let path = path.to_lowercase();
        path.match_indices('/').any(|(end, _)| files.contains(&path[..end]))
    };
    paths.into_iter().find(|path| below(path)).map(|path| (path, "a part of it is the name of another file"))
}

/// `text` with everything but letters, digits and `-._~` as `%XX`; `/` stays if `slashes`.
pub(super) fn encoded(text: &str, slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            b'/' if slashes => out.push('/'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Whether `name` matches a pattern in the manner of shells: `*` and `?` stand for any characters, `/` included,
/// `[a-z]` and `[!a-z]` for one. A pattern that ends with `/` takes everything below.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut pattern: Vec<char> = pattern.chars().collect();
    if pattern.last() == Some(&'/') {
        pattern.push('*');
    }
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    // Where the last star was, and how much it had swallowed: only the last one ever needs to grow.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match one(&pattern[p..], name[n]) {
            _ if pattern.get(p) == Some(&'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(used) => (p, n) = (p + used, n + 1),
            None => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    (p, n) = (at + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Characters of the pattern's start that match `c`, if they do.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern.first()? {
        '?' => Some(1),
        '[' => {
            let negated = pattern.get(1) == Some(&'!');
            let first = if negated { 2 } else { 1 };
            // A bracket right at the start is one of the set.
            let Some(close) = pattern.iter().skip(first + 1).position(|p| *p == ']').map(|at| at + first + 1)
            else {
                return (c == '[').then_some(1);
            };
            let set = &pattern[first..close];
            let mut found = false;
            let mut at = 0;
            while at < set.len() {
                if set.get(at + 1) == Some(&'-') && at + 2 < set.len() {
                    found |= (set[at]..=set[at + 2]).contains(&c);
                    at += 3;
                } else {
                    found |= set[at] == c;
                    at += 1;
                }
            }
            (found != negated).then_some(close + 1)
        }
        p => (*p == c).then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn references_name_a_repository_and_a_revision() {
        let parsed = |text| parse_reference(text).map(|(repo, revision)| (repo.to_string(), revision)).ok();
        let some = |repo: &str, revision: &str| Some((repo.to_owned(), revision.to_owned()));
        assert_eq!(parsed("zai-org/GLM-5.2"), some("zai-org/GLM-5.2", "main"));
        assert_eq!(parsed("gpt2@refs/pr/3"), some("gpt2", "refs/pr/3"));
        for bad in [
            "",
            "/",
            "a/b/c",
            "../x",
            "a/..",
            "a b/c",
            "a/b@",
            "a/b@../x",
            "a--b/c",
            "https://h/a/b",
            "a/b@x\ny",
        ] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }

    #[test]
    fn hostile_paths_are_refused() {
        let bad = [
            "",
            "/etc/passwd",
            "../x",
            "a/../b",
            "a/..",
            ".",
            "a//b",
            "a/",
            "a\\b",
            "C:x",
            "a\0b",
            "a\nb",
            "con",
            "CON.txt",
            "a/nul.json",
            "Aux",
            "com1",
            "LPT9.x",
            "x.",
            "x ",
            ".git/config",
            "a/.GIT/x",
            ".forebay/x",
            "m.safetensors.forebay.incomplete",
            "com\u{b9}",
            "COM1 .txt",
            "lpt\u{b3}",
        ];
        for path in bad {
            assert!(fault(path).is_some(), "{path:?}");
        }
        assert!(fault(&"x".repeat(201)).is_some());
        assert!(fault(&"x/".repeat(600)).is_some());
        for path in [
            "config.json",
            "a/b/c-00001-of-00002.safetensors",
            ".gitattributes",
            "com10",
            "com0",
            "comp.json",
            "comb/lpta.txt",
            "console",
            "a b",
            "\u{e9}",
        ] {
            assert_eq!(fault(path), None, "{path:?}");
        }
    }

    #[test]
    fn files_that_cannot_stand_side_by_side_are_named() {
        let named = |paths: &[&'static str]| clash(paths.iter().copied()).map(|(name, _)| name);
        assert_eq!(named(&["a", "b", "a/b2"]), Some("a/b2"));
        assert_eq!(named(&["a", "A"]), Some("A"));
        assert_eq!(named(&["x/y", "X"]), Some("x/y"));
        assert_eq!(named(&["a", "b", "c/a", "c/b"]), None);
    }

    #[test]
    fn patterns_choose_as_shells_do() {
        for (pattern, name) in [
            ("*.safetensors", "a/b.safetensors"),
            ("out-0000?.*", "out-00003.safetensors"),
            ("a/", "a/b/c"),
            ("*a*b*", "xxaxxbxx"),
            ("[a-c]x", "bx"),
            ("[!a-c]x", "dx"),
            ("[]]", "]"),
            ("[x", "[x"),
            ("", ""),
            ("**", "anything"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("*.json", "a.jsonl"), ("?", ""), ("[a-c]", "d"), ("[!a]", "a"), ("a", "ab"), ("A", "a")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        // Exponential matchers never end here.
        assert!(!matches(&"*a".repeat(60), &"a".repeat(59)));
    }

    #[test]
    fn addresses_hold_any_name() {
        assert_eq!(encoded("a b/c%\u{e9}.x", true), "a%20b/c%25%C3%A9.x");
        assert_eq!(encoded("refs/pr/1", false), "refs%2Fpr%2F1");
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_stays_below_the_folder(path in "[a.\\\\/:\u{0}-\u{7f}]{0,12}") {
            if fault(&path).is_none() {
                let only_names = std::path::Path::new(&path).components().all(|c| matches!(c, std::path::Component::Normal(_)));
                prop_assert!(only_names);
            }
        }

        #[test]
        fn matching_never_fails(pattern in ".{0,12}", name in ".{0,12}") {
            matches(&pattern, &name);
            prop_assert!(matches("*", &name));
        }
    }
}
