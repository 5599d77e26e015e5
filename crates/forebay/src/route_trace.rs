//! `--route-trace`: the experts that every token used, in a file.

use std::fs::File;
use std::path::Path;

use forebay_engine::RouteRecorder;
use forebay_tiers::routes::file::{Header, RouteFileError};
use sha2::{Digest, Sha256};

use crate::args::RunArgs;
use crate::bundled::hex;
use crate::failure::Failure;
use crate::load::Loaded;
use crate::record::create_outside;

/// Makes the file, anywhere but in the model's folder.
pub fn create(path: &Path, model: &Path) -> Result<File, Failure> {
    create_outside(path, model, "the route trace")
}

/// Writes the header; the prompt is the first `prompt` positions.
pub fn begin(
    file: File,
    model: &Loaded,
    args: &RunArgs,
    prompt: usize,
) -> Result<RouteRecorder<File>, RouteFileError> {
    let moe = &model.engine.spec().moe;
    let mut header = Header::new(&identity(&model.dir)?, moe.experts, moe.top_k);
    let mut set = |name: &str, value: String| header.settings.insert(name.to_owned(), value);
    set("family", model.engine.spec().family.to_string());
    set("prompt_tokens", prompt.to_string());
    set("chunk", model.engine.plan().chunk.to_string());
    set("arith", model.engine.options().arith.to_string());
    if let Some(seed) = args.answer.seed {
        set("seed", seed.to_string());
    }
    RouteRecorder::new(file, header, prompt)
}

/// The model's identity: a hash of its config.
fn identity(dir: &Path) -> Result<String, RouteFileError> {
    Ok(hex(&Sha256::digest(std::fs::read(dir.join("config.json"))?)))
}

/// The recording is not complete.
pub fn failed(args: &RunArgs, error: &RouteFileError) -> Failure {
    let path = args.route_trace.as_deref().unwrap_or(Path::new(""));
    Failure::runtime(format!("{} is incomplete: {error}", path.display()))
}
