//! Every rule about `config.json` (container spec section 2), one mutation of the toy's config at a time:
//! what is refused names the field, what was found and what is allowed.

use forebay_model::families::glm;
use forebay_model::spec::{FfnKind, IndexerKind, ModelSpec};
use forebay_store::config::{ConfigError, ConfigFile};
use forebay_testkit::toy;
use serde_json::{Value, json};

fn read(text: &str) -> Result<ModelSpec, ConfigError> {
    glm::spec(&ConfigFile::parse("config.json", text.as_bytes()).unwrap())
}

/// The toy's config with `changes`; a field set to "gone" is left out.
fn with(changes: &[(&str, Value)]) -> Result<ModelSpec, ConfigError> {
    let mut config = toy::config();
    for (field, value) in changes {
        let map = config.as_object_mut().unwrap();
        if *value == json!("gone") {
            map.remove(*field);
        } else {
            map.insert((*field).to_owned(), value.clone());
        }
    }
    read(&config.to_string())
}

/// The changed config is refused in one line that holds the field and all `words`.
#[track_caller]
fn refused(changes: &[(&str, Value)], field: &str, words: &[&str]) {
    let error = with(changes).expect_err(field).to_string();
    assert!(!error.contains('\n') && error.len() < 400, "{error}");
    for word in ["config.json", field].iter().chain(words) {
        assert!(error.contains(word), "{word:?} is missing: {error}");
    }
}

#[track_caller]
fn accepted(changes: &[(&str, Value)]) -> ModelSpec {
    with(changes).unwrap_or_else(|error| panic!("{changes:?}: {error}"))
}

/// Field, smallest and largest value, whether it must be there. From the table of section 2, narrowed by what
/// this engine additionally refuses; the toy's 256 experts do not limit `num_experts_per_tok` to less than 64.
const INTEGERS: [(&str, u64, u64, bool); 20] = [
    ("hidden_size", 1, 1 << 20, true),
    ("num_hidden_layers", 1, 128, true),
    ("num_attention_heads", 1, 1024, true),
    ("n_routed_experts", 8, 4096, true),
    ("num_experts_per_tok", 1, 64, true),
    ("moe_intermediate_size", 1, 1 << 20, true),
    ("intermediate_size", 1, 1 << 24, true),
    ("first_k_dense_replace", 0, 5, false),
    ("q_lora_rank", 1, 1 << 20, true),
    ("kv_lora_rank", 1, 1 << 20, true),
    ("qk_nope_head_dim", 1, 65_536, true),
    ("v_head_dim", 1, 65_536, true),
    ("n_shared_experts", 0, 64, false),
    ("vocab_size", 1, 1 << 24, true),
    ("n_group", 1, 1, true),
    ("topk_group", 1, 1, false),
    ("index_topk", 0, 1 << 20, false),
    ("index_n_heads", 0, 1024, false),
    ("index_head_dim", 8, 65_536, false),
    ("num_nextn_predict_layers", 0, 16, false),
];

#[test]
fn integers_have_the_ranges_of_the_table() {
    for (field, low, high, _) in INTEGERS {
        accepted(&[(field, json!(low))]);
        accepted(&[(field, json!(high))]);
        for beyond in [json!(high + 1), json!(u64::MAX), json!(-1)] {
            refused(&[(field, beyond.clone())], field, &[&beyond.to_string()]);
        }
        if low > 0 && field != "n_routed_experts" && field != "index_head_dim" {
            refused(&[(field, json!(low - 1))], field, &[&(low - 1).to_string()]);
        }
    }
}

