//! Formats found from byte counts, and everything that fits none.

mod common;

use common::{Tensor, converter_order, quantised, tensor, write_shard};
use forebay_core::format::{Format, GroupSize};
use forebay_store::catalog::Catalog;
use forebay_store::layout::{self, LayoutError, detect};
use forebay_store::record::ExpertRecord;
use proptest::prelude::*;

fn catalog(tensors: &[Tensor]) -> (tempfile::TempDir, Catalog) {
    let dir = tempfile::tempdir().unwrap();
    write_shard(&dir.path().join("out-00000.safetensors"), tensors);
    let catalog = Catalog::open(dir.path()).unwrap();
    (dir, catalog)
}

fn group(size: usize) -> Format {
    Format::Int4Group(GroupSize::new(size).unwrap())
}

#[test]
fn group_sizes_of_vector_v_04() {
    let cases = [
        (2usize, 64usize, 32, group(16)),
        (2, 64, 16, group(32)),
        (2, 64, 8, Format::Int4Row),
        (3, 65, 60, group(16)),
        (3, 65, 24, group(48)),
        (1, 200, 20, group(48)),
        (1, 200, 16, group(64)),
        (1, 200, 8, group(128)),
        (1, 200, 4, Format::Int4Row),
        (1, 100, 8, group(64)),
        (1, 31, 8, group(16)),
        (4, 2048, 688, group(48)),
        (2048, 6144, 393_216, group(128)),
    ];
    for (rows, cols, scale_bytes, format) in cases {
        let codes = (rows * cols.div_ceil(2)) as u64;
        assert_eq!(detect(codes, scale_bytes, rows, cols).map(|d| d.0), Some(format), "{rows} x {cols}");
        let (_dir, catalog) = catalog(&quantised("w", codes, scale_bytes / 4));
        assert_eq!(layout::weight(&catalog, "w", rows, cols).unwrap().format, format);
    }
    // Two groups of 65 columns may be 48 or 64 wide: the smallest is taken, and it is said.
    assert_eq!(detect(3 * 33, 24, 3, 65), Some((group(48), true)));
    assert_eq!(detect(2048 * 3072, 393_216, 2048, 6144), Some((group(128), false)));
}

#[test]
fn formats_of_vector_v_06() {
    let found = |codes, scales| {
        let (_dir, catalog) = catalog(&quantised("w", codes, scales));
        layout::weight(&catalog, "w", 3, 5)
    };
    assert_eq!(found(15, 3).unwrap().format, Format::Int8Row);
    assert_eq!(found(9, 3).unwrap().format, Format::Int4Row);
    assert_eq!(found(6, 3).unwrap().format, Format::Int2Row);
    let error = found(10, 3).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, LayoutError::Payload { found: 10, int8: 15, int4: 9, int2: 6, .. }));
    assert!(text.contains("out-00000.safetensors") && text.contains("tensor w "), "{text}");
    // The reference never counted the scales: too many overran its buffer.
    for (codes, scales) in [(15, 2), (15, 4), (15, 6), (9, 2), (9, 4), (6, 0), (6, 6)] {
        assert!(matches!(found(codes, scales), Err(LayoutError::Scales { .. })), "{codes} {scales}");
    }
}

#[test]
fn a_scale_count_that_no_group_size_gives_is_refused() {
    // 200 columns make 13, 7, 5, 4, 3 or 2 groups.
    for groups in [6, 8, 12, 14, 200] {
        assert_eq!(detect(100, 4 * groups, 1, 200), None, "{groups}");
    }
    // A group wider than the matrix is not looked at, and fewer scales than rows fit nothing.
    assert_eq!(detect(2 * 6, 4 * 4, 2, 12), None);
    assert_eq!(detect(2 * 100, 4, 2, 200), None);
}

#[test]
fn narrow_matrices_keep_the_order_of_the_formats() {
    // One column: int8 and int4 take the same bytes, int8 is first. Two columns: int4 before int2.
    assert_eq!(detect(4, 16, 4, 1), Some((Format::Int8Row, false)));
    assert_eq!(detect(8, 16, 4, 2), Some((Format::Int8Row, false)));
    assert_eq!(detect(4, 16, 4, 2), Some((Format::Int4Row, false)));
    assert_eq!(detect(4, 16, 4, 3), Some((Format::Int2Row, false)));
}

