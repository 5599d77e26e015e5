//! Our encoder against the Hugging Face `tokenizers` library on random text.

mod common;

use common::*;
use forebay_text::Tokenizer;
use proptest::prelude::*;
use std::sync::LazyLock;

struct Pair {
    ours: Tokenizer,
    theirs: tokenizers::Tokenizer,
}

impl Pair {
    fn new(bytes: &[u8]) -> Self {
        let ours = Tokenizer::from_bytes(bytes, "oracle").unwrap();
        Self { ours, theirs: tokenizers::Tokenizer::from_bytes(bytes).unwrap() }
    }

    fn check(&self, text: &str) -> Result<(), TestCaseError> {
        let ids = self.ours.encode_raw(text);
        let expected = self.theirs.encode(text, false).unwrap();
        prop_assert_eq!(&ids, expected.get_ids(), "{:?}", text);
        prop_assert_eq!(self.ours.decode_bytes(&ids), text.as_bytes());
        Ok(())
    }
}

static DEMO: LazyLock<Pair> =
    LazyLock::new(|| Pair::new(&std::fs::read(demo_dir().join("tokenizer.json")).unwrap()));
static TOY: LazyLock<Pair> = LazyLock::new(|| Pair::new(toy_json().to_string().as_bytes()));

/// Text made of what the encoder treats specially: words, runs of spaces, contractions, digits, marks, added
/// tokens whole and cut, and any character at all.
fn text() -> impl Strategy<Value = String> {
    let words = vec![
        "hello",
        "the",
        "The quick brown fox",
        "don't",
        "I'LL",
        "'s",
        "'S",
        "we've",
        "x",
        "é",
        "中文",
        "ß",
        "ſ",
        "İ",
        "e\u{301}",
        "🙂",
        "👩\u{200D}🚀",
        "123",
        "12345",
        "٣½",
        "Ⅷ",
        "_foo",
        "...",
        "!?",
        "$100.50",
        "->",
        "{\"a\": 1}",
    ];
    let spaces = vec![
        " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u{A0}", "\u{3000}", "\u{85}", "\u{2028}",
        "\u{200B}",
    ];
    let marks = vec![
        "<|user|>",
        "<|us",
        "er|>",
        "<|endoftext|>",
        "[gMASK]",
        "[gM",
        "<sop>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<<",
        "<",
        "|>",
        "/nothink",
    ];
    let fragment = prop_oneof![
        4 => proptest::sample::select(words).prop_map(str::to_owned),
        4 => proptest::sample::select(spaces).prop_map(str::to_owned),
        2 => proptest::sample::select(marks).prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
        1 => "[a-z]{1,12}",
        1 => "\\PC{0,8}",
    ];
    proptest::collection::vec(fragment, 0..24).prop_map(|fragments| fragments.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn demo_tokenizer_agrees(text in text()) {
        DEMO.check(&text)?;
    }

    #[test]
    fn toy_tokenizer_agrees(text in text()) {
        TOY.check(&text)?;
    }
}

/// Characters of all blocks, in the company that decides their class.
#[test]
fn characters_are_cut_alike() {
    let mut text = String::new();
    for c in ('\0'..=char::MAX).filter(|c| u32::from(*c) < 0x3000 || u32::from(*c) % 31 == 0) {
        text.extend(['a', c, 'b', '1', c, ' ', c, '!']);
        if text.len() > 8000 {
            DEMO.check(&text).unwrap();
            text.clear();
        }
    }
    DEMO.check(&text).unwrap();
}
