//! Pools of weights that went the way of real ones: normal numbers, FP8 in blocks of 128 x 128, then the
//! container's format by its own quantiser.
//!
//! Drawing, blocking and quantising every weight of a model would take a hundred times as long as writing it.
//! So a pool of a few hundred megabytes of quantised rows is made once, and matrices are put together from it
//! without any arithmetic on weights ([`super::matrix`]).

use std::thread;

use forebay_core::Format;
use forebay_core::float::{f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use forebay_core::format::FP8_BLOCK;
use forebay_core::quant::{EncodeError, columns_per_scale, encode};

use super::random::Stream;

/// Largest FP8 number: a block's largest weight becomes this.
const FP8_MAX: f32 = 448.0;

/// What distinguishes one pool from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolKey {
    /// Columns of the matrices made from it.
    pub cols: usize,
    format: FormatKey,
    std: u32,
    mean: u32,
}

/// [`Format`] with an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FormatKey(Format);

impl PartialOrd for FormatKey {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for FormatKey {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.to_string().cmp(&other.0.to_string())
    }
}

impl PoolKey {
    /// Weights with this mean and standard deviation.
    pub fn new(cols: usize, format: Format, std: f64, mean: f64) -> Self {
        Self { cols, format: FormatKey(format), std: (std as f32).to_bits(), mean: (mean as f32).to_bits() }
    }

    /// The container's format.
    pub fn format(&self) -> Format {
        self.format.0
    }

    /// Whether a row may be negated: its weights are as likely positive as negative.
    pub fn is_symmetric(&self) -> bool {
        f32::from_bits(self.mean) == 0.0
    }

    /// Columns that move together when columns change places, so that FP8 blocks and groups stay whole.
    pub fn unit(&self) -> usize {
        match self.format.0 {
            Format::Int4Group(size) => least_common_multiple(FP8_BLOCK, size.get()),
            _ => FP8_BLOCK,
        }
    }

