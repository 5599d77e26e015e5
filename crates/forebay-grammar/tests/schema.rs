//! JSON schemas, regular expressions and Lark: the texts they allow, and what is refused.

mod common;

use common::{TOKENIZER, VOCABULARY, accepts, begins, forced, matcher, schema};
use forebay_core::{Constraint, ConstraintError, Ending, TokenSet};
use forebay_grammar::{Grammar, GrammarError, Reasoned};

/// Where a schema is at fault.
fn fault(text: &str) -> String {
    match Grammar::json_schema(text).unwrap().matcher(&VOCABULARY).map(|_| ()) {
        Err(GrammarError::Schema { path, reason }) => {
            assert!(!reason.is_empty() && !reason.contains("panic"), "{reason}");
            path
        }
        other => panic!("{text}: {other:?}"),
    }
}

/// Decode spec D-16; here more is supported than there.
#[test]
fn d16_schema() {
    let object = r#"{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x",1,1.5,true,null]}},
        "required":["a","b"],"additionalProperties":false}"#;
    let object = schema(object);
    for good in [r#"{"a":0,"b":"x"}"#, "{ \"a\" : -42 ,\n \"b\" : 1.5 }", r#"{"a":7,"b":null}"#] {
        assert!(accepts(&object, good), "{good}");
    }
    for bad in [r#"{"a":01"#, r#"{"b""#, r#"{"a":1,"b":2"#, r#"{"a":1}"#, r#"{"a":1,"b":"x","c":1}"#] {
        assert!(!begins(&object, bad) || !accepts(&object, bad), "{bad}");
    }
    assert!(!begins(&object, r#"{"a":01"#) && !begins(&object, r#"{"b""#));
    let nullable = schema(r#"{"type":["string","null"]}"#);
    assert!(accepts(&nullable, "null") && accepts(&nullable, "\"a\"") && !begins(&nullable, "1"));
    let short = schema(r#"{"type":"string","maxLength":3}"#);
    assert!(accepts(&short, "\"abc\"") && accepts(&short, "\"é中😀\"") && !begins(&short, "\"abcd"));
    assert_eq!(fault(r##"{"$ref":"#/x"}"##), "#");
    let anything = schema("true");
    assert!(accepts(&anything, "[1,{\"a\":null}]") && accepts(&anything, "\"\""));
}

#[test]
fn large_documents() {
    let items = schema(r#"{"type":"array","items":{"type":"integer"},"minItems":100,"maxItems":100}"#);
    let list = |n: usize| format!("[{}]", (0..n).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
    assert!(accepts(&items, &list(100)));
    assert!(!accepts(&items, &list(99)) && !accepts(&items, &list(101)));
    assert_eq!(forced(&items, list(100).trim_end_matches(']')), "");

    let text = schema(r#"{"type":"string","minLength":10000,"maxLength":10000}"#);
    let of = |n: usize| format!("\"{}\"", "lorem é ".repeat(n / 8));
    assert!(accepts(&text, &of(10_000)));
    assert!(!accepts(&text, &of(9_992)) && !begins(&text, &of(10_008)));

    let tree = r##"{"$defs":{"tree":{"type":"object","properties":{"child":{"$ref":"#/$defs/tree"}},
        "additionalProperties":false}},"$ref":"#/$defs/tree"}"##;
    let tree = schema(tree);
    let deep = |n: usize| format!("{}{{}}{}", "{\"child\":".repeat(n), "}".repeat(n));
    assert!(accepts(&tree, &deep(64)));
    assert!(!accepts(&tree, &deep(64).replace("{}", "1")));
    // A schema that is itself as deep.
    let mut nested = r#"{"type":"null"}"#.to_owned();
    for _ in 0..64 {
        nested = format!(r#"{{"type":"array","items":{nested},"minItems":1,"maxItems":1}}"#);
    }
    let nested = schema(&nested);
    let document = format!("{}null{}", "[".repeat(64), "]".repeat(64));
    assert!(accepts(&nested, &document) && !accepts(&nested, &document[1..document.len() - 1]));
}

#[test]
fn refusals_name_the_schema_at_fault() {
    let cases = [
        (r#"{"type":"object","properties":{"a":{"type":"string"},"b":{"not":{}}}}"#, "#/properties/b"),
        (r#"{"properties":{"a/b":{"items":{"uniqueItems":true}}}}"#, "#/properties/a~1b/items"),
        (r#"{"anyOf":[{"type":"null"},{"contains":{"type":"null"}}]}"#, "#/anyOf/1"),
        (r#"{"if":{"type":"null"}}"#, "#"),
        (r#"{"type":"strin"}"#, "#"),
        (r##"{"properties":{"x":{"$ref":"#/nowhere"}}}"##, "#/properties/x"),
        (r#"{"properties":{"x":{"$ref":"http://example.com/other"}}}"#, "#/properties/x"),
        (r##"{"$defs":{"x":{"$id":"http://a/b","type":"null"}},"$ref":"#/$defs/x"}"##, "#/$defs/x"),
        (r#"{"prefixItems":[{"type":"string","pattern":"("}]}"#, "#/prefixItems/0"),
        (r#"{"$schema":"http://example.com/own","type":"null"}"#, "#/$schema"),
        (r#"{"items":{"type":"integer","multipleOf":99999989}}"#, "#/items"),
        (r#"{"items":{"type":"number","multipleOf":0.99999989}}"#, "#/items"),
        (r#"{"allOf":[{"multipleOf":9973},{"multipleOf":9967}]}"#, "#/allOf/0"),
        ("false", "#"),
        ("[1]", "#"),
    ];
    for (text, path) in cases {
        assert_eq!(fault(text), path, "{text}");
    }
    assert!(matches!(Grammar::json_schema("{"), Err(GrammarError::NotJson { .. })));
    let long = format!("\"{}\"", "x".repeat(1 << 20));
    assert!(matches!(Grammar::json_schema(&long), Err(GrammarError::TooLong { .. })));
}

/// A grammar that takes much: it is refused in words, or answers within its limits.
fn survives(what: &str, grammar: Result<Grammar, GrammarError>) -> bool {
    let plain = |error: &dyn std::fmt::Display| {
        let error = error.to_string();
        assert!(!error.contains("panic") && !error.contains("backtrace"), "{what}: {error}");
    };
    let mut matcher = match grammar.and_then(|grammar| grammar.matcher(&VOCABULARY)) {
        Ok(matcher) => matcher,
        Err(error) => {
            plain(&error);
            return false;
        }
    };
    let mut set = TokenSet::new();
    for _ in 0..20 {
        let next = match matcher.ending() {
            Ok(Ending::Must) => return true,
            Ok(_) => matcher.allowed(&mut set),
            Err(error) => Err(error),
        };
        if let Err(error) = next {
            plain(&error);
            return false;
        }
        let Some(token) = set.ids().next() else { return true };
        if let Err(error) = matcher.accept(token) {
            plain(&error);
            return false;
        }
    }
    true
}

/// Neither the stack nor minutes are taken.
#[test]
fn what_takes_too_much_is_refused() {
    let nested = |n: usize| format!("{}a{}", "(".repeat(n), ")".repeat(n));
    assert!(!survives("nested expression", Grammar::regex(&nested(5000))));
    assert!(survives("less nested expression", Grammar::regex(&nested(50))));
    assert!(!survives(
        "nested Lark",
        Grammar::lark(&format!("start: {}", nested(5000).replace('a', "\"a\"")))
    ));
    assert!(!survives("undefined", Grammar::lark("start: nowhere")));
    assert!(!survives("long expression", Grammar::regex(&"a?".repeat(20_000))));
    survives("expression of many states", Grammar::regex("((a{1,1000}){1,1000}){1,1000}b"));
    survives("ambiguous expression", Grammar::regex("(.*a){20}.{200}(b.*){20}"));
    survives("long literal", Grammar::lark(&format!("start: \"{}\"", "long ".repeat(20_000))));

    let rules = |n: usize, separator: &str, body: &dyn Fn(usize) -> String| -> String {
        (0..n).map(|at| format!("r{at} {separator} {}\n", body(at))).collect()
    };
    let chain = rules(4000, "::=", &|at| format!("\"a\" r{}", at + 1));
    survives("chain", Grammar::gbnf(&format!("root ::= r0\n{chain}r4000 ::= \"b\"")));
    survives("round chain", Grammar::gbnf(&format!("root ::= r0\n{chain}r4000 ::= \"b\" | root")));
    let chain = rules(12_000, ":", &|at| format!("\"a\" r{}", at + 1));
    survives("chain in Lark", Grammar::lark(&format!("start: r0\n{chain}r12000: \"b\"\n")));
    let chain = chain.replace('r', "T");
    survives("chain of terminals", Grammar::lark(&format!("start: T0\n{chain}T12000: \"b\"\n")));
    let doubling = rules(60, "::=", &|at| format!("r{0} r{0}", at + 1));
    survives("doubling", Grammar::gbnf(&format!("root ::= r0\n{doubling}r60 ::= \"a\"")));
    survives("round doubling", Grammar::gbnf(&format!("root ::= r0\n{doubling}r60 ::= \"a\" | root")));

    let values: Vec<String> = (0..20_000).map(|n| format!("\"value {n}\"")).collect();
    survives("enumeration", Grammar::json_schema(&format!("{{\"enum\":[{}]}}", values.join(","))));
    let properties = |n: usize| -> String {
        let all: Vec<String> = (0..n).map(|n| format!("\"p{n}\":{{}}")).collect();
        format!("{{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{{{}}}}}", all.join(","))
    };
    assert!(survives("properties", Grammar::json_schema(&properties(1000))));
    assert!(!survives("more properties", Grammar::json_schema(&properties(1001))));
    let patterns: Vec<String> = (0..101).map(|n| format!("\"^p{n}[a-z]*$\":{{}}")).collect();
    let patterns = format!("{{\"patternProperties\":{{{}}}}}", patterns.join(","));
    assert!(!survives("patterns", Grammar::json_schema(&patterns)));
    assert!(survives("multiples", Grammar::json_schema("{\"type\":\"integer\",\"multipleOf\":9973}")));
    survives("nowhere", Grammar::json_schema("{\"$ref\":\"#\"}"));
    let all = "{\"anyOf\":[{\"type\":\"null\"},".repeat(60) + "true" + &"]}".repeat(60);
    survives("nested choices", Grammar::json_schema(&all));
    survives("counted", Grammar::json_schema("{\"maxItems\":100000000,\"minItems\":99999999}"));
}

/// Whether one text has many patterns takes a time that doubles with each, however they come together.
#[test]
fn patterns_that_hold_at_once_are_counted() {
    let pattern = |at: usize| format!(r#"{{"type":"string","pattern":"^(a|b)*a(a|b){{{at}}}$"}}"#);
    let all = |count: usize, part: &dyn Fn(usize) -> String| {
        let parts: Vec<String> = (0..count).map(part).collect();
        format!(r#""allOf":[{}]"#, parts.join(","))
    };
    let definitions: Vec<String> = (0..30).map(|at| format!(r#""p{at}":{}"#, pattern(at))).collect();
    let definitions = format!(r#""$defs":{{{}}}"#, definitions.join(","));
    let reference = |at: usize| format!(r##"{{"$ref":"#/$defs/p{at}"}}"##);
    let property = |at: usize| format!(r#"{{"type":"object","properties":{{"x":{}}}}}"#, pattern(at));
    let others = |at: usize| format!(r#"{{"type":"object","additionalProperties":{}}}"#, pattern(at));
    let item = |at: usize| format!(r#"{{"type":"array","items":{}}}"#, pattern(at));
    let anchor = |at: usize| format!(r##"{{"$ref":"#a{at}"}}"##);
    for (text, path) in [
        (format!("{{{}}}", all(30, &pattern)), "#"),
        (format!("{{{definitions},{}}}", all(30, &reference)), "#"),
        (format!("{{{}}}", all(30, &anchor)), "#"),
        (format!("{{{}}}", all(30, &property)), "#/allOf/0/properties/x"),
        (format!("{{{}}}", all(30, &others)), "#/allOf/0/additionalProperties"),
        (format!("{{{}}}", all(30, &item)), "#/allOf/0/items"),
        (format!(r#"{{"$defs":{{"a":{{{}}}}}}}"#, all(30, &pattern)), "#/$defs/a"),
        (format!(r#"{{"anyOf":[{{"type":"null"}},{{{}}}]}}"#, all(30, &pattern)), "#"),
    ] {
        assert_eq!(fault(&text), path, "{text}");
    }
    let few = schema(r#"{"allOf":[{"type":"string","pattern":"^a"},{"pattern":"b$"}],"maxLength":5}"#);
    assert!(accepts(&few, "\"ab\"") && !accepts(&few, "\"ba\""));
    // As many as one likes of which only one holds.
    let one: Vec<String> = (0..30).map(|at| format!(r#"{{"type":"string","pattern":"^{at}x+$"}}"#)).collect();
    let one = schema(&format!(r#"{{"anyOf":[{}]}}"#, one.join(",")));
    assert!(accepts(&one, "\"7xx\"") && !accepts(&one, "\"x\""));
    // Two to the twentieth combinations.
    let pairs = |at: usize| {
        let choice = |n: usize| format!(r#"{{"properties":{{"p{at}":{{"const":{n}}}}}}}"#);
        format!(r#"{{"anyOf":[{},{}]}}"#, choice(1), choice(2))
    };
    assert_eq!(fault(&format!("{{{}}}", all(20, &pairs))), "#");
}

#[test]
fn regular_expressions() {
    let grammar = |text: &str| matcher(&Grammar::regex(text).unwrap());
    let date = grammar(r"^[0-9]{4}-[0-9]{2}$");
    assert!(accepts(&date, "2024-07") && !begins(&date, "x") && !accepts(&date, "2024-0"));
    let slashes = grammar(r"a/b\$");
    assert!(accepts(&slashes, "a/b$") && !begins(&slashes, "ab"));
    let escaped = grammar(r"a\\$");
    assert!(accepts(&escaped, "a\\"));
    let words = grammar(r"(yes|no|\w+ maybe)");
    assert!(accepts(&words, "yes") && accepts(&words, "éa maybe"));
}

#[test]
fn lark_grammars() {
    let lark = matcher(&Grammar::lark("start: \"a\" word+ \"!\"\nword: \" \" /[a-z]+/\n").unwrap());
    assert!(accepts(&lark, "a bc de!") && !begins(&lark, "b"));
    // Added tokens have to be named: their text is not them.
    let close = TOKENIZER.added_id("</think>").unwrap();
    let mut named = matcher(&Grammar::lark("start: \"a\" </think> \"b\"").unwrap());
    common::walk(&mut named, "a");
    assert_eq!((named.agrees(&[close]), begins(&named, "</think>")), (Ok(1), false));
    let mut text = matcher(&Grammar::lark("start: \"a</think>b\"").unwrap());
    common::walk(&mut text, "a");
    assert_eq!((text.agrees(&[close]), begins(&text, "</think>")), (Ok(0), true));
}

/// The set of allowed tokens is that of the tokens that are allowed one by one.
#[test]
fn the_mask_is_what_it_says() {
    let cases = [
        (schema(r#"{"type":"object","properties":{"name":{"type":"string"}}}"#), "{\"name\":\"a"),
        (schema(r#"{"type":"array","items":{"type":"number"}}"#), "[1"),
        (common::gbnf("root ::= \"x\" root \"y\" | [0-9é]+"), "xx"),
        (common::gbnf("root ::= [^a-m\"]+ \"\\\"\""), "n"),
    ];
    for (mut start, text) in cases {
        common::walk(&mut start, text);
        let mut set = TokenSet::new();
        assert_eq!(start.allowed(&mut set), Ok(true));
        assert!(!set.is_empty());
        for id in 0..TOKENIZER.vocab_size() as u32 + 5 {
            assert_eq!(set.contains(id), start.agrees(&[id]) == Ok(1), "{text}: token {id}");
        }
    }
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_and_so_is_all_that_follows() {
    let mut matcher = schema(r#"{"type":"integer"}"#);
    let word = TOKENIZER.encode_plain("word")[0];
    assert!(matches!(matcher.accept(word), Err(ConstraintError::NotAllowed { token, .. }) if token == word));
    assert!(matcher.ending().is_err() && matcher.allowed(&mut TokenSet::new()).is_err());
    let mut matcher = schema("true");
    let end = TOKENIZER.vocab_size() as u32;
    assert!(matches!(matcher.accept(end), Err(ConstraintError::NotAllowed { .. })));
}

#[test]
fn behind_a_think_block_the_grammar_begins() {
    let close = TOKENIZER.added_id("</think>").unwrap();
    let thought = TOKENIZER.encode_plain("so it is");
    let mut matcher = Reasoned::new(schema(r#"{"const":12}"#), close);
    let mut set = TokenSet::new();
    assert_eq!((matcher.ending(), matcher.allowed(&mut set)), (Ok(Ending::No), Ok(false)));
    let document = TOKENIZER.encode_plain("12");
    let all = [&thought[..], &[close], &document, &thought].concat();
    assert_eq!(matcher.agrees(&all), Ok(thought.len() + 1 + document.len()));
    for &token in all.iter().take(thought.len() + 1) {
        matcher.accept(token).unwrap();
    }
    assert_eq!((matcher.ending(), matcher.allowed(&mut set)), (Ok(Ending::No), Ok(true)));
    for token in document {
        assert!(set.contains(token));
        matcher.accept(token).unwrap();
        if matcher.ending() != Ok(Ending::Must) {
            matcher.allowed(&mut set).unwrap();
        }
    }
    assert_ne!(matcher.ending(), Ok(Ending::No));
}
