//! What a census says about folders that lack something or hold something else.

mod common;

use common::{Tensor, quantised, tensor, write_shard};
use forebay_core::ids::ExpertKey;
use forebay_store::catalog::Catalog;
use forebay_store::census::{Census, Group, KEPT, Kind, Requirement, check};
use forebay_store::layout::LayoutError;

/// A model of three layers with a norm and four experts each, and a global vector.
fn requirements() -> Vec<Requirement> {
    let weight = |name, group| Requirement { name, kind: Kind::Weight { rows: 4, cols: 8 }, group };
    let vector = |name, group| Requirement { name, kind: Kind::Vector { len: 8 }, group };
    let mut all = vec![vector("norm".to_owned(), Group::Global)];
    for layer in 0..3 {
        all.push(vector(format!("{layer}.norm"), Group::Layer(layer)));
        all.push(weight(format!("{layer}.o"), Group::Layer(layer)));
        for expert in 0..4 {
            all.push(weight(format!("{layer}.{expert}"), Group::Expert(ExpertKey { layer, expert })));
        }
    }
    all
}

fn tensors() -> Vec<Tensor> {
    let stored = |requirement: Requirement| match requirement.kind {
        Kind::Vector { len } => vec![tensor(&requirement.name, "F32", &[len as u64])],
        _ => quantised(&requirement.name, 16, 4).into(),
    };
    requirements().into_iter().flat_map(stored).collect()
}

fn census_of(tensors: &[Tensor], file: &str) -> Census {
    let dir = tempfile::tempdir().unwrap();
    write_shard(&dir.path().join(file), tensors);
    check(&Catalog::open(dir.path()).unwrap(), requirements())
}

fn without(gone: impl Fn(&str) -> bool) -> Census {
    let kept: Vec<_> = tensors().into_iter().filter(|t| !gone(&t.name)).collect();
    census_of(&kept, "model.safetensors")
}

#[test]
fn a_whole_model_is_counted() {
    let census = without(|_| false);
    assert!(census.is_complete() && !census.is_absent());
    // Vectors take 32 bytes, weights 16 + 16; 3 x 4 of the weights are experts.
    assert_eq!((census.checked, census.tensors), (19, 34));
    assert_eq!((census.resident_bytes, census.expert_bytes), (7 * 32, 12 * 32));
    assert!(census.require_complete().is_ok());
}

#[test]
fn gaps_are_named_by_layer_and_expert() {
    let says = |census: Census, part: &str| {
        let text = census.to_string();
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    };
    says(
        without(|n| n.starts_with("1.")),
        "incomplete download: layer 1 is missing. First: tensor 1.norm is",
    );
    says(without(|n| n.starts_with("1.") || n.starts_with("2.")), "layers 1-2 are missing");
    says(without(|n| n.starts_with("0.") || n.starts_with("2.")), "layers 0, 2 are missing");
    says(without(|n| n.starts_with("1.2")), "layer 1 lacks expert 2.");
    says(
        without(|n| ["1.0", "1.1", "1.3"].iter().any(|p| n.starts_with(p))),
        "layer 1 lacks experts 0-1, 3.",
    );
    says(without(|n| n == "2.norm"), "layer 2 lacks 1 of its 2 own tensors");
    says(without(|n| n == "norm"), "1 of 1 tensors outside the layers are missing");
    // Scales alone are enough to be missing, and the error names them.
    let census = without(|n| n == "1.2.qs");
    assert!(
        matches!(&census.first_missing, Some(LayoutError::MissingScales { scales, .. }) if scales == "1.2.qs")
    );
    says(census, "layer 1 lacks expert 2. First: model.safetensors: tensor 1.2 is U8 and its scales 1.2.qs");
    let nothing = without(|_| true);
    assert!(nothing.is_absent());
    says(nothing, "holds none of the 19 weights looked for");
}

#[test]
fn shards_numbered_of_so_many_are_missed_without_an_index() {
    let kept: Vec<_> = tensors().into_iter().filter(|t| !t.name.starts_with("2.")).collect();
    let text = census_of(&kept, "model-00002-of-00003.safetensors").to_string();
    let expected = "layer 2 is missing (2 of 3 shards named by their own numbering are absent: \
                    model-00001-of-00003.safetensors, model-00003-of-00003.safetensors)";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn malformed_is_not_missing() {
    let mut all = tensors();
    for tensor in all.iter_mut().filter(|t| t.dtype == "U8") {
        tensor.shape = vec![17];
    }
    let census = census_of(&all, "model.safetensors");
    assert_eq!((census.missing, census.malformed_count, census.malformed.len()), (0, 15, KEPT));
    assert!(census.missing_shards.is_none());
    let text = census.require_complete().unwrap_err().to_string();
    assert!(
        text.contains("15 of 19 weights are malformed; the first: model.safetensors: tensor 0.o"),
        "{text}"
    );
    assert!(!text.contains("incomplete download"), "{text}");

    let mut all: Vec<_> = tensors().into_iter().filter(|t| t.name != "norm").collect();
    all[0].shape = vec![9];
    let text = census_of(&all, "model.safetensors").to_string();
    assert!(text.contains("Besides, model.safetensors: tensor 0.norm has shape [9], expected [8]"), "{text}");
}

#[test]
fn experts_in_one_tensor_count_as_experts() {
    let dir = tempfile::tempdir().unwrap();
    write_shard(&dir.path().join("m.safetensors"), &[tensor("fused", "BF16", &[4, 6, 8])]);
    let kind = Kind::Fused { experts: 4, rows: 6, cols: 8 };
    let requirement = Requirement { name: "fused".to_owned(), kind, group: Group::Layer(0) };
    let census = check(&Catalog::open(dir.path()).unwrap(), [requirement]);
    assert_eq!((census.expert_bytes, census.resident_bytes), (384, 0));
}
