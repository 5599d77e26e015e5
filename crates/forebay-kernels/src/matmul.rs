//! Matrix products: which rows, which arithmetic, which thread.

use crate::coded;
use crate::portable::Out;
use crate::portable::combine::Coefficients;
use crate::{Activations, Kernels, Team};
use forebay_core::coded::CodedView;
use forebay_core::format::Format;
use forebay_core::panel::PanelView;
use forebay_core::view::MatrixView;
use std::marker::PhantomData;
use std::ops::Range;

/// Products below this many multiply-adds run on the calling thread alone.
const ALONE: usize = 1 << 17;
/// Multiply-adds that are worth a part of their own.
const PART: usize = 1 << 17;
/// Parts are multiples of this many weight rows: two panels, and whole cache lines of `y`.
const PART_ROWS: usize = 32;
/// Weight rows of a part if there are enough of them: they share the reading of a large batch.
const FEW_PARTS_ROWS: usize = 128;

/// A weight matrix in one of the layouts. The layout never changes a result.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// Row after row, as in the container.
    Rows(MatrixView<'a>),
    /// Sixteen rows at a time: integer formats at full speed.
    Panels(PanelView<'a>),
    /// Panels of int4 in fewer bytes, decoded as they are multiplied.
    Coded(CodedView<'a>),
}

impl Weights<'_> {
    /// Rows (outputs).
    pub fn rows(&self) -> usize {
        match self {
            Weights::Rows(view) => view.rows(),
            Weights::Panels(view) => view.shape().rows(),
            Weights::Coded(view) => view.shape().rows(),
        }
    }

    /// The format of the weights.
    pub fn format(&self) -> Format {
        match self {
            Weights::Rows(view) => view.format(),
            Weights::Panels(view) => view.shape().format(),
            Weights::Coded(view) => view.shape().format(),
        }
    }

    /// Columns (inputs).
    pub fn cols(&self) -> usize {
        match self {
            Weights::Rows(view) => view.cols(),
            Weights::Panels(view) => view.shape().cols(),
            Weights::Coded(view) => view.shape().cols(),
        }
    }
}

impl<'a> From<MatrixView<'a>> for Weights<'a> {
    fn from(view: MatrixView<'a>) -> Self {
        Weights::Rows(view)
    }
}

impl<'a> From<PanelView<'a>> for Weights<'a> {
    fn from(view: PanelView<'a>) -> Self {
        Weights::Panels(view)
    }
}

impl<'a> From<CodedView<'a>> for Weights<'a> {
    fn from(view: CodedView<'a>) -> Self {
        Weights::Coded(view)
    }
}

/// Activations `[batch, cols]`, row-major, and how they enter a product.
///
/// With `quantised` set, integer weights use the `int8` arithmetic; float weights
/// (f32, bf16, f16, fp8) always use `exact`. A result depends on its weight row and its
/// activation row only, never on the batch, the threads or the instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The f32 rows; none where integer weights take the quantised ones ([`Input::quantised`]).
    pub rows: &'a [f32],
    /// The same rows quantised: asks for the `int8` arithmetic.
    pub quantised: Option<&'a Activations>,
}

impl<'a> Input<'a> {
    /// Rows for the `exact` arithmetic.
    pub fn exact(rows: &'a [f32]) -> Self {
        Self { rows, quantised: None }
    }

    /// Rows for the `int8` arithmetic, where the weights allow it.
    pub fn int8(rows: &'a [f32], quantised: &'a Activations) -> Self {
        Self { rows, quantised: Some(quantised) }
    }

    /// Rows of which only the quantised form is there: for integer weights alone.
    pub fn quantised(quantised: &'a Activations) -> Self {
        Self { rows: &[], quantised: Some(quantised) }
    }

    /// Number of rows that these weights, which the input must fit, take.
    fn batch(&self, weights: &Weights<'_>) -> usize {
        let cols = weights.cols();
        if let (true, Some(quantised)) = (self.rows.is_empty(), self.quantised) {
            let format = weights.format();
            assert!(
                format.is_integer() || quantised.batch() == 0,
                "weights in {format} need the activations in f32"
            );
            assert_eq!(quantised.cols(), cols, "quantised activations must have the width of the weights");
            return quantised.batch();
        }
        assert_eq!(self.rows.len() % cols.max(1), 0, "activations must be whole rows of {cols} columns");
        let batch = self.rows.len() / cols.max(1);
        if let Some(quantised) = self.quantised {
            let shape = (quantised.batch(), quantised.cols());
            assert_eq!(shape, (batch, cols), "quantised activations must have the shape of the f32 ones");
        }
        batch
    }
}

