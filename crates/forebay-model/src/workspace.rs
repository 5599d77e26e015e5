//! The buffers of the forward pass.

use forebay_kernels::Activations;

use crate::attention::AttentionScratch;
use crate::mlp::MlpScratch;
use crate::moe::MoeScratch;
use crate::mtp::MtpScratch;
use crate::profile::Profile;
use crate::spec::ModelSpec;
use crate::uses::Uses;

/// Buffers of the forward pass, reused from pass to pass.
pub struct Workspace {
    block_rows: usize,
    /// `[rows, hidden]`: the residual stream; after a pass, the hidden states before the final norm.
    pub(crate) x: Vec<f32>,
    /// `[block rows, hidden]`
    pub(crate) normed: Vec<f32>,
    /// `[block rows, hidden]`: what attention or the feed-forward part adds.
    pub(crate) update: Vec<f32>,
    pub(crate) quantised: Quantised,
    pub(crate) attention: AttentionScratch,
    pub(crate) mlp: MlpScratch,
    pub(crate) moe: MoeScratch,
    pub(crate) logits: Vec<f32>,
    pub(crate) mtp: MtpScratch,
    /// Where the time went, over all passes since it was last reset.
    pub profile: Profile,
}

impl Workspace {
    /// No buffers yet; passes go through in blocks of `block_rows` rows (0 counts as 1).
    pub fn new(block_rows: usize) -> Self {
        Self {
            block_rows: block_rows.max(1),
            x: Vec::new(),
            normed: Vec::new(),
            update: Vec::new(),
            quantised: Quantised::default(),
            attention: AttentionScratch::default(),
            mlp: MlpScratch::default(),
            moe: MoeScratch::default(),
            logits: Vec::new(),
            mtp: MtpScratch::default(),
            profile: Profile::default(),
        }
    }

    /// Rows that go through a layer at once, its routed experts apart.
    pub fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// The hidden state of row `row` of the last pass, before the final norm.
    pub fn hidden(&self, spec: &ModelSpec, row: usize) -> &[f32] {
        &self.x[row * spec.hidden..(row + 1) * spec.hidden]
    }

    /// What texts used so far, of the decoder: rows of drafts that were not accepted are not among them.
    pub fn uses(&self) -> &Uses {
        &self.moe.uses
    }

    /// These rows of the last pass stay.
    pub fn accept(&mut self, rows: std::ops::Range<usize>) {
        self.moe.uses.accept(rows);
    }

    /// Bytes of buffers that passes of up to `size.rows` rows, with `context` positions, can need.
    pub fn planned_bytes(spec: &ModelSpec, size: PassSize, context: usize, threads: usize) -> u64 {
        let PassSize { rows, block, sequences, floats, mtp } = size;
        let block = rows.min(block);
        let hidden = spec.hidden;
        // The residual stream; normed, update, and the quantised copy of normed.
        let stream = 4 * hidden * (rows + 2 * block) + Activations::planned_bytes(block, hidden);
        let attention = AttentionScratch::planned_bytes(spec, rows, block, context, sequences, threads);
        let dense = MlpScratch::planned_bytes(block, spec.dense_width);
        let moe = MoeScratch::planned_bytes(spec, rows, block, floats);
        let logits = 4 * LOGIT_ROWS * spec.vocab;
        let mtp = if mtp { MtpScratch::planned_bytes(hidden) } else { 0 };
        // What every further sequence keeps from pass to pass: a hidden state.
        let kept = 4 * sequences.saturating_sub(1) * if mtp > 0 { hidden } else { 0 };
        (stream + attention + dense + moe + logits + mtp + kept) as u64
    }
}

/// How many rows go through a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSize {
    /// Rows of the pass: they share the reading of every expert.
    pub rows: usize,
    /// Rows that go through everything else at once. Changes no bit.
    pub block: usize,
    /// Sequences that its rows may belong to.
    pub sequences: usize,
    /// Whether experts take their inputs as floats: in `exact` arithmetic, or from float weights.
    pub floats: bool,
    /// Whether the MTP layer drafts.
    pub mtp: bool,
}

/// At most this many rows of logits are asked for at once.
pub const LOGIT_ROWS: usize = 8;

/// One buffer of quantised activations per width.
#[derive(Default)]
pub(crate) struct Quantised(Vec<Activations>);

impl Quantised {
    /// The buffer for rows of `cols` values.
    pub(crate) fn of_width(&mut self, cols: usize) -> &mut Activations {
        let at = self.0.iter().position(|a| a.cols() == cols).unwrap_or_else(|| {
            self.0.push(Activations::new(cols));
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

/// Makes `buffer` exactly `len` long. Its old contents mean nothing afterwards.
pub(crate) fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}