    fn stream(&self, seed: u64, band: usize) -> Stream {
        let Self { cols, format, std, mean } = self;
        Stream::new(seed, &format!("pool {cols} {} {std} {mean}", format.0), band as u64)
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Bands of 128 quantised rows.
pub struct Pool {
    key: PoolKey,
    bands: usize,
    row_bytes: usize,
    row_scales: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Pool {
    /// Draws and quantises `bands` bands with `threads` threads. The result depends on `key`, `bands` and
    /// `seed` alone.
    pub fn build(key: PoolKey, bands: usize, seed: u64, threads: usize) -> Result<Self, EncodeError> {
        let (row_bytes, row_scales) = match key.format() {
            // A band is a line of blocks; every row of it has the line's scales.
            Format::Fp8Block => (key.cols, key.cols.div_ceil(FP8_BLOCK)),
            format => {
                let one = encode(format, 1, key.cols, &vec![0.0; key.cols])?;
                (one.codes.len(), one.scales.len())
            }
        };
        let mut codes = vec![0; bands * FP8_BLOCK * row_bytes];
        let mut scales = vec![0.0; bands * FP8_BLOCK * row_scales];
        // Float formats have no scales; an empty piece for every band then.
        let mut pieces: Vec<(usize, &mut [u8], &mut [f32])> = Vec::with_capacity(bands);
        let mut rest = &mut scales[..];
        for (band, codes) in codes.chunks_mut(FP8_BLOCK * row_bytes).enumerate() {
            let (scales, others) = rest.split_at_mut(FP8_BLOCK * row_scales);
            rest = others;
            pieces.push((band, codes, scales));
        }
        let share = pieces.len().div_ceil(threads.max(1)).max(1);
        thread::scope(|scope| {
            let workers: Vec<_> = pieces
                .chunks_mut(share)
                .map(|mine| {
                    scope.spawn(move || {
                        mine.iter_mut()
                            .try_for_each(|(band, codes, scales)| fill_band(&key, seed, *band, codes, scales))
                    })
                })
                .collect();
            let join = |worker: thread::ScopedJoinHandle<'_, Result<(), EncodeError>>| match worker.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            workers.into_iter().try_for_each(join)
        })?;
        Ok(Self { key, bands, row_bytes, row_scales, codes, scales })
    }

    /// What it holds.
    pub fn key(&self) -> &PoolKey {
        &self.key
    }

    /// Bands in it.
    pub fn bands(&self) -> usize {
        self.bands
    }

    /// The codes of row `row` of band `band`.
    pub fn codes(&self, band: usize, row: usize) -> &[u8] {
        let at = (band * FP8_BLOCK + row) * self.row_bytes;
        &self.codes[at..at + self.row_bytes]
    }

    /// The scales of row `row` of band `band`; none in a float format.
    pub fn scales(&self, band: usize, row: usize) -> &[f32] {
        let at = (band * FP8_BLOCK + row) * self.row_scales;
        &self.scales[at..at + self.row_scales]
    }

    /// Columns that share one scale.
    pub fn columns_per_scale(&self) -> usize {
        match self.key.format() {
            Format::Fp8Block => FP8_BLOCK,
            format => columns_per_scale(format, self.key.cols),
        }
    }
}

fn fill_band(
    key: &PoolKey,
    seed: u64,
    band: usize,
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<(), EncodeError> {
    let row_bytes = codes.len() / FP8_BLOCK;
    let row_scales = scales.len() / FP8_BLOCK;
    if key.format() == Format::Fp8Block {
        let band = fp8_band(key, seed, band);
        codes.copy_from_slice(&band.codes);
        scales.chunks_exact_mut(row_scales).for_each(|row| row.copy_from_slice(&band.multipliers));
        return Ok(());
    }
    let values = band_values(key, seed, band);
    for (r, row) in values.chunks_exact(key.cols).enumerate() {
        let encoded = encode(key.format(), 1, key.cols, row)?;
        codes[r * row_bytes..(r + 1) * row_bytes].copy_from_slice(&encoded.codes);
        scales[r * row_scales..(r + 1) * row_scales].copy_from_slice(&encoded.scales);
    }
    Ok(())
}

/// A line of blocks of an FP8 checkpoint.
struct Fp8Band {
    /// Row after row.
    codes: Vec<u8>,
    /// One for each block.
    multipliers: Vec<f32>,
}

/// The weights of a band as an FP8 checkpoint holds them: code times its block's multiplier.
pub fn band_values(key: &PoolKey, seed: u64, band: usize) -> Vec<f32> {
    let Fp8Band { codes, multipliers } = fp8_band(key, seed, band);
    let decoded: [f32; 256] = std::array::from_fn(|code| fp8_e4m3_to_f32(code as u8));
    let value =
        |(at, code): (usize, &u8)| decoded[usize::from(*code)] * multipliers[at % key.cols / FP8_BLOCK];
    codes.iter().enumerate().map(value).collect()
}

fn fp8_band(key: &PoolKey, seed: u64, band: usize) -> Fp8Band {
    let mut values = vec![0.0; FP8_BLOCK * key.cols];
    key.stream(seed, band).fill_normal(&mut values, 0.0, f32::from_bits(key.std));
    for row in values.chunks_exact_mut(key.cols) {
        // Every row has exactly the wanted mean: what all tokens share must not leak where it is not wanted.
        let found = row.iter().map(|v| f64::from(*v)).sum::<f64>() / key.cols as f64;
        let shift = f32::from_bits(key.mean) - found as f32;
        row.iter_mut().for_each(|value| *value += shift);
    }
    let (mut codes, mut multipliers) = (vec![0; values.len()], Vec::new());
    for first in (0..key.cols).step_by(FP8_BLOCK) {
        let here = first..key.cols.min(first + FP8_BLOCK);
        let rows = || values.chunks_exact(key.cols).map(|row| &row[here.clone()]);
        let largest = rows().flatten().fold(0f32, |m, v| m.max(v.abs()));
        let multiplier = (largest / FP8_MAX).max(f32::MIN_POSITIVE);
        for (row, codes) in values.chunks_exact(key.cols).zip(codes.chunks_exact_mut(key.cols)) {
            for (value, code) in row[here.clone()].iter().zip(&mut codes[here.clone()]) {
                *code = f32_to_fp8_e4m3(*value / multiplier);
            }
        }
        multipliers.push(multiplier);
    }
    Fp8Band { codes, multipliers }
}
