//! `config.json` and its kin: read strictly, asked field by field.
//!
//! A getter says which values it allows; everything else is an error that names
//! the field, what was found and what is allowed.
//! Which fields there are is the business of the model family.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::folder;
use crate::json::{self, JsonError, shorten};

/// Larger configuration files are refused; real ones have a few kilobytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The range "above zero" for [`Section::f64`].
pub const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

const DAMAGED: &str = "the file is damaged, or describes a model that Forebay does not run";

/// Why a configuration file, or one of its fields, cannot be used. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not there.
    #[error("{} has no {file}: {advice}", dir.display())]
    NoFile {
        /// The folder that should hold it.
        dir: PathBuf,
        /// Its name.
        file: String,
        /// What the folder seems to be, and what to do.
        advice: String,
    },
    /// The file is there and cannot be read.
    #[error("{}: cannot read it: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The file is not a strict JSON object.
    #[error("{}: {error}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and what.
        error: JsonError,
    },
    /// A required field is absent.
    #[error("{file}: {field} is missing, expected {expected}; get the complete file from the model's source")]
    Missing {
        /// The file.
        file: String,
        /// The field, with the sections it lies in.
        field: String,
        /// What should be there.
        expected: String,
    },
    /// A field has a value that is not allowed, or of the wrong type.
    #[error("{file}: {field} is {found}, allowed {allowed}: {why}")]
    NotAllowed {
        /// The file.
        file: String,
        /// The field, with the sections it lies in.
        field: String,
        /// The value found, as JSON, shortened.
        found: String,
        /// The values allowed.
        allowed: String,
        /// The reason, or what to do.
        why: String,
    },
}

/// One configuration file, parsed.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    name: String,
    map: Map<String, Value>,
}

/// The file itself or an object within it; the getters live here.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    file: &'a str,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl ConfigFile {
    /// Reads `config.json` of the model folder `dir`.
    pub fn read(dir: &Path) -> Result<Self, ConfigError> {
        const NAME: &str = "config.json";
        Self::read_optional(dir, NAME)?.ok_or_else(|| {
            let (dir, advice) = (dir.to_owned(), folder::advice(dir));
            ConfigError::NoFile { dir, file: NAME.to_owned(), advice }
        })
    }

    /// Reads the file `name` of the model folder `dir`; `None` if there is no such file.
    pub fn read_optional(dir: &Path, name: &str) -> Result<Option<Self>, ConfigError> {
        let path = dir.join(name);
        match read_limited(&path, MAX_CONFIG_BYTES) {
            Ok(bytes) => {
                Self::parse(name, &bytes).map(Some).map_err(|error| ConfigError::Json { path, error })
            }
            Err(e)
                if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
            {
                Ok(None)
            }
            Err(error) => Err(ConfigError::Read { path, error }),
        }
    }

    /// Parses `bytes`; `name` is what errors call the file.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, JsonError> {
        Ok(Self { name: name.to_owned(), map: json::parse_object(bytes)? })
    }

    /// The whole file as a section.
    pub fn root(&self) -> Section<'_> {
        Section { file: &self.name, prefix: String::new(), map: &self.map }
    }
}

/// The stop tokens of a model: `eos_token_id` of its config, then those of its generation config
/// that are not among them yet, in order (there is no limit on their number).
pub fn stop_ids(config: &ConfigFile, generation: Option<&ConfigFile>) -> Result<Vec<u32>, ConfigError> {
    let (mut ids, mut seen) = (Vec::new(), HashSet::new());
    for file in [Some(config), generation].into_iter().flatten() {
        for id in file.root().opt_u32_or_list("eos_token_id")?.unwrap_or_default() {
            if seen.insert(id) {
                ids.push(id);
            }
        }
    }
    Ok(ids)
}

impl<'a> Section<'a> {
    /// A required integer within `allowed`.
    pub fn u64(&self, field: &str, allowed: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        self.required(field, self.opt_u64(field, allowed.clone())?, || integers(&allowed))
    }

    /// An integer within `allowed`; `None` if absent or null.
    pub fn opt_u64(&self, field: &str, allowed: RangeInclusive<u64>) -> Result<Option<u64>, ConfigError> {
        self.get(field, || integers(&allowed), |value| value.as_u64().filter(|n| allowed.contains(n)))
    }

