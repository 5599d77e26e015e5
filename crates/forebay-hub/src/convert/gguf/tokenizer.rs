//! The tokenizer of a GGUF file's metadata as a `tokenizer.json`.
//!
//! The metadata name the way in which text is cut before tokens are looked for, and do not say what it is. So this is
//! done for the names that stand for GLM's (tokenizer spec section 4), and for no other.

use std::collections::HashSet;

use serde_json::{Map, Value as Json, json};

use super::GgufSourceError;
use super::config::Metadata;

/// The kind of tokenizer: bytes in an alphabet of letters, joined pair by pair.
const BYTE_PAIRS: &str = "gpt2";
/// The names of GLM's way to cut a text.
const GLM_CUTS: [&str; 2] = ["glm4", "chatglm-bpe"];
/// That way.
const GLM_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Kinds of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// `tokenizer.json` of the file with this metadata.
pub fn made(metadata: &Metadata<'_>) -> Result<Vec<u8>, GgufSourceError> {
    let cannot = |what: String| GgufSourceError::NoTokenizer { what };
    let named = |key: &str, known: &[&str]| match metadata.text(key) {
        Some(found) if known.contains(&found) => Ok(()),
        found => {
            let found = found.map_or("missing".to_owned(), |text| format!("{:?}", clip(text)));
            Err(cannot(format!("{key} is {found}, and only {} is known here", known.join(" or "))))
        }
    };
    named("tokenizer.ggml.model", &[BYTE_PAIRS])?;
    named("tokenizer.ggml.pre", &GLM_CUTS)?;
    let missing = |what: &str| cannot(format!("the metadata have no {what}"));
    let tokens = metadata.tokens().ok_or_else(|| missing("vocabulary"))?;
    let merges = metadata.merges().ok_or_else(|| missing("merges"))?;
    let kinds = metadata.token_types().ok_or_else(|| missing("kinds of tokens"))?;
    if kinds.len() != tokens.len() {
        return Err(cannot(format!("there are {} tokens and {} kinds of tokens", tokens.len(), kinds.len())));
    }
    let (mut vocabulary, mut added, mut seen) = (Map::new(), Vec::new(), HashSet::new());
    for (id, (token, kind)) in tokens.iter().zip(kinds).enumerate() {
        match *kind {
            UNUSED => continue,
            NORMAL => drop(vocabulary.insert(token.clone(), json!(id))),
            CONTROL | USER_DEFINED => added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL,
            })),
            other => return Err(cannot(format!("token {id} is of kind {other}"))),
        }
        if !seen.insert(token) {
            return Err(cannot(format!("the token {:?} occurs twice", clip(token))));
        }
    }
    let pair = |merge: &String| match merge.split_once(' ') {
        Some((first, second)) if !first.is_empty() && !second.is_empty() && !second.contains(' ') => {
            Ok(json!([first, second]))
        }
        _ => Err(cannot(format!("{:?} is no pair of tokens", clip(merge)))),
    };
    let merges = merges.iter().map(pair).collect::<Result<Vec<Json>, _>>()?;
    let bytes = |space: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": space, "use_regex": regex});
    let mut cut = bytes(false, false);
    cut["trim_offsets"] = json!(true);
    let text = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": GLM_PATTERN}, "behavior": "Isolated", "invert": false},
            cut,
        ]},
        "post_processor": bytes(false, false),
        "decoder": bytes(true, true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocabulary, "merges": merges,
        },
    });
    Ok(text.to_string().into_bytes())
}

fn clip(text: &str) -> String {
    text.chars().take(60).collect()
}
