//! What the suites about containers share.
#![allow(dead_code, reason = "every suite uses its own part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::{CancelToken, Format};
use forebay_engine::{Engine, EngineOptions, Session};
use forebay_hub::pack::{self, Codes, PackError, PackOptions, Packed};
use forebay_hub::synth::{self, Dims, SynthSpec, TextFiles};
use forebay_store::catalog::Catalog;

/// A model of a few hundred kilobytes with everything in it; 12 experts in each of three layers, one of them MTP.
pub fn small(format: Format) -> SynthSpec {
    let dims = Dims {
        hidden: 160,
        dense_width: 128,
        expert_width: 128,
        experts: 12,
        top_k: 4,
        vocab: 320,
        max_context: 512,
        ..Dims::TINY
    };
    SynthSpec { dims, dense: 1, moe: 2, format, mtp: true, dsa: true, seed: 7, shard_bytes: 300_000 }
}

/// The same with eight experts a layer that are large enough to become smaller when they are coded.
pub fn codable(format: &str) -> SynthSpec {
    let small = small(format.parse().unwrap());
    let dims = Dims { hidden: 384, dense_width: 256, expert_width: 256, experts: 8, ..small.dims };
    SynthSpec { dims, shard_bytes: 1_000_000, ..small }
}

pub fn write_synth(dir: &Path, spec: &SynthSpec) {
    let files = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
    let text = TextFiles { files, tokens: 300, stop_ids: vec![290] };
    synth::write(dir, spec, &text, 2, &CancelToken::new(), &mut |_, _| {}).unwrap();
}

/// The bundled model.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

pub fn options(cancel: &CancelToken) -> PackOptions<'_> {
    PackOptions { threads: 2, codes: Codes::Raw, margin: 0, cancel }
}

pub fn pack(source: &Path, dir: &Path) -> Result<Packed, PackError> {
    pack::pack(source, dir, options(&CancelToken::new()), &mut |_, _| {})
}

/// Packs with every expert coded that becomes smaller.
pub fn pack_coded(source: &Path, dir: &Path) -> Result<Packed, PackError> {
    let cancel = CancelToken::new();
    pack::pack(source, dir, PackOptions { codes: Codes::Coded, ..options(&cancel) }, &mut |_, _| {})
}

pub fn unpack(source: &Path, dir: &Path) -> Result<Packed, PackError> {
    pack::unpack(source, dir, options(&CancelToken::new()), &mut |_, _| {})
}

/// Type, shape and bytes of every tensor of a folder of safetensors files.
pub fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let catalog = Catalog::open(dir).unwrap();
    assert!(catalog.native().is_none());
    let files: Vec<Vec<u8>> = catalog.shards().iter().map(|shard| fs::read(&shard.path).unwrap()).collect();
    let bytes =
        |shard: u32, at: u64, len: u64| files[shard as usize][at as usize..(at + len) as usize].to_vec();
    let tensors = catalog.iter().map(|(name, entry)| {
        let data = bytes(entry.shard, entry.offset, entry.len);
        (name.to_owned(), (entry.dtype.to_string(), entry.shape.to_vec(), data))
    });
    tensors.collect()
}

/// Every file of a folder.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    fs::read_dir(dir).unwrap().map(read).collect()
}

/// The bits of all logits of some tokens, as a prompt and then one by one.
pub fn logits(engine: &mut Engine) -> Result<Vec<u32>, String> {
    let vocab = engine.spec().vocab as u32;
    let tokens: Vec<u32> = (0..40u32).map(|i| (i * i * 7 + 31 * i + 3) % vocab.min(290)).collect();
    let mut session = Session::new(engine);
    let mut bits = Vec::new();
    let mut keep = |_: usize, row: &[f32]| bits.extend(row.iter().map(|logit| logit.to_bits()));
    let (prompt, rest) = tokens.split_at(30);
    let passes = std::iter::once(prompt).chain(rest.chunks(1));
    for pass in passes {
        session
            .run_tokens(engine, pass, &CancelToken::new(), &mut keep)
            .map_err(|error| error.to_string())?;
    }
    Ok(bits)
}

pub fn open(dir: &Path, options: EngineOptions) -> Result<Engine, String> {
    let options = EngineOptions { context: Some(64), threads: Some(1), ..options };
    Engine::open(dir, options, &mut |_, _| {}).map_err(|error| error.to_string())
}

/// What is wrong with a container.
pub fn verify_native(dir: &Path, hash: bool) -> Vec<forebay_hub::pack::Finding> {
    let verified = forebay_hub::pack::verify_native(dir, hash, &CancelToken::new(), &mut |_, _| {});
    verified.expect("nobody cancels")
}
