//! Reading a tokenizer.json and checking every assumption the encoder makes about it.
//! Nothing here builds search tables: the result is plain data in the file's own spelling.

use super::error::TokenizerError;
use super::pieces::PATTERN;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt;

/// The parts of the file that the encoder uses, after [`check`].
pub(super) struct TokenizerFile {
    /// Vocabulary string (byte-level alphabet) to id.
    pub vocab: HashMap<String, u64>,
    /// Left and right part of each merge, in order of rank.
    pub merges: Vec<(String, String)>,
    /// Added tokens in the file's order.
    pub added: Vec<AddedToken>,
}

/// One entry of `added_tokens`.
pub(super) struct AddedToken {
    pub id: u64,
    pub content: String,
    /// Ends a turn; true only when the file says exactly `true`.
    pub special: bool,
}

/// Parses and checks the bytes of a tokenizer.json.
pub(super) fn parse(bytes: &[u8], origin: &str) -> Result<TokenizerFile, TokenizerError> {
    let raw: RawFile = serde_json::from_slice(bytes)
        .map_err(|source| TokenizerError::Json { origin: origin.to_owned(), source })?;
    check(&raw, origin)?;
    let added = raw.added_tokens.0.into_iter().map(AddedToken::from).collect();
    Ok(TokenizerFile { vocab: raw.model.vocab.0, merges: raw.model.merges.0, added })
}

#[derive(serde::Deserialize)]
#[serde(expecting = "the object of a tokenizer.json, with the fields model and added_tokens")]
struct RawFile {
    #[serde(default)]
    truncation: Value,
    #[serde(default)]
    padding: Value,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: AddedTokens,
    model: RawModel,
}

#[derive(serde::Deserialize)]
#[serde(expecting = "the field model to be an object with the fields vocab and merges")]
struct RawModel {
    #[serde(default, rename = "type")]
    kind: Value,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    unk_token: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    byte_fallback: Value,
    #[serde(default)]
    ignore_merges: Value,
    vocab: Vocab,
    merges: MergeList,
}

/// `added_tokens`: absent and null both mean none.
#[derive(Default)]
struct AddedTokens(Vec<RawAdded>);

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Option::deserialize(deserializer)?.unwrap_or_default()))
    }
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an entry of added_tokens: an object with the fields id and content")]
struct RawAdded {
    id: u64,
    content: String,
    #[serde(default)]
    special: Value,
    #[serde(default)]
    lstrip: Value,
    #[serde(default)]
    rstrip: Value,
    #[serde(default)]
    single_word: Value,
    #[serde(default)]
    normalized: Value,
}

impl From<RawAdded> for AddedToken {
    fn from(raw: RawAdded) -> Self {
        Self { id: raw.id, content: raw.content, special: raw.special == Value::Bool(true) }
    }
}

/// `model.vocab`, with a repeated key refused instead of the last one winning.
struct Vocab(HashMap<String, u64>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object that maps tokens to ids")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut vocab = HashMap::new();
                while let Some((token, id)) = map.next_entry::<String, u64>()? {
                    if vocab.contains_key(&token) {
                        return Err(de::Error::custom(format_args!(
                            "vocabulary entry {token:?} appears twice"
                        )));
                    }
                    vocab.insert(token, id);
                }
                Ok(Vocab(vocab))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// `model.merges`: each a two-element array or one "left right" string.
struct MergeList(Vec<(String, String)>);

impl<'de> Deserialize<'de> for MergeList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let merges = Vec::<OneMerge>::deserialize(deserializer)?;
        Ok(Self(merges.into_iter().map(|merge| (merge.left, merge.right)).collect()))
    }
}

struct OneMerge {
    left: String,
    right: String,
}