/// One product for [`matmul_many`].
#[derive(Debug)]
pub struct MatmulJob<'a> {
    weights: Weights<'a>,
    input: Input<'a>,
    batch: usize,
    out: *mut f32,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer stands for an exclusive borrow of f32, and those may move between threads.
unsafe impl Send for MatmulJob<'_> {}
// SAFETY: a shared job gives no access to its output; only `matmul_many`, which holds all jobs
// exclusively, writes through the pointer.
unsafe impl Sync for MatmulJob<'_> {}

impl<'a> MatmulJob<'a> {
    /// `y[b][r] = W[r] . x[b]`, `y` being `[batch, weights.rows()]`, row-major.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn new(weights: impl Into<Weights<'a>>, input: Input<'a>, y: &'a mut [f32]) -> Self {
        let weights = weights.into();
        let batch = input.batch(&weights);
        assert_eq!(
            y.len(),
            batch * weights.rows(),
            "a product needs one output per batch row and weight row"
        );
        Self { weights, input, batch, out: y.as_mut_ptr(), borrow: PhantomData }
    }

    fn multiply_adds(&self) -> usize {
        self.weights.rows() * self.weights.cols() * self.batch
    }

    /// Weight rows of one part.
    fn part_rows(&self, team: &Team) -> usize {
        let per_row = (self.weights.cols() * self.batch).max(1);
        let least = PART.div_ceil(per_row);
        // A few parts for every thread, so that one which is late does not hold up the others.
        let share = self.weights.rows() / (4 * team.threads());
        let step = if let Weights::Coded(_) = self.weights { coded::PART_ROWS } else { PART_ROWS };
        least.max(share.min(FEW_PARTS_ROWS)).next_multiple_of(step)
    }

    fn parts(&self, team: &Team) -> usize {
        self.weights.rows().div_ceil(self.part_rows(team))
    }

    fn rows_of(&self, part: usize, team: &Team) -> Range<usize> {
        let step = self.part_rows(team);
        part * step..self.weights.rows().min((part + 1) * step)
    }
}

/// `y = x W^T` for one matrix, the weight rows split over the team. Allocates nothing, but for coded weights: each
/// thread keeps room for four decoded panels.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul<'a>(
    kernels: Kernels,
    team: &Team,
    weights: impl Into<Weights<'a>>,
    input: Input<'a>,
    y: &'a mut [f32],
) {
    matmul_many(kernels, team, &mut [MatmulJob::new(weights, input, y)]);
}