#[test]
fn wrong_types_are_refused_and_null_is_no_number() {
    // A float that is a whole number is still a float.
    assert!(
        read(&toy::config().to_string().replacen("\"hidden_size\":64", "\"hidden_size\":64.0", 1)).is_err()
    );
    for (field, _, _, required) in INTEGERS {
        for wrong in [json!("8"), json!(8.5), json!(true), json!([8]), json!({"n": 8})] {
            refused(&[(field, wrong.clone())], field, &[&wrong.to_string()]);
        }
        for nothing in [json!(null), json!("gone")] {
            if required {
                refused(&[(field, nothing)], field, &[]);
            } else {
                accepted(&[(field, nothing)]);
            }
        }
    }
    for field in ["rms_norm_eps", "routed_scaling_factor"] {
        refused(&[(field, json!("1"))], field, &["\"1\"", "a number"]);
        refused(&[(field, json!([]))], field, &["[]", "a number"]);
    }
    for field in ["norm_topk_prob", "attention_bias", "rope_interleave", "indexer_rope_interleave"] {
        refused(&[(field, json!(1))], field, &["1", "true or false"]);
        refused(&[(field, json!("true"))], field, &["true or false"]);
    }
    for field in ["hidden_act", "scoring_func", "topk_method", "model_type"] {
        refused(&[(field, json!(1))], field, &["is 1"]);
    }
    refused(&[("rope_parameters", json!(1))], "rope_parameters", &["an object"]);
    refused(&[("rope_parameters", json!({}))], "rope_parameters.rope_theta", &["missing"]);
    refused(&[("mlp_layer_types", json!("dense"))], "mlp_layer_types", &["a list of strings"]);
    refused(&[("indexer_types", json!(["full", 1]))], "indexer_types", &["a list of strings"]);
    let file = ConfigFile::parse("config.json", br#"{"tie_word_embeddings": 1}"#).unwrap();
    assert!(glm::ties_embeddings(&file).unwrap_err().to_string().contains("tie_word_embeddings is 1"));
}

#[test]
fn experts_per_token_are_among_the_experts() {
    refused(&[("n_routed_experts", json!(7))], "num_experts_per_tok", &["is 8", "1..=7"]);
    refused(&[("num_experts_per_tok", json!(0))], "num_experts_per_tok", &["is 0", "1..=64"]);
    accepted(&[("n_routed_experts", json!(8))]);
}

#[test]
fn the_rotated_part_is_even_and_fits() {
    let field = "qk_rope_head_dim";
    refused(&[(field, json!(7))], field, &["is 7", "even"]);
    refused(&[(field, json!(0))], field, &["is 0", "1..=256"]);
    refused(&[(field, json!(257))], field, &["is 257", "256"]);
    refused(&[(field, json!(258)), ("index_topk", json!(0))], field, &["is 258", "256"]);
    // The index key has 16 values.
    refused(&[(field, json!(18))], "index_head_dim", &["is 16", "18"]);
    let dense = accepted(&[(field, json!(256)), ("index_topk", json!(0))]);
    assert_eq!((dense.attention.rope, dense.indexer), (256, None));
    refused(&[("qk_head_dim", json!(25))], "qk_head_dim", &["is 25", "24"]);
    accepted(&[("qk_head_dim", json!(24))]);
    refused(&[("num_key_value_heads", json!(2))], "num_key_value_heads", &["is 2", "4..=4"]);
}

#[test]
fn other_functions_are_refused() {
    for (field, value, allowed) in [
        ("n_group", json!(8), "1..=1"),
        ("topk_group", json!(4), "1..=1"),
        ("moe_layer_freq", json!(2), "1..=1"),
        ("hidden_act", json!("gelu"), "silu"),
        ("scoring_func", json!("softmax"), "sigmoid"),
        ("topk_method", json!("greedy"), "noaux_tc"),
        ("attention_bias", json!(true), "false"),
        ("rope_interleave", json!(false), "true"),
        ("indexer_rope_interleave", json!(false), "true"),
        ("rope_scaling", json!({"type": "yarn", "factor": 4}), "null"),
        ("model_type", json!("deepseek_v3"), "glm_moe_dsa"),
    ] {
        let found = value.to_string();
        refused(&[(field, value)], field, &[&found, allowed]);
    }
    let yarn = json!({"rope_theta": 10000.0, "rope_type": "yarn"});
    refused(&[("rope_parameters", yarn)], "rope_parameters.rope_type", &["yarn", "default"]);
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [64, 128]});
    refused(&[("quantization_config", blocks)], "quantization_config.weight_block_size", &["[64,128]"]);
    let other = json!({"quant_method": "awq"});
    refused(&[("quantization_config", other)], "quantization_config.quant_method", &["awq", "fp8"]);
}

#[test]
fn the_rotary_base_is_a_positive_finite_number() {
    let place = "rope_parameters.rope_theta";
    for bad in [json!(0), json!(-1.0), json!("1e4"), json!(null)] {
        refused(&[("rope_parameters", json!({ "rope_theta": bad }))], place, &["above 0"]);
    }
    refused(&[("rope_parameters", json!("gone"))], "rope_theta", &["missing"]);
    refused(&[("rope_theta", json!(20000.0))], "rope_theta", &["20000", "10000"]);
    let old = accepted(&[("rope_parameters", json!("gone")), ("rope_theta", json!(5000))]);
    assert_eq!(old.attention.rope_theta, 5000.0);
}

