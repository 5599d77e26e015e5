//! A model packed and turned back is the same model, and computes the same bits in between.

mod packed;

use std::fs;
use std::path::Path;

use forebay_core::{ByteSize, CancelToken, Format};
use forebay_engine::{EngineOptions, IoOptions, inspect};
use forebay_hub::pack::{self as packer, Codes, PackError};
use forebay_io::{Access, Backend};
use forebay_model::{Arith, Capability, EmbeddingPlace, SlotCodes, Snapshot, SnapshotOptions};
use forebay_store::native::header::Layout;
use forebay_store::native::{HEADER_NAME, Native};
use forebay_testkit::toy;
use packed::{
    codable, demo, files, logits, open, options, pack, pack_coded, small, tensors, unpack, verify_native,
    write_synth,
};
use tempfile::TempDir;

/// Packs `source` and turns it back; the packed folder.
fn there_and_back(source: &Path) -> TempDir {
    let (packed, back) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let there = pack(source, packed.path()).unwrap();
    assert_eq!((there.bytes, there.kept), (there.total, 0));
    assert!(verify_native(packed.path(), true).is_empty(), "{:?}", verify_native(packed.path(), true));
    unpack(packed.path(), back.path()).unwrap();
    let (want, found) = (tensors(source), tensors(back.path()));
    assert!(want.keys().eq(found.keys()), "the same tensors");
    for (name, tensor) in &want {
        assert!(found[name] == *tensor, "{name} is not what it was");
    }
    for (name, bytes) in files(back.path()).iter().filter(|(name, _)| !name.ends_with(".safetensors")) {
        assert_eq!(*bytes, fs::read(source.join(name)).unwrap(), "{name}");
    }
    packed
}

/// The same bits from both, streaming and not, in both arithmetics.
fn same_bits(source: &Path, packed: &Path, quantise: Option<Format>) {
    same_bits_held(source, packed, quantise, None);
}

fn same_bits_held(source: &Path, packed: &Path, quantise: Option<Format>, expert_slots: Option<SlotCodes>) {
    for arith in [Arith::Int8, Arith::Exact] {
        let (context, threads) = (Some(64), Some(1));
        let base = EngineOptions { arith, quantise, context, threads, expert_slots, ..Default::default() };
        let want = logits(&mut open(source, base).unwrap()).unwrap();
        let minimum = inspect(packed, &base).unwrap().plan.unwrap().minimum;
        for (memory, embedding) in
            [(None, EmbeddingPlace::Memory), (Some(ByteSize(minimum)), EmbeddingPlace::Disk)]
        {
            let mut engine =
                open(packed, EngineOptions { memory, embedding: Some(embedding), ..base }).unwrap();
            assert!(
                logits(&mut engine).unwrap() == want,
                "{arith} {embedding} {quantise:?} {expert_slots:?}"
            );
            let counters = engine.counters();
            assert!(counters.loads > 0 && counters.checked_bytes == counters.bytes, "{counters:?}");
        }
    }
}

#[test]
fn every_format_goes_there_and_back_and_computes_the_same_bits() {
    let formats = ["int4-row", "int4-g64", "int4-g32", "int4-g16", "int8", "int2-row", "bf16", "f16", "f32"];
    for format in formats {
        let source = TempDir::new().unwrap();
        write_synth(source.path(), &small(format.parse().unwrap()));
        let packed = there_and_back(source.path());
        let header = Native::read_header(packed.path()).unwrap();
        let panels = format.starts_with("int4") || format == "int8";
        let wanted = if panels { Layout::Panels } else { Layout::Rows };
        assert_eq!(header.layers.len(), 3, "two decoder layers and the MTP layer");
        assert!(
            header
                .kinds
                .iter()
                .flat_map(|kind| &kind.matrices)
                .all(|m| m.layout == wanted || m.weight.format == Format::Int8Row),
            "{format}"
        );
        same_bits(source.path(), packed.path(), None);
        if !format.parse::<Format>().unwrap().is_integer() {
            same_bits(source.path(), packed.path(), Some("int4-g32".parse().unwrap()));
        }
    }
}

