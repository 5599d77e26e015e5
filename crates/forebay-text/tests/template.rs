//! Rendering: vectors T-07 to T-09, the built-in template against the demo model's own, and template loading.

mod common;

use common::*;
use forebay_text::template::{ReasoningEffort, RenderError, Role, TemplateError, ToolChoice};
use forebay_text::{ChatMessage, ChatTemplate, RenderOptions, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

static DEMO: LazyLock<Tokenizer> = LazyLock::new(demo_tokenizer);
static OWN: LazyLock<ChatTemplate> = LazyLock::new(|| ChatTemplate::load(&demo_dir(), &DEMO).unwrap());
static BUILT_IN: LazyLock<ChatTemplate> = LazyLock::new(ChatTemplate::built_in);

fn conversation(messages: Value) -> Vec<ChatMessage> {
    messages.as_array().unwrap().iter().map(|message| ChatMessage::from_json(message).unwrap()).collect()
}

fn prompting() -> RenderOptions {
    RenderOptions { add_generation_prompt: true, ..RenderOptions::default() }
}

/// Both templates give this text, and the same control tokens in it.
fn both_render(messages: Value, options: &RenderOptions, expected: &str) {
    let messages = conversation(messages);
    let own = OWN.render(&messages, options).unwrap();
    assert_eq!(own.text(), expected, "own template");
    assert_eq!(BUILT_IN.render(&messages, options).unwrap(), own, "built-in template");
}

#[test]
fn t07_plain_and_thinking() {
    let hi = json!([{"role": "user", "content": "Hi"}]);
    both_render(hi, &prompting(), "[gMASK]<sop><|user|>Hi<|assistant|><think></think>");
    let brief = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    for (effort, shown) in
        [(ReasoningEffort::High, "High"), (ReasoningEffort::Low, "Max"), (ReasoningEffort::Xhigh, "Max")]
    {
        let options = RenderOptions { reasoning_effort: Some(effort), ..prompting() };
        let expected = format!(
            "[gMASK]<sop><|system|>Reasoning Effort: {shown}<|system|>Be brief.<|user|>Hi<|assistant|><think>"
        );
        both_render(brief.clone(), &options, &expected);
    }
}

#[test]
fn t08_tool_history() {
    let messages = json!([
        {"role": "user", "content": "W?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": "{\"city\":\"Roma\",\"days\":2}"}},
        ]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": " ok \n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]);
    both_render(
        messages,
        &prompting(),
        "[gMASK]<sop><|user|>W?<|assistant|><think></think><tool_call>get_weather<arg_key>city</arg_key>\
         <arg_value>Roma</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call><|observation|>\
         <tool_response>sunny</tool_response><tool_response>rain</tool_response><|assistant|><think></think>ok\
         <|user|>ab<|assistant|><think></think>",
    );
}

#[test]
fn several_roles_without_a_generation_prompt() {
    let messages = json!([
        {"role": "system", "content": "System"}, {"role": "developer", "content": "Developer"},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello "},
        {"role": "user", "content": "Again"},
    ]);
    both_render(
        messages,
        &RenderOptions::default(),
        "[gMASK]<sop><|system|>System<|system|>Developer<|user|>Hi<|assistant|><think></think>Hello<|user|>Again",
    );
}

const TOOLS_HEAD: &str = "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user \
    query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
const TOOLS_TAIL: &str = "</tools>\n\nFor each function call, output the function name and arguments within the \
    following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}\
    </arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>";

fn two_tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {
            "name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object", "properties": {}},
        }}),
        json!({"name": "g", "defer_loading": true, "description": "<é> & 'q'", "x": 1.5e-7}),
    ]
}

#[test]
fn t09_tools_block_and_tool_choice() {
    let f = r#"{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}"#;
    let g = r#"{"name": "g", "description": "<é> & 'q'", "x": 1.5e-07}"#;
    let both = format!("{f}\n{g}\n");
    for (choice, lines, sentence) in [
        (ToolChoice::Auto, both.clone(), ""),
        (ToolChoice::Required, both, "\n\nYou must call one of the functions above. Do not answer directly."),
        (
            ToolChoice::Function("g".to_owned()),
            format!("{g}\n"),
            "\n\nYou must call the function `g`. Do not answer directly.",
        ),
    ] {
        let options = RenderOptions { tools: two_tools(), tool_choice: choice, ..prompting() };
        let expected = format!(
            "[gMASK]<sop>{TOOLS_HEAD}{lines}{TOOLS_TAIL}{sentence}<|user|>W?<|assistant|><think></think>"
        );
        both_render(json!([{"role": "user", "content": "W?"}]), &options, &expected);
    }
    let none = RenderOptions { tools: two_tools(), tool_choice: ToolChoice::None, ..prompting() };
    both_render(
        json!([{"role": "user", "content": "W?"}]),
        &none,
        "[gMASK]<sop><|user|>W?<|assistant|><think></think>",
    );
}

