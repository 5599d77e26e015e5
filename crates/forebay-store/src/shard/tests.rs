//! Headers that are read, and headers that are refused.

use super::*;
use proptest::prelude::*;

/// Parses `header` as if `data` bytes followed it.
fn parse(header: &str, data: u64) -> Result<Vec<HeaderTensor>, HeaderError> {
    parse_header(header.as_bytes(), 8 + header.len() as u64 + data)
}

fn one(body: &str, data: u64) -> Result<HeaderTensor, HeaderError> {
    parse(&format!("{{\"x\":{body}}}"), data).map(|mut tensors| tensors.remove(0))
}

#[test]
fn a_sound_header_is_read() {
    let header = r#"{"__metadata__":{"format":"pt","n":[1]},
        "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "b":{"shape":[],"data_offsets":[26,28],"dtype":"BF16","note":{}}, "c":{"dtype":"I64","shape":[9],"data_offsets":[24,24]}}   "#;
    let tensors = parse(header, 28).unwrap();
    let start = 8 + header.len() as u64;
    let find = |name: &str| tensors.iter().find(|t| &*t.name == name).unwrap();
    assert_eq!(tensors.len(), 3);
    assert_eq!((find("a").offset, find("a").len, &*find("a").shape), (start, 24, &[2, 3][..]));
    // A shape without dimensions is one element, and holes are allowed.
    assert_eq!((find("b").offset, find("b").len, find("b").shape.len()), (start + 26, 2, 0));
    // An unknown type is kept; nobody may need it.
    assert_eq!(find("c").dtype, Dtype::Other("I64".into()));
    assert_eq!(parse("{}", 0).unwrap(), []);
}

#[test]
fn offsets_stay_within_the_data() {
    // [4, 0] and [0, 8] over four bytes of data.
    let body = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[1],"data_offsets":{offsets}}}"#);
    assert!(one(&body("[0,4]"), 4).is_ok());
    assert!(matches!(one(&body("[4,0]"), 4), Err(HeaderError::Backwards { begin: 4, end: 0, .. })));
    let error = one(&body("[0,8]"), 4).unwrap_err();
    assert!(matches!(&error, HeaderError::PastEnd { tensor, .. } if tensor == "x"));
    assert!(error.to_string().contains("cut short"));
    for huge in ["[18446744073709551611,18446744073709551615]", "[0,18446744073709551615]"] {
        assert!(matches!(one(&body(huge), 4), Err(HeaderError::PastEnd { .. })));
    }
    for bad in
        ["[0]", "[]", "[0,4,8]", "[-1,4]", "[0.0,4]", "[0,1e1]", "[\"0\",4]", "4", "null", "{}", "[0,[4]]"]
    {
        assert!(matches!(one(&body(bad), 4), Err(HeaderError::Field { field: "data_offsets", .. })), "{bad}");
    }
}

#[test]
fn shapes_take_the_bytes_they_have() {
    let body =
        |dtype: &str, shape: &str| format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,4]}}"#);
    for (dtype, shape) in [("F32", "[1]"), ("F32", "[]"), ("BF16", "[1,2]"), ("F16", "[2]"), ("U8", "[4]")] {
        assert!(one(&body(dtype, shape), 4).is_ok());
    }
    assert!(one(&body("I8", "[2,2]"), 4).is_ok());
    assert!(one(&body("F8_E4M3", "[4]"), 4).is_ok());
    // Shape [3] with four bytes.
    let error = one(&body("F32", "[3]"), 4).unwrap_err();
    assert!(matches!(error, HeaderError::Size { found: 4, ref expected, .. } if expected == "12"));
    for shape in ["[0]", "[2]", "[4611686018427387905]", "[18446744073709551615,18446744073709551615]"] {
        assert!(matches!(one(&body("F32", shape), 4), Err(HeaderError::Size { .. })), "{shape}");
    }
    assert!(matches!(one(&body("U8", "[4294967296,4294967296]"), 4), Err(HeaderError::Size { .. })));
    for bad in ["[-1]", "[1.5]", "[null]", "1", "\"1\"", "null"] {
        assert!(matches!(one(&body("F32", bad), 4), Err(HeaderError::Field { field: "shape", .. })), "{bad}");
    }
    let long = format!("[{}]", ["1"; MAX_RANK + 1].join(","));
    assert!(matches!(one(&body("U8", &long), 4), Err(HeaderError::Field { field: "shape", .. })));
}

