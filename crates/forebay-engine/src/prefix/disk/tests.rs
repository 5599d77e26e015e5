//! Files that hold what they should, and files that do not.

use std::sync::Arc;

use forebay_model::{KvParts, KvPool, Snapshot, SnapshotOptions};
use forebay_testkit::toy;

use super::*;

/// A store with one full block with two hidden states, of the toy with all parts.
fn store() -> (tempfile::TempDir, Disk, StoredBlock, Arc<KvPool>, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    let spec = Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap().spec;
    let layout = KvLayout::new(&spec, KvDtype::Bf16, KvParts { index: true, mtp: true }).unwrap();
    let rows: Vec<u8> = (0..BLOCK * layout.position_bytes()).map(|i| (i * 7 % 251) as u8).collect();
    let hidden = layout.hidden();
    let pool = KvPool::new(layout, 3);
    let mut block = KvPool::take(&pool).unwrap();
    assert!(block.read_rows(BLOCK, &rows));
    let block = [Arc::new(block)];
    let tokens: Vec<u32> = (0..BLOCK as u32).map(|i| 3 * i).collect();
    let mut tree = Tree::default();
    tree.enter(&tokens[..50], &block, Some(&vec![0.5; hidden]));
    let path = tree.enter(&tokens, &block, Some(&vec![-1.5; hidden]));
    let config = PrefixConfig { dir: dir.path().join("kept"), limit: 1 << 30 };
    let (mut disk, found) = Disk::open(config.clone(), [5; 32], pool.layout()).unwrap();
    assert!(found.is_empty());
    let never = disk.save(&mut tree, &path, &mut || false).unwrap();
    assert!(never.blocks == 0 && never.unfinished);
    assert_eq!(disk.save(&mut tree, &path, &mut || true).unwrap().blocks, 1);
    let (disk, mut found) = Disk::open(config, [5; 32], pool.layout()).unwrap();
    assert_eq!((found.len(), &found[0].tokens), (1, &tokens));
    (dir, disk, found.remove(0), pool, rows)
}

#[test]
fn what_was_written_is_read() {
    let (_dir, mut disk, stored, pool, rows) = store();
    let mut block = KvPool::take(&pool).unwrap();
    let carries = disk.read(&stored.file, &Key::default(), &stored.tokens, &mut block).unwrap();
    assert_eq!(
        carries.iter().map(|(at, state)| (*at, state[7])).collect::<Vec<_>>(),
        [(49, 0.5), (63, -1.5)]
    );
    let mut again = Vec::new();
    block.write_rows(BLOCK, &mut again);
    assert!(again == rows);
    // Another place, other tokens: another block.
    let other = Stored { first: 64, ..stored.file.clone() };
    assert!(disk.read(&other, &Key::default(), &stored.tokens, &mut block).is_none());
}

/// Four thousand files with a changed bit, a changed byte, a cut, an addition, or two parts exchanged.
#[test]
fn no_damage_goes_unnoticed() {
    let (_dir, mut disk, stored, pool, _) = store();
    let path = disk.path(&stored.file.key);
    let sound = fs::read(&path).unwrap();
    let mut block = KvPool::take(&pool).unwrap();
    let mut state = 88_172_645_463_325_252u64;
    let mut below = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    for round in 0..4000 {
        let mut damaged = sound.clone();
        // The header is as likely as all the rest.
        let at = if below(2) == 0 { below(MAX_HEADER) } else { below(sound.len()) };
        match round % 5 {
            0 => damaged[at] ^= 1 << below(8),
            1 => damaged[at] = damaged[at].wrapping_add(1 + below(255) as u8),
            2 => damaged.truncate(at),
            3 => damaged.extend((0..=below(700)).map(|i| i as u8)),
            _ => {
                let (from, len) = (below(sound.len() / 2), 1 + below(300));
                let part = sound[from + 1..from + 1 + len].to_vec();
                damaged[from..from + len].copy_from_slice(&part);
            }
        }
        if damaged == sound {
            continue;
        }
        fs::write(&path, &damaged).unwrap();
        let read = disk.read(&stored.file, &Key::default(), &stored.tokens, &mut block);
        assert!(read.is_none(), "round {round}, byte {at}");
        assert!(!path.exists(), "round {round}: what is damaged goes");
    }
    fs::write(&path, &sound).unwrap();
    assert!(disk.read(&stored.file, &Key::default(), &stored.tokens, &mut block).is_some());
}
