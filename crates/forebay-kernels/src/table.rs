//! One table of functions per room, and the macro that compiles the portable
//! bodies with a room's target features.

use crate::Activations;
use crate::activations::{GROUP, GroupTotals};
use crate::attention::{AttendScratch, Attended, AttentionRows, KeyCache, KeyRows};
use crate::indexer::{IndexQueries, ScoreScratch};
use crate::portable::Out;
use crate::portable::combine::Coefficients;
use forebay_core::panel::PanelView;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// The functions of one room. All are unsafe for one reason: the processor must
/// have the room's instruction set. The two matrix products also write through
/// [`Out`], whose rules they pass on.
pub(crate) struct Table {
    pub exact_rows: unsafe fn(&MatrixView<'_>, Range<usize>, &[f32], Out),
    pub exact_panels: unsafe fn(&PanelView<'_>, Range<usize>, &[f32], Out),
    pub int8_rows: unsafe fn(&MatrixView<'_>, Range<usize>, &Activations, Out),
    pub int8_panels: unsafe fn(&PanelView<'_>, Range<usize>, &Activations, Out),
    pub combine: unsafe fn(&MatrixView<'_>, Range<usize>, Coefficients<'_>, &mut [f32]),
    pub quantise_row: QuantiseFn,
    pub dot: unsafe fn(&[f32], &[f32]) -> f32,
    pub axpy: unsafe fn(f32, &[f32], &mut [f32]),
    pub rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    pub layer_norm: LayerNormFn,
    pub exp_all: unsafe fn(&mut [f32]),
    pub sigmoid_all: unsafe fn(&mut [f32]),
    pub swiglu: unsafe fn(&mut [f32], &[f32]),
    pub attend: AttendFn,
    pub scores: ScoresFn,
    pub select: SelectFn,
    /// The same, but for `int8_panels`; see `free_order`.
    pub free_order: &'static Table,
}

/// Values, distance of the groups, codes, the same split, and totals.
pub(crate) type QuantiseFn =
    unsafe fn(&[f32], usize, &mut [[i8; GROUP]], &mut [[i8; GROUP]], &mut [GroupTotals]);
/// Values, weight, bias, eps, output.
pub(crate) type LayerNormFn = unsafe fn(&[f32], &[f32], &[f32], f32, &mut [f32]);
/// Queries, keys, attended positions, work space, output.
pub(crate) type AttendFn =
    unsafe fn(&AttentionRows<'_>, KeyCache<'_>, Attended<'_>, &mut AttendScratch, &mut [f32]);
/// Queries, keys, work space, output.
pub(crate) type ScoresFn = unsafe fn(&IndexQueries<'_>, KeyRows<'_>, &mut ScoreScratch, &mut [f32]);
/// Scores, how many to keep, room for ranks, output.
pub(crate) type SelectFn = unsafe fn(&[f32], usize, &mut Vec<i32>, &mut [u32]) -> usize;

/// Defines `TABLE` for a room type, each entry compiled with the given target features.
macro_rules! room_table {
    ($room:ty $(, $features:literal)?) => {
        mod entries {
            use super::*;
            use crate::Activations;
            use crate::activations::{GROUP, GroupTotals};
            use crate::attention::{AttendScratch, Attended, AttentionRows, KeyCache, KeyRows};
            use crate::indexer::{IndexQueries, ScoreScratch};
            use crate::portable::lanes;
            use crate::portable::combine::Coefficients;
            use crate::portable::{Out, attend, combine, exact, exp, int8, norm, quantise, score, select};
            use forebay_core::panel::PanelView;
            use forebay_core::view::MatrixView;
            use std::ops::Range;

            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn exact_rows(w: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { exact::rows::<$room>(w, rows, x, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn exact_panels(w: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { exact::panels::<$room>(w, rows, x, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn int8_rows(w: &MatrixView<'_>, rows: Range<usize>, x: &Activations, out: Out) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { int8::rows::<$room>(w, rows, x, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn int8_panels(w: &PanelView<'_>, rows: Range<usize>, x: &Activations, out: Out) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { int8::panels::<$room, false>(w, rows, x, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn int8_panels_free_order(
                w: &PanelView<'_>,
                rows: Range<usize>,
                x: &Activations,
                out: Out,
            ) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { int8::panels::<$room, true>(w, rows, x, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn combine(
                w: &MatrixView<'_>,
                rows: Range<usize>,
                c: Coefficients<'_>,
                out: &mut [f32],
            ) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { combine::combine::<$room>(w, rows, c, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn quantise_row(
                x: &[f32],
                stride: usize,
                codes: &mut [[i8; GROUP]],
                split: &mut [[i8; GROUP]],
                totals: &mut [GroupTotals],
            ) {
                quantise::row(x, stride, codes, split, totals)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
                // SAFETY: the rules of the table are those of the body.
                unsafe { lanes::dot::<$room, f32>(a, b) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn axpy(c: f32, x: &[f32], out: &mut [f32]) {
                lanes::axpy(c, x, out)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
                norm::rms_norm(x, w, eps, out)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, out: &mut [f32]) {
                norm::layer_norm(x, w, b, eps, out)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn exp_all(values: &mut [f32]) {
                exp::exp_all(values)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn sigmoid_all(values: &mut [f32]) {
                exp::sigmoid_all(values)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn swiglu(gate: &mut [f32], up: &[f32]) {
                exp::swiglu(gate, up)
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn attend(
                query: &AttentionRows<'_>,
                keys: KeyCache<'_>,
                attended: Attended<'_>,
                scratch: &mut AttendScratch,
                out: &mut [f32],
            ) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { attend::attend::<$room>(query, keys, attended, scratch, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn scores(
                query: &IndexQueries<'_>,
                keys: KeyRows<'_>,
                scratch: &mut ScoreScratch,
                out: &mut [f32],
            ) {
                // SAFETY: the rules of the table are those of the body.
                unsafe { score::scores::<$room>(query, keys, scratch, out) }
            }
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn select(
                scores: &[f32],
                keep: usize,
                ranks: &mut Vec<i32>,
                out: &mut [u32],
            ) -> usize {
                select::positions(scores, keep, ranks, out)
            }
        }

        /// The functions of this room.
        pub(crate) static TABLE: crate::table::Table = crate::table::Table {
            exact_rows: entries::exact_rows,
            exact_panels: entries::exact_panels,
            int8_rows: entries::int8_rows,
            int8_panels: entries::int8_panels,
            combine: entries::combine,
            quantise_row: entries::quantise_row,
            dot: entries::dot,
            axpy: entries::axpy,
            rms_norm: entries::rms_norm,
            layer_norm: entries::layer_norm,
            exp_all: entries::exp_all,
            sigmoid_all: entries::sigmoid_all,
            swiglu: entries::swiglu,
            attend: entries::attend,
            scores: entries::scores,
            select: entries::select,
            free_order: &FREE_ORDER,
        };

        static FREE_ORDER: crate::table::Table =
            crate::table::Table { int8_panels: entries::int8_panels_free_order, ..TABLE };
    };
}
pub(crate) use room_table;

/// A room whose arithmetic lives in its own `lanes`, `panel`, `unpack` and `weights` modules: every method
/// hands over to the function of that name there; one with a `rows` module names it last. Also
/// makes its table.
macro_rules! room {
    ($room:ident, $features:literal $(, $rows:ident)?) => {
        impl $crate::portable::Room for $room {
            type Lanes = lanes::Lanes;

            const REGISTERS: usize = lanes::REGISTERS;

            #[inline(always)]
            unsafe fn splat(value: f32) -> Self::Lanes {
                // SAFETY: the caller has checked for the room's instruction set.
                unsafe { lanes::splat(value) }
            }

            #[inline(always)]
            unsafe fn load(values: &[f32; $crate::portable::lanes::LANES]) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { lanes::load(values) }
            }

            #[inline(always)]
            unsafe fn load_bf16(
                values: &[$crate::portable::lanes::Bf16Bits; $crate::portable::lanes::LANES],
            ) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { lanes::load_bf16(values) }
            }

            #[inline(always)]
            unsafe fn load_f16(values: &[u16; $crate::portable::lanes::LANES]) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::load_f16(values) }
            }

            #[inline(always)]
            unsafe fn load_fp8(values: &[u8; $crate::portable::lanes::LANES]) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::load_fp8(values) }
            }

            #[inline(always)]
            unsafe fn load_i8(values: &[i8; $crate::portable::lanes::LANES]) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::load_i8(values) }
            }

            type Int4Scale = weights::Int4Scale;

            #[inline(always)]
            unsafe fn int4_scale(scale: f32) -> Self::Int4Scale {
                // SAFETY: as above.
                unsafe { weights::int4_scale(scale) }
            }

            #[inline(always)]
            unsafe fn load_int4(
                codes: &[u8; $crate::portable::lanes::LANES / 2],
                scale: Self::Int4Scale,
            ) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::load_int4(codes, scale) }
            }

            #[inline(always)]
            unsafe fn to_int4_order(lanes: Self::Lanes) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::to_int4_order(lanes) }
            }

            #[inline(always)]
            unsafe fn from_int4_order(lanes: Self::Lanes) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::from_int4_order(lanes) }
            }

            #[inline(always)]
            unsafe fn int8_column(
                unit: &[u8; forebay_core::panel::PANEL_LINE],
                column: usize,
            ) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::int8_column(unit, column) }
            }

            #[inline(always)]
            unsafe fn int4_column(
                unit: &[u8; forebay_core::panel::PANEL_LINE],
                column: usize,
            ) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { weights::int4_column(unit, column) }
            }

            #[inline(always)]
            unsafe fn store(lanes: Self::Lanes, out: &mut [f32; $crate::portable::lanes::LANES]) {
                // SAFETY: as above.
                unsafe { lanes::store(lanes, out) }
            }

            #[inline(always)]
            unsafe fn fma(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { lanes::fma(a, b, c) }
            }

            #[inline(always)]
            unsafe fn trees(sums: [Self::Lanes; 4]) -> [f32; 4] {
                // SAFETY: as above.
                unsafe { lanes::trees(sums) }
            }

            #[inline(always)]
            unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
                // SAFETY: as above.
                unsafe { unpack::int4(codes, out) }
            }

            #[inline(always)]
            unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
                // SAFETY: as above.
                unsafe { unpack::int2(codes, out) }
            }

            type Ints = panel::Ints;
            const PAIRS: bool = panel::PAIRS;
            const BATCH: usize = panel::BATCH;

            #[inline(always)]
            unsafe fn from_ints(ints: Self::Ints) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { panel::from_ints(ints) }
            }

            #[inline(always)]
            unsafe fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
                // SAFETY: as above.
                unsafe { lanes::mul(a, b) }
            }

            #[inline(always)]
            unsafe fn dot_int4<const P: usize, const S: usize>(
                codes: [*const u8; P],
                units: usize,
                x: *const i8,
                negated_sums: [i32; S],
            ) -> [[Self::Ints; S]; P] {
                // SAFETY: as above.
                unsafe { panel::dot_int4(codes, units, x, negated_sums) }
            }

            #[inline(always)]
            unsafe fn dot_int8<const P: usize, const S: usize>(
                codes: [*const u8; P],
                units: usize,
                x: *const i8,
                negated_sums: [i32; S],
            ) -> [[Self::Ints; S]; P] {
                // SAFETY: as above.
                unsafe { panel::dot_int8(codes, units, x, negated_sums) }
            }

            #[inline(always)]
            fn prefetch(at: *const u8) {
                panel::prefetch(at);
            }

            #[inline(always)]
            unsafe fn transpose(
                start: *const u8,
                stride: usize,
                out: &mut [u8; 16 * forebay_core::panel::PANEL_LINE],
            ) {
                // SAFETY: as above.
                unsafe { panel::transpose(start, stride, out) }
            }

            $(
                #[inline(always)]
                unsafe fn line_int4(
                    start: *const u8,
                    stride: usize,
                    x: [*const i8; 2],
                    negated_sums: [i32; 2],
                ) -> [Self::Ints; 2] {
                    // SAFETY: as above.
                    unsafe { $rows::line_int4(start, stride, x, negated_sums) }
                }

                #[inline(always)]
                unsafe fn line_int8(
                    start: *const u8,
                    stride: usize,
                    x: *const i8,
                    negated_sum: i32,
                ) -> Self::Ints {
                    // SAFETY: as above.
                    unsafe { $rows::line_int8(start, stride, x, negated_sum) }
                }
            )?
        }

        $crate::table::room_table!($room, $features);
    };
}
pub(crate) use room;
