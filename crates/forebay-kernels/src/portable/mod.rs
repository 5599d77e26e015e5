//! The arithmetic itself, written once and compiled once per instruction set.
//!
//! Every function here is `inline(always)`, so that it takes on the target
//! features of the wrapper that calls it (see `table.rs`). Results do not depend
//! on those features: each float operation is written out in its canonical order
//! (docs/numerics.md), fused multiply-adds are explicit, and the compiler never
//! reorders or contracts float operations by itself.

pub(crate) mod attend;
pub(crate) mod combine;
pub(crate) mod decode;
pub(crate) mod direct;
pub(crate) mod exact;
pub(crate) mod exp;
pub(crate) mod int8;
pub(crate) mod lanes;
pub(crate) mod line;
pub(crate) mod norm;
pub(crate) mod pack;
pub(crate) mod quantise;
pub(crate) mod registers;
pub(crate) mod score;
pub(crate) mod select;
pub(crate) mod space;

use forebay_core::panel::PANEL_LINE;
use lanes::{Bf16Bits, LANES};

/// Columns that are decoded at a time. A multiple of the activation group and of
/// every weight group size, so that no segment is ever cut in two.
pub(crate) const CHUNK: usize = 768;

/// What a room adds to the portable bodies: its registers, exact integer dots, and transposition.
///
/// # Safety of the methods
/// The processor must have the instruction set of the room.
pub(crate) trait Room {
    /// Whether this room is the truth that others are compared with: it takes the bodies that
    /// follow docs/numerics.md word for word where others have faster ones.
    const PLAIN: bool = false;

    /// Sixteen f32 lanes in registers.
    type Lanes: Copy;

    /// How many [`Lanes`](Self::Lanes) the processor's registers hold.
    const REGISTERS: usize;

    /// The same value in every lane.
    unsafe fn splat(value: f32) -> Self::Lanes;

    /// Lane `i` holds `values[i]`.
    unsafe fn load(values: &[f32; LANES]) -> Self::Lanes;

    /// Lane `i` holds `values[i]`, widened.
    unsafe fn load_bf16(values: &[Bf16Bits; LANES]) -> Self::Lanes;

    /// Lane `i` holds `values[i]`, half precision, widened.
    unsafe fn load_f16(values: &[u16; LANES]) -> Self::Lanes;

    /// Lane `i` holds `values[i]`, FP8 E4M3, widened.
    unsafe fn load_fp8(values: &[u8; LANES]) -> Self::Lanes;

    /// Lane `i` holds `values[i]`.
    unsafe fn load_i8(values: &[i8; LANES]) -> Self::Lanes;

    /// The scale of int4 weights, made ready for [`load_int4`](Self::load_int4).
    type Int4Scale: Copy;

    unsafe fn int4_scale(scale: f32) -> Self::Int4Scale;

    /// Sixteen int4 weights (value + 8, low nibble first), code times scale, in an order of the
    /// room's own.
    unsafe fn load_int4(codes: &[u8; LANES / 2], scale: Self::Int4Scale) -> Self::Lanes;

    /// From ascending columns to the order of [`load_int4`](Self::load_int4).
    unsafe fn to_int4_order(lanes: Self::Lanes) -> Self::Lanes;

    /// From the order of [`load_int4`](Self::load_int4) to ascending columns.
    unsafe fn from_int4_order(lanes: Self::Lanes) -> Self::Lanes;

    /// Lane `i` holds the code of row `i` and column `column` of a unit of a panel: byte `column`
    /// of the row's four, in two's complement.
    unsafe fn int8_column(unit: &[u8; PANEL_LINE], column: usize) -> Self::Lanes;

    /// The same for int4 codes: nibble `column` of the row's eight, low nibble first, value + 8.
    unsafe fn int4_column(unit: &[u8; PANEL_LINE], column: usize) -> Self::Lanes;

    /// `out[i]` holds lane `i`.
    unsafe fn store(lanes: Self::Lanes, out: &mut [f32; LANES]);

