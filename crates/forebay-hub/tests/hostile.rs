//! Sources that are damaged or of another kind, and disks that are full: a named error, and nothing lost.

mod common;

use std::fs;
use std::path::Path;

use common::{HandOut, convert, copy, golden, int4_g64, model_files, options, rewrite, run};
use forebay_core::CancelToken;
use forebay_hub::convert::{ConvertError, Job, LocalFolder, Options, Source, Targets};
use forebay_hub::pack::{Codes, PackError, PackOptions, pack};
use forebay_testkit::disk::SmallDisk;
use proptest::prelude::*;

/// The error of converting a golden whose tensors went through `change`; no model may come of it.
fn refused(
    case: &str,
    mut change: impl FnMut(&str, &mut String, &mut Vec<u64>, &mut Vec<u8>) -> bool,
) -> ConvertError {
    let (source, out) = (copy(case), tempfile::tempdir().unwrap());
    rewrite(source.path(), &mut change);
    let error = convert(source.path(), out.path(), int4_g64()).unwrap_err();
    assert!(!out.path().join("config.json").exists(), "{error}");
    error
}

const Q_A: &str = "model.layers.0.self_attn.q_a_proj.weight";
const UP: &str = "model.layers.1.mlp.shared_experts.up_proj.weight";

#[test]
fn weights_that_are_no_numbers_are_named() {
    for (bits, shown) in [([0x80, 0x7F], "inf"), ([0x80, 0xFF], "-inf"), ([0xC1, 0x7F], "NaN")] {
        let error = refused("bf16", |name, _, _, bytes| {
            if name == Q_A {
                bytes[2 * (104 * 3 + 5)..][..2].copy_from_slice(&bits);
            }
            true
        });
        let text = error.to_string();
        assert!(matches!(error, ConvertError::NotFinite { row: 3, column: 5, .. }), "{text}");
        assert!(text.contains(Q_A) && text.contains(shown), "{text}");
    }
    // An FP8 code that is no number, a multiplier that makes weights infinite, and a norm.
    let code = refused("fp8", |name, _, _, bytes| {
        if name == Q_A {
            bytes[200 * 129 + 199] = 0x7F;
        }
        true
    });
    assert!(matches!(code, ConvertError::NotFinite { row: 129, column: 199, .. }), "{code}");
    let scale = refused("fp8", |name, _, _, bytes| {
        if name.strip_suffix("_scale_inv") == Some(Q_A) {
            bytes[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes());
        }
        true
    });
    assert!(matches!(scale, ConvertError::NotFinite { .. }), "{scale}");
    let norm = refused("fp8", |name, dtype, shape, bytes| {
        if name == "model.norm.weight" {
            (*dtype, *shape, *bytes) = ("F32".to_owned(), vec![200], f32::NAN.to_le_bytes().repeat(200));
        }
        true
    });
    assert!(
        matches!(&norm, ConvertError::NotFinite { tensor, .. } if tensor == "model.norm.weight"),
        "{norm}"
    );
    let group = refused("nvfp4", |name, _, _, bytes| {
        if name.strip_suffix("_scale") == Some(UP) {
            bytes[0] = 0xFF;
        }
        true
    });
    assert!(matches!(&group, ConvertError::NotFinite { tensor, .. } if tensor == UP), "{group}");
}

#[test]
fn scales_that_are_missing_or_of_another_tool_are_refused() {
    let error = refused("fp8", |name, _, _, _| name.strip_suffix("_scale_inv") != Some(Q_A));
    assert!(error.to_string().contains("_scale_inv are missing"), "{error}");
    let error = refused("fp8", |name, _, shape, bytes| {
        if name.strip_suffix("_scale_inv") == Some(Q_A) {
            shape[0] -= 1;
            bytes.truncate(8);
        }
        true
    });
    assert!(error.to_string().contains("expected [2, 2]"), "{error}");
    let error = refused("nvfp4", |name, _, _, _| name.strip_suffix("_scale_2") != Some(UP));
    assert!(error.to_string().contains("_scale_2 are missing"), "{error}");
    for value in [1.0f32, 3584.0, 0.0, -0.5, f32::NAN] {
        let error = refused("nvfp4", |name, _, _, bytes| {
            if name.strip_suffix("_scale_2") == Some(UP) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            true
        });
        assert!(matches!(error, ConvertError::Nvfp4Scale { .. }), "{error}");
    }
    // A swizzled layout has its width rounded up to a multiple of four.
    let error = refused("nvfp4", |name, _, shape, bytes| {
        if name == "model.layers.1.mlp.shared_experts.down_proj.weight_scale" {
            assert_eq!(*shape, [128, 3]);
            shape[1] = 4;
            bytes.resize(128 * 4, 0);
        }
        true
    });
    assert!(
        error.to_string().contains("[128, 3]") && error.to_string().contains("order of a GPU"),
        "{error}"
    );
}

