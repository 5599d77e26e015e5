//! The inputs of a layer's experts, kept until every expert has come.

use forebay_kernels::{Activations, Input, KeptRows};

use crate::forward::Context;
use crate::workspace::Quantised;

/// The normalised rows of a pass, in the forms that its experts take.
#[derive(Default)]
pub(crate) struct KeptInput {
    hidden: usize,
    /// In the `int8` arithmetic.
    int8: Option<KeptRows>,
    use_int8: bool,
    /// `[rows, hidden]`, where some weights are floats or the arithmetic is `exact`.
    floats: Vec<f32>,
    use_floats: bool,
    /// Some of the rows, as a product takes them.
    gathered: Option<Activations>,
    gathered_floats: Vec<f32>,
}

impl KeptInput {
    /// Bytes held for passes of `rows` rows of which `at_once` are gathered.
    pub(crate) fn planned_bytes(hidden: usize, rows: usize, at_once: usize, floats: bool) -> usize {
        let float_rows = if floats { rows + at_once } else { 0 };
        KeptRows::planned_bytes(rows, hidden)
            + Activations::planned_bytes(at_once, hidden)
            + 4 * float_rows * hidden
    }

    /// Starts a layer of a pass of `rows` rows.
    pub(crate) fn begin(&mut self, hidden: usize, rows: usize, int8: bool, floats: bool) {
        self.hidden = hidden;
        (self.use_int8, self.use_floats) = (int8, floats);
        if int8 {
            self.int8.get_or_insert_with(|| KeptRows::new(hidden)).clear(rows);
        }
        self.floats.clear();
        if floats {
            self.floats.reserve_exact(rows * hidden);
        }
    }

    /// Keeps the next rows.
    pub(crate) fn keep(&mut self, ctx: Context<'_>, x: &[f32], quantised: &mut Quantised) {
        if let Some(kept) = self.int8.as_mut().filter(|_| self.use_int8) {
            let activations = quantised.of_width(self.hidden);
            activations.quantise(ctx.kernels, ctx.team, x);
            kept.keep(activations);
        }
        if self.use_floats {
            self.floats.extend_from_slice(x);
        }
    }

    /// Some rows, in this order.
    pub(crate) fn gather(&mut self, ctx: Context<'_>, rows: &[usize]) -> Input<'_> {
        let quantised = self.int8.as_ref().filter(|_| self.use_int8).map(|kept| {
            let gathered = self.gathered.get_or_insert_with(|| Activations::new(self.hidden));
            gathered.gather(ctx.team, kept, rows);
            &*gathered
        });
        self.gathered_floats.clear();
        if self.use_floats {
            for row in rows {
                let row = row * self.hidden..(row + 1) * self.hidden;
                self.gathered_floats.extend_from_slice(&self.floats[row]);
            }
        }
        Input { rows: &self.gathered_floats, quantised }
    }
}