/// Fused and FP8 experts, incomplete optional parts, odd sizes, formats mixed within a layer and over several files.
#[test]
fn every_geometry_of_the_goldens_goes_there_and_back() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    let mut seen = 0;
    for entry in fs::read_dir(goldens).unwrap() {
        let source = entry.unwrap().path();
        if !source.join("config.json").exists() {
            continue;
        }
        seen += 1;
        let packed = there_and_back(&source);
        let base = EngineOptions { context: Some(64), threads: Some(1), ..Default::default() };
        let [want, found] =
            [&*source, packed.path()].map(|dir| logits(&mut open(dir, base).unwrap()).unwrap());
        assert!(want == found, "{}", source.display());
        let [a, b] =
            [&*source, packed.path()].map(|dir| Snapshot::open(dir, SnapshotOptions::default()).unwrap());
        assert_eq!(
            format!("{:?} {:?}", a.mtp, a.sparse_attention),
            format!("{:?} {:?}", b.mtp, b.sparse_attention)
        );
        assert_eq!(a.formats(), b.formats(), "{}", source.display());
    }
    assert!(seen > 20, "{seen}");
}

#[test]
fn the_packed_folder_is_described_as_the_other_one() {
    let source = TempDir::new().unwrap();
    toy::write(source.path()).unwrap();
    let packed = there_and_back(source.path());
    let [a, b] =
        [source.path(), packed.path()].map(|dir| Snapshot::open(dir, SnapshotOptions::default()).unwrap());
    assert_eq!(a.spec, b.spec);
    assert_eq!(a.formats(), b.formats());
    assert_eq!(a.catalog.len(), b.catalog.stored_tensors());
    assert!(matches!((&b.sparse_attention, &b.mtp), (Capability::Active, Capability::Active)));
    assert_eq!(a.stop_ids, b.stop_ids);
    assert_eq!((b.experts.total, b.experts.coalesced, b.experts.displaced), (4 * 256, 4 * 256, 0));
    let [a, b] = [source.path(), packed.path()].map(|dir| inspect(dir, &EngineOptions::default()).unwrap());
    assert_eq!(a.plan.unwrap().weights, b.plan.unwrap().weights);
    same_bits(source.path(), packed.path(), None);
}

#[test]
fn the_bundled_model_goes_there_and_back_by_every_way_of_reading() {
    let packed = there_and_back(&demo());
    let base = EngineOptions { threads: Some(2), ..Default::default() };
    let want = logits(&mut open(&demo(), base).unwrap()).unwrap();
    let minimum =
        inspect(packed.path(), &EngineOptions { context: Some(64), ..base }).unwrap().plan.unwrap().minimum;
    for backend in [Backend::Pool, Backend::Uring] {
        for access in [Access::Buffered, Access::Direct] {
            let io = IoOptions { backend: Some(backend), access: Some(access), ..Default::default() };
            let memory = Some(ByteSize(minimum + (1 << 20)));
            let mut engine = open(packed.path(), EngineOptions { io, memory, ..base }).unwrap();
            assert!(logits(&mut engine).unwrap() == want, "{backend} {access}");
            let counters = engine.counters();
            assert!(counters.checked_bytes == counters.bytes && counters.check_ns > 0, "{counters:?}");
            assert!(counters.check_ns <= counters.service_ns, "{counters:?}");
        }
    }
}

/// Odd widths end in half a byte that panels have no place for: such a matrix stays in rows.
#[test]
fn odd_widths_lose_nothing() {
    for format in ["int4-row", "int8", "bf16"] {
        let source = TempDir::new().unwrap();
        let mut spec = small(format.parse().unwrap());
        spec.dims.expert_width = 37;
        write_synth(source.path(), &spec);
        // The half bytes are whatever somebody left there.
        for (name, bytes) in files(source.path()).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            let mut bytes = bytes.clone();
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let found = forebay_store::shard::parse_header(&bytes[8..header], bytes.len() as u64).unwrap();
            for (i, down) in found
                .iter()
                .filter(|t| format == "int4-row" && t.name.ends_with("down_proj.weight"))
                .enumerate()
            {
                let rows =
                    bytes[down.offset as usize..(down.offset + down.len) as usize].chunks_exact_mut(19);
                if down.name.contains(".experts.") {
                    rows.for_each(|row| row[18] = row[18] & 15 | (i as u8) << 4);
                }
            }
            fs::write(source.path().join(name), bytes).unwrap();
        }
        let packed = there_and_back(source.path());
        let header = Native::read_header(packed.path()).unwrap();
        let layouts = header.kinds[0].matrices.each_ref().map(|m| m.layout);
        match format {
            "int4-row" => assert_eq!(layouts, [Layout::Panels, Layout::Panels, Layout::Rows]),
            "int8" => assert_eq!(layouts, [Layout::Panels; 3]),
            _ => assert_eq!(layouts, [Layout::Rows; 3]),
        }
        same_bits(source.path(), packed.path(), None);
    }
}

