//! Encoding and decoding against the vectors T-02 to T-05, the demo model's golden prompts, and hostile files.

mod common;

use common::*;
use forebay_text::Tokenizer;
use forebay_text::tokenizer::TokenizerError;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// All 256 byte symbols at ids from 1000 on, then these tokens at their own ids.
fn small(tokens: &[(&str, u32)], merges: &[(&str, &str)]) -> Tokenizer {
    let mut vocab: Map<String, Value> =
        (0..=255u8).map(|b| (symbol(b).to_string(), json!(1000 + u32::from(b)))).collect();
    for (token, id) in tokens {
        vocab.insert(spelt(token), json!(id));
    }
    from_json(&tokenizer_json_of(vocab, merges, json!([])))
}

#[test]
fn t02_whole_pieces_then_merges_by_rank() {
    let abc = small(&[("a", 0), ("b", 1), ("c", 2), ("d", 5), ("ab", 3), ("abc", 4)], &[("a", "b")]);
    assert_eq!(abc.encode_raw("abc"), [4]);
    assert_eq!(abc.encode_raw("abcd"), [3, 2, 5]);

    let aa = small(&[("a", 0), ("aa", 1)], &[("a", "a")]);
    assert_eq!(aa.encode_raw("aaa"), [1, 0]);
    assert_eq!(aa.encode_raw("aaaa"), [1, 1]);

    let tokens = [("a", 0), ("b", 1), ("c", 2), ("ab", 3), ("bc", 4)];
    assert_eq!(small(&tokens, &[("b", "c"), ("a", "b")]).encode_raw("abc"), [0, 4]);
    assert_eq!(small(&tokens, &[("a", "b"), ("b", "c")]).encode_raw("abc"), [3, 2]);
}

#[test]
fn t03_toy_tokenizer() {
    let toy = toy_tokenizer();
    let table: &[(&str, &[u32])] = &[
        ("hello", &[259]),
        ("hellohello", &[259, 259]),
        (" hello", &[261]),
        ("hell", &[258]),
        ("123", &[265]),
        ("1234", &[265, 52]),
        ("the's", &[269, 270]),
        ("<think>hi</think>", &[292, 104, 105, 293]),
        ("a<|user|>b", &[97, 289, 98]),
        ("<|us", &[60, 124, 117, 115]),
        ("", &[]),
    ];
    for (text, ids) in table {
        assert_eq!(toy.encode_raw(text), *ids, "{text:?}");
        assert_eq!(toy.decode_bytes(ids), text.as_bytes());
    }
    assert_eq!(toy.vocab_size(), 296);
    assert_eq!(toy.special_ids(), (285..=291).collect::<Vec<_>>());
    assert_eq!(toy.id_of("<|user|>"), Some(289));
    assert_eq!(toy.id_of(" wor"), Some(263));
    assert_eq!(toy.id_of("nope"), None);
}

#[test]
fn t04_added_token_precedence() {
    let mut file = toy_json();
    file["added_tokens"] = json!([added_token(300, "<a>", false), added_token(301, "<a><b>", false)]);
    let toy = from_json(&file);
    assert_eq!(toy.encode_raw("<a><b>"), [301]);
    assert_eq!(toy.encode_raw("<a><a>"), [300, 300]);
    assert_eq!(toy.encode_raw("<a><b><a>x"), [301, 300, 120]);
    assert_eq!(toy.encode_raw("x<a"), [120, 60, 97]);
}

#[test]
fn t05_decode() {
    let toy = toy_tokenizer();
    let table = small(&[], &[]);
    assert_eq!(table.decode_bytes(&[1000 + 0xE4, 1000 + 0xB8, 1000 + 0xAD]), "中".as_bytes());
    let mut file = toy_json();
    let halves: String = [0xE4u8, 0xB8].map(symbol).iter().collect();
    file["model"]["vocab"][halves] = json!(400);
    let split = from_json(&file);
    assert_eq!(split.decode_bytes(&[400, 0xAD]), [0xE4, 0xB8, 0xAD]);

    assert_eq!(toy.decode_bytes(&[289]), b"<|user|>");
    assert_eq!(toy.decode_bytes(&[97, 296, u32::MAX, 98]), b"ab");
    assert_eq!(toy.token_bytes(296), None);
}

#[test]
fn ids_may_have_gaps_and_added_text_replaces_vocabulary_text() {
    let mut file = toy_json();
    file["added_tokens"] = json!([added_token(900, "<far>", true), added_token(284, "<near>", false)]);
    let toy = from_json(&file);
    assert_eq!(toy.vocab_size(), 901);
    assert_eq!(toy.encode_raw("<far><near>"), [900, 284]);
    assert_eq!(toy.token_bytes(284), Some(b"<near>".as_slice()));
    assert_eq!(toy.token_bytes(899), None);
    assert_eq!(toy.special_ids(), [900]);
}