#[test]
fn descriptions_are_complete_and_unambiguous() {
    for (body, wanted) in [
        (r#"{"shape":[4],"data_offsets":[0,4]}"#, "dtype"),
        (r#"{"dtype":7,"shape":[4],"data_offsets":[0,4]}"#, "dtype"),
        (r#"{"dtype":"U8","data_offsets":[0,4]}"#, "shape"),
        (r#"{"dtype":"U8","shape":[4]}"#, "data_offsets"),
        (r#"{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}"#, "the description"),
        (r#"[]"#, "the description"),
        (r#"null"#, "the description"),
    ] {
        let error = one(body, 4).unwrap_err();
        assert!(matches!(error, HeaderError::Field { field, .. } if field == wanted), "{body}: {error}");
    }
    for text in ["", "[]", "7", "{\"x\":", "{} x", "{}\0", "\"x\""] {
        assert!(matches!(parse(text, 0), Err(HeaderError::Json(_))), "{text}");
    }
}

#[test]
fn names_and_bytes_belong_to_one_tensor() {
    let u8s = |name: &str, from: u64, to: u64| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
    };
    let both = |a: String, b: String| parse(&format!("{{{a},{b}}}"), 8);
    assert!(both(u8s("a", 0, 4), u8s("b", 4, 8)).is_ok());
    assert!(both(u8s("a", 0, 4), u8s("b", 2, 2)).is_ok());
    assert!(matches!(
        both(u8s("a", 0, 4), u8s("a", 4, 8)),
        Err(HeaderError::Duplicate { tensor }) if tensor == "a"
    ));
    let twice = parse(r#"{"__metadata__":{},"__metadata__":{}}"#, 0);
    assert!(matches!(twice, Err(HeaderError::Duplicate { .. })));
    for (a, b) in [((0, 5), (4, 8)), ((4, 8), (0, 5)), ((0, 4), (0, 4)), ((0, 8), (2, 3))] {
        assert!(matches!(both(u8s("a", a.0, a.1), u8s("b", b.0, b.1)), Err(HeaderError::Overlap { .. })));
    }
}

#[test]
fn header_lengths_fit_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let with = |length: u64, rest: &[u8]| {
        std::fs::write(&path, [&length.to_le_bytes()[..], rest].concat()).unwrap();
        read_header(&path)
    };
    assert_eq!(with(2, b"{}").unwrap(), (10, vec![]));
    // A header of 1061 bytes in a file of 73.
    assert!(matches!(with(1061, &[b' '; 65]), Err(ShardError::HeaderLength { length: 1061, limit: 65, .. })));
    assert!(matches!(with(u64::MAX, b"{}"), Err(ShardError::HeaderLength { .. })));
    assert!(matches!(with(0, b""), Err(ShardError::Header { .. })));
    let error = with(u64::from_le_bytes(*b"version "), b"https://git-lfs").unwrap_err();
    assert!(error.to_string().contains("git lfs pull"), "{error}");
    std::fs::write(&path, [0; 7]).unwrap();
    assert!(matches!(read_header(&path), Err(ShardError::TooShort { size: 7, .. })));
    // A sparse file that claims a header over the limit costs nothing.
    let file = File::create(&path).unwrap();
    std::io::Write::write_all(&mut &file, &(MAX_HEADER_BYTES + 1).to_le_bytes()).unwrap();
    file.set_len(1 << 40).unwrap();
    let limit = MAX_HEADER_BYTES;
    assert!(matches!(read_header(&path), Err(ShardError::HeaderLength { limit: l, .. }) if l == limit));
    assert!(matches!(read_header(dir.path()), Err(ShardError::NotAFile { .. })));
    assert!(matches!(read_header(&dir.path().join("gone")), Err(ShardError::Read { .. })));
}

#[derive(Clone, Debug)]
struct Made {
    header: String,
    data: u64,
    tensors: Vec<(String, &'static str, Vec<u64>, u64)>,
}

fn sound() -> impl Strategy<Value = Made> {
    let tensor = (
        prop::sample::select(vec![("F32", 4), ("BF16", 2), ("F16", 2), ("U8", 1), ("I8", 1), ("F8_E4M3", 1)]),
        prop::collection::vec(0u64..5, 0..4),
        0u64..3,
    );
    prop::collection::btree_map("[a-z.\"\\\\é]{1,12}", tensor, 0..8).prop_map(|map| {
        let (mut header, mut at, mut tensors) = (serde_json::Map::new(), 0, Vec::new());
        for (name, ((dtype, size), shape, hole)) in map {
            let begin: u64 = at + hole;
            at = begin + shape.iter().product::<u64>() * size;
            let body = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, at]});
            header.insert(name.clone(), body);
            tensors.push((name, dtype, shape, begin));
        }
        Made { header: serde_json::Value::Object(header).to_string(), data: at, tensors }
    })
}

proptest! {
    #[test]
    fn what_was_written_is_read(made in sound()) {
        let read = parse(&made.header, made.data).unwrap();
        prop_assert_eq!(read.len(), made.tensors.len());
        for (found, (name, dtype, shape, begin)) in read.iter().zip(&made.tensors) {
            prop_assert_eq!(&*found.name, name.as_str());
            prop_assert_eq!(found.dtype.to_string(), *dtype);
            prop_assert_eq!(&*found.shape, shape.as_slice());
            prop_assert_eq!(found.offset, 8 + made.header.len() as u64 + begin);
        }
        // Every byte that the file lacks is noticed, unless it belonged to a hole.
        if let Some(last) = read.iter().map(|t| t.offset + t.len).max() {
            prop_assert!(parse_header(made.header.as_bytes(), last).is_ok());
            prop_assert!(parse_header(made.header.as_bytes(), last - 1).is_err());
        }
    }

    #[test]
    fn mutations_give_sound_tensors_or_an_error(
        made in sound(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = made.header.into_bytes();
        for (place, byte) in edits {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            let file_len = 8 + bytes.len() as u64 + made.data;
            for tensor in parse_header(bytes, file_len).unwrap_or_default() {
                prop_assert!(tensor.offset + tensor.len <= file_len);
                if let Some(size) = tensor.dtype.size() {
                    prop_assert_eq!(tensor.shape.iter().product::<u64>() * size, tensor.len);
                }
            }
        }
    }

    #[test]
    fn any_bytes_give_tensors_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300), len: u64) {
        let _ = parse_header(&bytes, len);
    }
}

/// Formats that the writer names (docs/convert.md); metadata of other writers is not looked at.
#[test]
fn declared_formats_are_read_and_strict() {
    let parse = |metadata: &str| {
        let text =
            format!(r#"{{"__metadata__":{metadata},"w":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}"#);
        parse_header(text.as_bytes(), 8 + text.len() as u64 + 4).map(|found| found[0].declared)
    };
    let named = parse(r#"{"forebay_container":"1","w":"int4-g64 2x4","gone":"int8 1x1"}"#).unwrap().unwrap();
    assert_eq!((named.to_string().as_str(), named.rows, named.cols), ("int4-g64 2x4", 2, 4));
    for other in [r#"{"format":"pt"}"#, r#"{"w":"int8 1x4"}"#, "{}", "null", "[1]", r#"{"w":7}"#] {
        assert_eq!(parse(other).unwrap(), None, "{other}");
    }
    for bad in [
        r#"{"forebay_container":"2"}"#,
        r#"{"forebay_container":"1","w":"int8"}"#,
        r#"{"forebay_container":"1","w":"int8 2x"}"#,
        r#"{"forebay_container":"1","w":"int8 2x2","w":"int8 1x4"}"#,
        r#"{"w":"q4_0 2x2","forebay_container":"1"}"#,
    ] {
        assert!(matches!(parse(bad), Err(HeaderError::Metadata { .. })), "{bad}");
    }
}
