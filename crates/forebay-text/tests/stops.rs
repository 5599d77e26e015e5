//! The stop set by hand and with the demo model.

mod common;

use common::*;
use forebay_text::StopSet;
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
    let set = StopSet::new([7].into_iter().chain([9, 7, 8]), &tokenizer);
    assert_eq!(set.ids(), [7, 9, 8, 285, 286, 287, 288, 289, 290, 291]);
}

#[test]
fn the_demo_model_stops_at_its_control_tokens_only() {
    let tokenizer = demo_tokenizer();
    let set = {
        let configured = ["config.json", "generation_config.json"].map(|name| {
            let ids = demo_json(name)["eos_token_id"].clone();
            serde_json::from_value::<Vec<u32>>(if ids.is_array() { ids } else { json!([ids]) }).unwrap()
        });
        StopSet::new(configured.concat(), &tokenizer)
    };
    assert_eq!(set.ids()[..4], [8160, 8167, 8169, 8161]);
    let stopping: Vec<u32> = (0..8192).filter(|&id| set.contains(id)).collect();
    assert_eq!(stopping, (8160..=8180).collect::<Vec<_>>());
}
