//! Headers of stored prefixes: whatever is accepted is sound and means what its bytes say.

#![no_main]

use forebay_store::prefix::{Header, MAX_HEADER};
use libfuzzer_sys::fuzz_target;

/// Puts a sound checksum behind the fuzzer's bytes, which it would never guess.
fn seal(body: &[u8]) -> Vec<u8> {
    let len = (16 + body.len() + 4) as u32;
    let mut bytes = b"FBPREFIX\x01\0\0\0".to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend(body);
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

fuzz_target!(|bytes: &[u8]| {
    let _ = Header::parse(bytes).map_err(|error| error.to_string());
    let sealed = seal(bytes);
    if let Ok(header) = Header::parse(&sealed) {
        assert_eq!(header.to_bytes(), sealed);
        assert!(header.len() <= MAX_HEADER && !header.tokens.is_empty());
        assert!(header.carries.iter().all(|at| (*at as usize) < header.tokens.len()));
    }
});