    /// A required integer within `allowed`, for sizes.
    pub fn usize(&self, field: &str, allowed: RangeInclusive<usize>) -> Result<usize, ConfigError> {
        self.required(field, self.opt_usize(field, allowed.clone())?, || integers(&allowed))
    }

    /// An integer within `allowed`, for sizes; `None` if absent or null.
    pub fn opt_usize(
        &self,
        field: &str,
        allowed: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ConfigError> {
        let convert = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|n| allowed.contains(n));
        self.get(field, || integers(&allowed), convert)
    }

    /// A required number within `allowed` (for instance [`POSITIVE`], or `..` for any).
    pub fn f64(&self, field: &str, allowed: impl RangeBounds<f64>) -> Result<f64, ConfigError> {
        let bounds = (allowed.start_bound().cloned(), allowed.end_bound().cloned());
        self.required(field, self.opt_f64(field, bounds)?, || numbers(&bounds))
    }

    /// A number within `allowed`; `None` if absent or null.
    pub fn opt_f64(&self, field: &str, allowed: impl RangeBounds<f64>) -> Result<Option<f64>, ConfigError> {
        self.get(field, || numbers(&allowed), |value| value.as_f64().filter(|x| allowed.contains(x)))
    }

    /// A required `true` or `false`.
    pub fn bool(&self, field: &str) -> Result<bool, ConfigError> {
        self.required(field, self.opt_bool(field)?, || "true or false".to_owned())
    }

    /// `true` or `false`; `None` if absent or null.
    pub fn opt_bool(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        self.get(field, || "true or false".to_owned(), Value::as_bool)
    }

    /// A required string.
    pub fn str(&self, field: &str) -> Result<&'a str, ConfigError> {
        self.required(field, self.opt_str(field)?, || "a string".to_owned())
    }

    /// A string; `None` if absent or null.
    pub fn opt_str(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        self.get(field, || "a string".to_owned(), Value::as_str)
    }

    /// A string that must be one of `allowed`; `None` if absent or null.
    pub fn opt_choice(&self, field: &str, allowed: &[&str]) -> Result<Option<&'a str>, ConfigError> {
        let wording = || allowed.iter().map(|a| format!("{a:?}")).collect::<Vec<_>>().join(" or ");
        self.get(field, wording, |value| value.as_str().filter(|text| allowed.contains(text)))
    }

    /// A required list of strings.
    pub fn str_list(&self, field: &str) -> Result<Vec<&'a str>, ConfigError> {
        self.required(field, self.opt_str_list(field)?, || "a list of strings".to_owned())
    }

    /// A list of strings; `None` if absent or null.
    pub fn opt_str_list(&self, field: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let convert = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.get(field, || "a list of strings".to_owned(), convert)
    }

    /// One token id or a list of them; `None` if absent or null.
    pub fn opt_u32_or_list(&self, field: &str) -> Result<Option<Vec<u32>>, ConfigError> {
        let one = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let convert = |value: &Value| match value.as_array() {
            Some(items) => items.iter().map(one).collect(),
            None => Some(vec![one(value)?]),
        };
        self.get(field, || format!("an integer 0..={} or a list of them", u32::MAX), convert)
    }

    /// A required object within this one.
    pub fn section(&self, field: &str) -> Result<Section<'a>, ConfigError> {
        self.required(field, self.opt_section(field)?, || "an object".to_owned())
    }

    /// An object within this one; `None` if absent or null.
    pub fn opt_section(&self, field: &str) -> Result<Option<Section<'a>>, ConfigError> {
        let map = self.get(field, || "an object".to_owned(), Value::as_object)?;
        Ok(map.map(|map| Section { file: self.file, prefix: format!("{}{field}.", self.prefix), map }))
    }

    /// The value as it stands, null included, for fields with more than one form.
    pub fn raw(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field)
    }

    /// The error "`field` has a value that is not allowed", for rules that span several fields.
    pub fn refuse(&self, field: &str, allowed: impl Into<String>, why: impl Into<String>) -> ConfigError {
        let found = self.map.get(field).map_or_else(|| "absent".to_owned(), |v| shorten(&v.to_string(), 60));
        ConfigError::NotAllowed {
            file: self.file.to_owned(),
            field: self.path(field),
            found,
            allowed: allowed.into(),
            why: why.into(),
        }
    }

    fn get<T>(
        &self,
        field: &str,
        allowed: impl Fn() -> String,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        match self.map.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.refuse(field, allowed(), DAMAGED)),
        }
    }

    fn required<T>(
        &self,
        field: &str,
        value: Option<T>,
        expected: impl Fn() -> String,
    ) -> Result<T, ConfigError> {
        value.ok_or_else(|| match self.map.get(field) {
            Some(_) => self.refuse(field, expected(), DAMAGED),
            None => {
                let (file, field) = (self.file.to_owned(), self.path(field));
                ConfigError::Missing { file, field, expected: expected() }
            }
        })
    }

    fn path(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }
}

