//! Shared by the integration tests: the demo model's files and the toy tokenizer of test vector T-03.

#![allow(dead_code, reason = "each test binary uses its own part")]

use forebay_text::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// The folder of the bundled demo model.
pub fn demo_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

pub fn demo_tokenizer() -> Tokenizer {
    Tokenizer::from_file(&demo_dir().join("tokenizer.json")).unwrap()
}

pub fn demo_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(demo_dir().join(name)).unwrap()).unwrap()
}

/// The byte-level symbol of a byte, built by the rule of GPT-2: bytes that are not printable Latin-1 take
/// U+0100, U+0101, ... in ascending order.
pub fn symbol(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !printable(other)).count();
    char::from_u32(0x100 + before as u32).unwrap()
}

/// Text in the byte-level alphabet.
pub fn spelt(text: &str) -> String {
    text.bytes().map(symbol).collect()
}

/// A tokenizer.json around a vocabulary and merges (plain text, spelt here), with the fixed parts that GLM's has.
pub fn tokenizer_json(vocab: &[(&str, u32)], merges: &[(&str, &str)], added: Value) -> Value {
    let vocab: Map<String, Value> = vocab.iter().map(|(token, id)| (spelt(token), json!(id))).collect();
    tokenizer_json_of(vocab, merges, added)
}

pub fn tokenizer_json_of(vocab: Map<String, Value>, merges: &[(&str, &str)], added: Value) -> Value {
    let merges: Vec<Value> = merges.iter().map(|(left, right)| json!([spelt(left), spelt(right)])).collect();
    let pattern = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": true,
            "vocab": vocab,
            "merges": merges,
        },
    })
}

pub fn added_token(id: u32, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "special": special,
        "lstrip": false, "rstrip": false, "single_word": false, "normalized": false,
    })
}

/// The file of T-03.
pub fn toy_json() -> Value {
    let mut vocab: Map<String, Value> = (0..=255u8).map(|b| (symbol(b).to_string(), json!(b))).collect();
    let tokens = [
        "he", "ll", "hell", "hello", " w", " hello", "or", " wor", "12", "123", "\n\n", "  ", "th", "the",
        "'s",
    ];
    for (at, token) in tokens.iter().enumerate() {
        vocab.insert(spelt(token), json!(256 + at));
    }
    for id in 271..=284 {
        vocab.insert(format!("zfiller{id}"), json!(id));
    }
    let merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        (" ", "w"),
        (" ", "hello"),
        ("o", "r"),
        (" w", "or"),
        ("1", "2"),
        ("12", "3"),
        ("\n", "\n"),
        (" ", " "),
        ("t", "h"),
        ("th", "e"),
        ("'", "s"),
    ];
    let added = [
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ];
    let added: Vec<Value> =
        added.iter().zip(285..).map(|(content, id)| added_token(id, content, id <= 291)).collect();
    tokenizer_json_of(vocab, &merges, added.into())
}

pub fn toy_tokenizer() -> Tokenizer {
    from_json(&toy_json())
}

pub fn from_json(file: &Value) -> Tokenizer {
    Tokenizer::from_bytes(file.to_string().as_bytes(), "test tokenizer").unwrap()
}

/// A small seeded generator (xorshift64*), for mutations that must be the same on every run.
pub struct Seeded(u64);

impl Seeded {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % bound.max(1)
    }
}
