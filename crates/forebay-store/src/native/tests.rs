use super::header::*;
use super::write::seal;
use super::*;
use crate::catalog::{Catalog, CatalogError};
use crate::layout;
use crate::shard::Dtype;
use forebay_core::{ExpertKey, Format};
use proptest::prelude::*;
use std::fs;

fn weight(format: Format, rows: u64, cols: u64) -> Weight {
    Weight { format, rows, cols }
}

fn matrix(format: Format, rows: u64, cols: u64) -> Matrix {
    let weight = weight(format, rows, cols);
    let layout = if weight.panels().is_some() { Layout::Panels } else { Layout::Rows };
    let (dtype, shape) = match format {
        Format::Bf16 => (Dtype::Bf16, vec![rows, cols]),
        _ => (Dtype::U8, vec![weight.payload().unwrap()]),
    };
    let scales = weight.scales().unwrap() / 4;
    let scales_shape = if scales > 0 { vec![scales] } else { vec![] };
    Matrix { weight, layout, codes: 7, scales: 9, dtype, shape, scales_shape }
}

/// Two tensors with scales, one that nobody needs, and two layers of experts in different formats.
fn header() -> Header {
    let int4 = |rows, cols| matrix(Format::Int4Row, rows, cols);
    let bf16 = |rows, cols| matrix(Format::Bf16, rows, cols);
    let kinds = vec![
        RecordKind::place([int4(32, 64), int4(32, 64), int4(64, 32)]).unwrap(),
        RecordKind::place([bf16(32, 64), bf16(32, 64), matrix(Format::Int8Row, 64, 32)]).unwrap(),
    ];
    let mut placer = Placer::default();
    let mut tensors = Vec::new();
    let embedding = weight(Format::Int8Row, 10, 64);
    let norm = weight(Format::F32, 1, 64);
    for (name, dtype, shape, weight, len) in [
        ("embed", Dtype::U8, vec![640], Some(embedding), 640),
        ("embed.qs", Dtype::F32, vec![10], None, 40),
        ("norm", Dtype::F32, vec![64], Some(norm), 256),
        ("odd", Dtype::Other("I64".into()), vec![3], None, 24),
    ] {
        let offset = placer.place(len).unwrap();
        let table = (name == "embed").then(|| placer.place(40).unwrap());
        let row_checks = table.map(|offset| RowChecks { offset, crc: 5 });
        let (name, crc) = (name.to_owned(), 1);
        tensors.push(Tensor { name, dtype, shape, weight, offset, len, crc, row_checks });
    }
    let mut files = vec![DataFile { name: "resident.fbw".into(), size: placer.end().unwrap(), layer: None }];
    let mut layers = Vec::new();
    for (file, (layer, kind)) in [(1, (3, 0u16)), (2, (4, 1))] {
        let len = kinds[usize::from(kind)].len;
        let record = |i: u64| Record { offset: PAGE + i * len, len, crc: i as u32, kind, coded: None };
        let names = ["gate", "up", "down"].map(|part| format!("layers.{layer}.experts.{{e}}.{part}"));
        let records: Vec<_> = (0..3).map(record).collect();
        files.push(DataFile {
            name: format!("experts-{layer}.fbw"),
            size: PAGE + 3 * len,
            layer: Some(layer),
        });
        layers.push(Layer { layer, file, fused: false, names, records });
    }
    let file = SourceFile { name: "out-0.safetensors".into(), size: 9, sha256: Some([3; 32]) };
    let unknown = SourceFile { sha256: None, ..file.clone() };
    Header {
        identity: [7; 32],
        source: Source { repository: "org/model".into(), revision: "abc".into(), files: vec![file, unknown] },
        side_files: vec![SideFile {
            name: "config.json".into(),
            size: 2,
            crc: crc32c::crc32c(b"{}"),
            sha256: [1; 32],
        }],
        files,
        tensors,
        kinds,
        layers,
    }
}

