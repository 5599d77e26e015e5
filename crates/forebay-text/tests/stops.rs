//! The stop set against D-05, V-10 and the demo model.

mod common;

use common::*;
use forebay_text::StopSet;
use forebay_text::stops::StopError;
use serde_json::{Value, json};

#[test]
fn d05_stops() {
    let mut file = toy_json();
    let names = ["<|endoftext|>", "<a>", "<b>", "<c>", "<d>"];
    let mut added: Vec<Value> =
        names.iter().zip(100..).map(|(name, id)| added_token(id, name, true)).collect();
    added.push(added_token(110, "<think>", false));
    added.push(added_token(111, "</think>", false));
    file["added_tokens"] = added.into();
    let tokenizer = from_json(&file);

    let set = StopSet::new([100].into_iter().chain([100, 101, 102]), &tokenizer);
    assert_eq!(set.ids(), [100, 101, 102, 103, 104]);
    for id in [110, 111, 0, 99, 105, u32::MAX] {
        assert!(!set.contains(id));
    }
}

#[test]
fn the_order_is_config_then_generation_then_end_of_text_then_control() {
    let mut file = toy_json();
    file["added_tokens"][0]["special"] = json!(false);
    let tokenizer = from_json(&file);
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("config.json", r#"{"eos_token_id": 7}"#);
    let expected = |generation: &[u32]| [&[7], generation, &[285, 286, 287, 288, 289, 290, 291]].concat();

    assert_eq!(StopSet::load(dir.path(), &tokenizer).unwrap().ids(), expected(&[]));
    write("generation_config.json", r#"{"eos_token_id": [9, 7, 8]}"#);
    assert_eq!(StopSet::load(dir.path(), &tokenizer).unwrap().ids(), expected(&[9, 8]));
    write("generation_config.json", r#"{"eos_token_id": [9, null]}"#);
    let error = StopSet::load(dir.path(), &tokenizer).unwrap_err();
    assert!(matches!(&error, StopError::NotAnId { found, .. } if found == "null"), "{error}");
    assert!(error.to_string().contains("generation_config.json"), "{error}");
    write("generation_config.json", "{");
    assert!(matches!(StopSet::load(dir.path(), &tokenizer).unwrap_err(), StopError::Json { .. }));
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(matches!(StopSet::load(dir.path(), &tokenizer).unwrap_err(), StopError::Io { .. }));
}

#[test]
fn the_demo_model_stops_at_its_control_tokens_only() {
    let tokenizer = demo_tokenizer();
    let set = StopSet::load(&demo_dir(), &tokenizer).unwrap();
    assert_eq!(set.ids()[..4], [8160, 8167, 8169, 8161]);
    let stopping: Vec<u32> = (0..8192).filter(|&id| set.contains(id)).collect();
    assert_eq!(stopping, (8160..=8180).collect::<Vec<_>>());
}