#[test]
fn characters_outside_the_alphabet_are_skipped_in_decoding() {
    let mut file = toy_json();
    file["model"]["vocab"]["h 中i"] = json!(500);
    assert_eq!(from_json(&file).token_bytes(500), Some(b"hi".as_slice()));
}

#[test]
fn merges_may_be_strings() {
    let mut file = toy_json();
    let merges = file["model"]["merges"].as_array().unwrap();
    let joined: Vec<Value> = merges
        .iter()
        .map(|pair| json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())))
        .collect();
    file["model"]["merges"] = joined.into();
    assert_eq!(from_json(&file).encode_raw("hello 1234"), toy_tokenizer().encode_raw("hello 1234"));
}

#[test]
fn special_means_exactly_true() {
    let mut file = toy_json();
    for (at, value) in [json!("true"), json!(1), json!(null)].into_iter().enumerate() {
        file["added_tokens"][at]["special"] = value;
    }
    file["added_tokens"][3].as_object_mut().unwrap().remove("special");
    assert_eq!(from_json(&file).special_ids(), [289, 290, 291]);
}

/// Every assumption about the file, broken one at a time, is refused by the name of its field.
#[test]
fn other_encoders_are_refused_by_field() {
    let pre = "/pre_tokenizer/pretokenizers";
    let split =
        json!({"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false});
    for (pointer, value, field) in [
        ("/model/type".to_owned(), json!("WordPiece"), "model.type"),
        ("/model/type".to_owned(), json!(null), "model.type"),
        ("/model/ignore_merges".to_owned(), json!(false), "model.ignore_merges"),
        ("/model/ignore_merges".to_owned(), json!(null), "model.ignore_merges"),
        ("/model/byte_fallback".to_owned(), json!(true), "model.byte_fallback"),
        ("/model/unk_token".to_owned(), json!("<unk>"), "model.unk_token"),
        ("/model/dropout".to_owned(), json!(0.1), "model.dropout"),
        ("/model/continuing_subword_prefix".to_owned(), json!("##"), "model.continuing_subword_prefix"),
        ("/model/end_of_word_suffix".to_owned(), json!("</w>"), "model.end_of_word_suffix"),
        ("/truncation".to_owned(), json!({"max_length": 5}), "truncation"),
        ("/padding".to_owned(), json!({}), "padding"),
        ("/normalizer".to_owned(), json!({"type": "NFC"}), "normalizer"),
        ("/pre_tokenizer".to_owned(), json!(null), "pre_tokenizer.type"),
        (pre.to_owned(), json!([split]), "pre_tokenizer.pretokenizers"),
        (format!("{pre}/0"), split, "pre_tokenizer.pretokenizers[0].pattern"),
        (format!("{pre}/0/type"), json!("Whitespace"), "pre_tokenizer.pretokenizers[0].type"),
        (format!("{pre}/0/pattern"), json!({"String": " "}), "pre_tokenizer.pretokenizers[0].pattern"),
        (format!("{pre}/0/behavior"), json!("Removed"), "pre_tokenizer.pretokenizers[0].behavior"),
        (format!("{pre}/0/invert"), json!(true), "pre_tokenizer.pretokenizers[0].invert"),
        (format!("{pre}/1/type"), json!("Metaspace"), "pre_tokenizer.pretokenizers[1].type"),
        (format!("{pre}/1/add_prefix_space"), json!(true), "pre_tokenizer.pretokenizers[1].add_prefix_space"),
        (format!("{pre}/1/use_regex"), json!(null), "pre_tokenizer.pretokenizers[1].use_regex"),
        ("/post_processor".to_owned(), json!({"type": "BertProcessing"}), "post_processor"),
        (
            "/post_processor".to_owned(),
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {}}]}),
            "post_processor",
        ),
        ("/decoder".to_owned(), json!({"type": "WordPiece"}), "decoder"),
        ("/added_tokens/0/lstrip".to_owned(), json!(true), "added_tokens[0].lstrip"),
        ("/added_tokens/1/rstrip".to_owned(), json!(true), "added_tokens[1].rstrip"),
        ("/added_tokens/2/single_word".to_owned(), json!(true), "added_tokens[2].single_word"),
        ("/added_tokens/3/normalized".to_owned(), json!(true), "added_tokens[3].normalized"),
    ] {
        let mut file = toy_json();
        *file.pointer_mut(&pointer).unwrap() = value;
        let error = Tokenizer::from_bytes(file.to_string().as_bytes(), "t.json").unwrap_err();
        match &error {
            TokenizerError::Unsupported { field: found, .. } => assert!(found.starts_with(field), "{error}"),
            _ => panic!("{pointer}: {error}"),
        }
        assert!(error.to_string().contains("t.json"), "{error}");
    }
}

