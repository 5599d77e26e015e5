use super::*;
use proptest::prelude::*;
use serde_json::json;

fn tools() -> Vec<ToolTypes> {
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "near": {"type": ["string", "null"]},
        "range": {"type": ["null", "array"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mixed": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/name"}]},
        "unit": {"enum": ["c", "f"]},
        "odd": {"type": "date"},
        "free": {},
    }, "$defs": {"name": {"type": "string"}}});
    vec![
        ToolTypes { name: "get_weather".to_owned(), parameters: weather },
        ToolTypes { name: "now".to_owned(), parameters: Value::Null },
    ]
}

/// Text and calls, the text joined.
fn parse_chunks(chunks: &[&str], complete: bool) -> (String, Vec<(String, Value)>) {
    let mut parser = ToolCallParser::new(tools());
    let mut parts: Vec<AnswerPart> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    parts.extend(parser.finish(complete));
    let (mut text, mut calls) = (String::new(), Vec::new());
    for part in parts {
        match part {
            AnswerPart::Text(more) => text += &more,
            AnswerPart::Call(call) => calls.push((call.name, Value::Object(call.arguments))),
        }
    }
    (text, calls)
}

fn parse(answer: &str) -> (String, Vec<(String, Value)>) {
    parse_chunks(&[answer], true)
}

fn call(key: &str, value: &str) -> String {
    format!("<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>")
}

fn argument(key: &str, value: &str) -> Value {
    let (text, calls) = parse(&call(key, value));
    assert_eq!((text.as_str(), calls.len()), ("", 1), "{key}: {value}");
    calls[0].1[key].clone()
}

/// Tokenizer spec T-10.
#[test]
fn published_answers() {
    let weather = |arguments: Value| vec![("get_weather".to_owned(), arguments)];
    let two = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12345</arg_value><arg_key>days</arg_key>\
        <arg_value>3</arg_value></tool_call>";
    assert_eq!(parse(two), (String::new(), weather(json!({"city": "12345", "days": 3}))));
    let between = format!("Sure.\n{} tail", call("city", "Roma"));
    assert_eq!(parse(&between), ("Sure.\n tail".to_owned(), weather(json!({"city": "Roma"}))));
    assert_eq!(argument("days", "true"), json!("true"));
    let undeclared = r#"<tool_call>f.g-1<arg_key>x</arg_key><arg_value>{"a":[1,2]}</arg_value></tool_call>"#;
    assert_eq!(parse(undeclared).1, [("f.g-1".to_owned(), json!({"x": {"a": [1, 2]}}))]);
    let broken_line =
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Roma</arg_value>\n</tool_call>";
    assert_eq!(parse(broken_line), (String::new(), weather(json!({"city": "Roma"}))));
}