impl<'de> Deserialize<'de> for OneMerge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = OneMerge;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge: two strings in an array, or one string with one space")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<OneMerge, E> {
                match text.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => {
                        Ok(OneMerge { left: left.to_owned(), right: right.to_owned() })
                    }
                    _ => Err(de::Error::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<OneMerge, A::Error> {
                let left = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let right = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
                match seq.next_element::<de::IgnoredAny>()? {
                    None => Ok(OneMerge { left, right }),
                    Some(_) => Err(de::Error::invalid_length(3, &self)),
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Refuses the first field that describes another encoder.
fn check(file: &RawFile, origin: &str) -> Result<(), TokenizerError> {
    let require = |holds: bool, field: &str, found: &Value, expected: &'static str| {
        if holds {
            return Ok(());
        }
        let (origin, field, found) = (origin.to_owned(), field.to_owned(), shortened(found));
        Err(TokenizerError::Unsupported { origin, field, found, expected })
    };
    let model = &file.model;
    require(model.kind == "BPE", "model.type", &model.kind, "\"BPE\"")?;
    require(model.ignore_merges == true, "model.ignore_merges", &model.ignore_merges, "true")?;
    require(is_false(&model.byte_fallback), "model.byte_fallback", &model.byte_fallback, "false")?;
    for (field, value) in [("model.unk_token", &model.unk_token), ("model.dropout", &model.dropout)] {
        require(value.is_null(), field, value, "null")?;
    }
    for (field, value) in [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        require(value.is_null() || value == "", field, value, "null or empty")?;
    }
    for (field, value) in
        [("truncation", &file.truncation), ("padding", &file.padding), ("normalizer", &file.normalizer)]
    {
        require(value.is_null(), field, value, "null")?;
    }
    check_pre_tokenizer(&file.pre_tokenizer, &require)?;
    require(
        adds_nothing(&file.post_processor),
        "post_processor",
        &file.post_processor,
        "none, or one that adds no tokens",
    )?;
    require(file.decoder["type"] == "ByteLevel", "decoder", &file.decoder, "type ByteLevel")?;
    for (at, token) in file.added_tokens.0.iter().enumerate() {
        for (flag, value) in [
            ("lstrip", &token.lstrip),
            ("rstrip", &token.rstrip),
            ("single_word", &token.single_word),
            ("normalized", &token.normalized),
        ] {
            let field = || format!("added_tokens[{at}].{flag} of {:?}", token.content);
            require(is_false(value), &field(), value, "false")?;
        }
    }
    Ok(())
}

/// The regular expression that isolates its matches, then the byte-level map without additions.
fn check_pre_tokenizer(
    pre: &Value,
    require: &impl Fn(bool, &str, &Value, &'static str) -> Result<(), TokenizerError>,
) -> Result<(), TokenizerError> {
    require(pre["type"] == "Sequence", "pre_tokenizer.type", &pre["type"], "\"Sequence\"")?;
    let steps = &pre["pretokenizers"];
    require(
        steps.as_array().is_some_and(|steps| steps.len() == 2),
        "pre_tokenizer.pretokenizers",
        steps,
        "a Split followed by a ByteLevel",
    )?;
    let name = |field: &str| format!("pre_tokenizer.pretokenizers{field}");
    let (split, bytes) = (&steps[0], &steps[1]);
    require(split["type"] == "Split", &name("[0].type"), &split["type"], "\"Split\"")?;
    let pattern = &split["pattern"];
    require(pattern["Regex"] == PATTERN, &name("[0].pattern"), pattern, "the GLM pattern as a Regex")?;
    require(split["behavior"] == "Isolated", &name("[0].behavior"), &split["behavior"], "\"Isolated\"")?;
    require(is_false(&split["invert"]), &name("[0].invert"), &split["invert"], "false")?;
    require(bytes["type"] == "ByteLevel", &name("[1].type"), &bytes["type"], "\"ByteLevel\"")?;
    // Both default to true in the library that defines the format, so absent is refused too.
    for flag in ["add_prefix_space", "use_regex"] {
        require(bytes[flag] == false, &name(&format!("[1].{flag}")), &bytes[flag], "false")?;
    }
    Ok(())
}

/// Whether a post-processor leaves the ids alone. ByteLevel only moves offsets.
fn adds_nothing(post: &Value) -> bool {
    match post["type"].as_str() {
        None => post.is_null(),
        Some("ByteLevel") => true,
        Some("TemplateProcessing") => post["single"]
            .as_array()
            .is_some_and(|pieces| pieces.len() == 1 && pieces[0].get("Sequence").is_some()),
        Some("Sequence") => post["processors"].as_array().is_some_and(|all| all.iter().all(adds_nothing)),
        Some(_) => false,
    }
}

fn is_false(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false))
}

/// A value as JSON, cut to a length that fits an error message.
fn shortened(value: &Value) -> String {
    const LONGEST: usize = 120;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