#[test]
fn post_processors_that_add_nothing_are_accepted() {
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
    let template = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]});
    for post in [bytes.clone(), template, json!({"type": "Sequence", "processors": [bytes]})] {
        let mut file = toy_json();
        file["post_processor"] = post;
        from_json(&file);
    }
}

#[test]
fn unusable_tables_are_refused() {
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut file = toy_json();
        change(&mut file);
        Tokenizer::from_bytes(file.to_string().as_bytes(), "t.json").unwrap_err()
    };
    let error = refused(&|file| {
        file["model"]["vocab"].as_object_mut().unwrap().remove(&symbol(0x0A).to_string());
    });
    assert!(matches!(error, TokenizerError::BadMerge { .. } | TokenizerError::MissingByte { .. }), "{error}");
    let error = refused(&|file| {
        file["model"]["vocab"].as_object_mut().unwrap().remove(&symbol(0xFF).to_string());
    });
    assert!(matches!(error, TokenizerError::MissingByte { byte: 0xFF, .. }), "{error}");
    for id in [1u64 << 22, 1 << 32, u64::MAX] {
        let error = refused(&|file| file["model"]["vocab"]["zfiller284"] = json!(id));
        assert!(matches!(error, TokenizerError::IdTooLarge { id: found, .. } if found == id), "{error}");
    }
    let error = refused(&|file| file["model"]["vocab"]["zfiller284"] = json!(7));
    assert!(matches!(error, TokenizerError::Duplicate { what: "id", .. }), "{error}");
    let error = refused(&|file| file["added_tokens"][1]["id"] = json!(285));
    assert!(matches!(error, TokenizerError::Duplicate { what: "id", .. }), "{error}");
    let error = refused(&|file| file["added_tokens"][1]["content"] = json!("<sop>"));
    assert!(matches!(error, TokenizerError::Duplicate { what: "text", .. }), "{error}");
    let error = refused(&|file| file["added_tokens"][1]["content"] = json!("x".repeat((1 << 20) + 1)));
    assert!(matches!(error, TokenizerError::TooManyAddedTokens { .. }), "{error}");

    // The last of these makes the Hugging Face library panic: longer than any vocabulary entry.
    let longest = "zfiller284";
    for pair in [json!(["h", "zz"]), json!(["zz", "h"]), json!(["h", "h"]), json!([longest, longest])] {
        let error = refused(&|file| file["model"]["merges"][0] = pair.clone());
        assert!(matches!(error, TokenizerError::BadMerge { rank: 0, .. }), "{error}");
    }
    let error = refused(&|file| file["model"]["merges"][1] = file["model"]["merges"][0].clone());
    assert!(matches!(error, TokenizerError::BadMerge { rank: 1, .. }), "{error}");
    for merge in [json!("he"), json!("h e l"), json!(["h"]), json!(["h", "e", "l"]), json!(7), json!({})] {
        let error = refused(&|file| file["model"]["merges"][0] = merge.clone());
        assert!(matches!(error, TokenizerError::Json { .. }), "{error}");
    }
    let twice =
        toy_json().to_string().replacen("\"zfiller284\":284", "\"zfiller284\":284,\"zfiller284\":300", 1);
    let error = Tokenizer::from_bytes(twice.as_bytes(), "t.json").unwrap_err();
    assert!(error.to_string().contains("appears twice"), "{error}");
}

