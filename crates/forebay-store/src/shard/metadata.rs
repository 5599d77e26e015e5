//! What a writer says of its own tensors in a header's `__metadata__`, so that no reader has to guess formats from
//! byte counts: `forebay_container` is the version, and every other key that is a tensor's name says what that tensor
//! is, as in `"int4-g64 2048x6144"` (docs/convert.md). Files of other writers have no such key, and then nothing of
//! their metadata is looked at.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use forebay_core::Format;

use super::HeaderError;
use crate::json::{Kind, Reader, shorten};

/// The key that says that formats are declared.
pub const CONTAINER_KEY: &str = "forebay_container";
/// Its value.
pub const CONTAINER_VERSION: &str = "1";

/// A matrix as its writer describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Storage format.
    pub format: Format,
    /// Rows (outputs).
    pub rows: usize,
    /// Columns (inputs).
    pub cols: usize,
}

impl fmt::Display for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}x{}", self.format, self.rows, self.cols)
    }
}

impl FromStr for Declared {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (format, shape) = text.split_once(' ').ok_or(())?;
        let (rows, cols) = shape.split_once('x').ok_or(())?;
        let size = |text: &str| text.parse().map_err(|_| ());
        Ok(Self { format: format.parse().map_err(|_| ())?, rows: size(rows)?, cols: size(cols)? })
    }
}

/// Reads the value of `__metadata__`: the declared tensors by name.
pub fn read(reader: &mut Reader<'_>) -> Result<HashMap<String, Declared>, HeaderError> {
    if reader.kind()? != Kind::Object {
        reader.skip()?;
        return Ok(HashMap::new());
    }
    let (mut version, mut declared, mut wrong) = (None, HashMap::new(), None);
    reader.object(|reader, key| {
        if reader.kind()? != Kind::String {
            return reader.skip().map_err(HeaderError::from);
        }
        let value = reader.string()?;
        if key == CONTAINER_KEY {
            version = Some(value.into_owned());
        } else if let Ok(matrix) = value.parse() {
            if declared.insert(key.clone().into_owned(), matrix).is_some() {
                wrong.get_or_insert(refuse(&key, &value, "one description of a tensor"));
            }
        } else {
            wrong
                .get_or_insert_with(|| refuse(&key, &value, "a format and a shape, such as \"int8 64x128\""));
        }
        Ok::<_, HeaderError>(())
    })?;
    match (version.as_deref(), wrong) {
        // Somebody else's metadata.
        (None, _) => Ok(HashMap::new()),
        (Some(CONTAINER_VERSION), None) => Ok(declared),
        (Some(CONTAINER_VERSION), Some(wrong)) => Err(wrong),
        (Some(other), _) => Err(refuse(CONTAINER_KEY, other, "version 1")),
    }
}

fn refuse(key: &str, value: &str, expected: &'static str) -> HeaderError {
    HeaderError::Metadata { key: shorten(key, 200), value: shorten(value, 60), expected }
}
