//! A GGUF file, or a model split into several, as a source.
//!
//! - `config`: the metadata as a `config.json`. `tokenizer`: as a `tokenizer.json`. [`names`]: the tensors by the names they have here.
//!
//! Every layer of a file counts as a weight file of its own, so that a stopped conversion goes on behind the last
//! complete layer even if the model is a single file. docs/convert.md says what is read and what is refused.

mod config;
pub mod names;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_store::json::parse_object;
use forebay_store::shard::{Dtype, HeaderTensor};

use super::error::ConvertError;
use super::source::{LocalFolder, Source, SourceFile, modified};
use crate::gguf::{GgufError, Header, Info, Kind, Value};
use config::{ARCHITECTURES, Metadata};
use names::{Named, SPLIT, meaning};

/// Experts of a layer, at most (as in the reader of the config).
const MAX_EXPERTS: u64 = 4096;
/// Files that a model may be split into.
const MAX_FILES: usize = 1024;

/// Why a GGUF model cannot be converted. [`ConvertError`] adds the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufSourceError {
    /// A file is not what it should be.
    #[error(transparent)]
    File(#[from] GgufError),
    /// Another kind of model.
    #[error("the architecture is {found:?}, which is not read; GGUF files of {} are", ARCHITECTURES.join(", "))]
    Architecture {
        /// What it is.
        found: String,
    },
    /// A metadata value is missing or not one that can be computed with.
    #[error(
        "the metadata value {key} is {found}, expected {expected}; it is another kind of model, or damaged"
    )]
    Metadata {
        /// Its key.
        key: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A tensor is missing.
    #[error("tensor {tensor} is missing; the file is another kind of model, or damaged")]
    Missing {
        /// The tensor.
        tensor: String,
    },
    /// A tensor that this model should not have. Left out, the model would be another one.
    #[error("tensor {tensor} is none that a model of this kind has; leaving it out would change the model")]
    Unknown {
        /// The tensor.
        tensor: String,
    },
    /// A tensor has a shape that it cannot have.
    #[error("tensor {tensor} has shape {found:?}, expected {expected}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape, outermost dimension first.
        found: Vec<u64>,
        /// What it should be.
        expected: String,
    },
    /// A model of several files that are not all there, or not its own.
    #[error(
        "{what}; put all files of the model side by side under the names they were published with, and name the first"
    )]
    Split {
        /// What is wrong.
        what: String,
    },
    /// The tokenizer was not named, and cannot be made from the metadata.
    #[error(
        "no tokenizer can be made from the metadata: {what}; give the folder with the tokenizer.json of the original \
         model: --tokenizer DIR"
    )]
    NoTokenizer {
        /// Why not.
        what: String,
    },
    /// The tokenizer is not this model's.
    #[error("{}: {what}; give the folder of the model that this GGUF file was made from", dir.display())]
    Tokenizer {
        /// The folder.
        dir: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// One file.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    size: u64,
    identity: String,
    header: Header,
}

/// The model.
#[derive(Debug)]
pub struct GgufModel {
    path: PathBuf,
    texts: Texts,
    parts: Vec<Part>,
    config: Vec<u8>,
    /// By weight file of the source: the part it lies in.
    files: Vec<usize>,
}

/// Where tokenizer and template come from.
#[derive(Debug)]
enum Texts {
    /// The folder of the original model.
    Folder(LocalFolder),
    /// The metadata.
    Made { tokenizer: Vec<u8>, template: Option<Vec<u8>> },
}

impl GgufModel {
    /// The model whose first file is `path`, with the tokenizer of the folder `tokenizer`, or one made from the
    /// metadata.
    ///
    /// # Errors
    /// If a file, the architecture, a type or a tensor is not one that can be read, or the tokenizer is another's.
    pub fn open(path: &Path, tokenizer: Option<&Path>) -> Result<Self, ConvertError> {
        let mut parts = vec![Part::read(path)?];
        for path in others(path, &parts[0].header).map_err(at(path))? {
            parts.push(Part::read(&path)?);
        }
        let first = parts[0].header.metadata.clone();
        let metadata = Metadata::new(&first).map_err(at(path))?;
        check_split(&parts).map_err(at(path))?;
        let tensors: Vec<&Info> = parts.iter().flat_map(|part| &part.header.tensors).collect();
        let config = metadata.config(&tensors).map_err(at(path))?;
        let texts = match tokenizer {
            Some(dir) => {
                let mut folder = LocalFolder::new(dir);
                check_tokenizer(&mut folder, dir, metadata.tokens())?;
                Texts::Folder(folder)
            }
            None => {
                let template = metadata.text("tokenizer.chat_template").map(|text| text.as_bytes().to_vec());
                Texts::Made { tokenizer: tokenizer::made(&metadata).map_err(at(path))?, template }
            }
        };
        Ok(Self { path: path.to_owned(), texts, parts, config, files: Vec::new() })
    }

