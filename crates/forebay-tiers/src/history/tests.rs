use super::*;
use proptest::prelude::*;
use std::fs;

fn model() -> History {
    History::new("abc").unwrap()
}

/// Counts the experts of one token.
fn observe(history: &mut History, layer: u32, experts: &[u32]) {
    let mut counts = vec![0; experts.iter().max().map_or(0, |last| *last as usize + 1)];
    experts.iter().for_each(|expert| counts[*expert as usize] += 1);
    history.observe(layer, 1, &counts);
}

#[test]
fn what_is_saved_is_loaded_and_two_processes_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let mut one = History::load(&path, "abc").unwrap();
    let mut two = one.clone();
    observe(&mut one, 3, &[7, 1]);
    observe(&mut one, 78, &[0]);
    observe(&mut two, 3, &[1, 2]);
    one.save(&path).unwrap();
    two.save(&path).unwrap();
    // Nothing new: nothing changes, and nothing is counted twice.
    one.save(&path).unwrap();
    let both = History::load(&path, "abc").unwrap();
    assert_eq!(both.counts(3), [0, 2, 1, 0, 0, 0, 0, 1]);
    assert_eq!((both.counts(78), both.counts(4)), (vec![1], vec![]));
    assert_eq!(one.counts(3), both.counts(3));
    assert!(!dir.path().join("usage.new").exists());
}

#[test]
fn counts_fade() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let mut history = model();
    history.half_life = 4;
    (0..11).for_each(|_| observe(&mut history, 0, &[5, 9]));
    assert_eq!(history.counts(0)[5], 11);
    history.save(&path).unwrap();
    // Two half-lives of four tokens in eleven.
    assert_eq!(history.counts(0)[5], 2);
    observe(&mut history, 0, &[5]);
    history.save(&path).unwrap();
    assert_eq!(History::load(&path, "abc").unwrap().counts(0)[5], 1);
}

#[test]
fn another_models_file_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    model().save(&path).unwrap();
    let before = fs::read(&path).unwrap();
    assert!(matches!(History::load(&path, "xyz"), Err(HistoryError::OtherModel { .. })));
    let mut other = History::new("xyz").unwrap();
    observe(&mut other, 1, &[1]);
    assert!(matches!(other.save(&path), Err(HistoryError::OtherModel { .. })));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(other.counts(1), [0, 1]);
    for bad in ["", "a b", "a\nb", &"x".repeat(129)] {
        assert!(matches!(History::new(bad), Err(HistoryError::Identity { .. })), "{bad:?}");
    }
}

#[test]
fn every_flipped_byte_and_every_cut_is_noticed_and_moved_aside() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let mut history = model();
    observe(&mut history, 2, &[3, 1]);
    history.save(&path).unwrap();
    let good = fs::read(&path).unwrap();
    let damaged = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        matches!(History::load(&path, "abc"), Err(HistoryError::Damaged { .. }))
    };
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(damaged(&bad), "byte {at}");
        assert!(damaged(&good[..at]), "cut at {at}");
    }
    assert!(damaged(&[&good[..], b"x"].concat()));
    let mut fresh = model();
    observe(&mut fresh, 2, &[3]);
    fresh.save(&path).unwrap();
    assert_eq!(History::load(&path, "abc").unwrap().counts(2), [0, 0, 0, 1]);
    assert_eq!(fs::read(dir.path().join("usage.damaged")).unwrap(), [&good[..], b"x"].concat());
}

#[test]
fn a_full_disk_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    model().save(&path).unwrap();
    let before = fs::read(&path).unwrap();
    let error = file::replace_with(&path, |file| {
        io::Write::write_all(file, b"forebay-us")?;
        Err(io::ErrorKind::StorageFull.into())
    });
    let Err(HistoryError::Write { source, .. }) = error else { panic!("{error:?}") };
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    assert_eq!(fs::read(&path).unwrap(), before);
    assert!(!dir.path().join("usage.new").exists());
    // A folder that does not exist, and a file in the place of one.
    assert!(matches!(model().save(&dir.path().join("no/usage")), Err(HistoryError::Write { .. })));
    assert!(matches!(model().save(&path.join("usage")), Err(HistoryError::Write { .. })));
}

#[test]
fn a_lock_that_is_held_is_an_error_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let held = file::lock(&path).unwrap();
    let mut history = model();
    observe(&mut history, 0, &[1]);
    assert!(matches!(history.save(&path), Err(HistoryError::Busy { .. })));
    drop(held);
    history.save(&path).unwrap();
    assert_eq!(History::load(&path, "abc").unwrap().counts(0), [0, 1]);
}

#[test]
fn numbers_of_no_model_are_not_counted() {
    let mut history = model();
    observe(&mut history, 0, &[MAX_EXPERTS as u32, 2]);
    observe(&mut history, u32::MAX, &[2]);
    assert_eq!(history.counts(0), [0, 0, 1]);
    assert!(history.counts(u32::MAX).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_history_survives_its_file(
        uses in prop::collection::vec((0u32..90, prop::collection::vec(0u32..300, 0..9)), 0..30),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("usage");
        let mut history = model();
        for (layer, experts) in &uses {
            observe(&mut history, *layer, experts);
        }
        let mut saved = history.clone();
        saved.save(&path).unwrap();
        let loaded = History::load(&path, "abc").unwrap();
        prop_assert_eq!(&loaded, &saved);
        for layer in 0..90 {
            prop_assert_eq!(loaded.counts(layer), history.counts(layer));
        }
    }

    #[test]
    fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("usage");
        fs::write(&path, &bytes).unwrap();
        prop_assert!(History::load(&path, "abc").is_err());
    }
}