/// Several products in one go of the team: gate and up, the projections of one norm,
/// the experts of a token. Allocates nothing.
pub fn matmul_many(kernels: Kernels, team: &Team, jobs: &mut [MatmulJob<'_>]) {
    let jobs = &*jobs;
    if jobs.iter().map(MatmulJob::multiply_adds).sum::<usize>() < ALONE {
        for job in jobs {
            // SAFETY: this call holds every job exclusively.
            unsafe { run_rows(kernels, job, 0..job.weights.rows()) };
        }
        return;
    }
    let parts = jobs.iter().map(|job| job.parts(team)).sum();
    team.run(parts, &|mut part| {
        for job in jobs {
            let parts = job.parts(team);
            if part < parts {
                // SAFETY: this call holds every job exclusively, and each part has its own rows.
                return unsafe { run_rows(kernels, job, job.rows_of(part, team)) };
            }
            part -= parts;
        }
    });
}

/// `out = silu(x G^T) * (x U^T)` in one go of the team, for `[G, U] = weights`: the gate and up
/// products of an MLP and their SwiGLU, which meets each result while it is in the cache. Both
/// `up` (work space) and `out` are `[batch, rows]`. The same bits as [`matmul`] twice and
/// [`Kernels::swiglu`]. Allocates nothing.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul_swiglu<'a>(
    kernels: Kernels,
    team: &Team,
    weights: [Weights<'a>; 2],
    input: Input<'a>,
    up: &'a mut [f32],
    out: &'a mut [f32],
) {
    let [gate, up] = [MatmulJob::new(weights[0], input, out), MatmulJob::new(weights[1], input, up)];
    let rows = gate.weights.rows();
    assert_eq!(up.weights.rows(), rows, "gate and up have one shape");
    let some_rows = |part: Range<usize>| {
        // SAFETY: this call holds both jobs exclusively, and each part has its own rows.
        unsafe {
            run_rows(kernels, &gate, part.clone());
            run_rows(kernels, &up, part.clone());
            for b in 0..gate.batch {
                let at = b * rows + part.start;
                let gate = std::slice::from_raw_parts_mut(gate.out.add(at), part.len());
                kernels.swiglu(gate, std::slice::from_raw_parts(up.out.add(at), part.len()));
            }
        }
    };
    if gate.multiply_adds() + up.multiply_adds() < ALONE {
        return some_rows(0..rows);
    }
    team.run(gate.parts(team), &|part| some_rows(gate.rows_of(part, team)));
}

/// # Safety
/// Nobody else may use these rows of the job's output meanwhile.
unsafe fn run_rows(kernels: Kernels, job: &MatmulJob<'_>, rows: Range<usize>) {
    let out = Out { ptr: job.out, stride: job.weights.rows(), first: 0 };
    // SAFETY: `MatmulJob::new` checked that every row of every batch row has its place.
    unsafe { multiply(kernels, &job.weights, rows, job.input, out) }
}

/// `y[b][r - rows.start] = W[r] . x[b]` for the weight rows `rows` alone, on the calling
/// thread; `y` is `[batch, rows.len()]`, row-major. The same bits as [`matmul`].
///
/// # Panics
/// If the shapes do not fit or the rows leave the matrix.
pub fn matmul_rows(
    kernels: Kernels,
    weights: MatrixView<'_>,
    rows: Range<usize>,
    input: Input<'_>,
    y: &mut [f32],
) {
    let batch = input.batch(&Weights::Rows(weights));
    assert!(rows.end <= weights.rows(), "rows {rows:?} of a matrix of {}", weights.rows());
    assert_eq!(y.len(), batch * rows.len(), "a product needs one output per batch row and weight row");
    let out = Out { ptr: y.as_mut_ptr(), stride: rows.len(), first: rows.start };
    // SAFETY: `y` is ours alone and was just checked to have a place for every result.
    unsafe { multiply(kernels, &Weights::Rows(weights), rows, input, out) }
}

/// # Safety
/// `rows` lie inside `weights` and start with a panel, if it has panels; `input` has been
/// checked against its columns; `out` has a place, used by nobody else, for every batch row
/// and every row of `rows`.
unsafe fn multiply(kernels: Kernels, weights: &Weights<'_>, rows: Range<usize>, input: Input<'_>, out: Out) {
    let table = kernels.table();
    // SAFETY: the processor has the instruction set (see `Kernels::table`); the rest is the
    // caller's promise.
    unsafe {
        match (weights, input.quantised) {
            (Weights::Coded(view), _) => coded::multiply(kernels, view, rows, input, out),
            (Weights::Panels(view), Some(quantised)) => (table.int8_panels)(view, rows, quantised, out),
            (Weights::Panels(view), None) => (table.exact_panels)(view, rows, input.rows, out),
            (Weights::Rows(view), Some(quantised)) if view.format().is_integer() => {
                (table.int8_rows)(view, rows, quantised, out)
            }
            (Weights::Rows(view), _) => (table.exact_rows)(view, rows, input.rows, out),
        }
    }
}

/// `out[c] = fma(coefficients[i], W[rows.start + i][c], out[c])` for the rows in ascending
/// order, weights dequantised (`exact`): the product with the transposed matrix that
/// absorbed attention needs.
///
/// # Panics
/// If the shapes do not fit or the rows leave the matrix.
pub fn combine_rows(
    kernels: Kernels,
    weights: MatrixView<'_>,
    rows: Range<usize>,
    coefficients: &[f32],
    out: &mut [f32],
) {
    assert_eq!(coefficients.len(), rows.len(), "one coefficient per row");
    assert_eq!(out.len(), weights.cols(), "one output per column");
    combine_batch(kernels, weights, rows, coefficients, 0, out);
}

/// As [`combine_rows`] for a batch of combinations, the weights decoded once for all: `out` is
/// `[batch, weights.cols()]`, and the coefficients of combination `b` start at
/// `coefficients[b * stride]`. The same bits as one by one.
///
/// # Panics
/// If the shapes do not fit or the rows leave the matrix.
pub fn combine_batch(
    kernels: Kernels,
    weights: MatrixView<'_>,
    rows: Range<usize>,
    coefficients: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    assert!(rows.end <= weights.rows(), "rows {rows:?} of a matrix of {}", weights.rows());
    assert_eq!(out.len() % weights.cols().max(1), 0, "outputs must be whole rows");
    let Some(last) = (out.len() / weights.cols().max(1)).checked_sub(1) else { return };
    assert!(last * stride + rows.len() <= coefficients.len(), "one coefficient per row and combination");
    let coefficients = Coefficients { values: coefficients, stride };
    // SAFETY: the processor has the instruction set (see `Kernels::table`).
    unsafe { (kernels.table().combine)(&weights, rows, coefficients, out) }
}
