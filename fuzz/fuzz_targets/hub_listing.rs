//! A hub's answer about a repository: names, sizes and digests that are not trusted.

#![no_main]

use std::collections::BTreeSet;
use std::path::{Component, Path};

use forebay_hub::get::Listing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let repo = "owner/name".parse().expect("a repository's name");
    let listing = match Listing::parse(&repo, "main", bytes) {
        Ok(listing) => listing,
        Err(error) => return drop(error.to_string()),
    };
    let mut names = BTreeSet::new();
    let mut total = 0u64;
    for file in &listing.files {
        assert!(Path::new(&file.name).components().all(|part| matches!(part, Component::Normal(_))));
        assert!(!file.name.contains(['\\', ':', '\0']));
        assert!(names.insert(file.name.to_lowercase()));
        assert!(matches!(file.digest.hex().len(), 40 | 64));
        total = total.checked_add(file.size).expect("sizes add up");
    }
    assert_eq!(listing.select(&[]).map_or(0, |files| files.len()), listing.files.len());
});
