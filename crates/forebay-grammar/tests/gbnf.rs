//! GBNF grammars: the texts they allow, what is forced, and what is wrong with a wrong one.

mod common;

use common::{accepts, begins, forced, gbnf};
use forebay_core::{Constraint, Ending};
use forebay_grammar::gbnf::{Found, GbnfError, Problem, read};
use proptest::prelude::*;

fn fault(text: &str) -> (usize, usize, Problem) {
    let GbnfError { line, column, problem } = read(text).expect_err(text);
    (line, column, problem)
}

/// Decode spec D-14. What is forced is cut where other tokens could say the same text, so it may be shorter.
#[test]
fn d14_forced_spans() {
    let abc = gbnf(r#"root ::= "a" ("b" | "c") "d""#);
    assert!(accepts(&abc, "abd") && accepts(&abc, "acd"));
    assert!(!accepts(&abc, "ab") && !begins(&abc, "ad") && !begins(&abc, "abdd"));
    assert_eq!(forced(&abc, "ab"), "d");

    let repeated = gbnf(r#"root ::= "ab"+ "c""#);
    assert!(accepts(&repeated, "abc") && accepts(&repeated, "abababc"));
    assert!(!begins(&repeated, "c") && !begins(&repeated, "abac"));
    assert_eq!(forced(&repeated, "ab"), "");

    let lines = gbnf("root ::= (\"x\" \"\\n\")+");
    assert!(accepts(&lines, "x\n") && accepts(&lines, "x\nx\nx\n") && !accepts(&lines, "x\nx"));
    assert_eq!(forced(&lines, "x\n"), "");

    let names = gbnf(r#"root ::= "\"" ("no_fit" | "partial_fit" | "good_fit") "\"""#);
    assert!(["no_fit", "partial_fit", "good_fit"].iter().all(|name| accepts(&names, &format!("\"{name}\""))));
    assert!(!begins(&names, "\"bad"));
    assert_eq!(forced(&names, "\"n"), "o_fit\"");

    let quoted = gbnf(r#"root ::= [^"]* "\"""#);
    assert!(accepts(&quoted, "anything, é中 \n\"") && !begins(&quoted, "a\"b"));
    assert_eq!(forced(&quoted, "a"), "");
}

/// Decode spec D-15: repetition has no end.
#[test]
fn d15_repetition() {
    let digits = "7".repeat(5_000);
    let grammar = gbnf(r#"root ::= "a" [0-9]* "b""#);
    assert!(accepts(&grammar, &format!("a{digits}b")) && accepts(&grammar, "ab"));
    assert!(!begins(&grammar, &format!("a{digits}c")));
    // Through rules that call themselves, left and right.
    for body in [r#"ds ::= ds [0-9] | """#, r#"ds ::= [0-9] ds | """#, r#"ds ::= ([0-9]?)*"#] {
        let grammar = gbnf(&format!("root ::= \"a\" ds \"b\"\n{body}"));
        assert!(accepts(&grammar, &format!("a{}b", &digits[..500])), "{body}");
        assert!(!begins(&grammar, "a7x"), "{body}");
    }
}

/// A grammar with recursion, in the way people write them.
#[test]
fn json_as_a_grammar() {
    let grammar = gbnf(
        r##"# a value is anything
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= [ \t\n]{0,20}
"##,
    );
    for good in [
        "{}",
        "[]",
        r#"{"a": [1, -2.5e+3, true, null, "x\n\u00e9é"], "b": {"c": {}}}"#,
        "[[[[[[[[1]]]]]]]]",
        "0",
        "\"\"",
        "{ \"a\" : 1 }",
    ] {
        assert!(accepts(&grammar, good), "{good}");
    }
    for bad in ["{a", "[1,]", "01x", "{\"a\" 1", "\"\u{1}", "[1}"] {
        assert!(!accepts(&grammar, bad), "{bad}");
    }
    let deep = format!("{}1{}", "[".repeat(64), "]".repeat(64));
    assert!(accepts(&grammar, &deep));
}

#[test]
fn what_can_be_written() {
    assert!(accepts(&gbnf(r#"root ::= "é\u4e2d\U0001F600\x41\xC3\xA9""#), "é中😀Aé"));
    assert!(accepts(&gbnf("root ::= [а-яё]+ [^a-z] ."), "привётZ\n"));
    // Reversed ranges are turned round; a hyphen at the end is one.
    assert!(accepts(&gbnf(r"root ::= [z-x]+ [a-]+ [\]\^\-]+"), "xyza-a]^-"));
    assert!(accepts(
        &gbnf("root ::= a-1 | long_name.\na-1 ::= \"x\"{2,3} \"y\"{2} \"z\"{1,}\nlong_name ::= \"q\""),
        "xxyyzzz"
    ));
    // An empty alternative, an empty literal that repeats, comments, rules over several lines.
    let odd = gbnf("# head\nroot ::= (\"a\" | ) # tail\n  \"\"* | \"b\"\n  \"c\"\nother ::= \"d\" root");
    assert!(accepts(&odd, "") && accepts(&odd, "a") && accepts(&odd, "bc") && !begins(&odd, "c"));
    let nested = gbnf(r#"root ::= "(" root ")" | (("a"?)* "b")?"#);
    assert!(
        accepts(&nested, "((aab))")
            && accepts(&nested, "()")
            && accepts(&nested, "")
            && !begins(&nested, ")")
    );
}

#[test]
fn names_are_told_apart_whatever_their_length() {
    let long = "n".repeat(100);
    let grammar = gbnf(&format!("root ::= {long}1 {long}2\n{long}1 ::= \"a\"\n{long}2 ::= \"b\""));
    assert!(accepts(&grammar, "ab") && !begins(&grammar, "aa"));
}

#[test]
fn faults_are_named_where_they_are() {
    let unclosed = |what| Problem::Unclosed { what };
    let name = || "a".to_owned();
    assert_eq!(fault("root ::= \"a\"\n  b"), (2, 3, Problem::Undefined { name: "b".to_owned() }));
    assert_eq!(fault("root ::= a\na ::= \"x\"\na ::= \"y\""), (3, 1, Problem::Duplicate { name: name() }));
    assert_eq!(fault("a ::= \"x\""), (1, 10, Problem::NoRoot));
    assert_eq!(fault(""), (1, 1, Problem::NoRoot));
    assert_eq!(fault("root ::= (\"a\""), (1, 10, unclosed("parenthesis")));
    assert_eq!(fault("root ::= (\"a\"\nb ::= \"c\""), (1, 10, unclosed("parenthesis")));
    assert_eq!(fault("root ::= \"é\" \"a\nb\""), (1, 14, unclosed("literal")));
    assert_eq!(fault("root ::= [a-"), (1, 10, unclosed("class")));
    assert_eq!(fault("root ::= \"\\q\""), (1, 11, Problem::Escape { escape: "q".to_owned() }));
    assert_eq!(fault("root ::= \"\\xZ0\""), (1, 11, Problem::Escape { escape: "x".to_owned() }));
    assert_eq!(fault("root ::= \"\\xFF\""), (1, 10, Problem::NotText));
    assert_eq!(fault("root ::= [\\xFF]"), (1, 11, Problem::NotText));
    assert_eq!(fault("root ::= []"), (1, 10, Problem::EmptyClass));
    assert_eq!(fault("root ::= \"a\"?*"), (1, 14, Problem::TwoRepeats));
    assert_eq!(fault("root ::= \"a\"{3,2}"), (1, 13, Problem::Repeat { found: "{3,2}".to_owned() }));
    assert_eq!(fault("root ::= \"a\"{x}"), (1, 13, Problem::Repeat { found: "{x}".to_owned() }));
    assert_eq!(fault("root ::= \"a\"{2"), (1, 13, unclosed("repetition")));
    let found = |expected, c| Problem::Unexpected { expected, found: Found::Char(c) };
    assert_eq!(fault("root = \"a\""), (1, 6, found("::=", '=')));
    assert_eq!(fault("root ::= \"a\" )"), (1, 14, found("a rule, an item or |", ')')));
    assert_eq!(fault("root ::= (\"a\" &)"), (1, 15, found("an item, | or )", '&')));
    assert_eq!(fault("::= \"a\""), (1, 1, found("the name of a rule", ':')));
    assert_eq!(fault("root ::= \"a\" root"), (1, 1, Problem::Endless { name: "root".to_owned() }));
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65));
    assert_eq!(fault(&deep), (1, 74, Problem::TooDeep));
    let many: String = (0..4097).map(|n| format!("r{n} ::= \"a\"\n")).collect();
    assert_eq!(fault(&many), (4097, 1, Problem::TooManyRules));
    assert_eq!(fault(&" ".repeat((1 << 18) + 1)), (1, 1, Problem::TooLong { bytes: (1 << 18) + 1 }));
    let said = read("root ::= \"a\"{3,2}").unwrap_err().to_string();
    assert!(said.starts_with("line 1, column 13: {3,2} is no repetition; use {m}, {m,} or {m,n}"), "{said}");
}

#[test]
fn an_answer_ends_where_the_grammar_ends() {
    let mut matcher = gbnf(r#"root ::= "ab" "c"?"#);
    assert_eq!(matcher.ending(), Ok(Ending::No));
    common::walk(&mut matcher, "ab");
    assert_eq!(matcher.ending(), Ok(Ending::May));
    common::walk(&mut matcher, "c");
    assert_eq!(matcher.ending(), Ok(Ending::Must));
}

/// Pieces of grammars, sound and broken.
fn messy() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        proptest::sample::select(vec![
            "root", " ::= ", "a", "b", "\"x\"", "\"", "[a-z]", "[^", "]", "(", ")", "|", "?", "*", "+",
            "{2,3}", "{", "\n", "#", "\\x41", "\\", ".", " ", "é",
        ])
        .prop_map(str::to_owned),
        any::<char>().prop_map(String::from),
    ];
    let beginning = proptest::sample::select(vec!["", "root ::= ", "a ::= \"y\"\nroot ::= a | "]);
    let pieces = proptest::collection::vec(piece, 0..14);
    (beginning, pieces).prop_map(|(beginning, pieces)| beginning.to_owned() + &pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// No text is a panic; a grammar that was read is one in Lark too, or is refused in words.
    #[test]
    fn arbitrary_text_never_panics(text in messy()) {
        if let Ok(grammar) = forebay_grammar::Grammar::gbnf(&text) {
            let matcher = grammar.matcher(&common::VOCABULARY);
            if let Err(error) = &matcher {
                prop_assert!(!error.to_string().contains("panic"), "{}", error);
            }
        }
    }

    /// A grammar made of a text allows that text and no other beginning.
    #[test]
    fn a_literal_allows_itself(text in "[a-zA-Z0-9 \"\\\\/\\[\\]^é中😀.*+?(){}|#\n-]{1,30}") {
        let escaped: String = text
            .chars()
            .map(|c| match c {
                '"' => "\\\"".to_owned(),
                '\\' => "\\\\".to_owned(),
                '\n' => "\\n".to_owned(),
                c => c.to_string(),
            })
            .collect();
        let matcher = gbnf(&format!("root ::= \"{escaped}\""));
        prop_assert!(accepts(&matcher, &text));
        let longer = text.clone() + "x";
        prop_assert!(!begins(&matcher, &longer));
        prop_assert!(!accepts(&matcher, &text[..text.len() - text.chars().last().map_or(0, char::len_utf8)]));
    }
}
