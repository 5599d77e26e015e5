//! Packed codes to signed bytes.

/// Two codes a byte: value + 8, even column in the low nibble.
#[inline(always)]
pub(crate) fn int4(codes: &[u8], out: &mut [i8]) {
    for (two, byte) in out.chunks_mut(2).zip(codes) {
        for (i, o) in two.iter_mut().enumerate() {
            *o = ((byte >> (4 * i)) & 15) as i8 - 8;
        }
    }
}

/// Four codes a byte: value + 2, first column in the lowest bits.
#[inline(always)]
pub(crate) fn int2(codes: &[u8], out: &mut [i8]) {
    for (four, byte) in out.chunks_mut(4).zip(codes) {
        for (i, o) in four.iter_mut().enumerate() {
            *o = ((byte >> (2 * i)) & 3) as i8 - 2;
        }
    }
}
