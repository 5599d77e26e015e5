//! Random weights in memory, several copies of a matrix one after the other.

use std::cell::Cell;

use forebay_core::format::FP8_BLOCK;
use forebay_core::{CodedView, Format, MatrixView, PanelShape, PanelView, coded, float, quant};
use forebay_kernels::Buffer;
use forebay_kernels::{Team, Weights};

use super::cases::{Layout, Shape};

/// Copies start on a cache line of their own.
const LINE: usize = 64;
/// Bytes of one run of random numbers.
const RUN: usize = 1 << 16;

/// Copies of a matrix with random codes, and scales of about 0.01.
pub struct Pool {
    format: Format,
    layout: Layout,
    shape: Shape,
    /// Codes; with panels and coded, scales too.
    codes: Buffer,
    /// Empty with panels and coded.
    scales: Buffer,
    copies: usize,
    next: Cell<usize>,
}

impl Pool {
    /// As many copies as fill `bytes`, at least one; `None` if there is not enough memory for it.
    pub fn random(team: &Team, format: Format, layout: Layout, shape: Shape, bytes: u64) -> Option<Self> {
        match layout {
            Layout::Rows => Self::rows(team, format, shape, bytes),
            Layout::Panels => Self::panels(team, format, shape, bytes),
            Layout::Coded => Self::coded(format, shape, bytes),
        }
    }

    fn rows(team: &Team, format: Format, shape: Shape, bytes: u64) -> Option<Self> {
        let (code_bytes, scale_bytes) = stored(format, shape)?;
        let one = code_bytes.checked_add(scale_bytes)?;
        let copies = usize::try_from(bytes).ok()?.div_ceil(one).max(1);
        let mut codes = Buffer::zeroed(code_bytes.checked_mul(copies)?)?;
        let mut scales = Buffer::zeroed(scale_bytes.checked_mul(copies)?)?;
        randomise(team, &mut codes, Kind::Codes(format));
        randomise(team, &mut scales, Kind::Scales);
        Some(Self { format, layout: Layout::Rows, shape, codes, scales, copies, next: Cell::new(0) })
    }

    /// Packs a row-major matrix and copies it.
    fn panels(team: &Team, format: Format, shape: Shape, bytes: u64) -> Option<Self> {
        let panels = PanelShape::new(format, shape.rows, shape.cols)?;
        let rows = Self::rows(team, format, shape, 1)?;
        let copies = usize::try_from(bytes).ok()?.div_ceil(panels.bytes()).max(1);
        let mut codes = Buffer::zeroed(panels.bytes().checked_mul(copies)?)?;
        let (first, others) = codes.split_at_mut(panels.bytes());
        let view = rows.row_major(0);
        team.for_each_chunk(first, panels.panel_bytes(), &|panel, out| panels.pack_panel(&view, panel, out));
        team.for_each_chunk(others, panels.bytes(), &|_, copy| copy.copy_from_slice(first));
        let scales = Buffer::zeroed(0)?;
        Some(Self { format, layout: Layout::Panels, shape, codes, scales, copies, next: Cell::new(0) })
    }

    /// Codes a matrix and copies it. How well weights can be coded depends on them: these are Gaussian, as those of
    /// models nearly are, and come by way of FP8.
    fn coded(format: Format, shape: Shape, bytes: u64) -> Option<Self> {
        let panels = PanelShape::new(format, shape.rows, shape.cols)?;
        let strip = gaussian_fp8(shape.cols)?;
        let strip = quant::encode(format, FP8_BLOCK, shape.cols, &strip).ok()?;
        let mut raw = Buffer::zeroed(panels.bytes())?;
        let some = PanelShape::new(format, FP8_BLOCK, shape.cols)?;
        let view = MatrixView::new(format, FP8_BLOCK, shape.cols, &strip.codes, &strip.scales).ok()?;
        // The same rows again and again.
        for (panel, out) in raw.chunks_exact_mut(panels.panel_bytes()).enumerate() {
            some.pack_panel(&view, panel % some.panels(), out);
        }
        let one = coded::encode(&panels, &raw)?;
        let copies = usize::try_from(bytes).ok()?.div_ceil(one.len()).max(1);
        let mut codes = Buffer::zeroed(one.len().checked_mul(copies)?)?;
        codes.chunks_exact_mut(one.len()).for_each(|copy| copy.copy_from_slice(&one));
        let scales = Buffer::zeroed(0)?;
        Some(Self { format, layout: Layout::Coded, shape, codes, scales, copies, next: Cell::new(0) })
    }

