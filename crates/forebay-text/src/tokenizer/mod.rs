//! Text to token ids and back, from the model's own tokenizer.json.
//!
//! `file` checks what the file claims, `added` finds added tokens, [`pieces()`] cuts the text between them,
//! `bpe` merges inside a piece. The result equals the Hugging Face library's on every file accepted here
//! (the tests compare them). That library is not used at run time because it renumbers added tokens when ids
//! have gaps, panics on some damaged files, and cannot switch control tokens off for one part of a text.

mod added;
mod alphabet;
mod bpe;
mod error;
mod file;
mod pieces;

pub use error::{EncodeError, TokenizerError};
pub use pieces::{Pieces, pieces};

use crate::limits::{self, ReadError};
use crate::prompt::{PromptPart, RenderedPrompt};
use added::{Added, Finder};
use bpe::{Merge, Merges};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Largest supported token id. Bounds the id table whatever a file claims (GLM-5.2 needs 154,879).
const MAX_ID: u32 = (1 << 22) - 1;
/// Most bytes of text in all added tokens together. Bounds the search automata.
const MAX_ADDED_TEXT: usize = 1 << 20;

/// A byte-level BPE tokenizer. Immutable; share it between threads.
pub struct Tokenizer {
    /// Every token that ordinary text can become, by its bytes.
    by_bytes: HashMap<Box<[u8]>, u32>,
    /// The token of each single byte.
    byte_ids: [u32; 256],
    merges: Merges,
    texts: TokenTexts,
    /// Ascending by id.
    added: Vec<Added>,
    /// Index into `added` by text.
    added_by_content: HashMap<String, usize>,
    /// Finds every added token.
    every_added: Finder,
    /// Finds the added tokens that are content (`<think>`, `<tool_call>`, ...), not the control tokens.
    content_added: Finder,
}