#[test]
fn threads_and_interruptions_change_no_byte() {
    let source = TempDir::new().unwrap();
    write_synth(source.path(), &small(Format::Int4Row));
    let whole = TempDir::new().unwrap();
    pack(source.path(), whole.path()).unwrap();
    let want = files(whole.path());
    assert_eq!(want.len(), 1 + 4 + 2, "header, weight files, config, tokenizer: {:?}", want.keys());

    for back in [false, true] {
        let dir = TempDir::new().unwrap();
        let (mut stops, mut kept) = (0, 0);
        loop {
            let cancel = CancelToken::new();
            let mut seen = 0;
            let mut stop = |_: u64, _: u64| {
                seen += 1;
                if seen > 25 + 10 * stops {
                    cancel.cancel();
                }
            };
            let result = match back {
                false => packer::pack(source.path(), dir.path(), options(&cancel), &mut stop),
                true => packer::unpack(whole.path(), dir.path(), options(&cancel), &mut stop),
            };
            match result {
                Ok(done) => {
                    kept = kept.max(done.kept);
                    break;
                }
                Err(PackError::Cancelled) => stops += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(!dir.path().join(HEADER_NAME).exists() && !dir.path().join("config.json").exists());
            let message = Snapshot::open(dir.path(), SnapshotOptions::default()).err().unwrap().to_string();
            assert!(message.contains("did not finish"), "{message}");
            assert!(stops < 200);
        }
        assert!(stops > 2 && kept > 0, "{stops} {kept}");
        match back {
            false => assert!(files(dir.path()) == want, "the same bytes"),
            true => assert!(tensors(dir.path()) == tensors(source.path())),
        }
    }
    let again = pack(source.path(), whole.path()).unwrap();
    assert_eq!((again.bytes, again.files, again.kept), (0, 0, 4));
    assert!(files(whole.path()) == want);
}

/// A finished file counts only as long as its bytes are those that were finished.
#[test]
fn what_a_killed_run_left_is_not_trusted_by_its_name() {
    let source = TempDir::new().unwrap();
    write_synth(source.path(), &small(Format::Int8Row));
    let whole = TempDir::new().unwrap();
    pack(source.path(), whole.path()).unwrap();
    let want = files(whole.path());

    let dir = TempDir::new().unwrap();
    let cancel = CancelToken::new();
    let result = packer::pack(source.path(), dir.path(), options(&cancel), &mut |done, total| {
        if done * 10 > total * 9 {
            cancel.cancel();
        }
    });
    assert!(matches!(result, Err(PackError::Cancelled)), "{result:?}");
    let damage = |name: &str, at: usize| {
        let path = dir.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 4;
        fs::write(&path, bytes).unwrap();
    };
    damage("resident.fbw", 5000);
    damage("experts-001.fbw", 4096 + 17);
    let done = pack(source.path(), dir.path()).unwrap();
    assert_eq!((done.kept, done.files), (1, 3), "one file was whole, two were damaged, one was not there");
    assert!(files(dir.path()) == want);
}

/// What was packed, and the same with coded experts, which turns back to the same tensors.
fn coded_and_back(source: &Path) -> (packer::Packed, TempDir) {
    let (coded, back) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let done = pack_coded(source, coded.path()).unwrap();
    assert!(verify_native(coded.path(), true).is_empty(), "{:?}", verify_native(coded.path(), true));
    unpack(coded.path(), back.path()).unwrap();
    assert!(tensors(back.path()) == tensors(source), "the same tensors, byte for byte");
    (done, coded)
}

#[test]
fn coded_experts_come_back_byte_for_byte_and_are_smaller() {
    for (format, least) in [("int4-row", 0.88), ("int4-g64", 0.92), ("int4-g32", 0.92), ("int4-g16", 0.92)] {
        let source = TempDir::new().unwrap();
        write_synth(source.path(), &codable(format));
        let (done, dir) = coded_and_back(source.path());
        // The MTP layer's experts are int8.
        assert_eq!((done.experts.all, done.experts.coded), (24, 16), "{format}");
        let header = Native::read_header(dir.path()).unwrap();
        let mut bytes = (0, 0);
        for layer in &header.layers[..2] {
            for record in &layer.records {
                assert!(record.coded.is_some());
                bytes = (bytes.0 + record.len, bytes.1 + header.kinds[usize::from(record.kind)].len);
            }
        }
        let share = bytes.0 as f64 / bytes.1 as f64;
        assert!(share < least, "{format}: {share}");
        let index_scales =
            header.layers[0].records.iter().filter_map(|r| r.coded).filter(|c| c.index_scales).count();
        assert_eq!(index_scales > 0, format != "int4-row", "{format}: {index_scales}");
        for slots in SlotCodes::ALL {
            same_bits_held(source.path(), dir.path(), None, Some(slots));
        }
        let raw = TempDir::new().unwrap();
        let raw_bytes = pack(source.path(), raw.path()).unwrap();
        assert_eq!(done.total + done.experts.raw_bytes, raw_bytes.total + done.experts.bytes);
        assert_eq!((raw_bytes.experts.coded, raw_bytes.experts.bytes), (0, done.experts.raw_bytes));
    }
}

#[test]
fn the_bundled_model_and_the_toy_come_back_from_codes() {
    let toy = TempDir::new().unwrap();
    toy::write(toy.path()).unwrap();
    for source in [demo(), toy.path().to_owned()] {
        let cancel = CancelToken::new();
        let auto = packer::PackOptions { codes: Codes::Auto, ..options(&cancel) };
        let (dir, back) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        packer::pack(&source, dir.path(), auto, &mut |_, _| {}).unwrap();
        unpack(dir.path(), back.path()).unwrap();
        assert!(tensors(back.path()) == tensors(&source), "{}", source.display());
    }
}

/// Other formats have no codes: auto leaves them raw, a request for codes says why it cannot be.
#[test]
fn only_int4_is_coded() {
    let source = TempDir::new().unwrap();
    write_synth(source.path(), &small(Format::Int8Row));
    let (dir, raw) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let error = pack_coded(source.path(), dir.path()).unwrap_err();
    assert!(matches!(&error, PackError::NotCodable { formats } if formats == "int8"), "{error}");
    assert!(files(dir.path()).is_empty());
    let cancel = CancelToken::new();
    let auto = packer::PackOptions { codes: Codes::Auto, ..options(&cancel) };
    packer::pack(source.path(), dir.path(), auto, &mut |_, _| {}).unwrap();
    pack(source.path(), raw.path()).unwrap();
    assert!(files(dir.path()) == files(raw.path()));
}

#[test]
fn coded_and_raw_are_not_mixed_up() {
    let source = TempDir::new().unwrap();
    write_synth(source.path(), &codable("int4-row"));
    let (coded, raw) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    pack(source.path(), raw.path()).unwrap();
    pack_coded(source.path(), coded.path()).unwrap();
    for (dir, result) in
        [(&raw, pack_coded(source.path(), raw.path())), (&coded, pack(source.path(), coded.path()))]
    {
        let error = result.unwrap_err();
        assert!(
            matches!(&error, PackError::Occupied { found, .. } if found.contains("the same model")),
            "{error}"
        );
        assert!(verify_native(dir.path(), true).is_empty());
    }
    let again = pack_coded(source.path(), coded.path()).unwrap();
    assert_eq!((again.files, again.kept, again.experts.coded), (0, 4, 16));
    // Half of one is no half of the other.
    let half = TempDir::new().unwrap();
    let cancel = CancelToken::new();
    let stopped = packer::pack(source.path(), half.path(), options(&cancel), &mut |_, _| cancel.cancel());
    assert!(matches!(stopped, Err(PackError::Cancelled)));
    assert!(matches!(pack_coded(source.path(), half.path()), Err(PackError::Other { .. })));
}

/// Lengths that only the first run knew survive it, and are not trusted.
#[test]
fn coding_is_resumed_with_the_lengths_that_were_found() {
    let source = TempDir::new().unwrap();
    write_synth(source.path(), &codable("int4-g64"));
    let whole = TempDir::new().unwrap();
    pack_coded(source.path(), whole.path()).unwrap();
    let want = files(whole.path());
    for threads in [1, 3] {
        let dir = TempDir::new().unwrap();
        let (mut stops, mut kept) = (0, 0);
        loop {
            let cancel = CancelToken::new();
            let options = packer::PackOptions { threads, codes: Codes::Coded, ..options(&cancel) };
            let mut seen = 0;
            let result = packer::pack(source.path(), dir.path(), options, &mut |done, total| {
                assert!(done <= total);
                seen += 1;
                if seen > 25 + 7 * stops {
                    cancel.cancel();
                }
            });
            match result {
                Ok(done) => {
                    kept = kept.max(done.kept);
                    break;
                }
                Err(PackError::Cancelled) => stops += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(!dir.path().join(HEADER_NAME).exists() && stops < 200);
        }
        assert!(stops > 2 && kept > 0, "{stops} {kept}");
        assert!(files(dir.path()) == want, "the same bytes");
    }
    // What somebody changed in the list of what is finished is written again.
    for (from, to) in [
        ("\"records\":[[", "\"records\":[[9"),
        ("\"records\":[[", "\"records\":[[1,"),
        ("true", "7"),
        ("\"records\"", "\"other\""),
    ] {
        let dir = TempDir::new().unwrap();
        let cancel = CancelToken::new();
        let options = packer::PackOptions { codes: Codes::Coded, ..options(&cancel) };
        let stop = packer::pack(source.path(), dir.path(), options, &mut |done, total| {
            if done * 10 > total * 9 {
                cancel.cancel();
            }
        });
        assert!(matches!(stop, Err(PackError::Cancelled)));
        let path = dir.path().join("pack.progress.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace(from, to)).unwrap();
        pack_coded(source.path(), dir.path()).unwrap();
        assert!(text.contains(from) && files(dir.path()) == want, "{from} {to} in {text}");
    }
}

#[test]
fn other_folders_are_left_alone() {
    let (source, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_synth(source.path(), &small(Format::Int8Row));
    write_synth(other.path(), &forebay_hub::synth::SynthSpec { seed: 8, ..small(Format::Int8Row) });
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let error = pack(source.path(), dir.path()).unwrap_err();
    assert!(matches!(&error, PackError::Occupied { found, .. } if found == "thesis.txt"), "{error}");
    assert_eq!(files(dir.path()).len(), 1);

    let packed = TempDir::new().unwrap();
    pack(source.path(), packed.path()).unwrap();
    let before = files(packed.path());
    let error = pack(other.path(), packed.path()).unwrap_err();
    assert!(matches!(&error, PackError::Occupied { found, .. } if found == "another model"), "{error}");
    assert!(files(packed.path()) == before);
    assert!(matches!(pack(packed.path(), dir.path()), Err(PackError::Packed { .. })));
    assert!(matches!(unpack(source.path(), dir.path()), Err(PackError::NotPacked { .. })));

    // Half of one model is no beginning of another, equal as their headers are.
    let half = TempDir::new().unwrap();
    let cancel = CancelToken::new();
    let stopped = packer::pack(source.path(), half.path(), options(&cancel), &mut |_, _| cancel.cancel());
    assert!(matches!(stopped, Err(PackError::Cancelled)));
    let error = pack(other.path(), half.path()).unwrap_err();
    assert!(matches!(error, PackError::Other { .. }), "{error}");

    let full = packer::PackOptions { margin: u64::MAX / 2, ..options(&cancel) };
    let fresh = CancelToken::new();
    let full = packer::PackOptions { cancel: &fresh, ..full };
    let error = packer::pack(source.path(), half.path(), full, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, PackError::NoRoom { .. }), "{error}");
}

/// Whoever opened the pipe would wait for ever, and whoever read the device would never end.
#[cfg(unix)]
#[test]
fn what_is_no_file_is_not_packed() {
    for name in ["tokenizer.json", "chat_template.jinja"] {
        let (source, out) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write_synth(source.path(), &small(Format::Int4Row));
        let path = source.path().join(name);
        let _ = fs::remove_file(&path);
        for device in [false, true] {
            match device {
                true => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                false => assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success()),
            }
            let error = pack(source.path(), out.path()).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
            fs::remove_file(&path).unwrap();
        }
        // A file of a terabyte of nothing takes no disk, and must take no memory.
        fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let error = pack(source.path(), out.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("longer than"), "{error}");
    }
}