#[test]
fn types_and_companions_have_to_fit() {
    let (_dir, catalog) = catalog(&[
        tensor("float.qs", "F32", &[2]),
        tensor("float", "BF16", &[2, 4]),
        tensor("half_scales", "U8", &[8]),
        tensor("half_scales.qs", "BF16", &[2]),
        tensor("i8", "I8", &[8]),
        tensor("i8.qs", "F32", &[2]),
        tensor("alone", "U8", &[2, 4]),
        tensor("no_codes.qs", "F32", &[2]),
        tensor("wide", "F64", &[2, 4]),
        tensor("plain", "F16", &[2, 4]),
        tensor("flat", "F32", &[8]),
        tensor("vector", "BF16", &[4]),
        tensor("row", "BF16", &[1, 4]),
    ]);
    let weight = |name| layout::weight(&catalog, name, 2, 4);
    assert!(matches!(weight("float"), Err(LayoutError::Dtype { .. })));
    assert!(
        matches!(weight("half_scales"), Err(LayoutError::Dtype { tensor, .. }) if tensor == "half_scales.qs")
    );
    assert_eq!(weight("i8").unwrap().format, Format::Int8Row);
    let error = weight("alone").unwrap_err();
    assert!(matches!(&error, LayoutError::MissingScales { scales, .. } if scales == "alone.qs"));
    assert!(error.is_missing());
    assert_eq!(weight("no_codes"), Err(LayoutError::Missing { tensor: "no_codes".to_owned() }));
    assert!(matches!(weight("wide"), Err(LayoutError::Dtype { .. })));
    let plain = weight("plain").unwrap();
    assert_eq!((plain.format, plain.codes.len, plain.scales), (Format::F16, 16, None));
    assert!(matches!(weight("flat"), Err(LayoutError::Shape { .. })));
    assert!(matches!(layout::weight(&catalog, "plain", 4, 2), Err(LayoutError::Shape { .. })));

    let vector = layout::vector(&catalog, "vector", 4).unwrap();
    assert_eq!((vector.format, vector.rows, vector.cols, vector.codes.len), (Format::Bf16, 1, 4, 8));
    assert!(matches!(layout::vector(&catalog, "vector", 5), Err(LayoutError::Shape { .. })));
    assert!(matches!(layout::vector(&catalog, "row", 4), Err(LayoutError::Shape { .. })));
    // Bytes where floats are expected.
    assert!(matches!(layout::vector(&catalog, "i8", 8), Err(LayoutError::Dtype { .. })));
    assert!(matches!(layout::float_matrix(&catalog, "i8", 2, 4), Err(LayoutError::Dtype { .. })));
    assert_eq!(layout::float_matrix(&catalog, "plain", 2, 4).unwrap(), plain);
    assert!(matches!(layout::float_matrix(&catalog, "gone", 2, 4), Err(LayoutError::Missing { .. })));
    for (rows, cols) in [(0, 4), (4, 0), (usize::MAX, 2), (1 << 62, 1)] {
        assert!(matches!(
            layout::weight(&catalog, "plain", rows, cols),
            Err(LayoutError::Unaddressable { .. })
        ));
    }
}

#[test]
fn fp8_blocks_need_their_multipliers() {
    let (_dir, catalog) = catalog(&[
        tensor("a", "F8_E4M3", &[130, 256]),
        tensor("a_scale_inv", "F32", &[2, 2]),
        tensor("b", "F8_E4M3", &[130, 256]),
        tensor("b_scale_inv", "BF16", &[2, 2]),
        tensor("c", "F8_E4M3", &[130, 256]),
        tensor("c_scale_inv", "F32", &[2, 1]),
        tensor("d", "F8_E4M3", &[130, 256]),
    ]);
    let weight = |name| layout::weight(&catalog, name, 130, 256);
    let a = weight("a").unwrap();
    assert_eq!((a.format, a.codes.len, a.scales.map(|s| s.len)), (Format::Fp8Block, 33_280, Some(16)));
    assert!(matches!(weight("b"), Err(LayoutError::Dtype { tensor, .. }) if tensor == "b_scale_inv"));
    assert!(matches!(weight("c"), Err(LayoutError::Shape { tensor, .. }) if tensor == "c_scale_inv"));
    assert!(matches!(weight("d"), Err(LayoutError::MissingScales { .. })));
    assert!(matches!(layout::weight(&catalog, "a", 256, 130), Err(LayoutError::Shape { .. })));
}

#[test]
fn experts_within_one_tensor_are_sliced() {
    let (_dir, catalog) = catalog(&[tensor("pad", "U8", &[8]), tensor("gate_up_proj", "BF16", &[4, 6, 10])]);
    let whole = catalog.get("gate_up_proj").unwrap();
    let slice = |expert, rows| layout::fused_slice(&catalog, "gate_up_proj", [4, 6, 10], expert, rows);
    let (gate, up) = (slice(2, 0..3).unwrap(), slice(2, 3..6).unwrap());
    // Two bytes an element: expert 2 starts 2 * 6 * 10 elements in, its second half 3 * 10 later.
    assert_eq!((gate.codes.offset, gate.codes.len), (whole.offset + 240, 60));
    assert_eq!((up.codes.offset, up.codes.len), (whole.offset + 300, 60));
    assert_eq!((up.rows, up.cols, up.format), (3, 10, Format::Bf16));
    let last = slice(3, 3..6).unwrap().codes;
    assert_eq!(last.offset + last.len, whole.offset + whole.len);
    for (expert, rows) in [(4, 0..3), (0, 0..7), (0, 3..3), (usize::MAX, 0..1)] {
        assert!(matches!(slice(expert, rows), Err(LayoutError::Unaddressable { .. })));
    }
    let other = layout::fused_slice(&catalog, "gate_up_proj", [4, 10, 6], 0, 0..1);
    assert!(matches!(other, Err(LayoutError::Shape { .. })));
}

