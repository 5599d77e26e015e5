//! What a conversion ends with: the census of what it wrote.

use std::path::Path;

use forebay_core::CancelToken;
use forebay_hub::pack::{Finding, verify_native};
use forebay_hub::verify::{Report, census};
use forebay_store::native::Native;
use serde_json::{Value, json};

use crate::verify;

/// A folder, looked at by its headers.
pub enum Checked {
    /// Safetensors files: whether every tensor that the config asks for is there, and nothing else.
    Reference(Box<Report>),
    /// A Forebay container: what is not as its header says, which was planned from such a census.
    Forebay(Vec<Finding>),
}

impl Checked {
    /// Looks at `dir`.
    pub fn of(dir: &Path) -> Self {
        let headers = || verify_native(dir, false, &CancelToken::new(), &mut |_, _| {});
        match Native::is_at(dir) {
            true => Self::Forebay(headers().unwrap_or_default()),
            false => Self::Reference(Box::new(census(dir))),
        }
    }

    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        match self {
            Self::Reference(report) => report.is_sound(),
            Self::Forebay(findings) => findings.is_empty(),
        }
    }

    /// What was found, for people.
    pub fn description(&self) -> String {
        match self {
            Self::Reference(report) => verify::describe(report),
            Self::Forebay(findings) => findings.iter().map(|finding| format!("bad: {finding}\n")).collect(),
        }
    }

    /// The last line for people.
    pub fn verdict(&self) -> String {
        match self {
            Self::Reference(report) => verify::verdict(report, false),
            Self::Forebay(findings) if findings.is_empty() => {
                "whole, by its header and sizes (`forebay verify --hash` checks every byte)\n".to_owned()
            }
            Self::Forebay(findings) => format!("{} problems\n", findings.len()),
        }
    }

    /// For programs.
    pub fn json(&self) -> Value {
        match self {
            Self::Reference(report) => report.json(),
            Self::Forebay(findings) => json!({
                "container": true,
                "sound": findings.is_empty(),
                "problems": findings.iter().map(ToString::to_string).collect::<Vec<_>>(),
            }),
        }
    }
}