/// Layers whose int4 experts have five pages, coded ones two or four, and one is as it was.
fn coded_header() -> Header {
    let mut header = header();
    for (kind, format) in ["int4-g64", "int4-row"].into_iter().enumerate() {
        let int4 = |rows, cols| matrix(format.parse().unwrap(), rows, cols);
        header.kinds[kind] = RecordKind::place([int4(64, 128), int4(64, 128), int4(128, 64)]).unwrap();
    }
    let of = |index_scales, up, down| Some(Coded { index_scales, up, down });
    for (layer, index_scales) in [(0, true), (1, false)] {
        let Layer { file, records, .. } = &mut header.layers[layer];
        let mut at = PAGE;
        for (record, (pages, coded)) in
            records.iter_mut().zip([(2, of(index_scales, 40, 80)), (0, None), (1, of(false, 1, 63))])
        {
            let kind = &header.kinds[usize::from(record.kind)];
            let len = if pages == 0 { kind.len } else { pages * PAGE };
            *record = Record { offset: at, len, coded, ..*record };
            at += len;
        }
        header.files[*file as usize].size = at;
    }
    header
}

fn parse(bytes: &[u8]) -> Result<Header, NativeError> {
    Header::parse(bytes, Path::new("model.forebay"))
}

/// The header with a change of its fields, sealed anew.
fn refused(change: impl FnOnce(&mut Header)) -> String {
    refused_of(header(), change)
}