#[test]
fn conversations_that_cannot_be_rendered_are_refused() {
    for template in [&*OWN, &*BUILT_IN] {
        assert_eq!(template.render(&[], &prompting()), Err(RenderError::NoMessages));
        let nul = [ChatMessage::text(Role::User, "a\0b")];
        assert_eq!(template.render(&nul, &prompting()), Err(RenderError::NulCharacter));
        let hi = [ChatMessage::text(Role::User, "Hi")];
        let options = RenderOptions { tool_choice: ToolChoice::Required, ..prompting() };
        assert_eq!(template.render(&hi, &options), Err(RenderError::ToolChoiceWithoutTools));
    }
}

/// The demo model's golden chat prompts are what its template makes of the question.
#[test]
fn golden_prompts_are_rendered_and_encoded_alike() {
    let mut seen = 0;
    for prompt in demo_json("eval/greedy.json")["prompts"].as_array().unwrap() {
        let text = prompt["prompt_text"].as_str().unwrap();
        let Some(question) = text
            .strip_prefix("[gMASK]<sop><|user|>")
            .and_then(|rest| rest.strip_suffix("<|assistant|><think></think>"))
            .filter(|question| !question.contains("<|"))
        else {
            continue;
        };
        let rendered = OWN.render(&[ChatMessage::text(Role::User, question)], &prompting()).unwrap();
        let ids: Vec<u32> = serde_json::from_value(prompt["prompt_ids"].clone()).unwrap();
        assert_eq!(DEMO.encode_rendered(&rendered).unwrap(), ids, "{text}");
        seen += 1;
    }
    assert!(seen >= 3, "{seen}");
}

fn own(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source, "test template", &DEMO).unwrap()
}

fn hi() -> Vec<ChatMessage> {
    vec![ChatMessage::text(Role::User, "Hi")]
}

#[test]
fn the_environment_is_the_one_templates_are_written_for() {
    let shown = |source: &str| own(source).render(&hi(), &prompting()).unwrap().text();
    for (source, expected) in [
        // Blocks are trimmed: the newline after a block tag and the spaces before it disappear.
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("a {%- generation -%} x {%- endgeneration -%} y", "axy"),
        ("{{ messages[0].content.lower().strip('i') }}", "h"),
        ("{{ {'a': '<é>', 'b': [1, 2.0]} | tojson }}", r#"{"a": "<é>", "b": [1, 2.0]}"#),
        (
            "{{ {'b': '\\u00e9', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}",
            r#"{"a": 1, "b": "\u00e9"}"#,
        ),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ [1, [2]] | tojson(indent=2) }}", "[\n  1,\n  [\n    2\n  ]\n]"),
        ("{% for m in messages %}{{ loop.index0 }}{% break %}{% endfor %}", "0"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ nothing }}", "2"),
        ("{{ strftime_now('%Y') | int > 2024 }}", "True"),
        ("{{ enable_thinking }}{{ add_generation_prompt }}{{ tools is none }}", "FalseTrueTrue"),
    ] {
        assert_eq!(shown(source).to_lowercase(), expected.to_lowercase(), "{source}");
    }
    let extra = json!({"style": "terse", "enable_thinking": true});
    let options = RenderOptions { extra: extra.as_object().unwrap().clone(), ..prompting() };
    let prompt = own("{{ style }}{{ enable_thinking }}").render(&hi(), &options).unwrap();
    assert_eq!(prompt.text().to_lowercase(), "tersefalse");
}

/// Doubling without a loop: 60 names, and 60 loops inside one another.
static STRAIGHT: LazyLock<String> =
    LazyLock::new(|| format!("{{% set a = [1] %}}{}{{{{ a }}}}", "{% set a = [a, a] %}".repeat(60)));
static NESTED: LazyLock<String> = LazyLock::new(|| {
    let (open, close) = ("{% for a in [[a, a]] %}".repeat(60), "{% endfor %}".repeat(60));
    format!("{{% set a = [1] %}}{open}{{{{ a }}}}{close}")
});