#[test]
fn wrong_shapes_types_and_models_are_refused() {
    let error = refused("bf16", |name, _, shape, _| {
        if name == Q_A {
            shape.swap(0, 1);
        }
        true
    });
    assert!(matches!(&error, ConvertError::Layout { count: 1, .. }), "{error}");
    let error = refused("bf16", |name, dtype, _, _| {
        if name == Q_A {
            *dtype = "I16".to_owned();
        }
        true
    });
    assert!(error.to_string().contains("I16"), "{error}");
    let error = refused("bf16", |name, _, _, _| !name.contains("self_attn.q_"));
    assert!(error.to_string().contains("weights cannot be converted"), "{error}");
    // What is quantised already is not quantised again.
    let (out, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    convert(&golden("bf16"), out.path(), int4_g64()).unwrap();
    let error = convert(out.path(), again.path(), int4_g64()).unwrap_err();
    assert!(matches!(error, ConvertError::Quantised { .. }), "{error}");
    // Formats that nobody could read, or that are of no use.
    let mut targets = Targets::of("int4-row".parse().unwrap());
    targets.mtp = targets.experts;
    assert!(matches!(
        Job::new(&mut LocalFolder::new(&golden("bf16")), options(targets)),
        Err(ConvertError::MtpFormat { .. })
    ));
    let fp8 = Targets::of("fp8-e4m3".parse().unwrap());
    assert!(matches!(
        Job::new(&mut LocalFolder::new(&golden("bf16")), options(fp8)),
        Err(ConvertError::Format { .. })
    ));
    let ambiguous = options(Targets { attention: "int4-g64".parse().unwrap(), ..int4_g64().targets });
    let error = Job::new(&mut LocalFolder::new(&golden("fp8")), ambiguous).unwrap_err();
    assert!(matches!(error, ConvertError::Ambiguous { cols: 130, .. }), "{error}");
    let error = Job::new(&mut LocalFolder::new(Path::new("no such folder")), int4_g64()).unwrap_err();
    assert!(error.to_string().contains("nothing at that path"), "{error}");
}

#[test]
fn a_source_that_is_cut_short_or_changes_on_the_way_is_noticed() {
    let (source, out) = (copy("fp8"), tempfile::tempdir().unwrap());
    let path = source.path().join("model-00002-of-00003.safetensors");
    let good = fs::read(&path).unwrap();
    fs::write(&path, &good[..good.len() - 1]).unwrap();
    let error = convert(source.path(), out.path(), int4_g64()).unwrap_err();
    assert!(error.to_string().contains("cut short"), "{error}");
    fs::write(&path, &good).unwrap();
    let mut folder = LocalFolder::new(source.path());
    let job = Job::new(&mut folder, int4_g64()).unwrap();
    fs::write(&path, [&good[..], &[0]].concat()).unwrap();
    let error = job.run(&mut folder, out.path(), &CancelToken::new(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, ConvertError::SourceChanged { .. }), "{error}");
}

#[test]
fn room_is_looked_for_before_every_file() {
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("new");
    let error = convert(&golden("bf16"), &dir, Options { margin: u64::MAX / 2, ..int4_g64() }).unwrap_err();
    assert!(matches!(error, ConvertError::NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("--margin"), "{error}");
    convert(&golden("bf16"), &dir, int4_g64()).unwrap();
}

/// The disk fills up between two files, and in the middle of one; then there is room again.
#[test]
fn a_full_disk_stops_it_cleanly_and_loses_nothing() {
    let whole = tempfile::tempdir().unwrap();
    convert(&golden("fp8"), whole.path(), int4_g64()).unwrap();
    let Some(disk) = SmallDisk::new(4_000_000) else { return };
    let (dir, ballast) = (disk.path().join("model"), disk.path().join("ballast"));
    let fill = |leave: u64| {
        let free = forebay_hub::output::folder::free_bytes(disk.path()).unwrap();
        fs::write(&ballast, vec![0; free.saturating_sub(leave) as usize]).unwrap();
    };
    let at = tempfile::tempdir().unwrap();
    let mut source = HandOut::new(&golden("fp8"), at.path());
    let (path, root) = (ballast.clone(), disk.path().to_owned());
    source.before_take = Box::new(move |file| {
        if file == 1 {
            let free = forebay_hub::output::folder::free_bytes(&root).unwrap();
            fs::write(&path, vec![0; free as usize - 100_000]).unwrap();
        }
        Ok(())
    });
    let error = run(&mut source, &dir, int4_g64()).unwrap_err();
    assert!(matches!(error, ConvertError::NoRoom { .. }), "{error}");
    source.release(1);
    assert!(dir.join("out-00000.safetensors").exists() && !dir.join("config.json").exists());
    fs::remove_file(&ballast).unwrap();

    // Now in the middle of a file, at its first piece.
    let mut folder = HandOut::new(&golden("fp8"), at.path());
    let job = Job::new(&mut folder, int4_g64()).unwrap();
    let mut filled = false;
    let error = job.run(&mut folder, &dir, &CancelToken::new(), &mut |_, _| {
        if !std::mem::replace(&mut filled, true) {
            fill(0);
        }
    });
    let error = error.unwrap_err();
    assert!(matches!(error, ConvertError::Full { .. }), "{error}");
    let partial =
        fs::read_dir(&dir).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().ends_with(".partial"));
    assert!(!partial, "half a file is of no use on a full disk");
    fs::remove_file(&ballast).unwrap();
    for entry in fs::read_dir(at.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    run(&mut HandOut::new(&golden("fp8"), at.path()), &dir, int4_g64()).unwrap();
    assert!(model_files(&dir) == model_files(whole.path()));
}

/// The same of packing: the disk becomes full at every third step of writing.
#[test]
fn a_full_disk_stops_packing_cleanly_and_loses_nothing() {
    let (model, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    convert(&golden("fp8"), model.path(), int4_g64()).unwrap();
    let cancel = CancelToken::new();
    let how = PackOptions { threads: 2, margin: 0, codes: Codes::Raw, cancel: &cancel };
    pack(model.path(), whole.path(), how, &mut |_, _| {}).unwrap();
    let Some(disk) = SmallDisk::new(4_000_000) else { return };
    let (dir, mut stops, mut kept) = (disk.path().join("model"), 0, 0);
    for step in (0..3000).step_by(3) {
        let mut steps = 0;
        let ended = pack(model.path(), &dir, how, &mut |_, _| {
            if steps == step {
                disk.fill();
            }
            steps += 1;
        });
        disk.empty();
        match ended {
            Ok(done) => {
                kept = done.kept;
                break;
            }
            Err(error) => {
                assert!(matches!(error, PackError::Full { .. } | PackError::NoRoom { .. }), "{error}");
                assert!(error.to_string().contains("free"), "{error}");
                assert!(!dir.join("model.forebay").exists());
                stops += 1;
            }
        }
    }
    assert!(stops > 2 && kept > 0, "{stops} stops, {kept} files kept");
    assert!(model_files(&dir) == model_files(whole.path()), "after {stops} stops");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// A changed byte anywhere in a header is an error or makes no difference; never a panic.
    #[test]
    fn damaged_headers_never_panic(at in 0usize..4000, byte in any::<u8>(), case in 0usize..4) {
        let (source, out) = (copy(common::CASES[case]), tempfile::tempdir().unwrap());
        let path = source.path().join("model-00001-of-00003.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] = byte;
        fs::write(&path, &bytes).unwrap();
        let _ = forebay_hub::verify::census(source.path());
        let _ = convert(source.path(), out.path(), int4_g64());
    }
}

/// What lies in the result's folder under the names of what is written: pipes are not waited for, links not followed.
#[cfg(unix)]
#[test]
fn what_lies_in_the_way_is_not_written_through() {
    let (whole, cancel) = (tempfile::tempdir().unwrap(), CancelToken::new());
    convert(&golden("fp8"), whole.path(), int4_g64()).unwrap();
    for link in [false, true] {
        let (out, other) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        // Begun, so that it is a conversion's folder.
        let mut source = LocalFolder::new(&golden("fp8"));
        let job = Job::new(&mut source, int4_g64()).unwrap();
        cancel.cancel();
        assert!(job.run(&mut source, out.path(), &cancel, &mut |_, _| {}).is_err());
        for name in ["out-00001.safetensors.partial", "config.json.partial", "forebay-convert.json.partial"] {
            let path = out.path().join(name);
            let _ = fs::remove_file(&path);
            match link {
                true => std::os::unix::fs::symlink(other.path(), &path).unwrap(),
                false => assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success()),
            }
        }
        convert(&golden("fp8"), out.path(), int4_g64()).unwrap();
        assert!(model_files(out.path()) == model_files(whole.path()));
        assert_eq!(fs::metadata(other.path()).unwrap().len(), 0);
    }
}

/// Whoever opened the pipe would wait for ever.
#[cfg(unix)]
#[test]
fn pipes_in_a_source_are_not_waited_for() {
    for name in ["config.json", "tokenizer.json"] {
        let (source, out) = (copy("bf16"), tempfile::tempdir().unwrap());
        let path = source.path().join(name);
        let _ = fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = convert(source.path(), out.path(), int4_g64()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
    }
}
