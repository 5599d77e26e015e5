//! Headers of Forebay containers: whatever is accepted is sound and means what its bytes say.

#![no_main]

use std::path::Path;

use forebay_store::native::Header;
use libfuzzer_sys::fuzz_target;

/// Puts sound checksums around the fuzzer's body, which it would never guess.
fn seal(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"FOREBAY\0\x01\0\0\0\0\0\0\0".to_vec();
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(crc32c::crc32c(body).to_le_bytes());
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes.extend(body);
    bytes
}

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("model.forebay");
    let _ = Header::parse(bytes, path).map_err(|error| error.to_string());
    let sealed = seal(bytes);
    match Header::parse(&sealed, path) {
        Err(error) => assert!(error.to_string().len() < 8192),
        Ok(header) => {
            assert_eq!(header.to_bytes(), sealed);
            for (number, file) in header.files.iter().enumerate() {
                let mut end = 4096;
                for part in header.checked(number) {
                    assert!(part.offset >= end);
                    end = part.offset.checked_add(part.len).expect("ends were checked");
                }
                assert!(end <= file.size);
            }
        }
    }
});