/// Measuring changes nothing that a harmless template writes.
#[test]
fn measured_templates_write_what_they_wrote() {
    for (source, expected) in [
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l|join(',') }}",
            "0,1,2",
        ),
        ("a\n{%- for k, v in {'x': 1}|items -%}\n {{ k }}={{ v }}\n{%- endfor -%}\n b", "ax=1b"),
        (
            "{% macro m(a, b='z') %}\n{{ a }}{{ b }}{% endmacro %}{{ m('q') }}{% with c = 1, d = (2, 3) %}\n{{ c }}{{ d[1] }}{% endwith %}",
            "qz13",
        ),
        ("{% raw %}{% set a = 1 * 2 %}{% endraw %}{# a * b #}{{ '*' }}* { {", "{% set a = 1 * 2 %}**"),
        (
            "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t %}x{% endset %}{{ t }}{% set e = 1 == 1 %}{{ 7 if e }}",
            "12x7",
        ),
        (
            "{% set u = nothing %}{{ u is defined }}{% macro m(x) %}{{ x is defined }}{% endmacro %}{{ m() }}",
            "FalseFalse",
        ),
        (
            "{%- set t = messages[0].content if messages -%}\n{% set n = -1 -%}\n {{ t }}{{ n }}{{ '%}' }}",
            "Hi-1%}",
        ),
        (
            "{% set ns = namespace(last=none) %}{% for m in messages[::-1] %}{% if ns.last is none %}{% set ns.last = m %}{% endif %}{% endfor %}{{ ns.last.content }}",
            "Hi",
        ),
        ("{% for k in [3, 1]|sort if k > 1 %}{{ k }}{{ loop.last }}{% else %}none{% endfor %}", "3True"),
        ("{% macro w() %}<{{ caller(5) }}>{% endmacro %}{% call(x) w() %}{{ x }}{% endcall %}", "<5>"),
    ] {
        let expected =
            if source.ends_with("* { {") { format!("{expected} {{ {{") } else { expected.to_owned() };
        let text = own(source).render(&hi(), &prompting()).unwrap().text();
        assert_eq!(text.to_lowercase(), expected.to_lowercase(), "{source}");
    }
}

#[test]
fn templates_that_misbehave_give_typed_errors() {
    let fails = |source: &str| own(source).render(&hi(), &prompting()).unwrap_err();
    let refused = fails("{{ raise_exception('no ' ~ messages[0].content) }}");
    assert_eq!(refused, RenderError::Refused { message: "no Hi".to_owned() });
    for endless in [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns=namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l=ns.l+ns.l %}{% endfor %}{{ ns.l|length }}",
        "{% set l=namespace(x=[]) %}{% for i in range(9999) %}{% set l.x=[l.x,l.x] %}{% endfor %}{{ l.x }}",
        "{% set l=namespace(x=[]) %}{%- for i in range(9999) -%}{%- set l.x = {'a': l.x} -%}{%- endfor -%}{{ l.x }}",
        "{% set l=namespace(x=[1]) %}{% for i in range(9999) %}{% set l.x=l.x|batch(2)|list %}{% endfor %}{{ l.x }}",
        "{% set n=namespace() %}{% set n.x=n %}{{ n }}",
        "{% set n=namespace() %}{% set c=[n] %}{% set n.x=c %}{{ n }}",
        "{% macro f(x, n) %}{% if n %}{{ f([x,x], n-1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f([], 40) }}",
        STRAIGHT.as_str(),
        NESTED.as_str(),
        "{% macro m(x) %}{{ m(x ~ 'x') }}{{ m(x) }}{% endmacro %}{{ m('') }}",
    ] {
        let error = fails(endless);
        assert!(
            matches!(error, RenderError::OutOfFuel { .. } | RenderError::Failed { .. }),
            "{endless}: {error}"
        );
    }
    for broken in [
        "{{ 1 + messages }}",
        "{{ messages|tojson(indent=1099511627776) }}",
        "{{ messages|tojson(indent=17) }}",
        "{{ messages.nothing.more }}",
        "{{ nothing | tojson }}",
        "{{ [1]|tojson(x=1) }}",
    ] {
        let error = fails(broken);
        assert!(matches!(&error, RenderError::Failed { origin, .. } if origin == "test template"), "{error}");
    }
    for invalid in [
        "{{ ([1] * 2000000000) | tojson }}",
        "{% if %}",
        "{{ ",
        "{% for x in y %}",
        "{{ '' | no_such_filter }}",
    ] {
        let error =
            ChatTemplate::from_source(invalid, "test template", &DEMO).map(|t| t.render(&hi(), &prompting()));
        assert!(
            matches!(error, Err(TemplateError::Syntax { .. }) | Ok(Err(RenderError::Failed { .. }))),
            "{error:?}"
        );
    }
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(20_000), ")".repeat(20_000));
    assert!(matches!(ChatTemplate::from_source(&deep, "deep", &DEMO), Err(TemplateError::Syntax { .. })));
}