impl Tokenizer {
    /// Reads and checks a tokenizer.json.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let origin = path.display().to_string();
        match limits::read_capped(path, limits::TOKENIZER_JSON) {
            Ok(bytes) => Self::from_bytes(&bytes, &origin),
            Err(ReadError::Io(source)) => Err(TokenizerError::Io { path: path.to_owned(), source }),
            Err(ReadError::TooLarge) => {
                Err(TokenizerError::TooLarge { origin, limit: limits::TOKENIZER_JSON })
            }
            Err(ReadError::NotAFile) => Err(TokenizerError::NotAFile { path: path.to_owned() }),
        }
    }

    /// Checks the bytes of a tokenizer.json; `origin` names them in errors.
    ///
    /// Any field that describes an encoder other than the one implemented here is an error that names it.
    pub fn from_bytes(bytes: &[u8], origin: &str) -> Result<Self, TokenizerError> {
        let owned = || origin.to_owned();
        if bytes.len() as u64 > limits::TOKENIZER_JSON {
            return Err(TokenizerError::TooLarge { origin: owned(), limit: limits::TOKENIZER_JSON });
        }
        if limits::starts_with_byte_order_mark(bytes) {
            return Err(TokenizerError::ByteOrderMark { origin: owned() });
        }
        let file = file::parse(bytes, origin)?;
        let vocab = checked_vocab(file.vocab, origin)?;
        let merges = resolved_merges(&file.merges, &vocab, origin)?;
        let (added, added_by_content) = checked_added(file.added, origin)?;
        let texts = TokenTexts::new(&vocab, &added, origin)?;
        let by_bytes = encodable(&vocab);
        let byte_ids = single_bytes(&by_bytes, origin)?;
        let search = |source| TokenizerError::AddedTokenSearch { origin: owned(), source };
        let every_added = Finder::new(&added, |_| true).map_err(search)?;
        let content_added = Finder::new(&added, |token| !token.control).map_err(search)?;
        Ok(Self { by_bytes, byte_ids, merges, texts, added, added_by_content, every_added, content_added })
    }

    /// The ids of a text in which every added token is active, control tokens included. For prompts that the
    /// caller wrote whole (completions, scoring), never for parts of a conversation.
    pub fn encode_raw(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.encode_into(text, &self.every_added, &mut ids);
        ids
    }

    /// The ids of a rendered conversation: control tokens exactly where the template put them, text encoded
    /// with control tokens switched off (a literal `<|user|>` becomes ordinary bytes).
    pub fn encode_rendered(&self, prompt: &RenderedPrompt) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::new();
        for part in prompt.parts() {
            match part {
                PromptPart::Text(text) => self.encode_into(text, &self.content_added, &mut ids),
                PromptPart::Control(content) => ids.push(
                    self.added_id(content)
                        .ok_or_else(|| EncodeError::UnknownControl { content: content.clone() })?,
                ),
            }
        }
        Ok(ids)
    }

    /// The ids of a text in which no added token is active: all of it is ordinary text.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for piece in pieces(text) {
            self.encode_piece(piece.as_bytes(), &mut ids);
        }
        ids
    }

    /// A text that is known to come from a template alone, cut at its control tokens.
    pub(crate) fn split_controls(&self, text: &str) -> RenderedPrompt {
        let mut prompt = RenderedPrompt::new();
        for (between, hit) in self.every_added.cut(text) {
            prompt.push_text(between);
            let token = hit.and_then(|id| {
                // Ascending by id.
                self.added.binary_search_by_key(&id, |token| token.id).ok().and_then(|at| self.added.get(at))
            });
            match token {
                Some(token) if token.control => prompt.push_control(&token.content),
                Some(token) => prompt.push_text(&token.content),
                None => {}
            }
        }
        prompt
    }

    fn encode_into(&self, text: &str, active: &Finder, ids: &mut Vec<u32>) {
        for (between, hit) in active.cut(text) {
            for piece in pieces(between) {
                self.encode_piece(piece.as_bytes(), ids);
            }
            ids.extend(hit);
        }
    }

    /// A piece that is a token as a whole is that token, whatever the merges would do (`ignore_merges`).
    fn encode_piece(&self, piece: &[u8], ids: &mut Vec<u32>) {
        match self.by_bytes.get(piece) {
            Some(&id) => ids.push(id),
            None => {
                let byte_ids = piece.iter().map(|&byte| self.byte_ids[usize::from(byte)]);
                bpe::merge_piece(byte_ids, &self.merges, ids);
            }
        }
    }

    /// The bytes that ids stand for, concatenated. A token may hold part of a character, so the result need
    /// not be UTF-8. Ids without text give nothing; control tokens give their literal text.
    pub fn decode_bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().filter_map(|&id| self.token_bytes(id)).flatten().copied().collect()
    }

    /// The bytes of one token, or `None` when the id has no text (a model's vocabulary may be larger than its
    /// tokenizer's).
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.texts.get(id)
    }

    /// The id of a token given its literal text: an added token, else an ordinary token with these bytes.
    pub fn id_of(&self, content: &str) -> Option<u32> {
        self.added_id(content).or_else(|| self.by_bytes.get(content.as_bytes()).copied())
    }

    /// The id of the added token with this text.
    pub fn added_id(&self, content: &str) -> Option<u32> {
        self.added_by_content.get(content).and_then(|&at| self.added.get(at)).map(|token| token.id)
    }

    /// The control tokens (`"special": true`): id and literal text, ascending by id.
    pub fn control_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.added.iter().filter(|token| token.control).map(|token| (token.id, token.content.as_str()))
    }

    /// All added tokens, control or not: id and literal text, ascending by id.
    pub fn added_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.added.iter().map(|token| (token.id, token.content.as_str()))
    }

    /// Ids of the control tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        self.control_tokens().map(|(id, _)| id).collect()
    }

    /// Largest id plus one. Gaps below it are ids without text.
    pub fn vocab_size(&self) -> usize {
        self.texts.spans.len()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("merges", &self.merges.len())
            .field("added", &self.added.len())
            .finish_non_exhaustive()
    }
}

/// The bytes of every id, in one buffer.
struct TokenTexts {
    buffer: Vec<u8>,
    spans: Vec<Option<Range<usize>>>,
}

impl TokenTexts {
    /// An added token's literal text replaces what the vocabulary says about its id.
    fn new(vocab: &HashMap<String, u32>, added: &[Added], origin: &str) -> Result<Self, TokenizerError> {
        let largest = vocab.values().copied().chain(added.iter().map(|token| token.id)).max();
        let mut texts =
            Self { buffer: Vec::new(), spans: vec![None; largest.map_or(0, |id| id as usize + 1)] };
        for (token, &id) in vocab {
            if texts.spans[id as usize].is_some() {
                return Err(duplicate(origin, "id", id, "vocabulary entries"));
            }
            texts.set(id, &alphabet::bytes_of(token).0);
        }
        for token in added {
            texts.set(token.id, token.content.as_bytes());
        }
        Ok(texts)
    }