#[test]
fn types_come_from_the_schema() {
    assert_eq!(argument("city", " 7\nlines "), json!(" 7\nlines "));
    assert_eq!(argument("days", " 12 "), json!(12));
    assert_eq!(argument("days", "a few"), json!("a few"));
    assert_eq!(argument("exact", "true"), json!(true));
    assert_eq!(argument("exact", "yes"), json!("yes"));
    assert_eq!(argument("near", "null"), json!("null"));
    assert_eq!(argument("range", "[1, 2]"), json!([1, 2]));
    assert_eq!(argument("range", "[1, 2"), json!("[1, 2"), "JSON that does not parse stays text");
    assert_eq!(argument("either", "null"), json!(null));
    assert_eq!(argument("either", "12345"), json!("12345"));
    assert_eq!(argument("mixed", "12345"), json!(12345));
    assert_eq!(argument("mixed", "Roma"), json!("Roma"));
    assert_eq!(argument("unit", "c"), json!("c"));
    assert_eq!(argument("odd", "17"), json!("17"));
    assert_eq!(argument("free", "17"), json!(17));
    assert_eq!(argument("undeclared", r#"{"a": 1}"#), json!({"a": 1}));
    let twice = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>1</arg_value><arg_key>days</arg_key>\
        <arg_value>2</arg_value></tool_call>";
    assert_eq!(parse(twice).1[0].1, json!({"days": 2}), "the last value counts");
}

#[test]
fn what_is_meant_is_taken() {
    let roma = || vec![("get_weather".to_owned(), json!({"city": "Roma"}))];
    for answer in [
        // A tag around the name, a key that is not closed, a prefix, and what other families write.
        "<tool_call><name>get_weather</name><arg_key>city</arg_key><arg_value>Roma</arg_value></tool_call>",
        "<tool_call>get_weather</arg_key><arg_key>city</arg_key><arg_value>Roma</arg_value></tool_call>",
        "<tool_call>get_weather<arg_key>city<arg_value>Roma</arg_value></tool_call>",
        "<tool_call>functions.get_weather<arg_key>city</arg_key><arg_value>Roma</arg_value></tool_call>",
        r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Roma"}}</tool_call>"#,
        r#"<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Roma\"}"}</tool_call>"#,
        r#"<tool_call>get_weather {"city": "Roma"}</tool_call>"#,
        r#"<tool_call>get_weather({"city": "Roma"})</tool_call>"#,
        // Not closed.
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma</tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma</tool_call>\n",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma</arg_value>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma</arg_value></tool_",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma",
    ] {
        assert_eq!(parse(answer), (String::new(), roma()), "{answer}");
    }
    let names = |answer: &str| parse(answer).1.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names("<tool_call>now</tool_call><tool_call>now</tool_call>"), ["now", "now"]);
    assert_eq!(names("<tool_call>now<tool_call>get_weather</tool_call>"), ["now", "get_weather"]);
    assert_eq!(names("<tool_call>now()</tool_call>"), ["now"]);
    assert_eq!(names("<tool_call>now"), ["now"]);
    let unclosed_twice = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma</tool_call>\n\
        <tool_call>get_weather<arg_key>city</arg_key><arg_value>Bari</tool_call>";
    let cities: Vec<_> = parse(unclosed_twice).1.into_iter().map(|(_, it)| it["city"].clone()).collect();
    assert_eq!(cities, ["Roma", "Bari"]);
}

#[test]
fn tags_in_a_value_are_text() {
    for value in ["a </tool_call> b", "<tool_call>x</tool_call> y", "<b>bold</b>", "</think>", "<", "a < b"] {
        assert_eq!(argument("city", value), json!(value));
    }
}

#[test]
fn what_is_no_call_stays_text() {
    for answer in [
        "<tool_call></tool_call>",
        "<tool_call>  </tool_call>",
        "a <tool_call>{not json</tool_call> b",
        "<tool_call>天 气</tool_call>",
        "no call, only a <tool tag",
        "<tool_call",
    ] {
        assert_eq!(parse(answer), (answer.to_owned(), Vec::new()), "{answer}");
    }
    // A sentence, and names without values, beside a call.
    let (text, calls) = parse("<tool_call>now please<arg_key>zone</arg_key></tool_call>");
    assert_eq!((text.as_str(), calls.len()), ("please\nzone", 1));
}

#[test]
fn half_a_call_is_not_made() {
    for cut in [
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ro",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Roma</arg_value>",
        "<tool_call>get_wea",
    ] {
        assert_eq!(parse_chunks(&[cut], false), (cut.to_owned(), Vec::new()));
    }
    // The model stopped in the middle of a name.
    for cut in ["<tool_call>get_wea", "<tool_call>get_weather<arg_key>ci"] {
        assert_eq!(parse(cut), (cut.to_owned(), Vec::new()));
    }
}

#[test]
fn text_flows_and_calls_come_when_they_are_closed() {
    let mut parser = ToolCallParser::new(tools());
    let text = |text: &str| vec![AnswerPart::Text(text.to_owned())];
    assert_eq!(parser.push("\n Hi "), text("Hi"));
    assert_eq!(parser.push("you\n"), text(" you"));
    assert_eq!(parser.push("<to"), []);
    assert_eq!(parser.push("ast>"), text("\n<toast>"));
    assert_eq!(parser.push(" <tool_call>now"), []);
    assert!(parser.is_in_call());
    let now = ParsedCall { name: "now".to_owned(), arguments: Map::new() };
    assert_eq!(parser.push("</tool_call>"), [AnswerPart::Call(now)]);
    assert_eq!(parser.push("\n"), []);
    assert_eq!(parser.finish(true), []);
}

fn pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("<tool_call>"),
        Just("</tool_call>"),
        Just("<arg_key>"),
        Just("</arg_key>"),
        Just("<arg_value>"),
        Just("</arg_value>"),
        Just("now"),
        Just("get_weather"),
        Just("city"),
        Just("<"),
        Just("</"),
        Just(" "),
        Just("\n"),
        Just("é中"),
        Just("{\"a\": 1}"),
        Just("x"),
    ];
    proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    /// How the text is cut changes nothing.
    #[test]
    fn cuts_change_nothing(answer in pieces(), cuts in proptest::collection::vec(0usize..400, 0..8), complete: bool) {
        let whole = parse_chunks(&[&answer], complete);
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| answer.is_char_boundary(*cut)).collect();
        cuts.sort_unstable();
        let ends = cuts.iter().copied().chain([answer.len()]);
        let chunks: Vec<&str> = std::iter::once(0).chain(cuts.iter().copied()).zip(ends)
            .map(|(from, to)| &answer[from..to.max(from)]).collect();
        prop_assert_eq!(parse_chunks(&chunks, complete), whole.clone());
        let single: Vec<String> = answer.chars().map(String::from).collect();
        let single: Vec<&str> = single.iter().map(String::as_str).collect();
        prop_assert_eq!(parse_chunks(&single, complete), whole);
    }

    /// Every letter that is no part of a tag comes out somewhere, in text or in a call.
    #[test]
    fn nothing_is_lost(words in proptest::collection::vec("[a-z]{5,9}", 1..8), answer in pieces(), at in 0usize..200) {
        let mut at = at.min(answer.len());
        while !answer.is_char_boundary(at) {
            at -= 1;
        }
        let inserted = words.iter().map(|word| format!(" Q{word}Q ")).collect::<String>();
        let answer = format!("{}{inserted}{}", &answer[..at], &answer[at..]);
        // Of a name that stands twice the last value counts.
        prop_assume!(answer.matches("<arg_value>").count() < 2);
        let (text, calls) = parse_chunks(&[&answer], true);
        let all = format!("{text} {}", Value::from_iter(calls.into_iter().map(|(name, args)| json!([name, args]))));
        for word in &words {
            prop_assert!(all.contains(&format!("Q{word}Q")), "{} is lost from {:?}: {}", word, answer, all);
        }
    }
}