    /// Bytes of one copy, scales included, of coded weights those that they stand for; `None` if the layout does not have the format, or on overflow.
    pub fn copy_bytes(format: Format, layout: Layout, shape: Shape) -> Option<u64> {
        let bytes = match layout {
            Layout::Rows => format.total_bytes(shape.rows, shape.cols),
            Layout::Panels | Layout::Coded => {
                PanelShape::new(format, shape.rows, shape.cols).map(|panels| panels.bytes())
            }
        };
        bytes.map(|bytes| bytes as u64)
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How the copies lie in memory.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The shape of each copy.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many copies there are.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// The codes of all copies.
    pub fn bytes(&self) -> &[u8] {
        &self.codes
    }

    /// The next copy, in turns.
    pub fn next(&self) -> Weights<'_> {
        let copy = self.next.get();
        self.next.set((copy + 1) % self.copies);
        let Shape { rows, cols } = self.shape;
        match (self.layout, PanelShape::new(self.format, rows, cols)) {
            (Layout::Panels, Some(shape)) => {
                let bytes = &self.codes[copy * shape.bytes()..][..shape.bytes()];
                PanelView::new(shape, bytes).expect("the pool was made for this shape").into()
            }
            (Layout::Coded, Some(shape)) => {
                let len = self.codes.len() / self.copies;
                let bytes = &self.codes[copy * len..][..len];
                CodedView::new(shape, bytes).expect("the pool was made for this shape").into()
            }
            _ => self.row_major(copy).into(),
        }
    }

    fn row_major(&self, copy: usize) -> MatrixView<'_> {
        let Shape { rows, cols } = self.shape;
        let (code_stride, scale_stride) = (self.codes.len() / self.copies, self.scales.len() / self.copies);
        let codes = self.format.payload_bytes(rows, cols).unwrap_or(0);
        let scales = self.format.scale_count(rows, cols).unwrap_or(0);
        let codes = &self.codes[copy * code_stride..][..codes];
        let scales = bytemuck::cast_slice(&self.scales[copy * scale_stride..][..4 * scales]);
        MatrixView::new(self.format, rows, cols, codes, scales).expect("the pool was made for this shape")
    }
}

