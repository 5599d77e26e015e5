//! Tokenizers: a file that was accepted can encode.

#![no_main]

use forebay_text::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Tokenizer::from_bytes(bytes, "tokenizer.json") {
        Ok(tokenizer) => {
            let ids = tokenizer.encode_raw("Hello, world 123\n<|user|> \u{e9}\u{1f600}");
            assert!(!ids.is_empty());
        }
        Err(error) => assert!(error.to_string().len() < 1 << 16),
    }
});