fn refused_of(mut header: Header, change: impl FnOnce(&mut Header)) -> String {
    change(&mut header);
    match parse(&header.to_bytes()) {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

/// Files of the right size that begin rightly.
fn write(dir: &Path, header: &Header) {
    fs::write(dir.join("config.json"), "{}").unwrap();
    for (number, file) in header.files.iter().enumerate() {
        let mut bytes = preamble(header, number);
        bytes.resize(file.size as usize, 0);
        fs::write(dir.join(&file.name), bytes).unwrap();
    }
    fs::write(dir.join(HEADER_NAME), header.to_bytes()).unwrap();
}

#[test]
fn what_was_written_is_read() {
    for header in [header(), coded_header()] {
        assert_eq!(parse(&header.to_bytes()).unwrap(), header);
    }
}

/// The bytes that docs/format.md shows, put together here by hand.
#[test]
fn the_fixed_part_is_as_documented() {
    let bytes = header().to_bytes();
    assert_eq!(bytes[..16], *b"FOREBAY\0\x01\0\0\0\0\0\0\0");
    assert_eq!(bytes[16..24], (bytes.len() as u64 - 32).to_le_bytes());
    assert_eq!(bytes[24..28], crc32c::crc32c(&bytes[32..]).to_le_bytes());
    assert_eq!(bytes[28..32], crc32c::crc32c(&bytes[..28]).to_le_bytes());
    assert_eq!(bytes[32..64], [7; 32]);
    assert_eq!(bytes[64..75], *b"\x09\0org/model");
    // RFC 3720, B.4: the CRC of 32 zeros.
    assert_eq!(crc32c::crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
    let page = preamble(&header(), 1);
    assert_eq!(page[..32], *b"\xf8\x0f\0\0\0\0\0\0FOREBAYW\x01\0\0\0\x01\0\0\0\x03\0\0\0\0\0\0\0");
    assert!(page[32..64] == [7; 32] && page[64..].iter().all(|byte| *byte == 0) && page.len() == 4096);
}

#[test]
fn places_follow_one_rule() {
    // Panels of int4 take what rows take: 32 x 64 / 2 codes and 32 scales.
    let header = header();
    let [gate, up, down] = &header.kinds[0].matrices;
    assert_eq!((gate.codes, up.codes, down.codes), (0, 1152, 2304));
    assert_eq!(header.kinds[0].len, 4096);
    // Rows of bf16 have no scales; the panels behind them do.
    let [gate, up, down] = &header.kinds[1].matrices;
    assert_eq!((gate.codes, gate.scales, up.codes, down.codes), (0, 4096, 4096, 8192));
    assert_eq!(header.kinds[1].len, 12_288);
    let places: Vec<_> = header.tensors.iter().map(|tensor| tensor.offset).collect();
    assert_eq!(places, [4096, 4800, 4864, 5120]);
    assert_eq!(header.tensors[0].row_checks.unwrap().offset, 4736);
}

#[test]
fn every_byte_of_a_header_matters() {
    let bytes = header().to_bytes();
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            assert!(parse(&damaged).is_err(), "byte {at}, bit {bit}");
        }
        assert!(parse(&bytes[..at]).is_err(), "cut at {at}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(parse(&longer), Err(NativeError::HeaderLength { .. })));
}

#[test]
fn later_versions_and_unknown_flags_are_refused_by_name() {
    let mut bytes = header().to_bytes();
    bytes[8] = 2;
    assert!(matches!(parse(&bytes), Err(NativeError::Version { found: 2, known: 1, .. })));
    let mut bytes = header().to_bytes();
    bytes[12] = 4;
    let crc = crc32c::crc32c(&bytes[..28]).to_le_bytes();
    bytes[28..32].copy_from_slice(&crc);
    assert!(matches!(parse(&bytes), Err(NativeError::Flags { found: 4, .. })));
    // The last record ends the body: codec, scales, reserved.
    let body = header().to_bytes()[32..].to_vec();
    for (back, value, words) in
        [(10, 1, "codec"), (9, 1, "scale encoding"), (8, 1, "last field"), (10, 77, "codec")]
    {
        let mut body = body.clone();
        let at = body.len() - back;
        body[at] = value;
        let error = parse(&seal(&body)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn contradictions_are_refused() {
    assert!(refused(|h| h.files[1].size += 4096).contains("size of experts-3.fbw"));
    assert!(refused(|h| h.files[0].size += 4096).contains("resident file"));
    assert!(refused(|h| h.files[1].name = "../x".into()).contains("file name"));
    assert!(refused(|h| h.files[1].name = ".x".into()).contains("file name"));
    assert!(refused(|h| h.files[1].name = "a/b".into()).contains("file name"));
    assert!(refused(|h| h.files[1].name = "CONFIG.json".into()).contains("not used before"));
    assert!(refused(|h| h.side_files[0].name = HEADER_NAME.into()).contains("not used before"));
    assert!(refused(|h| h.files[2].layer = Some(3)).contains("layer of a weight file"));
    assert!(refused(|h| h.files[0].layer = Some(1)).contains("layer of a weight file"));
    assert!(refused(|h| h.files.truncate(2)).contains("file of layer 4"));
    assert!(refused(|h| drop(h.layers.pop())).contains("number of layers"));
    assert!(refused(|h| h.layers[1] = h.layers[0].clone()).contains("file of its own"));
    assert!(refused(|h| h.tensors[1].offset -= 64).contains("the place of"));
    assert!(refused(|h| h.tensors[2].offset += 64).contains("the place of"));
    assert!(refused(|h| h.tensors[0].row_checks = None).contains("the place of"));
    assert!(refused(|h| h.tensors[2].len = u64::MAX).contains("bytes of F32"));
    assert!(refused(|h| h.tensors[3].len = u64::MAX - 100).contains("can be addressed"));
    assert!(refused(|h| h.tensors[2].name = "embed".into()).contains("not used before"));
    assert!(refused(|h| h.tensors[3].name = "layers.3.experts.3.up".into()).contains("none of an expert"));
    assert!(refused(|h| h.tensors[3].name = "layers.4.experts.9.up.qs".into()).contains("none of an expert"));
    assert!(
        refused(|h| h.tensors[0].weight = Some(weight(Format::Int4Row, 10, 64))).contains("int4-row 10 x 64")
    );
    assert!(refused(|h| h.tensors[0].weight = Some(weight(Format::Int8Row, u64::MAX, 64))).contains("int8"));
    assert!(refused(|h| h.tensors[3].shape = vec![0; 65]).contains("dimensions"));
    assert!(refused(|h| h.kinds[0].matrices[1].codes += 64).contains("places in a record"));
    assert!(refused(|h| h.kinds[0].len += 4096).contains("places in a record"));
    assert!(refused(|h| h.kinds[1].matrices[0].layout = Layout::Panels).contains("record"));
    assert!(refused(|h| h.kinds[0].matrices[0].weight.rows = 1 << 60).contains("matrix in the source"));
    assert!(refused(|h| h.kinds[0].matrices[0].scales_shape = vec![31]).contains("scales in the source"));
    assert!(refused(|h| h.layers[0].records[1].offset += 4096).contains("place of a record"));
    assert!(refused(|h| h.layers[0].records[1].kind = 2).contains("kind of a record"));
    assert!(refused(|h| h.layers[0].records.clear()).contains("size of experts-3.fbw"));
    assert!(refused(|h| h.layers[0].names[0] = "gate".into()).contains("names in layer 3"));
    assert!(refused(|h| h.layers[0].names[1] = h.layers[0].names[0].clone()).contains("names in layer 3"));
    assert!(refused(|h| h.layers[1].names = h.layers[0].names.clone()).contains("others in every layer"));
    assert!(refused(|h| h.layers[0].fused = true).contains("names in layer 3"));
}

#[test]
fn coded_records_are_what_section_5_says() {
    let header = coded_header();
    // Two matrices of 64 x 128 and one of 128 x 64: 4096 bytes of codes each, and 64 or 128 lines of scales.
    assert_eq!((header.kinds[0].len, header.kinds[1].len), (16_384, 16_384));
    let coded = |up, down| Coded { index_scales: false, up, down };
    assert_eq!(coded(40, 80).places(8192), Some([0..2560, 2560..5120, 5120..8192]));
    assert_eq!(coded(1, 2).places(4096), Some([0..64, 64..128, 128..4096]));
    for (up, down) in [(0, 80), (40, 40), (80, 40), (40, 128), (40, u32::MAX), (u32::MAX, u32::MAX)] {
        assert_eq!(coded(up, down).places(8192), None, "{up} {down}");
    }
    // The last entry, as docs/format.md lists its fields.
    let bytes = header.to_bytes();
    let entry = bytes[bytes.len() - 32..].to_vec();
    let Record { offset, len, crc, .. } = header.layers[1].records[2];
    let by_hand = [
        &offset.to_le_bytes()[..],
        &len.to_le_bytes(),
        &crc.to_le_bytes(),
        b"\x01\0",
        b"\x01\0",
        &1u32.to_le_bytes(),
        &63u32.to_le_bytes(),
    ];
    assert_eq!(entry, by_hand.concat());
}

#[test]
fn hostile_coded_records_are_refused_by_name() {
    let refused = |layer: usize, expert: usize, change: &dyn Fn(&mut Record)| {
        refused_of(coded_header(), |header| change(&mut header.layers[layer].records[expert]))
    };
    let coded =
        |up, down| move |record: &mut Record| record.coded = Some(Coded { index_scales: false, up, down });
    for (up, down) in [(0, 9), (9, 9), (9, 8), (9, 128), (u32::MAX, u32::MAX)] {
        assert!(refused(0, 0, &coded(up, down)).contains("the places in a coded record"), "{up} {down}");
    }
    assert!(refused(0, 0, &|record| record.len = 0).contains("the places in a coded record"));
    for len in [1, 8191, 16_384, 1 << 40, u64::MAX] {
        assert!(refused(0, 0, &|record| record.len = len).contains("the length of a coded record"), "{len}");
    }
    // Shorter or longer by a page, the next one is not where it must be.
    assert!(refused(0, 0, &|record| record.len = 12_288).contains("the place of a record"));
    assert!(refused(0, 2, &|record| record.len = 8192).contains("the size of experts-3.fbw"));
    // A record that is not as long as its kind says is no raw one.
    assert!(refused(0, 0, &|record| record.coded = None).contains("the place of a record"));
    // One scale a row has no index; matrices that are not int4 in panels have no codes.
    let index = |record: &mut Record| record.coded = Some(Coded { index_scales: true, up: 9, down: 10 });
    assert!(refused(1, 0, &index).contains("the scale encoding of a coded record"));
    let mut header = header();
    index(&mut header.layers[1].records[0]);
    assert!(parse(&header.to_bytes()).unwrap_err().to_string().contains("not all is int4 in panels"));
    let body = coded_header().to_bytes()[32..].to_vec();
    for (back, value, words) in
        [(10, 2, "the codec of a record"), (9, 2, "the scale encoding"), (8, 0, "the places")]
    {
        let mut body = body.clone();
        let at = body.len() - back;
        body[at] = value;
        let error = parse(&seal(&body)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_coded_record_is_one_read_as_long_as_it_is() {
    let header = coded_header();
    let of = |expert: usize| {
        let record = &header.layers[0].records[expert];
        crate::record::ExpertRecord::native(1, record, &header.kinds[0]).unwrap()
    };
    let coded = of(0);
    assert_eq!(
        (coded.len, coded.segments[0].len, coded.segments[0].dst, coded.check),
        (8192, 8192, 0, Some(0))
    );
    let places = coded.parts.each_ref().map(|part| (part.layout, part.codes.clone(), part.scales.clone()));
    let lies = |range| (crate::record::Codes::Coded, range, 0..0);
    assert_eq!(places, [lies(0..2560), lies(2560..5120), lies(5120..8192)]);
    let raw = of(1);
    assert_eq!((raw.len, raw.parts[1].layout), (16_384, crate::record::Codes::Panels));
    assert_eq!(raw.segments[0].offset, 4096 + 8192);
}

#[test]
fn a_folder_must_have_exactly_the_files_of_its_header() {
    let dir = tempfile::tempdir().unwrap();
    let header = header();
    write(dir.path(), &header);
    let open = || Catalog::open(dir.path());
    let catalog = open().unwrap();
    assert_eq!((catalog.len(), catalog.stored_tensors(), catalog.shards().len()), (4, 4 + 3 * 6 + 3 * 4, 3));
    // A safetensors file beside them is nobody's; the header decides.
    let found = layout::weight(&catalog, "embed", 10, 64).unwrap();
    assert_eq!((found.format, found.codes.offset, found.codes.len), (Format::Int8Row, 4096, 640));
    assert_eq!(catalog.checksum(found.codes), Some(1));
    assert!(layout::weight(&catalog, "embed", 20, 32).is_err(), "as many bytes, other rows");
    let key = |layer, expert| ExpertKey { layer, expert };
    let down = layout::recorded(&catalog, key(3, 2), 2, "down", [64, 32]).unwrap();
    assert_eq!((down.codes.shard, down.codes.offset), (1, 4096 + 2 * 4096 + 2304));
    assert!(layout::recorded(&catalog, key(3, 2), 2, "down", [32, 64]).is_err());
    assert!(layout::recorded(&catalog, key(3, 3), 2, "down", [64, 32]).unwrap_err().is_missing());

    let refused = |name: &str, change: &dyn Fn(&mut Vec<u8>), words: &str| {
        let path = dir.path().join(name);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let error = open().unwrap_err();
        assert!(matches!(error, CatalogError::Native(_)), "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains(words), "{error}");
        fs::write(&path, whole).unwrap();
    };
    refused("experts-3.fbw", &|b| b.truncate(b.len() - 1), "expected 16384");
    refused("experts-3.fbw", &|b| b.push(0), "16385 bytes");
    refused("experts-4.fbw", &|b| b[40] ^= 1, "byte 40 of the first page");
    refused("resident.fbw", &|b| b[4095] ^= 1, "byte 4095");
    refused("config.json", &|b| b[1] = b' ', "checksum");
    refused(HEADER_NAME, &|b| b.truncate(20), "not the header");
    refused(HEADER_NAME, &|b| b[0] = 0, "not the header");
    fs::remove_file(dir.path().join("experts-4.fbw")).unwrap();
    assert!(
        matches!(open(), Err(CatalogError::Native(NativeError::Missing { name, .. })) if name == "experts-4.fbw")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// Whatever a body is turned into: an error, or a header that is sound and means what its bytes say.
    #[test]
    fn damaged_bodies_never_panic(coded in any::<bool>(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..6)) {
        let header = if coded { coded_header() } else { header() };
        let mut body = header.to_bytes()[FIXED_BYTES..].to_vec();
        for (at, value, how) in changes {
            let at = at.index(body.len());
            match how {
                0 => body[at] = value,
                1 => body[at] ^= 1 << (value % 8),
                2 => body.truncate(at.max(1)),
                _ => drop(body.splice(at..at, [value; 3])),
            }
        }
        let bytes = seal(&body);
        if let Ok(found) = parse(&bytes) {
            prop_assert_eq!(found.to_bytes(), bytes);
            for number in 0..found.files.len() {
                let mut end = PAGE;
                for part in found.checked(number) {
                    prop_assert!(part.offset >= end && part.offset - end < PAGE);
                    end = part.offset + part.len;
                }
                prop_assert!(end <= found.files[number].size);
            }
        }
    }
}
