//! The vocabulary of a model as a trie of bytes: built once a model, shared by all answers.

use std::sync::Arc;

use forebay_text::Tokenizer;
use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// Most bytes of a token that is offered: the trie's nodes count their parents in ten bits. Longer ones (runs of a
/// thousand spaces) are never allowed; shorter ones spell the same text.
const LONGEST_TOKEN: usize = 1000;
/// Most bytes of all tokens together: the trie's nodes count their descendants in 22 bits.
const MOST_BYTES: usize = (1 << 22) - 1024;
/// Stands behind the vocabulary for the end of the answer. Which of the model's tokens end it is the decoder's business.
const END: &str = "<|forebay end of answer|>";

/// Most regular expression states that a grammar may take, about 2 KB each.
const LEXER_STATES: usize = 50_000;
/// Most ways that a grammar may go on at one place: an object without further properties has three for each that is
/// still to come.
const WAYS: usize = 4 * crate::schema::MAX_PROPERTIES;

/// Why no vocabulary can be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VocabularyError {
    /// It is too large.
    #[error(
        "the tokens of this model have {bytes} bytes together; structured output works with up to {MOST_BYTES}"
    )]
    TooLarge {
        /// Bytes of all tokens.
        bytes: usize,
    },
    /// The engine refused it.
    #[error("the vocabulary of this model cannot be used for structured output: {reason}")]
    Refused {
        /// What it said.
        reason: String,
    },
}

/// What the tokens of a model are, for matching grammars. Cheap to clone.
#[derive(Clone)]
pub struct Vocabulary {
    factory: Arc<ParserFactory>,
}

impl Vocabulary {
    /// The vocabulary of `tokenizer`.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<Self, VocabularyError> {
        let words = words(&tokenizer)?;
        let end = words.len() as u32 - 1;
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
        let env: TokEnv = Arc::new(Env { tokenizer, trie });
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| VocabularyError::Refused { reason: error.to_string() })?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = LEXER_STATES;
        limits.max_items_in_row = WAYS;
        limits.verbose_errors = false;
        Ok(Self { factory: Arc::new(factory) })
    }

    pub(crate) fn factory(&self) -> &ParserFactory {
        &self.factory
    }
}

/// The bytes of every token by id, and of the end behind them. Added tokens are marked, so that no text is taken for
/// one: they have to be named in a grammar.
fn words(tokenizer: &Tokenizer) -> Result<Vec<Vec<u8>>, VocabularyError> {
    let ordinary = |id: u32| tokenizer.token_bytes(id).filter(|bytes| bytes.len() <= LONGEST_TOKEN);
    let mut words: Vec<Vec<u8>> =
        (0..tokenizer.vocab_size() as u32).map(|id| ordinary(id).unwrap_or_default().to_vec()).collect();
    let marked = |text: &str| [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
    for (id, text) in tokenizer.added_tokens() {
        let short = text.len() < LONGEST_TOKEN && !text.is_empty();
        words[id as usize] = if short { marked(text) } else { Vec::new() };
    }
    words.push(marked(END));
    let bytes = words.iter().map(Vec::len).sum();
    if bytes > MOST_BYTES {
        return Err(VocabularyError::TooLarge { bytes });
    }
    Ok(words)
}

/// The tokenizer as `toktrie` wants to see one.
struct Env {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenizer.encode_plain(text))
    }
}