#[test]
fn experts_lie_in_the_order_of_vector_v_11() {
    let (rows, cols) = (16u64, 64u64);
    let mut tensors = Vec::new();
    for expert in [0, 1, 2, 10] {
        for (proj, out) in [("gate", rows), ("up", rows), ("down", cols)] {
            let name = format!("model.layers.1.mlp.experts.{expert}.{proj}_proj.weight");
            tensors.extend(quantised(&name, rows * cols / 2, out));
        }
    }
    converter_order(&mut tensors);
    let (_dir, catalog) = catalog(&tensors);
    let layout = |expert: u32, proj: &str, rows, cols| {
        let name = format!("model.layers.1.mlp.experts.{expert}.{proj}_proj.weight");
        layout::weight(&catalog, &name, rows, cols).unwrap()
    };
    let mut file_order = Vec::new();
    for expert in [0, 1, 2, 10] {
        let (gate, up) = (layout(expert, "gate", 16, 64), layout(expert, "up", 16, 64));
        let down = layout(expert, "down", 64, 16);
        let record = ExpertRecord::new(&gate, &up, &down).unwrap();
        assert!(record.coalesced && record.segments.len() == 2, "expert {expert}");
        let [g, u, d] = &record.parts;
        assert!(d.codes.end == g.codes.start && g.codes.end == u.codes.start);
        assert!(d.scales.end == g.scales.start && g.scales.end == u.scales.start);
        file_order.push((record.segments[1].offset, expert));
        assert!(record.segments[0].offset < catalog.get(&tensors[12].name).unwrap().offset);
    }
    file_order.sort_unstable();
    assert_eq!(file_order.into_iter().map(|(_, expert)| expert).collect::<Vec<_>>(), [0, 1, 10, 2]);
}

proptest! {
    #[test]
    fn what_is_detected_has_these_byte_counts(rows in 1usize..50, cols in 1usize..400, format in 0usize..11) {
        let mut formats = vec![Format::Int8Row, Format::Int4Row, Format::Int2Row];
        formats.extend(GroupSize::ALL.map(Format::Int4Group));
        let written = formats[format];
        let codes = written.payload_bytes(rows, cols).unwrap() as u64;
        let scales = written.scale_count(rows, cols).unwrap() as u64 * 4;
        let readable = !matches!(written, Format::Int4Group(size) if size.get() > cols);
        // Whatever is found decodes these very bytes; and what was written is found, or something
        // that comes earlier in the fixed order and has the same counts.
        let found = detect(codes, scales, rows, cols);
        if let Some((format, _)) = found {
            prop_assert_eq!(format.payload_bytes(rows, cols), Some(codes as usize));
            prop_assert_eq!(format.scale_count(rows, cols), Some(scales as usize / 4));
            prop_assert!(formats.iter().position(|f| *f == format) <= formats.iter().position(|f| *f == written));
        }
        prop_assert!(found.is_some() || !readable || cols <= 2);
    }

    #[test]
    fn other_byte_counts_are_refused(rows in 1usize..20, cols in 1usize..200, codes in 0u64..5000, scales in 0u64..5000) {
        if let Some((format, _)) = detect(codes, scales, rows, cols) {
            prop_assert_eq!(format.payload_bytes(rows, cols), Some(codes as usize));
            prop_assert_eq!(format.scale_count(rows, cols).map(|n| n * 4), Some(scales as usize));
        }
    }
}

/// A writer that names its formats is believed, and held to it (docs/convert.md).
#[test]
fn declared_formats_are_not_guessed() {
    let write = |declared: &str, codes: u64, scales: u64| {
        let dir = tempfile::tempdir().unwrap();
        let header = serde_json::json!({
            "__metadata__": {"forebay_container": "1", "w": declared},
            "w": {"dtype": "U8", "shape": [codes], "data_offsets": [0, codes]},
            "w.qs": {"dtype": "F32", "shape": [scales], "data_offsets": [codes, codes + 4 * scales]},
        })
        .to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + (codes + 4 * scales) as usize, 0);
        std::fs::write(dir.path().join("out-00000.safetensors"), file).unwrap();
        layout::weight(&Catalog::open(dir.path()).unwrap(), "w", 3, 65)
    };
    // Two groups in 65 columns are groups of 48 to a reader that has to guess.
    let found = write("int4-g64 3x65", 99, 6).unwrap();
    assert_eq!((found.format, found.ambiguous_groups), (group(64), false));
    assert_eq!(write("int4-row 3x65", 99, 3).unwrap().format, Format::Int4Row);
    for (declared, codes, scales) in [
        ("int4-g64 3x64", 99, 6),
        ("int4-g64 65x3", 99, 6),
        ("int4-g32 3x65", 99, 6),
        ("int8 3x65", 99, 3),
        ("int4-row 3x65", 99, 6),
        ("bf16 3x65", 390, 3),
    ] {
        let error = write(declared, codes, scales).unwrap_err();
        assert!(matches!(error, LayoutError::Declared { .. }), "{error}");
        assert!(error.to_string().contains(declared), "{error}");
    }
}
