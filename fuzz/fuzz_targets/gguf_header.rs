//! Headers of GGUF files: whatever is accepted is sound, and its blocks can be decoded.

#![no_main]

use forebay_hub::gguf::{Header, blocks};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let header = match Header::parse(bytes, bytes.len() as u64) {
        Ok(header) => header,
        Err(error) => return assert!(error.to_string().len() < 16_384),
    };
    let mut tensors: Vec<_> = header.tensors.iter().collect();
    for tensor in &tensors {
        assert!(tensor.offset.checked_add(tensor.len).is_some_and(|end| end <= bytes.len() as u64));
        let (cols, rest) = tensor.shape.split_last().expect("at least one dimension");
        let rows: u64 = rest.iter().product();
        assert_eq!(tensor.kind.row_bytes(*cols).map(|row| row * rows), Some(tensor.len));
        let row = &bytes[tensor.offset as usize..][..(tensor.len / rows) as usize];
        blocks::decode_row(tensor.kind, row, &mut vec![0.0; *cols as usize]);
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    assert!(tensors.windows(2).all(|pair| pair[0].offset + pair[0].len <= pair[1].offset));
});
