//! GBNF grammars: what was read can be written as Lark, and a fault is somewhere in the text.

#![no_main]

use forebay_grammar::gbnf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match gbnf::read(text) {
        // Every character becomes at most twelve, in a part of its rule and in the rule.
        Ok(grammar) => assert!(grammar.to_lark().len() <= 64 * (text.len() + 16)),
        Err(error) => {
            assert!((1..=text.lines().count() + 1).contains(&error.line), "{error}");
            assert!(error.column >= 1 && error.column <= text.chars().count() + 1, "{error}");
        }
    }
});
