//! Conversion straight into a Forebay container: the bytes that converting and then packing make, without the files in
//! between ever being there.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{CASES, HandOut, convert, format, golden, int4_g64, model_files, options, run};
use forebay_core::{CancelToken, Format};
use forebay_hub::convert::{ConvertError, Job, LocalFolder, Options, ResultKind, Targets};
use forebay_hub::pack::{Codes, PackOptions, pack, verify_native};
use forebay_store::native::HEADER_NAME;
use forebay_testkit::disk::SmallDisk;
use tempfile::TempDir;

fn forebay(options: Options) -> Options {
    Options { kind: ResultKind::Forebay, ..options }
}

/// What converting and then packing make.
fn packed(case: &str, options: Options) -> BTreeMap<String, Vec<u8>> {
    let (between, out) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    convert(&golden(case), between.path(), options).unwrap();
    let cancel = CancelToken::new();
    let how = PackOptions { threads: 2, margin: 0, codes: Codes::Raw, cancel: &cancel };
    pack(between.path(), out.path(), how, &mut |_, _| {}).unwrap();
    model_files(out.path())
}

fn is_sound(dir: &Path) {
    let found = verify_native(dir, true, &CancelToken::new(), &mut |_, _| {}).unwrap();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn it_is_what_converting_and_packing_make() {
    for case in CASES {
        for to in ["int4-g64", "int4-row", "int8", "bf16"] {
            let asked = options(Targets::of(format(to)));
            let want = packed(case, asked);
            for threads in [1, 5] {
                let dir = TempDir::new().unwrap();
                let done = convert(&golden(case), dir.path(), forebay(Options { threads, ..asked })).unwrap();
                assert!(model_files(dir.path()) == want, "{case} {to}");
                let weights = want.iter().filter(|(name, _)| name.ends_with(".fbw"));
                assert_eq!(done.bytes, weights.map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
                is_sound(dir.path());
                assert!(!dir.path().join("forebay-convert.parts").exists());
            }
        }
    }
    // Embeddings of any format have a checksum for every row; parts may be left out.
    let mixed = Targets { embedding: Format::Bf16, head: format("int4-g32"), ..Targets::of(Format::Int8Row) };
    let asked = Options { mtp: false, indexer: false, ..options(mixed) };
    let (want, dir) = (packed("fp8", asked), TempDir::new().unwrap());
    convert(&golden("fp8"), dir.path(), forebay(asked)).unwrap();
    assert!(model_files(dir.path()) == want);
}

/// Bytes of disk that weights and what is set aside take, by their sizes if there are no holes in them.
fn on_disk(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.path() {
        path if path.is_dir() => on_disk(&path),
        path if path.extension().is_some_and(|end| end == "json" || end == "lock") => 0,
        path => forebay_hub::output::folder::allocated(&path),
    };
    entries.map(|entry| size(entry.unwrap())).sum()
}

#[test]
fn a_source_that_gives_one_file_at_a_time_makes_the_same_within_its_bound() {
    for case in CASES {
        let (want, dir, at) = (packed(case, int4_g64()), TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut source = HandOut::new(&golden(case), at.path());
        let job = Job::new(&mut source, forebay(int4_g64())).unwrap();
        let (bound, mut most) = (job.streamed_disk_bytes(), 0);
        job.run(&mut source, dir.path(), &CancelToken::new(), &mut |_, _| {
            most = most.max(on_disk(dir.path()) + on_disk(at.path()));
        })
        .unwrap();
        assert_eq!(source.taken, [0, 1, 2], "{case}: every file is taken once");
        assert!(model_files(dir.path()) == want, "{case}");
        // Besides, for every file of the source, the 64 KiB that the identity is made of.
        assert!(most > 0 && most <= bound + 3 * (17 << 12), "{case}: {most} of {bound}");
    }
}

/// Stopped before every file; and what is on the disk then is not what was written any more.
#[test]
fn it_goes_on_where_it_was_stopped_and_trusts_no_byte_by_its_place() {
    let want = packed("fp8", int4_g64());
    for damage in [None, Some("resident.fbw"), Some("experts-001.fbw")] {
        let (dir, at) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        for fails_at in 0..3 {
            let mut source = HandOut::new(&golden("fp8"), at.path());
            source.before_take = Box::new(move |file| match file == fails_at {
                true => Err(ConvertError::Source { name: file.to_string(), what: "the line was cut".into() }),
                false => Ok(()),
            });
            let error = run(&mut source, dir.path(), forebay(int4_g64())).unwrap_err();
            assert!(error.to_string().contains("the line was cut"), "{error}");
            assert_eq!(source.taken, if fails_at == 0 { vec![] } else { vec![fails_at - 1] });
            assert!(!dir.path().join(HEADER_NAME).exists() && !dir.path().join("config.json").exists());
        }
        if let Some(name) = damage {
            let path = dir.path().join(format!("{name}.partial"));
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.iter().rposition(|byte| *byte != 0).unwrap();
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
        let mut source = HandOut::new(&golden("fp8"), at.path());
        run(&mut source, dir.path(), forebay(int4_g64())).unwrap();
        assert_eq!(source.taken.len() > 1, damage.is_some(), "{damage:?}: {:?}", source.taken);
        assert!(model_files(dir.path()) == want, "{damage:?}");
        // Again: nothing to do, and nothing is taken.
        let taken = source.taken.len();
        let again = run(&mut source, dir.path(), forebay(int4_g64())).unwrap();
        assert_eq!((again.written, again.kept, source.taken.len()), (0, 3, taken));
        // A container is not what somebody asks for who wants the other kind.
        let error = run(&mut source, dir.path(), int4_g64()).unwrap_err();
        assert!(matches!(error, ConvertError::OtherOptions { .. }), "{error}");
    }
}

/// The disk becomes full in the middle of a file, at every tenth step of writing; then there is room again.
#[test]
fn a_full_disk_stops_it_cleanly_and_loses_nothing() {
    let want = packed("fp8", int4_g64());
    let Some(disk) = SmallDisk::new(4_000_000) else { return };
    let (dir, mut stops) = (disk.path().join("model"), 0);
    for step in (0..).step_by(10) {
        let mut source = LocalFolder::new(&golden("fp8"));
        let job = Job::new(&mut source, forebay(int4_g64())).unwrap();
        let mut steps = 0;
        let ended = job.run(&mut source, &dir, &CancelToken::new(), &mut |_, _| {
            if steps == step {
                disk.fill();
            }
            steps += 1;
        });
        disk.empty();
        match ended {
            Ok(_) => break,
            Err(error) => {
                let text = error.to_string();
                let full = matches!(error, ConvertError::Full { .. } | ConvertError::NoRoom { .. })
                    || text.contains("became full");
                assert!(full && text.contains("same command again"), "{text}");
                assert!(!dir.join(HEADER_NAME).exists());
                stops += 1;
            }
        }
        assert!(step < 10_000);
    }
    assert!(stops > 2, "{stops}");
    assert!(model_files(&dir) == want, "after {stops} stops");
}
