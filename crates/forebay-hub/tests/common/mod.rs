//! Checkpoints to convert, and where the goldens are.

#![allow(dead_code, reason = "every test file uses a part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::{CancelToken, Format};
use forebay_engine::{Engine, EngineOptions, Session};
use forebay_hub::convert::{
    ConvertError, Converted, Job, LocalFolder, Options, ResultKind, Source, SourceFile, Targets,
};
use forebay_store::catalog::Catalog;
use serde_json::{Value, json};

pub const CASES: [&str; 4] = ["bf16", "fp8", "fused", "nvfp4"];

pub fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case)
}

/// A copy of a golden's checkpoint that a test may damage.
pub fn copy(case: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(case)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "expected.json" {
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    dir
}

pub fn options(targets: Targets) -> Options {
    Options { targets, kind: ResultKind::Reference, mtp: true, indexer: true, margin: 0, threads: 2 }
}

pub fn int4_g64() -> Options {
    options(Targets::of("int4-g64".parse().unwrap()))
}

pub fn convert(from: &Path, to: &Path, options: Options) -> Result<Converted, ConvertError> {
    run(&mut LocalFolder::new(from), to, options)
}

pub fn run(source: &mut dyn Source, to: &Path, options: Options) -> Result<Converted, ConvertError> {
    Job::new(source, options)?.run(source, to, &CancelToken::new(), &mut |_, _| {})
}

/// Every file that makes the model, with its bytes: all but the record of conversion, which has times in it.
pub fn model_files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let named = files.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    let kept = named.filter(|(name, _)| !name.starts_with("forebay-convert."));
    kept.map(|(name, path)| (name, fs::read(path).unwrap())).collect()
}

/// The bytes of a tensor.
pub fn bytes(catalog: &Catalog, name: &str) -> Option<Vec<u8>> {
    let entry = catalog.get(name)?;
    let file = fs::read(&catalog.shards()[entry.shard as usize].path).unwrap();
    Some(file[entry.offset as usize..(entry.offset + entry.len) as usize].to_vec())
}

pub fn format(text: &str) -> Format {
    text.parse().unwrap()
}

/// Changes a tensor: its name, type, shape and bytes. False drops it.
pub type Change<'a> = dyn FnMut(&str, &mut String, &mut Vec<u64>, &mut Vec<u8>) -> bool + 'a;

/// Rewrites the tensors of every file of a checkpoint.
pub fn rewrite(dir: &Path, change: &mut Change<'_>) {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    for path in files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")) {
        let bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let map: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let (mut entries, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, entry) in map.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
            let at = |n: usize| 8 + header + entry["data_offsets"][n].as_u64().unwrap() as usize;
            let mut dtype = entry["dtype"].as_str().unwrap().to_owned();
            let mut shape: Vec<u64> = serde_json::from_value(entry["shape"].clone()).unwrap();
            let mut tensor = bytes[at(0)..at(1)].to_vec();
            if change(name, &mut dtype, &mut shape, &mut tensor) {
                let offsets = [data.len(), data.len() + tensor.len()];
                entries
                    .insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
                data.extend(tensor);
            }
        }
        let text = Value::Object(entries).to_string();
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text.as_bytes());
        file.extend(data);
        fs::write(path, file).unwrap();
    }
}

/// Hands out one file at a time, as a copy that is gone when it is released.
pub struct HandOut {
    pub inner: LocalFolder,
    pub at: PathBuf,
    pub taken: Vec<usize>,
    pub before_take: Box<dyn FnMut(usize) -> Result<(), ConvertError>>,
}

impl HandOut {
    pub fn new(from: &Path, at: &Path) -> Self {
        let (inner, at) = (LocalFolder::new(from), at.to_owned());
        Self { inner, at, taken: Vec::new(), before_take: Box::new(|_| Ok(())) }
    }

    /// Bytes of a file.
    pub fn size(&mut self, file: usize) -> u64 {
        fs::metadata(self.inner.take(file, &CancelToken::new()).unwrap()).unwrap().len()
    }

    fn path(&self, file: usize) -> PathBuf {
        self.at.join(format!("{file}.safetensors"))
    }
}

impl Source for HandOut {
    fn place(&self) -> PathBuf {
        self.inner.place()
    }

    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError> {
        self.inner.files()
    }

    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError> {
        self.inner.text(name)
    }

    fn take(&mut self, file: usize, cancel: &CancelToken) -> Result<PathBuf, ConvertError> {
        assert_eq!(fs::read_dir(&self.at).unwrap().count(), 0, "one file at a time");
        (self.before_take)(file)?;
        self.taken.push(file);
        fs::copy(self.inner.take(file, cancel)?, self.path(file)).unwrap();
        Ok(self.path(file))
    }

    fn release(&mut self, file: usize) {
        fs::remove_file(self.path(file)).unwrap();
    }

    fn room(&self, _: usize) -> u64 {
        0
    }

    fn keeps_files(&self) -> bool {
        false
    }
}

/// What the engine predicts for a few tokens.
pub fn scores(dir: &Path, quantise: Option<Format>) -> Vec<forebay_engine::TokenScore> {
    let options = EngineOptions { context: Some(32), threads: Some(1), quantise, ..Default::default() };
    let mut engine = Engine::open(dir, options, &mut |_, _| {}).unwrap();
    let tokens: Vec<u32> = (0..24).map(|n| (n * 7 + 3) % 67).collect();
    let mut session = Session::new(&engine);
    session.score(&mut engine, &tokens, &CancelToken::new(), None, &mut |_| {}).unwrap()
}