fn integers<T: std::fmt::Display>(range: &RangeInclusive<T>) -> String {
    format!("{}..={}", range.start(), range.end())
}

fn numbers(range: &impl RangeBounds<f64>) -> String {
    let low = match range.start_bound() {
        Bound::Included(x) => format!(" of at least {x}"),
        Bound::Excluded(x) => format!(" above {x}"),
        Bound::Unbounded => String::new(),
    };
    let high = match range.end_bound() {
        Bound::Included(x) => format!(" of at most {x}"),
        Bound::Excluded(x) => format!(" below {x}"),
        Bound::Unbounded => String::new(),
    };
    let and = if low.is_empty() || high.is_empty() { "" } else { " and" };
    format!("a number{low}{and}{high}")
}

/// The bytes of the regular file `path`, or an error if there are more than `limit`.
pub(crate) fn read_limited(path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    // Asked before opening: opening a pipe would wait for its writer.
    if !fs::metadata(path)?.is_file() {
        let message = "it is not a regular file; put the model's own file there";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, message));
    }
    let mut bytes = Vec::new();
    // The length is not trusted: the file may grow.
    fs::File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let message = format!("it is larger than {limit} bytes, far too large for what it should hold");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, message));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> ConfigFile {
        ConfigFile::parse("config.json", text.as_bytes()).unwrap()
    }

    fn message<T: std::fmt::Debug>(result: Result<T, ConfigError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting_for_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.json")).unwrap();
        let said = message(ConfigFile::read(dir.path()));
        assert!(said.contains("config.json") && said.contains("not a regular file"), "{said}");
    }

    #[test]
    fn a_million_stop_ids_are_kept_once_each_in_order() {
        let ids: Vec<String> = (0..1_000_000u32).map(|i| (i ^ 1).to_string()).collect();
        let file = config(&format!(r#"{{"eos_token_id": [{}]}}"#, ids.join(",")));
        let found = stop_ids(&file, Some(&file)).unwrap();
        assert_eq!((found.len(), &found[..4]), (1_000_000, &[1, 0, 3, 2][..]));
    }

    #[test]
    fn integers_are_checked_against_their_range() {
        let file = config(r#"{"k": 9, "f": 8.5, "w": 8.0, "s": "8", "n": null, "m": -1, "ok": 8}"#);
        let root = file.root();
        assert_eq!(root.u64("ok", 1..=8).unwrap(), 8);
        assert_eq!(root.usize("ok", 1..=8).unwrap(), 8);
        assert!(message(root.u64("k", 1..=8)).starts_with("config.json: k is 9, allowed 1..=8: "));
        for field in ["f", "w", "s", "m", "n"] {
            assert!(matches!(root.u64(field, 0..=100), Err(ConfigError::NotAllowed { .. })), "{field}");
            assert!(matches!(root.usize(field, 0..=100), Err(ConfigError::NotAllowed { .. })), "{field}");
        }
        assert!(message(root.u64("gone", 1..=8)).contains("gone is missing, expected 1..=8"));
        assert_eq!(root.opt_u64("gone", 1..=8).unwrap(), None);
        assert_eq!(root.opt_u64("n", 1..=8).unwrap(), None);
        assert!(root.opt_u64("s", 1..=8).is_err());
        assert!(root.opt_usize("k", 1..=8).is_err());
    }

    #[test]
    fn numbers_booleans_and_strings_keep_their_type() {
        let file = config(
            r#"{"theta": 1000000, "eps": 1e-5, "zero": 0, "yes": true, "one": 1, "act": "silu",
                "types": ["full", "shared"], "mixed": ["full", 1]}"#,
        );
        let root = file.root();
        assert_eq!(root.f64("theta", POSITIVE).unwrap(), 1e6);
        assert_eq!(root.f64("eps", POSITIVE).unwrap(), 1e-5);
        assert!(message(root.f64("zero", POSITIVE)).contains("zero is 0, allowed a number above 0: "));
        assert!(message(root.f64("one", 2.0..3.0)).contains("of at least 2 and below 3"));
        assert!(root.f64("act", ..).is_err());
        assert!(root.bool("yes").unwrap());
        assert!(message(root.bool("one")).contains("one is 1, allowed true or false"));
        assert_eq!(root.str("act").unwrap(), "silu");
        assert!(root.str("one").is_err());
        assert_eq!(root.opt_choice("act", &["silu"]).unwrap(), Some("silu"));
        assert!(message(root.opt_choice("act", &["gelu", "relu"])).contains(r#"allowed "gelu" or "relu""#));
        assert_eq!(root.str_list("types").unwrap(), ["full", "shared"]);
        assert!(root.str_list("mixed").is_err());
        assert!(root.str_list("act").is_err());
        assert_eq!(root.opt_str_list("gone").unwrap(), None);
    }

    #[test]
    fn sections_name_their_fields_in_full() {
        let file = config(r#"{"rope_parameters": {"rope_theta": -1}, "flat": 3}"#);
        let rope = file.root().section("rope_parameters").unwrap();
        assert!(message(rope.f64("rope_theta", POSITIVE)).contains("rope_parameters.rope_theta is -1"));
        assert!(message(file.root().section("flat")).contains("flat is 3, allowed an object"));
        assert!(file.root().opt_section("gone").unwrap().is_none());
        let error = file.root().refuse("flat", "at most 2", "there are only 2 experts");
        assert_eq!(error.to_string(), "config.json: flat is 3, allowed at most 2: there are only 2 experts");
    }

    #[test]
    fn stop_ids_are_united_in_order() {
        let ids = |a: &str, b: Option<&str>| stop_ids(&config(a), b.map(config).as_ref());
        let scalar = r#"{"eos_token_id": 7}"#;
        assert_eq!(
            ids(r#"{"eos_token_id": [100]}"#, Some(r#"{"eos_token_id": [100, 101, 102]}"#)).unwrap(),
            [100, 101, 102]
        );
        assert_eq!(ids(r#"{"eos_token_id": [100]}"#, None).unwrap(), [100]);
        assert_eq!(ids(scalar, None).unwrap(), [7]);
        assert_eq!(ids("{}", Some(scalar)).unwrap(), [7]);
        assert_eq!(ids(r#"{"eos_token_id": null}"#, None).unwrap(), [0u32; 0]);
        // The reference kept eight; there is no limit here.
        let many: Vec<u32> = (0..20).collect();
        assert_eq!(ids(&format!("{{\"eos_token_id\": {many:?}}}"), None).unwrap(), many);
        // The reference read a null as token 0 and a fraction as its whole part.
        for bad in ["[1, null]", "1.5", "[1.0]", "-1", "\"2\"", "[[1]]", "4294967296", "true"] {
            assert!(ids(&format!("{{\"eos_token_id\": {bad}}}"), None).is_err(), "{bad}");
            assert!(ids(scalar, Some(&format!("{{\"eos_token_id\": {bad}}}"))).is_err(), "{bad}");
        }
    }

    #[test]
    fn files_are_found_or_explained() {
        let dir = tempfile::tempdir().unwrap();
        let error = ConfigFile::read(dir.path()).unwrap_err();
        assert!(error.to_string().contains("the folder is empty"), "{error}");
        assert!(ConfigFile::read_optional(dir.path(), "generation_config.json").unwrap().is_none());
        let path = dir.path().join("config.json");
        fs::write(&path, r#"{"a": 1, "a": 2}"#).unwrap();
        let error = ConfigFile::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("config.json: ") && error.contains("\"a\" is given twice"), "{error}");
        fs::File::create(&path).unwrap().set_len(MAX_CONFIG_BYTES + 1).unwrap();
        assert!(matches!(ConfigFile::read(dir.path()), Err(ConfigError::Read { .. })));
        fs::write(&path, r#"{"a": 1}"#).unwrap();
        assert_eq!(ConfigFile::read(dir.path()).unwrap().root().u64("a", 0..=9).unwrap(), 1);
        let error = ConfigFile::read(&path).unwrap_err().to_string();
        assert!(error.contains("give the folder that holds it"), "{error}");
    }
}