/// Numbers that are fine as f64 and become 0 or infinite as f32 are refused where they are read.
#[test]
fn numbers_stay_positive_and_finite_in_single_precision() {
    for bad in [1e-50, 1e39, 1e300] {
        let rope = json!({ "rope_theta": bad });
        refused(&[("rope_parameters", rope)], "rope_parameters.rope_theta", &["single precision"]);
        refused(&[("rms_norm_eps", json!(bad))], "rms_norm_eps", &["single precision"]);
    }
    for bad in [1e39, -1e39] {
        refused(&[("routed_scaling_factor", json!(bad))], "routed_scaling_factor", &["single precision"]);
    }
    for bad in [0.0, -1e-5] {
        refused(&[("rms_norm_eps", json!(bad))], "rms_norm_eps", &["above 0"]);
    }
}

/// JSON has no infinity; a literal too large for a double is refused by the parser or by the field.
#[test]
fn overflowing_literals_are_refused() {
    for (from, field) in
        [("10000.0", "rope_theta"), ("2.5", "routed_scaling_factor"), ("0.00001", "rms_norm_eps")]
    {
        for literal in ["1e999", "-1e999"] {
            let text = toy::config().to_string().replacen(from, literal, 1);
            assert!(text.contains(literal), "{field} is not in {text}");
            match ConfigFile::parse("config.json", text.as_bytes()) {
                Err(error) => assert!(!error.to_string().is_empty()),
                Ok(file) => {
                    let error = glm::spec(&file).unwrap_err().to_string();
                    assert!(error.contains(field), "{error}");
                }
            }
        }
    }
}

#[test]
fn the_routed_weights_have_no_silent_defaults() {
    refused(&[("norm_topk_prob", json!("gone"))], "norm_topk_prob", &["missing", "true or false"]);
    refused(&[("norm_topk_prob", json!(null))], "norm_topk_prob", &["null"]);
    refused(&[("routed_scaling_factor", json!("gone"))], "routed_scaling_factor", &["missing", "a number"]);
    refused(&[("routed_scaling_factor", json!(null))], "routed_scaling_factor", &["null"]);
    let spec = accepted(&[("norm_topk_prob", json!(false)), ("rms_norm_eps", json!("gone"))]);
    assert!(!spec.moe.normalise);
    assert_eq!((spec.moe.scaling, spec.norm_eps), (2.5, 1e-5));
}