/// Gaussian numbers as an FP8 checkpoint has them, as many rows as a block.
fn gaussian_fp8(cols: usize) -> Option<Vec<f32>> {
    let mut state = 0;
    // Between 0 and 1, neither of them.
    let mut uniform = || ((splitmix(&mut state) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut normal = || {
        let (size, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        (0.01 * size * angle.cos()) as f32
    };
    let mut weights: Vec<f32> = (0..FP8_BLOCK.checked_mul(cols)?).map(|_| normal()).collect();
    for first in (0..cols).step_by(FP8_BLOCK) {
        let places = || {
            (0..FP8_BLOCK)
                .flat_map(move |row| (first..cols.min(first + FP8_BLOCK)).map(move |c| row * cols + c))
        };
        let value = places().fold(0f32, |most, at| most.max(weights[at].abs())) / 448.0;
        for at in places() {
            weights[at] = float::fp8_e4m3_to_f32(float::f32_to_fp8_e4m3(weights[at] / value)) * value;
        }
    }
    Some(weights)
}

/// Bytes of codes and of scales of one row-major copy, in whole cache lines.
fn stored(format: Format, shape: Shape) -> Option<(usize, usize)> {
    let codes = format.payload_bytes(shape.rows, shape.cols)?.checked_next_multiple_of(LINE)?;
    let scales = format.scale_count(shape.rows, shape.cols)?.checked_mul(4)?;
    Some((codes, scales.checked_next_multiple_of(LINE)?))
}

/// What random bits are made into. All numbers are normal and about 0.01 in size, or about 1: speed must not
/// depend on NaN, infinities or denormal numbers.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Codes of weights.
    Codes(Format),
    /// Scales of weights: f32, positive.
    Scales,
    /// Activations, queries: f32 from 0.5 to 1, with either sign.
    Floats,
    /// Cached keys: bf16 from 0.5 to 1, with either sign.
    Bf16,
}

impl Kind {
    /// Bits to keep and bits to set in every eight bytes.
    fn masks(self) -> (u64, u64) {
        match self {
            Kind::Codes(Format::F32) => (0x807F_FFFF_807F_FFFF, 0x3C00_0000_3C00_0000),
            Kind::Codes(Format::Bf16) => (0x807F_807F_807F_807F, 0x3C00_3C00_3C00_3C00),
            Kind::Codes(Format::F16) => (0x83FF_83FF_83FF_83FF, 0x2000_2000_2000_2000),
            // Without the highest bit of the exponent there is no NaN.
            Kind::Codes(Format::Fp8Block) => (0xBFBF_BFBF_BFBF_BFBF, 0),
            Kind::Codes(_) => (u64::MAX, 0),
            Kind::Scales => (0x007F_FFFF_007F_FFFF, 0x3C00_0000_3C00_0000),
            Kind::Floats => (0x807F_FFFF_807F_FFFF, 0x3F00_0000_3F00_0000),
            Kind::Bf16 => (0x807F_807F_807F_807F, 0x3F00_3F00_3F00_3F00),
        }
    }
}

/// Fills `bytes` with random numbers, the same ones every time whatever the team.
pub fn randomise(team: &Team, bytes: &mut [u8], kind: Kind) {
    let (keep, set) = kind.masks();
    team.for_each_chunk(bytes, RUN, &|run, bytes| {
        let mut state = run as u64;
        for word in bytes.chunks_mut(8) {
            let random = (splitmix(&mut state) & keep | set).to_le_bytes();
            word.copy_from_slice(&random[..word.len()]);
        }
    });
}

/// Random f32 numbers from 0.5 to 1, with either sign.
pub fn random_floats(team: &Team, count: usize) -> Vec<f32> {
    let mut values = vec![0f32; count];
    randomise(team, bytemuck::cast_slice_mut(&mut values), Kind::Floats);
    values
}

/// The SplitMix64 generator (Steele, Lea and Flood, 2014).
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::quant::decode_row;
    use forebay_kernels::{Input, Kernels, matmul};

    /// The rows of a copy, as f32.
    fn decoded(view: &MatrixView<'_>) -> Vec<f32> {
        let mut values = vec![0.0; view.rows() * view.cols()];
        for (i, row) in values.chunks_exact_mut(view.cols()).enumerate() {
            decode_row(view, i, row);
        }
        values
    }

    #[test]
    fn every_weight_is_an_ordinary_number() {
        let team = Team::new(2).unwrap();
        let shape = Shape { rows: 5, cols: 200 };
        for name in ["f32", "bf16", "f16", "fp8-e4m3", "int8", "int4-row", "int2-row", "int4-g64"] {
            let pool = Pool::random(&team, name.parse().unwrap(), Layout::Rows, shape, 3000).unwrap();
            assert!(pool.copies() >= 1 && pool.bytes().len() >= 250, "{name}");
            for _ in 0..pool.copies() + 1 {
                let Weights::Rows(view) = pool.next() else { panic!("{name}") };
                let values = decoded(&view);
                assert!(values.iter().all(|w| w.is_finite() && w.abs() < 16.0), "{name}: {values:?}");
                assert!(values.iter().any(|w| *w != values[0]), "{name}");
            }
        }
    }

    /// Speeds of the two layouts are comparable because they hold the same numbers.
    #[test]
    fn panels_hold_the_first_row_major_matrix() {
        let team = Team::new(2).unwrap();
        let shape = Shape { rows: 37, cols: 200 };
        for name in ["int8", "int4-row", "int4-g64"] {
            let make = |layout| Pool::random(&team, name.parse().unwrap(), layout, shape, 20_000).unwrap();
            let (panels, rows) = (make(Layout::Panels), make(Layout::Rows));
            let Weights::Rows(first) = rows.next() else { panic!("{name}") };
            let x = random_floats(&team, shape.cols);
            let product = |weights: Weights<'_>| {
                let mut y = vec![0.0; shape.rows];
                matmul(Kernels::detect(), &team, weights, Input::exact(&x), &mut y);
                y
            };
            let want = product(first.into());
            assert!(panels.copies() >= 2 && want.iter().all(|y| *y != 0.0));
            for _ in 0..panels.copies() {
                assert_eq!(product(panels.next()), want, "{name}");
            }
        }
        assert!(Pool::random(&team, Format::Bf16, Layout::Panels, shape, 1).is_none());
    }

    /// Fewer bytes, and as many numbers.
    #[test]
    fn coded_weights_are_small_and_ordinary() {
        let team = Team::new(2).unwrap();
        let shape = Shape { rows: 300, cols: 384 };
        for (name, ratio) in [("int4-row", 0.9), ("int4-g64", 0.85)] {
            let format = name.parse().unwrap();
            let pool = Pool::random(&team, format, Layout::Coded, shape, 200_000).unwrap();
            let raw = Pool::copy_bytes(format, Layout::Coded, shape).unwrap() as f64;
            let stored = (pool.bytes().len() / pool.copies()) as f64;
            assert!(pool.copies() >= 2 && stored < ratio * raw, "{name}: {stored} of {raw}");
            let x = random_floats(&team, shape.cols);
            for _ in 0..pool.copies() + 1 {
                let mut y = vec![f32::NAN; shape.rows];
                matmul(Kernels::detect(), &team, pool.next(), Input::exact(&x), &mut y);
                assert!(y.iter().all(|y| y.is_finite() && *y != 0.0), "{name}");
                assert_eq!(y[..172], y[128..], "{name}: rows repeat");
            }
        }
        assert!(Pool::random(&team, Format::Int8Row, Layout::Coded, shape, 1).is_none());
    }

    #[test]
    fn numbers_do_not_depend_on_the_team() {
        let make = |threads| random_floats(&Team::new(threads).unwrap(), 40_001);
        assert_eq!(make(1), make(3));
        assert!(make(1).iter().all(|x| (0.5..1.0).contains(&x.abs())));
    }
}
