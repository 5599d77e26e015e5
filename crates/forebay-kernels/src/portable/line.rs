//! The weight formats, sixteen columns of a row at a time.

use super::Room;
use super::lanes::{Bf16Bits, LANES};

/// A format whose weights are read in lines of sixteen.
///
/// # Safety of the methods
/// The processor has the room's instruction set; `codes` points to [`BYTES`](Self::BYTES)
/// readable bytes of any alignment; `scale` points to a readable scale if the format has any.
pub(crate) trait Line {
    /// Bytes of sixteen codes.
    const BYTES: usize;
    /// Whether weights have scales.
    const SCALED: bool = true;

    /// A scale, made ready for the lines of its group.
    type Scale<R: Room>: Copy;

    unsafe fn scale<R: Room>(scale: *const f32) -> Self::Scale<R>;

    /// Code times scale, one rounding, in the order of the format.
    unsafe fn line<R: Room>(codes: *const u8, scale: Self::Scale<R>) -> R::Lanes;

    /// From the order of the columns to that of the format: the same unless a room reads the
    /// format faster in another one.
    #[inline(always)]
    unsafe fn to_order<R: Room>(lanes: R::Lanes) -> R::Lanes {
        lanes
    }

    /// Back to the order of the columns.
    #[inline(always)]
    unsafe fn from_order<R: Room>(lanes: R::Lanes) -> R::Lanes {
        lanes
    }
}

/// What `codes` points to, wherever it lies.
#[inline(always)]
unsafe fn read<T: bytemuck::AnyBitPattern, const N: usize>(codes: *const u8) -> [T; N] {
    // SAFETY: the caller's bytes are readable, and any of them make a `T`.
    unsafe { codes.cast::<[T; N]>().read_unaligned() }
}

/// One of the formats that need no scale.
macro_rules! unscaled {
    ($(#[$doc:meta])* $name:ident, $element:ty, $load:ident) => {
        $(#[$doc])*
        pub(crate) struct $name;

        impl Line for $name {
            const BYTES: usize = LANES * size_of::<$element>();
            const SCALED: bool = false;
            type Scale<R: Room> = ();

            #[inline(always)]
            unsafe fn scale<R: Room>(_scale: *const f32) {}

            #[inline(always)]
            unsafe fn line<R: Room>(codes: *const u8, _scale: ()) -> R::Lanes {
                // SAFETY: passed on to the caller.
                unsafe { R::$load(&read::<$element, LANES>(codes)) }
            }
        }
    };
}

unscaled!(
    /// f32.
    F32, f32, load
);
unscaled!(
    /// bfloat16.
    Bf16, Bf16Bits, load_bf16
);
unscaled!(
    /// Half precision.
    F16, u16, load_f16
);

/// One of the formats of one byte a code.
macro_rules! bytes {
    ($(#[$doc:meta])* $name:ident, $element:ty, $load:ident) => {
        $(#[$doc])*
        pub(crate) struct $name;

        impl Line for $name {
            const BYTES: usize = LANES;
            type Scale<R: Room> = R::Lanes;

            #[inline(always)]
            unsafe fn scale<R: Room>(scale: *const f32) -> R::Lanes {
                // SAFETY: passed on to the caller.
                unsafe { R::splat(*scale) }
            }

            #[inline(always)]
            unsafe fn line<R: Room>(codes: *const u8, scale: R::Lanes) -> R::Lanes {
                // SAFETY: passed on to the caller.
                unsafe { R::mul(R::$load(&read::<$element, LANES>(codes)), scale) }
            }
        }
    };
}

bytes!(
    /// FP8 E4M3.
    Fp8, u8, load_fp8
);
bytes!(
    /// Two's complement.
    Int8, i8, load_i8
);

/// Value + 8, even column in the low nibble.
pub(crate) struct Int4;

impl Line for Int4 {
    const BYTES: usize = LANES / 2;
    type Scale<R: Room> = R::Int4Scale;

    #[inline(always)]
    unsafe fn scale<R: Room>(scale: *const f32) -> R::Int4Scale {
        // SAFETY: passed on to the caller.
        unsafe { R::int4_scale(*scale) }
    }

    #[inline(always)]
    unsafe fn line<R: Room>(codes: *const u8, scale: R::Int4Scale) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::load_int4(&read::<u8, { LANES / 2 }>(codes), scale) }
    }

    #[inline(always)]
    unsafe fn to_order<R: Room>(lanes: R::Lanes) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::to_int4_order(lanes) }
    }

    #[inline(always)]
    unsafe fn from_order<R: Room>(lanes: R::Lanes) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::from_int4_order(lanes) }
    }
}

/// Runs the expression with `$line` being the [`Line`] of a format; int2 has none and takes the other one.
macro_rules! with_line {
    ($format:expr, $line:ident => $do:expr, $int2:expr) => {{
        use forebay_core::format::Format;
        use $crate::portable::line;
        match $format {
            Format::F32 => {
                type $line = line::F32;
                $do
            }
            Format::Bf16 => {
                type $line = line::Bf16;
                $do
            }
            Format::F16 => {
                type $line = line::F16;
                $do
            }
            Format::Fp8Block => {
                type $line = line::Fp8;
                $do
            }
            Format::Int8Row => {
                type $line = line::Int8;
                $do
            }
            Format::Int4Row | Format::Int4Group(_) => {
                type $line = line::Int4;
                $do
            }
            Format::Int2Row => $int2,
        }
    }};
}
pub(crate) use with_line;