#[test]
fn dense_layers_are_the_first_ones() {
    let types = |names: &[&str]| [("mlp_layer_types", json!(names))];
    let spec = accepted(&types(&["dense", "sparse", "sparse", "sparse", "sparse"]));
    assert_eq!(spec.layers.iter().filter(|layer| layer.ffn == FfnKind::Dense).count(), 1);
    for wrong in [
        &["sparse"; 5][..],
        &["dense", "sparse"],
        &["dense", "dense", "sparse", "sparse", "sparse"],
        &["dense", "sparse", "sparse", "sparse", "other"],
        &["dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
    ] {
        refused(&types(wrong), "mlp_layer_types", &["first_k_dense_replace", "1 times \"dense\""]);
    }
}

/// The schedule as a string, `F` for full and `S` for shared.
fn schedule(spec: &ModelSpec) -> String {
    let letter = |layer: &forebay_model::spec::LayerSpec| match layer.indexer {
        IndexerKind::Full => 'F',
        IndexerKind::Shared => 'S',
    };
    spec.layers.iter().map(letter).collect()
}

/// V-08: frequency and offset, the first layers, and how many of 78 are full.
#[test]
fn schedules_of_vector_v_08() {
    let layers = ("num_hidden_layers", json!(78));
    for (frequency, offset, first, full) in [
        (1, 2, "FFFFFF", 78),
        (2, 2, "FFSFSFSF", 40),
        (4, 2, "FFSSSFSSSFSS", 21),
        (4, 3, "FFFSSSFSSSFS", 21),
        (0, 2, "FFFFFF", 78),
    ] {
        let spec = accepted(&[
            layers.clone(),
            ("index_topk_freq", json!(frequency)),
            ("index_skip_topk_offset", json!(offset)),
        ]);
        let found = schedule(&spec);
        assert!(found.starts_with(first), "({frequency}, {offset}): {found}");
        assert_eq!(found.matches('F').count(), full, "({frequency}, {offset})");
    }
    // Layer 0 has nothing to share.
    let shared = [layers, ("index_topk_freq", json!(3)), ("index_skip_topk_offset", json!(0))];
    refused(&shared, "index_skip_topk_offset", &["is 0", "layer 0"]);
    let dense = accepted(&[&shared[..], &[("index_topk", json!(0))]].concat());
    assert!(schedule(&dense).starts_with("SSFSSF"), "{}", schedule(&dense));
}

#[test]
fn named_schedules_go_before_the_formula_and_may_be_short() {
    let formula = schedule(&accepted(&[]));
    assert_eq!(formula, "FFSFS", "frequency 2, offset 2");
    let named = |names: Value| schedule(&accepted(&[("indexer_types", names)]));
    assert_eq!(named(json!(["full", "shared", "full", "shared", "full"])), "FSFSF");
    // Missing entries use the formula.
    assert_eq!(named(json!(["full", "shared", "full"])), "FSFFS");
    assert_eq!(named(json!([])), formula);
    assert_eq!(named(json!(null)), formula);
    refused(&[("indexer_types", json!(["shared"]))], "indexer_types", &["layer 0"]);
    refused(&[("indexer_types", json!(["full", "Full"]))], "indexer_types", &["\"Full\""]);
    refused(&[("indexer_types", json!(vec!["full"; 6]))], "indexer_types", &["at most 5"]);
    let field = "index_topk_pattern";
    let pattern = |pattern: Value| schedule(&accepted(&[(field, pattern)]));
    assert_eq!(pattern(json!("FSSFS")), "FSSFS");
    assert_eq!(pattern(json!(["F", "S", "S", "F", "S"])), "FSSFS");
    assert_eq!(pattern(json!("FS")), "FSSFS", "the formula from layer 2 on");
    assert_eq!(pattern(json!(null)), formula);
    refused(&[(field, json!("FXSFS"))], field, &["\"X\""]);
    refused(&[(field, json!("FSSFSF"))], field, &["at most 5"]);
    refused(&[(field, json!(4))], field, &["a list of strings"]);
    refused(&[(field, json!("SF"))], field, &["layer 0"]);
    // Both: the list of types decides.
    let both = accepted(&[(field, json!("FSSSS")), ("indexer_types", json!(vec!["full"; 5]))]);
    assert_eq!(schedule(&both), "FFFFF");
}

#[test]
fn an_indexer_that_cannot_be_used_is_off() {
    for (field, value) in
        [("index_topk", 0), ("index_n_heads", 0), ("index_head_dim", 0), ("index_head_dim", 257)]
    {
        assert_eq!(accepted(&[(field, json!(value))]).indexer, None, "{field} = {value}");
        assert_eq!(accepted(&[(field, json!("gone"))]).indexer, None, "{field}");
    }
    let on = accepted(&[("index_head_dim", json!(256))]).indexer.unwrap();
    assert_eq!((on.heads, on.dim, on.top_k), (2, 256, 6));
}

/// V-10 and defect 10: no limit on their number, and what is no id is refused.
#[test]
fn stop_ids_are_united_and_strict() {
    let file = |ids: Value| {
        ConfigFile::parse("x.json", json!({ "eos_token_id": ids }).to_string().as_bytes()).unwrap()
    };
    let ids = |a: Value, b: Option<Value>| {
        forebay_store::config::stop_ids(&file(a), b.map(file).as_ref()).map_err(|error| error.to_string())
    };
    assert_eq!(ids(json!([100]), Some(json!([100, 101, 102]))), Ok(vec![100, 101, 102]));
    assert_eq!(ids(json!([100]), None), Ok(vec![100]));
    assert_eq!(ids(json!(7), None), Ok(vec![7]));
    let many: Vec<u32> = (0..40).collect();
    assert_eq!(ids(json!(many[..20]), Some(json!(many))), Ok(many));
    for bad in [json!([1, null]), json!([1, -1]), json!([1, 2.5]), json!("7"), json!([4_294_967_296u64])] {
        assert!(ids(bad.clone(), None).unwrap_err().contains("eos_token_id"), "{bad}");
    }
}