#[test]
fn files_that_are_missing_or_not_json_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let error = Tokenizer::from_file(&path).unwrap_err();
    assert!(
        matches!(error, TokenizerError::Io { .. }) && error.to_string().contains("tokenizer.json"),
        "{error}"
    );
    std::fs::write(&path, "{").unwrap();
    assert!(matches!(Tokenizer::from_file(&path).unwrap_err(), TokenizerError::Json { .. }));
    std::fs::write(&path, "\u{feff}{}").unwrap();
    assert!(matches!(Tokenizer::from_file(&path).unwrap_err(), TokenizerError::ByteOrderMark { .. }));
    assert!(matches!(Tokenizer::from_file(dir.path()).unwrap_err(), TokenizerError::NotAFile { .. }));
    for (wrong, field) in [
        ("[]", "tokenizer.json"),
        (r#"{"model": 7}"#, "the field model"),
        (r#"{"model": {"vocab": {}, "merges": []}, "added_tokens": [7]}"#, "added_tokens"),
    ] {
        std::fs::write(&path, wrong).unwrap();
        let message = Tokenizer::from_file(&path).unwrap_err().to_string();
        assert!(message.contains(field) && !message.contains("struct"), "{message}");
    }
}

/// Golden prompts and answers of the demo model, made with the transformers library.
#[test]
fn demo_prompts_have_the_reference_ids() {
    let tokenizer = demo_tokenizer();
    let greedy = demo_json("eval/greedy.json");
    let prompts = greedy["prompts"].as_array().unwrap();
    assert!(prompts.len() >= 8);
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    for prompt in prompts {
        let name = prompt["name"].as_str().unwrap();
        let text = prompt["prompt_text"].as_str().unwrap();
        let expected = ids(&prompt["prompt_ids"]);
        assert_eq!(tokenizer.encode_raw(text), expected, "{name}");
        assert_eq!(tokenizer.decode_bytes(&expected), text.as_bytes(), "{name}");
        if let Some(stop) = prompt["stop_index"].as_u64() {
            let answer = &ids(&prompt["new_ids"])[..stop as usize];
            let expected = prompt["new_text"].as_str().unwrap();
            assert_eq!(String::from_utf8_lossy(&tokenizer.decode_bytes(answer)), expected, "{name}");
        }
    }
    assert_eq!(tokenizer.vocab_size(), 8192);
    assert_eq!(tokenizer.special_ids(), (8160..=8180).collect::<Vec<_>>());
}

/// Thirty-two times the text takes 32 times as long and something more for the caches; were it quadratic, 1024.
#[test]
fn long_runs_of_one_class_are_not_quadratic() {
    let tokenizer = demo_tokenizer();
    let fastest = |text: &str| -> Duration {
        let once = || {
            let start = Instant::now();
            std::hint::black_box(tokenizer.encode_raw(text));
            start.elapsed()
        };
        (0..4).map(|_| once()).min().unwrap()
    };
    for unit in ["a", "e ", " ", "\n", " \n", "<", "é", "中", "1", "-", "\u{301}", "'", "<|user|"] {
        let (short, long) = (unit.repeat(5_000), unit.repeat(160_000));
        let ratio = fastest(&long).as_secs_f64() / fastest(&short).as_secs_f64().max(1e-6);
        assert!(ratio < 320.0, "{unit:?}: {ratio}");
        assert_eq!(tokenizer.decode_bytes(&tokenizer.encode_raw(&long)), long.as_bytes());
    }
}

/// A tokenizer that loads must work; one that does not must say so. Neither may panic.
fn load_and_use(bytes: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_bytes(bytes, "mutated") {
        let text = "hello 123 <|user|>\n\n the's é中 <think>";
        let ids = tokenizer.encode_raw(text);
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        tokenizer.decode_bytes(&ids);
    }
}

#[test]
fn damaged_files_never_panic() {
    let demo = std::fs::read(demo_dir().join("tokenizer.json")).unwrap();
    let toy = toy_json().to_string().into_bytes();
    for (file, rounds) in [(toy, 1500), (demo, 60)] {
        let mut random = Seeded::new(rounds);
        for _ in 0..rounds {
            let mut bytes = file.clone();
            if random.below(3) == 0 {
                bytes.truncate(random.below(file.len()));
            }
            for _ in 0..=random.below(4) {
                if !bytes.is_empty() {
                    let at = random.below(bytes.len());
                    bytes[at] = random.below(256) as u8;
                }
            }
            load_and_use(&bytes);
        }
    }
}

/// Well-formed JSON with one value replaced by a surprising one.
#[test]
fn surprising_values_never_panic() {
    fn pointers(value: &Value, at: String, out: &mut Vec<String>) {
        out.push(at.clone());
        match value {
            Value::Object(fields) => {
                for (key, inner) in fields {
                    pointers(inner, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
                }
            }
            Value::Array(items) => {
                for (index, inner) in items.iter().enumerate() {
                    pointers(inner, format!("{at}/{index}"), out);
                }
            }
            _ => {}
        }
    }
    let file = toy_json();
    let mut all = Vec::new();
    pointers(&file, String::new(), &mut all);
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(4_000_000_000_u32),
        json!(1e300),
        json!(""),
        json!("a b"),
        json!("\u{10FFFF}"),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!(["h", "e"]),
    ];
    let mut random = Seeded::new(7);
    for _ in 0..2500 {
        let mut mutated = file.clone();
        *mutated.pointer_mut(&all[random.below(all.len())]).unwrap() =
            values[random.below(values.len())].clone();
        load_and_use(mutated.to_string().as_bytes());
    }
    for nonsense in ["", "null", "[]", "{}", "\u{feff}{}", "{\"model\":{}}"] {
        assert!(Tokenizer::from_bytes(nonsense.as_bytes(), "nonsense").is_err());
    }
    let deep = "[".repeat(100_000);
    assert!(Tokenizer::from_bytes(deep.as_bytes(), "deep").is_err());
}
