//! Opening folders: which files count, what is refused, what is told.

mod common;

use std::fs;
use std::path::Path;

use common::{tensor, write_shard};
use forebay_store::catalog::{Catalog, CatalogError, Options};
use forebay_store::shard::{Dtype, HeaderError, ShardError};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn advice(dir: &Path) -> String {
    Catalog::open(dir).unwrap_err().to_string()
}

#[test]
fn only_files_with_the_exact_suffix_count() {
    let dir = folder();
    let write = |name: &str, tensor_name: &str| {
        write_shard(&dir.path().join(name), &[tensor(tensor_name, "U8", &[1])]);
    };
    write("b.safetensors", "in.b");
    write("a.b.safetensors", "in.a");
    write("B.safetensors", "in.B");
    write("c.safetensors.bak", "bak");
    write("d.SAFETENSORS", "upper");
    write("esafetensors", "no.dot");
    fs::create_dir(dir.path().join("_inflight")).unwrap();
    write("_inflight/f.safetensors", "deeper");
    let catalog = Catalog::open(dir.path()).unwrap();
    let names: Vec<_> = catalog.iter().map(|(name, entry)| (name, entry.shard)).collect();
    assert_eq!(names, [("in.B", 0), ("in.a", 1), ("in.b", 2)]);
    assert_eq!(catalog.shard_name(1), "a.b.safetensors");
    assert_eq!((catalog.len(), catalog.shards().len()), (3, 3));
    assert!(catalog.get("deeper").is_none());
}

#[cfg(unix)]
#[test]
fn links_are_followed() {
    let (dir, blobs) = (folder(), folder());
    let blob = blobs.path().join("0123abcd");
    write_shard(&blob, &[tensor("x", "F32", &[2])]);
    let link = dir.path().join("model.safetensors");
    std::os::unix::fs::symlink(&blob, &link).unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!(catalog.get("x").unwrap().len, 8);
    assert_eq!(catalog.shards()[0].size, fs::metadata(&blob).unwrap().len());
    fs::remove_file(&blob).unwrap();
    let error = Catalog::open(dir.path()).unwrap_err();
    assert!(matches!(error, CatalogError::Shard(ShardError::Read { .. })));
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_pipe_named_like_a_shard_does_not_hang() {
    let dir = folder();
    let made = std::process::Command::new("mkfifo").arg(dir.path().join("x.safetensors")).status();
    if made.is_ok_and(|status| status.success()) {
        assert!(matches!(Catalog::open(dir.path()), Err(CatalogError::Shard(ShardError::NotAFile { .. }))));
    }
}

#[test]
fn a_name_in_two_shards_is_refused_unless_the_first_may_win() {
    // Files a and b both define x; the reference takes a's.
    let dir = folder();
    write_shard(&dir.path().join("a.safetensors"), &[tensor("x", "F32", &[1]), tensor("y", "U8", &[1])]);
    write_shard(&dir.path().join("b.safetensors"), &[tensor("x", "F32", &[2]), tensor("z", "U8", &[1])]);
    let Err(CatalogError::Duplicate { tensor, first, second }) = Catalog::open(dir.path()) else { panic!() };
    assert_eq!((&*tensor, &*first, &*second), ("x", "a.safetensors", "b.safetensors"));
    let catalog = Catalog::open_with(dir.path(), Options { first_wins: true }).unwrap();
    let x = catalog.get("x").unwrap();
    assert_eq!((x.shard, x.len, catalog.shadowed(), catalog.len()), (0, 4, 1, 3));
}

#[test]
fn a_shard_cut_short_names_file_tensor_and_offset() {
    let dir = folder();
    let path = dir.path().join("model-00001-of-00001.safetensors");
    write_shard(&path, &[tensor("whole", "F32", &[4]), tensor("cut", "F32", &[4])]);
    let size = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(size - 1).unwrap();
    let error = Catalog::open(dir.path()).unwrap_err();
    let CatalogError::Shard(ShardError::Header {
        error: HeaderError::PastEnd { offset, end, file_len, .. },
        ..
    }) = error
    else {
        panic!("{error}")
    };
    assert_eq!((offset, end, file_len), (size - 16, size, size - 1));
    for part in ["model-00001-of-00001.safetensors", "\"cut\"", &(size - 16).to_string()] {
        assert!(error.to_string().contains(part), "{error} lacks {part}");
    }
}

#[test]
fn unknown_types_are_noted_and_do_no_harm() {
    let dir = folder();
    let tensors = [tensor("n", "I64", &[3]), tensor("m", "I64", &[1]), tensor("x", "F8_E4M3", &[4])];
    write_shard(&dir.path().join("a.safetensors"), &tensors);
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!(catalog.unknown_dtypes().into_iter().collect::<Vec<_>>(), [("I64", 2)]);
    assert_eq!(catalog.get("n").unwrap().dtype, Dtype::Other("I64".into()));
    assert_eq!(catalog.get("x").unwrap().dtype, Dtype::F8E4m3);
}

#[test]
fn a_folder_without_shards_is_explained() {
    let dir = folder();
    assert!(advice(dir.path()).contains("the folder is empty"));
    let gone = dir.path().join("gone");
    assert!(advice(&gone).contains("nothing at that path"));
    let file = dir.path().join("model.gguf");
    fs::write(&file, "GGUF").unwrap();
    assert!(advice(&file).contains("GGUF"));
    assert!(advice(dir.path()).contains("GGUF"));
    fs::remove_file(&file).unwrap();

    fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert!(advice(dir.path()).contains("incomplete"));
    fs::write(dir.path().join("model-00001-of-00002.safetensors.incomplete"), "").unwrap();
    assert!(advice(dir.path()).contains("unfinished download"));
    let index = r#"{"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let told = advice(dir.path());
    assert!(
        told.contains("2 of 2 shards named by model.safetensors.index.json are absent: m-1.safetensors"),
        "{told}"
    );

    let cache = folder();
    let revision = cache.path().join("snapshots/0abc");
    fs::create_dir_all(&revision).unwrap();
    write_shard(&revision.join("model.safetensors"), &[]);
    assert!(advice(cache.path()).contains("snapshots/0abc"));
    assert!(advice(&revision.join("model.safetensors")).contains("give the folder that holds it"));
    assert!(Catalog::open(&revision).unwrap().is_empty());
}

#[test]
fn the_number_of_shards_has_no_limit() {
    // The reference stops at 512 files. 600 files of 40 tensors each, found in byte order.
    let dir = folder();
    for shard in 0..600 {
        let tensors: Vec<_> =
            (0..40).map(|i| tensor(&format!("model.layers.{shard}.w{i}"), "BF16", &[8, i])).collect();
        write_shard(&dir.path().join(format!("model-{shard:05}.safetensors")), &tensors);
    }
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!((catalog.shards().len(), catalog.len()), (600, 24_000));
    let entry = catalog.get("model.layers.599.w39").unwrap();
    assert_eq!((entry.shard, &*entry.shape, entry.len), (599, &[8, 39][..], 624));
    assert_eq!(entry.offset + entry.len, catalog.shards()[599].size);
}
