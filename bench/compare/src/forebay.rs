//! Forebay's side: its quantised matrices, its team of threads.

use forebay_core::format::GroupSize;
use forebay_core::panel::{PanelShape, PanelView};
use forebay_core::quant::{Encoded, encode};
use forebay_core::{Format, view::MatrixView};
use forebay_kernels::{Activations, Input, Kernels, Team, matmul};
use std::rc::Rc;

use crate::contender::{Contender, Shape};

/// How the codes lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Row after row, as in a container.
    Rows,
    /// Sixteen rows at a time.
    Panels,
}

/// A weight format in one of its layouts.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    format: Format,
    bits: u8,
    layout: Layout,
}

impl Kind {
    /// Engine, weight format and layout.
    pub fn name(&self) -> String {
        let layout = match self.layout {
            Layout::Rows => "rows",
            Layout::Panels => "panels",
        };
        format!("forebay {} {layout}", self.format)
    }
}

/// Everything that is measured.
pub fn kinds() -> Vec<Kind> {
    let int4 = Format::Int4Group(GroupSize::new(64).expect("groups of 64 are allowed"));
    let formats = [(int4, 4), (Format::Int8Row, 8)];
    let layouts = [Layout::Rows, Layout::Panels];
    let kinds = formats.map(|(format, bits)| layouts.map(|layout| Kind { format, bits, layout }));
    kinds.into_iter().flatten().collect()
}

/// One matrix in memory of its own.
#[derive(Debug)]
enum Matrix {
    Rows(Encoded),
    Panels { shape: PanelShape, memory: Vec<u8>, start: usize },
}

impl Matrix {
    /// The rows `encoded` in panels, which begin at a cache line.
    fn panels(format: Format, shape: Shape, encoded: &Encoded) -> Self {
        let panels = PanelShape::new(format, shape.rows, shape.cols).expect("an integer format has panels");
        let mut memory = vec![0u8; panels.bytes() + LINE];
        let start = memory.as_ptr().align_offset(LINE);
        panels.pack(&rows(format, shape, encoded), &mut memory[start..start + panels.bytes()]);
        Matrix::Panels { shape: panels, memory, start }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

fn rows(format: Format, shape: Shape, encoded: &Encoded) -> MatrixView<'_> {
    MatrixView::new(format, shape.rows, shape.cols, &encoded.codes, &encoded.scales)
        .expect("the codes and scales of this shape")
}

/// Several equal matrices.
#[derive(Debug)]
pub struct Weights {
    kind: Kind,
    shape: Shape,
    bytes: usize,
    matrices: Vec<Matrix>,
}

impl Weights {
    /// Quantises `values`, repeats these rows until the matrix is full, and lays out enough
    /// matrices to fill `total_bytes`.
    pub fn new(kind: Kind, shape: Shape, values: &[f32], total_bytes: usize) -> Self {
        let distinct = values.len() / shape.cols;
        let rows =
            encode(kind.format, distinct, shape.cols, values).expect("an integer format can be written");
        let times = shape.rows / distinct;
        let encoded = Encoded { codes: rows.codes.repeat(times), scales: rows.scales.repeat(times) };
        let bytes = encoded.codes.len() + size_of_val(encoded.scales.as_slice());
        let copies = total_bytes.div_ceil(bytes);
        let matrices = (0..copies)
            .map(|_| match kind.layout {
                Layout::Rows => Matrix::Rows(encoded.clone()),
                Layout::Panels => Matrix::panels(kind.format, shape, &encoded),
            })
            .collect();
        Self { kind, shape, bytes, matrices }
    }
}

/// Forebay's products of one weight format with one batch of activations.
#[derive(Debug)]
pub struct Products<'a> {
    weights: &'a Weights,
    kernels: Kernels,
    team: Rc<Team>,
    x: &'a [f32],
    activations: Activations,
    y: Vec<f32>,
    products: usize,
}

impl<'a> Products<'a> {
    /// Products with `x`, `[batch, cols]`, row-major.
    pub fn new(weights: &'a Weights, kernels: Kernels, team: Rc<Team>, x: &'a [f32]) -> Self {
        let Shape { rows, cols } = weights.shape;
        let activations = Activations::new(cols);
        let y = vec![0.0; x.len() / cols * rows];
        Self { weights, kernels, team, x, activations, y, products: 0 }
    }

    /// One product, both layouts.
    fn product(&mut self, matrix: &Matrix) {
        let (kernels, team, y) = (self.kernels, &self.team, &mut self.y);
        self.activations.quantise(kernels, team, self.x);
        let input = Input::int8(self.x, &self.activations);
        match matrix {
            Matrix::Rows(encoded) => {
                let view = rows(self.weights.kind.format, self.weights.shape, encoded);
                matmul(kernels, team, view, input, y);
            }
            Matrix::Panels { shape, memory, start } => {
                let bytes = &memory[*start..start + shape.bytes()];
                let view = PanelView::new(*shape, bytes).expect("the bytes of this shape");
                matmul(kernels, team, view, input, y);
            }
        }
    }
}

impl Contender for Products<'_> {
    fn name(&self) -> String {
        self.weights.kind.name()
    }

    fn bits(&self) -> u8 {
        self.weights.kind.bits
    }

    fn matrix_bytes(&self) -> usize {
        self.weights.bytes
    }

    fn prepare(&mut self, products: usize) {
        self.products = products;
    }

    fn wake(&mut self) {}

    fn run(&mut self) {
        let weights = self.weights;
        for matrix in weights.matrices.iter().cycle().take(self.products) {
            self.product(matrix);
        }
    }

    /// The team's threads park by themselves after some microseconds.
    fn rest(&mut self) {}

    fn results(&self) -> Vec<f32> {
        self.y.clone()
    }
}
