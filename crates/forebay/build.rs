//! Hands the SHA-256 of each file of the bundled model to `src/bundled.rs`, so that a run can check its
//! unpacked copy without touching the copy inside the program.

use std::fmt::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    for name in FILES {
        let path = folder.join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        let bytes = std::fs::read(&path)
            .unwrap_or_else(|error| panic!("models/demo/{name}: {error}; check out the complete repository"));
        let mut hex = String::new();
        for byte in Sha256::digest(&bytes) {
            write!(hex, "{byte:02x}").expect("writing to a string cannot fail");
        }
        println!("cargo::rustc-env=DEMO_SHA256_{name}={hex}");
    }
}