    /// The weight files of one part: what lies outside the layers, then layer by layer.
    fn part_files(&self, part: &Part) -> Result<Vec<SourceFile>, GgufSourceError> {
        let metadata = Metadata::new(&self.parts[0].header.metadata)?;
        let (blocks, widths) = (metadata.blocks()?, metadata.head_widths()?);
        let mut layers: BTreeMap<Option<usize>, Vec<HeaderTensor>> = BTreeMap::new();
        for info in &part.header.tensors {
            let tensors = layers.entry(names::layer(&info.name)).or_default();
            let unknown = || GgufSourceError::Unknown { tensor: info.name.clone() };
            match meaning(&info.name, blocks).ok_or_else(unknown)? {
                Named::Whole(name) => {
                    check_split_width(info, &name, widths)?;
                    tensors.push(tensor(info, name, &info.shape, info.offset, info.len));
                }
                Named::Experts { before, after } => {
                    let &[experts, rows, cols] = &info.shape[..] else {
                        return Err(shape(info, "three dimensions, one of them the expert"));
                    };
                    if experts > MAX_EXPERTS {
                        return Err(shape(info, "at most 4096 experts"));
                    }
                    let len = info.len / experts;
                    let slices = (0..experts).map(|expert| {
                        let name = format!("{before}{expert}{after}");
                        tensor(info, name, &[rows, cols], info.offset + expert * len, len)
                    });
                    tensors.extend(slices);
                }
            }
        }
        let file = part.path.file_name().unwrap_or_default().to_string_lossy();
        let named = |layer: Option<usize>| match layer {
            Some(layer) => format!("{file} (layer {layer})"),
            None => format!("{file} (outside the layers)"),
        };
        let files = layers.into_iter().map(|(layer, tensors)| SourceFile {
            name: named(layer),
            size: part.size,
            digest: None,
            tensors,
            identity: part.identity.clone(),
        });
        Ok(files.collect())
    }
}

impl Part {
    fn read(path: &Path) -> Result<Self, ConvertError> {
        let (size, header) = Header::read(path).map_err(|error| at(path)(error.into()))?;
        let identity = format!("modified:{}", modified(path)?);
        Ok(Self { path: path.to_owned(), size, identity, header })
    }
}

impl Source for GgufModel {
    fn place(&self) -> PathBuf {
        self.path.clone()
    }

    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError> {
        self.files.clear();
        let mut all = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            let files = self.part_files(part).map_err(at(&part.path))?;
            self.files.extend(files.iter().map(|_| number));
            all.extend(files);
        }
        Ok(all)
    }

    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError> {
        match (name, &mut self.texts) {
            ("config.json", _) => Ok(Some(self.config.clone())),
            (_, Texts::Folder(folder)) => folder.text(name),
            ("tokenizer.json", Texts::Made { tokenizer, .. }) => Ok(Some(tokenizer.clone())),
            ("chat_template.jinja", Texts::Made { template, .. }) => Ok(template.clone()),
            _ => Ok(None),
        }
    }

    fn take(&mut self, file: usize, _: &CancelToken) -> Result<PathBuf, ConvertError> {
        let part = self.files.get(file).and_then(|part| self.parts.get(*part));
        Ok(part.map(|part| part.path.clone()).unwrap_or_default())
    }

    fn release(&mut self, _: usize) {}

    fn room(&self, _: usize) -> u64 {
        0
    }

    fn keeps_files(&self) -> bool {
        true
    }

    fn is_unchanged(&self, path: &Path, planned: &SourceFile) -> Result<bool, ConvertError> {
        let size = std::fs::metadata(path).map_err(|cause| ConvertError::at("look at", path, cause))?.len();
        Ok(size == planned.size && planned.identity == format!("modified:{}", modified(path)?))
    }

    fn is_quantised(&self) -> bool {
        true
    }
}

/// Adds the file to an error.
fn at(path: &Path) -> impl Fn(GgufSourceError) -> ConvertError {
    move |error| ConvertError::Gguf { path: path.to_owned(), error: Box::new(error) }
}

fn shape(info: &Info, expected: &str) -> GgufSourceError {
    let (tensor, found) = (info.name.clone(), info.shape.clone());
    GgufSourceError::Shape { tensor, found, expected: expected.to_owned() }
}