#[test]
fn templates_are_found_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let load = || ChatTemplate::load(dir.path(), &DEMO);
    let shown = || load().unwrap().render(&hi(), &prompting()).unwrap().text();

    assert!(load().unwrap().is_built_in());
    write("tokenizer_config.json", r#"{"chat_template": null}"#);
    assert!(load().unwrap().is_built_in());
    write("tokenizer_config.json", r#"{"chat_template": "one"}"#);
    assert_eq!(shown(), "one");
    assert!(load().unwrap().origin().ends_with("tokenizer_config.json"));
    let list = r#"[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]"#;
    write("tokenizer_config.json", &format!(r#"{{"chat_template": {list}}}"#));
    assert_eq!(shown(), "two");
    for wrong in ["[]", "7", r#"[{"name": "default"}]"#] {
        write("tokenizer_config.json", &format!(r#"{{"chat_template": {wrong}}}"#));
        assert!(matches!(load().unwrap_err(), TemplateError::BadShape { .. }));
    }
    let names = r#""bos_token": "[gMASK]", "eos_token": {"content": "<|endoftext|>"}"#;
    write("tokenizer_config.json", &format!("{{{names}}}"));
    write("chat_template.jinja", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}");
    let prompt = load().unwrap().render(&hi(), &prompting()).unwrap();
    assert_eq!((prompt.text().as_str(), prompt.control_count()), ("[gMASK]Hi<|endoftext|>", 2));
    assert!(load().unwrap().origin().ends_with("chat_template.jinja"));
    write("tokenizer_config.json", "{");
    assert!(matches!(load().unwrap_err(), TemplateError::Json { .. }));
    write("tokenizer_config.json", "{}");
    std::fs::write(dir.path().join("chat_template.jinja"), b"ab\xFF").unwrap();
    assert!(matches!(load().unwrap_err(), TemplateError::NotText { at: 2, .. }));
    write("chat_template.jinja", &"x".repeat((1 << 20) + 1));
    assert!(matches!(load().unwrap_err(), TemplateError::TooLarge { .. }));
}

/// Without its control tokens a tokenizer would make ordinary text of every mark of a turn.
#[test]
fn a_tokenizer_without_the_templates_control_tokens_is_refused() {
    let mut bare = toy_json();
    bare["added_tokens"] = json!([]);
    let bare = from_json(&bare);
    let dir = tempfile::tempdir().unwrap();
    let missing = |tokenizer: &Tokenizer| match ChatTemplate::load(dir.path(), tokenizer) {
        Err(TemplateError::MissingControl { token, .. }) => token,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(&bare), "[gMASK]");
    let source = "{# <|comment|> #}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|nosuch|>";
    std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    assert_eq!(missing(&bare), "<|user|>");
    assert_eq!(missing(&DEMO), "<|nosuch|>");
    let mut content = toy_json();
    for token in content["added_tokens"].as_array_mut().unwrap() {
        token["special"] = json!(false);
    }
    assert_eq!(missing(&from_json(&content)), "<|user|>");
    assert!(ChatTemplate::load(&demo_dir(), &bare).is_err());
}

#[test]
fn messages_say_what_the_user_can_do() {
    let empty = own("{% if false %}x{% endif %}").render(&hi(), &prompting()).unwrap_err();
    assert!(matches!(empty, RenderError::Empty { .. }), "{empty}");
    assert!(empty.to_string().contains("remove it"), "{empty}");
    let broken = ChatTemplate::from_source("{% if %}", "test template", &DEMO).unwrap_err().to_string();
    assert!(broken.contains("replace chat_template.jinja, or remove it"), "{broken}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), "\u{feff}{}").unwrap();
    let marked = ChatTemplate::load(dir.path(), &DEMO).unwrap_err();
    assert!(matches!(marked, TemplateError::ByteOrderMark { .. }), "{marked}");
    std::fs::create_dir(dir.path().join("chat_template.jinja")).unwrap();
    std::fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    let folder = ChatTemplate::load(dir.path(), &DEMO).unwrap_err();
    assert!(folder.to_string().contains("is not a regular file"), "{folder}");
}

/// Rendering looks at each character once, not once per control token.
#[test]
fn many_control_tokens_do_not_slow_rendering() {
    let mut file = toy_json();
    let added = file["added_tokens"].as_array_mut().unwrap();
    added.extend((0..60_000).map(|n| added_token(1000 + n, &format!("<c{n}>"), true)));
    let tokenizer = from_json(&file);
    let text = "\u{10FFFD}\u{10FFFC}xyz".repeat(20_000);
    let source = "{{ messages[0].content }}<c0><c59999>";
    let template = ChatTemplate::from_source(source, "test template", &tokenizer).unwrap();
    let begun = std::time::Instant::now();
    let prompt = template.render(&[ChatMessage::text(Role::User, text.as_str())], &prompting()).unwrap();
    assert!(begun.elapsed().as_secs() < 5, "{:?}", begun.elapsed());
    assert_eq!((prompt.text(), prompt.control_count()), (format!("{text}<c0><c59999>"), 2));
}

/// The demo model's tokenizer_config.json carries the same template.
#[test]
fn the_demo_template_is_the_same_in_both_places() {
    let config = demo_json("tokenizer_config.json");
    let source = std::fs::read_to_string(demo_dir().join("chat_template.jinja")).unwrap();
    assert_eq!(config["chat_template"], json!(source));
}

/// A template that does not write the known tools block gets the sentence as a system message in front.
#[test]
fn a_binding_tool_choice_reaches_any_template() {
    let template = own("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
    let options = RenderOptions { tools: two_tools(), tool_choice: ToolChoice::Required, ..prompting() };
    assert_eq!(
        template.render(&hi(), &options).unwrap().text(),
        "system: You must call one of the functions above. Do not answer directly.\nuser: Hi\n"
    );
}

/// Text without anything that looks like a mark.
fn plain_text() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "[ \n]?\\PC{0,12}[ \n]?", "[ -;=?-~]{0,20}", any::<String>()]
        .prop_map(|text| text.replace(['<', '[', '\0'], "("))
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_filter("JSON has only finite numbers", |x| x.is_finite()).prop_map(Value::from),
        plain_text().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((plain_text(), inner), 0..4)
                .prop_map(|f| Value::Object(f.into_iter().collect())),
        ]
    })
}

fn message() -> impl Strategy<Value = Value> {
    let calls = proptest::collection::vec(
        (plain_text(), proptest::collection::vec((plain_text(), json_value()), 0..3)).prop_map(
            |(name, fields)| {
                let arguments: serde_json::Map<String, Value> = fields.into_iter().collect();
                json!({"function": {"name": name, "arguments": arguments}})
            },
        ),
        0..3,
    );
    prop_oneof![
        ("system|developer|user|tool", plain_text())
            .prop_map(|(role, text)| json!({"role": role, "content": text})),
        (plain_text(), calls)
            .prop_map(|(text, calls)| { json!({"role": "assistant", "content": text, "tool_calls": calls}) }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// On conversations without marks the two templates agree, and encoding the parts equals encoding the text
    /// with every added token active.
    #[test]
    fn benign_conversations_render_and_encode_alike(
        messages in proptest::collection::vec(message(), 1..6),
        tools in proptest::collection::vec((plain_text(), json_value()), 0..3),
        thinking: Option<bool>,
        high: bool,
    ) {
        let options = RenderOptions {
            tools: tools.into_iter().map(|(name, rest)| json!({"name": name, "parameters": rest})).collect(),
            enable_thinking: thinking,
            reasoning_effort: high.then_some(ReasoningEffort::High),
            ..prompting()
        };
        let messages = conversation(json!(messages));
        let own = OWN.render(&messages, &options).unwrap();
        prop_assert_eq!(&BUILT_IN.render(&messages, &options).unwrap(), &own);
        let ids = DEMO.encode_rendered(&own).unwrap();
        prop_assert_eq!(&ids, &DEMO.encode_raw(&own.text()));
        prop_assert_eq!(DEMO.decode_bytes(&ids), own.text().into_bytes());
    }
}
