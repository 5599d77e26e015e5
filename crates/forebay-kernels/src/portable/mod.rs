//! The arithmetic itself, written once and compiled once per instruction set.
//!
//! Every function here is `inline(always)`, so that it takes on the target
//! features of the wrapper that calls it (see `table.rs`). Results do not depend
//! on those features: each float operation is written out in its canonical order
//! (docs/numerics.md), fused multiply-adds are explicit, and the compiler never
//! reorders or contracts float operations by itself.

pub(crate) mod attend;
pub(crate) mod decode;
pub(crate) mod exact;
pub(crate) mod exp;
pub(crate) mod int8;
pub(crate) mod lanes;
pub(crate) mod norm;
pub(crate) mod quantise;
pub(crate) mod score;

/// Columns that are decoded at a time. A multiple of the activation group and of
/// every weight group size, so that no segment is ever cut in two.
pub(crate) const CHUNK: usize = 768;

/// What a room adds to the portable bodies: unpacking and exact integer dots.
///
/// # Safety of the methods
/// The processor must have the instruction set of the room.
pub(crate) trait Room {
    /// Two codes a byte (value + 8, low nibble first): `out.len() <= 2 * codes.len()`.
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]);

    /// Four codes a byte (value + 2, lowest bits first): `out.len() <= 4 * codes.len()`.
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]);

    /// `sum_k w[k] x[k]` of a whole activation group; `|x| <= 127`.
    /// `corrections` are `-128 * sum(x)` of each sixteen columns, for rooms that
    /// shift weights to unsigned.
    unsafe fn dot64(w: &[i8; 64], x: &[i8; 64], corrections: &[i32; 4]) -> i32;

    /// `sum_k w[k] x[k]` of sixteen columns.
    unsafe fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32;
}

/// Where a block of weight rows puts its results: `y[batch row][weight row - first]`.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    /// Start of the output.
    pub ptr: *mut f32,
    /// Elements from one batch row to the next.
    pub stride: usize,
    /// Weight row that belongs to column 0.
    pub first: usize,
}

impl Out {
    /// Stores one result.
    ///
    /// # Safety
    /// The element must lie inside the output, and nobody else may touch it meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn put(self, batch_row: usize, row: usize, value: f32) {
        // SAFETY: passed on to the caller.
        unsafe { *self.ptr.add(batch_row * self.stride + (row - self.first)) = value }
    }
}