/// The plan knows floats by their types, and blocks by the names of theirs.
fn tensor(info: &Info, name: String, shape: &[u64], offset: u64, len: u64) -> HeaderTensor {
    let dtype = match info.kind {
        Kind::F32 => Dtype::F32,
        Kind::F16 => Dtype::F16,
        Kind::Bf16 => Dtype::Bf16,
        kind => Dtype::Other(kind.name().into()),
    };
    HeaderTensor { name: name.into(), dtype, shape: shape.into(), offset, len, declared: None }
}

/// Both halves of a split `kv_b` are of the widths that the metadata say: the plan knows only their sum.
fn check_split_width(info: &Info, name: &str, [nope, value]: [u64; 2]) -> Result<(), GgufSourceError> {
    let [keys, values] = SPLIT.map(|part| name.ends_with(&format!("self_attn.{part}")));
    match info.shape[..] {
        [_, _, width] if keys && width != nope => Err(shape(info, &format!("[heads, kv_lora_rank, {nope}]"))),
        [_, width, _] if values && width != value => {
            Err(shape(info, &format!("[heads, {value}, kv_lora_rank]")))
        }
        _ => Ok(()),
    }
}

/// The other files of a split model, from the name of the first.
fn others(path: &Path, header: &Header) -> Result<Vec<PathBuf>, GgufSourceError> {
    let split = |what: String| GgufSourceError::Split { what };
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let named = name.strip_suffix(".gguf").and_then(|stem| {
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, number) = stem.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        (digits(number) && digits(count)).then(|| (stem, number.parse::<usize>(), count.parse::<usize>()))
    });
    let declared = match header.metadata.get("split.count") {
        Some(Value::Integer(n)) => usize::try_from(*n).unwrap_or(usize::MAX).max(1),
        _ => 1,
    };
    match named {
        Some((stem, Ok(1), Ok(count))) if count == declared && count <= MAX_FILES => {
            let other = |number: usize| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"));
            Ok((2..=count).map(other).collect())
        }
        Some((_, Ok(number), Ok(count))) if number != 1 => {
            Err(split(format!("it is file {number} of {count} of a split model")))
        }
        Some((_, _, Ok(count))) => Err(split(format!(
            "its name says that the model has {count} files, and its metadata say {declared}"
        ))),
        _ if declared > 1 => {
            Err(split(format!("it is the first of {declared} files, and its name does not say so")))
        }
        _ => Ok(Vec::new()),
    }
}

/// Every file says its own number, and the number of all tensors.
fn check_split(parts: &[Part]) -> Result<(), GgufSourceError> {
    let split = |what: String| Err(GgufSourceError::Split { what });
    if parts.len() == 1 {
        return Ok(());
    }
    for (number, part) in parts.iter().enumerate() {
        let says =
            |key: &str, value: usize| part.header.metadata.get(key) == Some(&Value::Integer(value as i128));
        if !says("split.no", number) || !says("split.count", parts.len()) {
            let (file, number, count) = (part.path.display(), number + 1, parts.len());
            return split(format!("{file} does not say that it is file {number} of {count}"));
        }
    }
    let found: usize = parts.iter().map(|part| part.header.tensors.len()).sum();
    match parts[0].header.metadata.get("split.tensors.count") {
        Some(Value::Integer(n)) if *n != found as i128 => {
            split(format!("the files have {found} tensors, and should have {n}"))
        }
        _ => Ok(()),
    }
}

/// That every entry of the tokenizer's vocabulary is the file's token of that number.
fn check_tokenizer(
    folder: &mut LocalFolder,
    dir: &Path,
    tokens: Option<&[String]>,
) -> Result<(), ConvertError> {
    const NAME: &str = "tokenizer.json";
    let refuse = |what: String| at(dir)(GgufSourceError::Tokenizer { dir: dir.to_owned(), what });
    let bytes = folder.text(NAME)?.ok_or_else(|| refuse(format!("there is no {NAME}")))?;
    let map = parse_object(&bytes).map_err(|error| refuse(format!("{NAME}: {error}")))?;
    let vocabulary =
        map.get("model").and_then(|model| model.get("vocab")).and_then(|vocab| vocab.as_object());
    let vocabulary = vocabulary.ok_or_else(|| refuse(format!("{NAME} has no model.vocab")))?;
    let Some(tokens) = tokens else { return Ok(()) };
    let same = |text: &String, id: &serde_json::Value| {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        id.and_then(|id| tokens.get(id)) == Some(text)
    };
    match vocabulary.iter().find(|(text, id)| !same(text, id)) {
        None => Ok(()),
        Some((text, id)) => {
            let text: String = text.chars().take(60).collect();
            Err(refuse(format!("{NAME} has the token {text:?} with number {id}, and the GGUF file another")))
        }
    }
}
