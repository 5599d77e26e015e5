//! Whether a container still is what was written: a list of everything that is not.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::path::Path;

use forebay_core::CancelToken;

use forebay_store::native::header::{Checked, Header};
use forebay_store::native::{
    HEADER_NAME, Native, NativeError, check_side_file, expect_size, preamble, read_preamble,
};
use sha2::{Digest, Sha256};

use super::identity::read_all;
use super::scan::scan;
use crate::convert::manifest::OWN;
use crate::output::folder;

/// Something that is not as it was written. `Display` is one line.
#[derive(Debug)]
pub struct Finding {
    /// The file, by its name in the folder.
    pub file: String,
    /// What it is about, such as a tensor or an expert; empty if it is about the file.
    pub what: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What can be wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Problem {
    /// The header, a size, the first page of a weight file or a configuration file is wrong.
    Refused(NativeError),
    /// Bytes are not those that were written.
    Checksum {
        /// First byte in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Their CRC32C when they were written.
        expected: u32,
        /// Their CRC32C now.
        found: u32,
    },
    /// A digest differs although the checksum does not.
    Digest,
    /// A byte between tensors is not zero.
    Padding {
        /// Its place in the file.
        offset: u64,
    },
    /// The file cannot be read to its end.
    Unreadable(io::Error),
    /// The header does not name the file.
    Stray,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, what, problem } = self;
        let what = if what.is_empty() { String::new() } else { format!(" {what}:") };
        match problem {
            Problem::Refused(error) => write!(f, "{error}"),
            Problem::Checksum { offset, len, expected, found } => write!(
                f,
                "{file}:{what} the {len} bytes from offset {offset} have checksum {found:#010x}, expected {expected:#010x}; \
                 copy the file again"
            ),
            Problem::Digest => {
                write!(f, "{file}:{what} its SHA-256 is not the recorded one; copy the file again")
            }
            Problem::Padding { offset } => {
                write!(
                    f,
                    "{file}:{what} byte {offset} belongs to nothing and is not zero; copy the file again"
                )
            }
            Problem::Unreadable(error) => write!(f, "{file}:{what} cannot read it: {error}; check the disk"),
            Problem::Stray => {
                write!(f, "{file}: does not belong to the container; move it out of the folder")
            }
        }
    }
}

/// Compares the container in `dir` with its header: the header itself, the configuration files, names and sizes of
/// all files, the first pages of weight files; with `hash`, every byte. What is found is told in this order; a header
/// that cannot be used ends the search. `progress` gets the bytes of weights that were read, and all there are.
///
/// `None` if it was cancelled.
pub fn verify_native(
    dir: &Path,
    hash: bool,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(u64, u64),
) -> Option<Vec<Finding>> {
    let refused = |file: &str, error| Finding {
        file: file.to_owned(),
        what: String::new(),
        problem: Problem::Refused(error),
    };
    let header = match Native::read_header(dir) {
        Ok(header) => header,
        Err(error) => return Some(vec![refused(HEADER_NAME, error)]),
    };
    let mut findings = strays(dir, &header);
    for file in &header.side_files {
        match check_side_file(dir, file) {
            Err(error) => findings.push(refused(&file.name, error)),
            Ok(()) if hash => {
                let mut sha = Sha256::new();
                let read = read_all(&dir.join(&file.name), &mut |bytes| sha.update(bytes));
                let digest: [u8; 32] = sha.finalize().into();
                let problem = match read {
                    Err(error) => Some(Problem::Unreadable(error)),
                    Ok(()) => (digest != file.sha256).then_some(Problem::Digest),
                };
                findings.extend(problem.map(|problem| Finding {
                    file: file.name.clone(),
                    what: String::new(),
                    problem,
                }));
            }
            Ok(()) => {}
        }
    }
    let total = header.files.iter().fold(0u64, |sum, file| sum.saturating_add(file.size));
    let mut done = 0;
    let mut each = |bytes| {
        done += bytes;
        progress(done, total);
        // Whatever error: it is asked for below why it ended.
        if cancel.is_cancelled() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    };
    for (number, file) in header.files.iter().enumerate() {
        if cancel.is_cancelled() {
            return None;
        }
        if let Err(error) = expect_size(dir, &file.name, file.size) {
            findings.push(refused(&file.name, error));
        } else if hash {
            findings.extend(every_byte(dir, &header, number, &mut each));
        } else if let Err(error) = read_preamble(dir, &header, number) {
            findings.push(refused(&file.name, error));
        }
    }
    (!cancel.is_cancelled()).then_some(findings)
}

fn strays(dir: &Path, header: &Header) -> Vec<Finding> {
    let finding = |file: &str, problem| Finding { file: file.to_owned(), what: String::new(), problem };
    let found = match folder::names(dir) {
        Ok(found) => found,
        Err(error) => return vec![finding(".", Problem::Unreadable(error.cause))],
    };
    let mut ours = HashSet::from([HEADER_NAME]);
    ours.extend(header.side_files.iter().map(|file| file.name.as_str()));
    ours.extend(header.files.iter().map(|file| file.name.as_str()));
    found
        .iter()
        // The record of a conversion stays with what it made.
        .filter(|name| !ours.contains(name.as_str()) && !name.starts_with(OWN))
        .map(|name| finding(name, Problem::Stray))
        .collect()
}

fn every_byte(
    dir: &Path,
    header: &Header,
    number: usize,
    each: &mut dyn FnMut(u64) -> io::Result<()>,
) -> Vec<Finding> {
    let file = &header.files[number];
    let of = |what: String, problem| Finding { file: file.name.clone(), what, problem };
    let parts = header.checked(number);
    let scanned = match scan(&dir.join(&file.name), &preamble(header, number), &parts, file.size, each) {
        Ok(scanned) => scanned,
        Err(error) => return vec![of(String::new(), Problem::Unreadable(error))],
    };
    let mut findings = Vec::new();
    match (read_preamble(dir, header, number), scanned.stray) {
        (Err(error), _) => findings.push(of(String::new(), Problem::Refused(error))),
        (Ok(()), Some(offset)) => findings.push(of(String::new(), Problem::Padding { offset })),
        (Ok(()), None) => {}
    }
    let names = names(header, number);
    for ((part, found), name) in parts.into_iter().zip(scanned.crcs).zip(names) {
        let Checked { offset, len, crc: expected } = part;
        if found != expected {
            findings.push(of(name, Problem::Checksum { offset, len, expected, found }));
        }
    }
    findings
}

/// What the checked parts of a file are called.
fn names(header: &Header, number: usize) -> Vec<String> {
    if let Some(at) = header.layer_in(number) {
        let layer = &header.layers[at];
        return (0..layer.records.len())
            .map(|expert| format!("expert {expert} of layer {}", layer.layer))
            .collect();
    }
    let tensors = header.tensors.iter().flat_map(|tensor| {
        let rows = tensor.row_checks.map(|_| format!("row checksums of {}", tensor.name));
        [Some(format!("tensor {}", tensor.name)), rows].into_iter().flatten()
    });
    tensors.collect()
}
