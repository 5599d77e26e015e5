//! Matrices put together from a pool: rows change places and signs, columns change places in whole blocks.
//!
//! Each of these steps commutes with quantisation: what comes out is bit for bit what the quantiser makes of
//! the same steps on the FP8 weights. So entropy of codes and the lattice of scales are real, while the cost is
//! that of copying.

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_core::Format;
use forebay_core::format::FP8_BLOCK;

use super::pool::{Pool, PoolKey};
use super::random::Stream;

/// Rows of one matrix that come from one pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// How many.
    pub rows: usize,
    /// From where.
    pub pool: PoolKey,
}

/// A matrix to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// The tensor's name, which also chooses its random numbers.
    pub name: String,
    /// Columns.
    pub cols: usize,
    /// Its format; that of all its pools.
    pub format: Format,
    /// Its rows, from the top.
    pub segments: Vec<Segment>,
}

/// Up to 128 rows of a matrix that come from one band of a pool.
#[derive(Clone, Copy, Debug)]
struct Band {
    pool: PoolKey,
    rows: usize,
}

impl Matrix {
    /// A matrix whose rows are all alike.
    pub fn plain(name: String, rows: usize, pool: PoolKey) -> Self {
        let segments = vec![Segment { rows, pool }];
        Self { name, cols: pool.cols, format: pool.format(), segments }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.segments.iter().map(|segment| segment.rows).sum()
    }

    /// Whether every band is a line of blocks of an FP8 matrix, which begins at a multiple of 128 rows.
    pub fn is_blocked(&self) -> bool {
        let before_last = self.segments.split_last().map_or(&[][..], |(_, rest)| rest);
        before_last.iter().all(|segment| segment.rows.is_multiple_of(FP8_BLOCK))
    }

    fn bands(&self) -> impl Iterator<Item = Band> + '_ {
        self.segments.iter().flat_map(|&Segment { rows, pool }| {
            let first_rows = (0..rows).step_by(FP8_BLOCK);
            first_rows.map(move |first| Band { pool, rows: FP8_BLOCK.min(rows - first) })
        })
    }

    /// Cuts the matrix into ranges of bands of about `rows` rows each.
    pub fn pieces(&self, rows: usize) -> Vec<Range<usize>> {
        let (mut pieces, mut first, mut held) = (Vec::new(), 0, 0);
        let count = self.bands().count();
        for (band, Band { rows: here, .. }) in self.bands().enumerate() {
            held += here;
            if held >= rows || band + 1 == count {
                pieces.push(first..band + 1);
                (first, held) = (band + 1, 0);
            }
        }
        pieces
    }

    /// The codes of these bands.
    pub fn codes(&self, pools: &BTreeMap<PoolKey, Pool>, seed: u64, bands: Range<usize>) -> Vec<u8> {
        let mut out = Vec::new();
        self.each_row(pools, seed, bands, |pool, draw, row| {
            let start = out.len();
            let unit = pool.key().format().row_bytes(pool.key().unit()).unwrap_or(usize::MAX);
            draw.gather(pool.codes(draw.band, usize::from(draw.rows[row])), unit, &mut out);
            if draw.negated(row) {
                negate(pool.key().format(), self.cols, &mut out[start..]);
            }
        });
        out
    }

    /// The scales of these bands, little-endian.
    pub fn scales(&self, pools: &BTreeMap<PoolKey, Pool>, seed: u64, bands: Range<usize>) -> Vec<u8> {
        let mut out: Vec<f32> = Vec::new();
        self.each_row(pools, seed, bands, |pool, draw, row| {
            if self.format == Format::Fp8Block && row > 0 {
                // All rows of a band share their line of blocks.
                return;
            }
            let unit = pool.key().unit() / pool.columns_per_scale();
            let scales = pool.scales(draw.band, usize::from(draw.rows[row]));
            // One scale for the whole row stays where it is.
            match scales.len() {
                0 | 1 => out.extend(scales),
                _ => draw.gather(scales, unit.max(1), &mut out),
            }
        });
        out.iter().flat_map(|scale| scale.to_le_bytes()).collect()
    }

    fn each_row(
        &self,
        pools: &BTreeMap<PoolKey, Pool>,
        seed: u64,
        wanted: Range<usize>,
        mut row_of: impl FnMut(&Pool, &Draw, usize),
    ) {
        for (index, band) in self.bands().enumerate().skip(wanted.start).take(wanted.len()) {
            let pool = &pools[&band.pool];
            let draw = Draw::new(pool, Stream::new(seed, &self.name, index as u64));
            (0..band.rows).for_each(|row| row_of(pool, &draw, row));
        }
    }
}

/// How one band of a matrix is made from one band of its pool.
struct Draw {
    band: usize,
    rows: Vec<u16>,
    units: Vec<u16>,
    signs: [u64; 2],
}

impl Draw {
    fn new(pool: &Pool, mut stream: Stream) -> Self {
        let band = stream.below(pool.bands() as u32) as usize;
        let rows = stream.permutation(FP8_BLOCK);
        let units = stream.permutation(pool.key().cols / pool.key().unit());
        let signs = match pool.key().is_symmetric() {
            true => [stream.bits(), stream.bits()],
            false => [0, 0],
        };
        Self { band, rows, units, signs }
    }

    fn negated(&self, row: usize) -> bool {
        self.signs[row / 64] >> (row % 64) & 1 == 1
    }

    /// Appends `source`, its units in the drawn order and what is left behind them where it is.
    fn gather<T: Copy>(&self, source: &[T], unit: usize, out: &mut Vec<T>) {
        for place in &self.units {
            let at = usize::from(*place) * unit;
            out.extend_from_slice(&source[at..at + unit]);
        }
        out.extend_from_slice(&source[self.units.len() * unit..]);
    }
}

/// Negates every weight of a row. Symmetric quantisation never uses the code that has no negative.
fn negate(format: Format, cols: usize, codes: &mut [u8]) {
    match format {
        // Nibbles 8 + q become 8 - q. An unused upper one is 0, and stays: the lower one never is.
        Format::Int4Row | Format::Int4Group(_) => {
            codes.iter_mut().for_each(|byte| *byte = 0x10u8.wrapping_sub(*byte));
        }
        // The same with 2 + q and four codes a byte.
        Format::Int2Row => {
            codes.iter_mut().for_each(|byte| *byte = 0x54u8.wrapping_sub(*byte));
            if let (Some(last), used @ 1..) = (codes.last_mut(), cols % 4) {
                *last &= (1 << (2 * used)) - 1;
            }
        }
        Format::Int8Row => codes.iter_mut().for_each(|byte| *byte = byte.wrapping_neg()),
        Format::Fp8Block => codes.iter_mut().for_each(|byte| *byte ^= 0x80),
        Format::F32 => codes.iter_mut().skip(3).step_by(4).for_each(|byte| *byte ^= 0x80),
        Format::Bf16 | Format::F16 => codes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80),
    }
}
