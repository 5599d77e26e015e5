//! Shard headers: whatever is accepted is sound.

#![no_main]

use forebay_store::shard::parse_header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((size, header)) = bytes.split_first_chunk::<8>() else { return };
    let file_len = u64::from_le_bytes(*size);
    let mut tensors = match parse_header(header, file_len) {
        Ok(tensors) => tensors,
        Err(error) => {
            assert!(error.to_string().len() < 8192);
            return;
        }
    };
    for tensor in &tensors {
        assert!(tensor.offset >= 8 + header.len() as u64);
        assert!(tensor.offset.checked_add(tensor.len).is_some_and(|end| end <= file_len));
        if let Some(size) = tensor.dtype.size() {
            let empty = tensor.shape.contains(&0);
            let product = tensor.shape.iter().try_fold(size, |n, &dim| n.checked_mul(dim));
            assert_eq!(if empty { Some(0) } else { product }, Some(tensor.len));
        }
    }
    tensors.retain(|tensor| tensor.len > 0);
    tensors.sort_by_key(|tensor| tensor.offset);
    for pair in tensors.windows(2) {
        assert!(pair[0].offset + pair[0].len <= pair[1].offset);
        assert!(pair[0].name != pair[1].name);
    }
});
