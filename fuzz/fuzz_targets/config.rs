//! Configuration files: strict JSON, then every getter on every field.

#![no_main]

use forebay_store::config::{ConfigFile, POSITIVE, Section, stop_ids};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = ConfigFile::parse("config.json", bytes) else { return };
    // What we accept, a lenient parser accepts too; and then the keys are its keys.
    let theirs: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(bytes).expect("serde_json refuses what we accept");
    for field in theirs.keys() {
        assert!(file.root().raw(field).is_some());
        ask(&file.root(), field);
        if let Ok(Some(section)) = file.root().opt_section(field) {
            ask(&section, "rope_theta");
        }
    }
    let _ = stop_ids(&file, Some(&file)).map_err(|e| e.to_string());
});

fn ask(section: &Section<'_>, field: &str) {
    let text =
        |error: forebay_store::config::ConfigError| assert!(error.to_string().len() < 4096 + field.len());
    let _ = section.u64(field, 1..=128).map_err(text);
    let _ = section.usize(field, 0..=usize::MAX).map_err(text);
    let _ = section.f64(field, POSITIVE).map_err(text);
    let _ = section.bool(field).map_err(text);
    let _ = section.str(field).map_err(text);
    let _ = section.opt_choice(field, &["default"]).map_err(text);
    let _ = section.str_list(field).map_err(text);
    let _ = section.opt_u32_or_list(field).map_err(text);
}