    /// `a * b + c` in every lane, rounded once.
    unsafe fn fma(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;

    /// The fixed tree 8-4-2-1 (see [`lanes::tree`]) of each of four.
    unsafe fn trees(sums: [Self::Lanes; 4]) -> [f32; 4];

    /// Two codes a byte (value + 8, low nibble first): `out.len() <= 2 * codes.len()`.
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]);

    /// Four codes a byte (value + 2, lowest bits first): `out.len() <= 4 * codes.len()`.
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]);

    /// Sixteen i32 lanes in registers.
    type Ints: Copy;

    /// Whether there are registers for two panels at once.
    const PAIRS: bool;

    /// Batch rows that go together: at most 8.
    const BATCH: usize;

    /// Lane `i` as f32; exact for what segments add up to.
    unsafe fn from_ints(ints: Self::Ints) -> Self::Lanes;

    /// `a * b` in every lane.
    unsafe fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;

    /// The exact dots of `units` units of int4 codes of each panel (eight columns of sixteen
    /// rows, 64 bytes) with `S` rows of activations: lane `i` belongs to row `i` of the panel.
    /// The even columns of the first row start at `x`, the odd ones 32 bytes further; the next
    /// row lies 64 bytes further.
    /// `negated_sums` are the sums of the activations, negated. A segment has at most 64 columns.
    unsafe fn dot_int4<const P: usize, const S: usize>(
        codes: [*const u8; P],
        units: usize,
        x: *const i8,
        negated_sums: [i32; S],
    ) -> [[Self::Ints; S]; P];

    /// The same for units of int8 codes (four columns of sixteen rows) and activations in the
    /// order of the columns.
    unsafe fn dot_int8<const P: usize, const S: usize>(
        codes: [*const u8; P],
        units: usize,
        x: *const i8,
        negated_sums: [i32; S],
    ) -> [[Self::Ints; S]; P];

    /// Asks for the cache line at this address, which need not exist.
    fn prefetch(at: *const u8);

    /// Word `i` (four bytes) of row `j` becomes word `j` of line `i`: sixteen rows of 64 bytes,
    /// the first at `start`, the next `stride` bytes further.
    unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]);

    /// The exact dots of 64 bytes of int4 codes (two activation groups) of sixteen rows, the
    /// first at `start`, the next `stride` bytes further, with one row of activations: lane `i`
    /// belongs to row `i`. `x` are the two groups, each with its even columns first, and
    /// `negated_sums` their sums, negated.
    #[inline(always)]
    unsafe fn line_int4(
        start: *const u8,
        stride: usize,
        x: [*const i8; 2],
        negated_sums: [i32; 2],
    ) -> [Self::Ints; 2] {
        let mut units = [0; 16 * PANEL_LINE];
        // SAFETY: passed on to the caller.
        unsafe {
            Self::transpose(start, stride, &mut units);
            let codes = [units.as_ptr(), units.as_ptr().add(8 * PANEL_LINE)];
            let [[first]] = Self::dot_int4([codes[0]], 8, x[0], [negated_sums[0]]);
            let [[second]] = Self::dot_int4([codes[1]], 8, x[1], [negated_sums[1]]);
            [first, second]
        }
    }

    /// The same for int8 codes, one activation group in the order of the columns.
    #[inline(always)]
    unsafe fn line_int8(start: *const u8, stride: usize, x: *const i8, negated_sum: i32) -> Self::Ints {
        let mut units = [0; 16 * PANEL_LINE];
        // SAFETY: passed on to the caller.
        unsafe {
            Self::transpose(start, stride, &mut units);
            let [[dots]] = Self::dot_int8([units.as_ptr()], 16, x, [negated_sum]);
            dots
        }
    }
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
    /// The same places without those of the first batch rows.
    #[inline(always)]
    pub(crate) fn skip_batch_rows(self, first: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(first * self.stride), ..self }
    }

    /// The same places for a matrix that starts with weight row `row` of this one.
    #[inline(always)]
    pub(crate) fn starting_with(self, row: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(row - self.first), first: 0, ..self }
    }

    /// Stores one result.
    ///
    /// # Safety
    /// The element must lie inside the output, and nobody else may touch it meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn put(self, batch_row: usize, row: usize, value: f32) {
        // SAFETY: passed on to the caller.
        unsafe { *self.ptr.add(batch_row * self.stride + (row - self.first)) = value }
    }

    /// Stores the results of four weight rows from `row` on.
    ///
    /// # Safety
    /// As [`put`](Self::put), for all four.
    #[inline(always)]
    pub(crate) unsafe fn put_four(self, batch_row: usize, row: usize, values: [f32; 4]) {
        // SAFETY: passed on to the caller.
        unsafe {
            let place = self.ptr.add(batch_row * self.stride + (row - self.first));
            place.cast::<[f32; 4]>().write_unaligned(values);
        }
    }
}