    fn set(&mut self, id: u32, bytes: &[u8]) {
        let start = self.buffer.len();
        self.buffer.extend_from_slice(bytes);
        self.spans[id as usize] = Some(start..self.buffer.len());
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let span = self.spans.get(id as usize)?.clone()?;
        self.buffer.get(span)
    }
}

fn duplicate(origin: &str, what: &'static str, value: impl ToString, table: &'static str) -> TokenizerError {
    TokenizerError::Duplicate { origin: origin.to_owned(), what, value: value.to_string(), table }
}

fn checked_id(id: u64, token: &str, origin: &str) -> Result<u32, TokenizerError> {
    match u32::try_from(id) {
        Ok(id) if id <= MAX_ID => Ok(id),
        _ => Err(TokenizerError::IdTooLarge {
            origin: origin.to_owned(),
            token: token.to_owned(),
            id,
            limit: MAX_ID,
        }),
    }
}

fn checked_vocab(vocab: HashMap<String, u64>, origin: &str) -> Result<HashMap<String, u32>, TokenizerError> {
    vocab
        .into_iter()
        .map(|(token, id)| {
            let id = checked_id(id, &token, origin)?;
            Ok((token, id))
        })
        .collect()
}

fn checked_added(
    file: Vec<file::AddedToken>,
    origin: &str,
) -> Result<(Vec<Added>, HashMap<String, usize>), TokenizerError> {
    let bytes: usize = file.iter().map(|token| token.content.len()).sum();
    if bytes > MAX_ADDED_TEXT {
        let origin = origin.to_owned();
        return Err(TokenizerError::TooManyAddedTokens { origin, bytes, limit: MAX_ADDED_TEXT });
    }
    let mut added = Vec::with_capacity(file.len());
    for token in file {
        let id = checked_id(token.id, &token.content, origin)?;
        added.push(Added { id, content: token.content, control: token.special });
    }
    added.sort_by_key(|token| token.id);
    if let Some(pair) = added.windows(2).find(|pair| pair[0].id == pair[1].id) {
        return Err(duplicate(origin, "id", pair[0].id, "added tokens"));
    }
    let mut by_content = HashMap::new();
    for (at, token) in added.iter().enumerate().filter(|(_, token)| !token.content.is_empty()) {
        if by_content.insert(token.content.clone(), at).is_some() {
            return Err(duplicate(origin, "text", &token.content, "added tokens"));
        }
    }
    Ok((added, by_content))
}

/// Merges as pairs of ids. Both parts and their concatenation must be in the vocabulary.
fn resolved_merges(
    list: &[(String, String)],
    vocab: &HashMap<String, u32>,
    origin: &str,
) -> Result<Merges, TokenizerError> {
    let mut merges = Merges::with_capacity(list.len());
    let mut joined = String::new();
    for (rank, (left, right)) in list.iter().enumerate() {
        let bad = |reason| TokenizerError::BadMerge {
            origin: origin.to_owned(),
            rank,
            merge: format!("{left} {right}"),
            reason,
        };
        let find = |part: &str, reason| vocab.get(part).copied().ok_or_else(|| bad(reason));
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        let pair = (
            find(left, "its left part is not in the vocabulary")?,
            find(right, "its right part is not in the vocabulary")?,
        );
        let id = find(&joined, "its result is not in the vocabulary")?;
        let rank = u32::try_from(rank).map_err(|_| bad("there are too many merges"))?;
        if merges.insert(pair, Merge { rank, id }).is_some() {
            return Err(bad("it appears twice"));
        }
    }
    Ok(merges)
}

/// The vocabulary entries that text can become: those spelt wholly in the byte-level alphabet.
fn encodable(vocab: &HashMap<String, u32>) -> HashMap<Box<[u8]>, u32> {
    vocab
        .iter()
        .filter_map(|(token, &id)| match alphabet::bytes_of(token) {
            (bytes, true) => Some((bytes.into_boxed_slice(), id)),
            _ => None,
        })
        .collect()
}

fn single_bytes(by_bytes: &HashMap<Box<[u8]>, u32>, origin: &str) -> Result<[u32; 256], TokenizerError> {
    let mut ids = [0; 256];
    for byte in 0..=u8::MAX {
        match by_bytes.get([byte].as_slice()) {
            Some(&id) => ids[usize::from(byte)] = id,
            None => return Err(TokenizerError::MissingByte { origin: origin.to_owned(), byte }),
        }
    }
    Ok(ids)
}
