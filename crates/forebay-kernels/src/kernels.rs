//! The chosen room, and the small vector operations.

use crate::activations::{GROUP, GroupTotals};
use crate::coded::{DecodeFn, decoder_of};
use crate::isa::{Isa, IsaUnavailable};
use crate::scalar;
use crate::table::Table;
use std::fmt;

/// A set of kernels for one instruction set that this machine has. Cheap to copy.
///
/// All sets compute the same bits (docs/numerics.md); only the payload of a NaN may differ.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
    /// For coded weights, and whether it is faster than the plain one.
    decoder: (DecodeFn, bool),
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernels").field(&self.isa).finish()
    }
}

impl Kernels {
    /// The fastest set of this machine.
    pub fn detect() -> Self {
        let fastest = Isa::available().last().unwrap_or(Isa::Scalar);
        Self::of(fastest)
    }

    /// The set for `isa`, if this machine has it.
    pub fn with_isa(isa: Isa) -> Result<Self, IsaUnavailable> {
        if isa.is_available() { Ok(Self::of(isa)) } else { Err(IsaUnavailable { isa }) }
    }

    /// The set for an instruction set that this machine has.
    fn of(isa: Isa) -> Self {
        Self { isa, table: table_of(isa), decoder: decoder_of(isa) }
    }

    /// The instruction set in use.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// The functions of the room. The processor has its instruction set: that was
    /// checked when this value was made, and there is no other way to make one.
    pub(crate) fn table(self) -> &'static Table {
        self.table
    }

    /// The same but for its products in `free_order`, which alone may use it.
    pub(crate) fn in_free_order(self) -> Self {
        Self { table: self.table.free_order, ..self }
    }

    /// The decoder of coded weights, chosen for this processor.
    pub(crate) fn decoder(self) -> DecodeFn {
        self.decoder.0
    }

    /// Whether coded weights are decoded in registers (AVX-512 with VBMI and VBMI2), at gigabytes a second, instead
    /// of a code at a time.
    pub fn decodes_fast(self) -> bool {
        self.decoder.1
    }

    /// The canonical dot product of two vectors of one length.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "a dot product takes vectors of one length");
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.dot)(a, b) }
    }

    /// `out[i] = fma(coefficient, x[i], out[i])`: a weighted expert's output, a residual with 1.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add_scaled(self, coefficient: f32, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "a sum takes vectors of one length");
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.axpy)(coefficient, x, out) }
    }

    /// RMSNorm of one row: `out = (x * r) * weight`, `r = 1 / sqrt(mean(x^2) + eps)`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len(), "a norm takes vectors of one length");
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.rms_norm)(x, weight, eps, out) }
    }

    /// LayerNorm of one row: `out = ((x - mean) * r) * weight + bias`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn layer_norm(self, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        let n = x.len();
        assert!(n == weight.len() && n == bias.len() && n == out.len(), "a norm takes vectors of one length");
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.layer_norm)(x, weight, bias, eps, out) }
    }

    /// `values[i] = e^values[i]`.
    pub fn exp(self, values: &mut [f32]) {
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.exp_all)(values) }
    }

    /// `values[i] = 1 / (1 + e^-values[i])`.
    pub fn sigmoid(self, values: &mut [f32]) {
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.sigmoid_all)(values) }
    }

    /// `gate[i] = silu(gate[i]) * up[i]`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn swiglu(self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "SwiGLU takes vectors of one length");
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.swiglu)(gate, up) }
    }

    /// Quantises one row of activations: one entry per started group, `stride` entries apart.
    pub(crate) fn quantise_row(
        self,
        x: &[f32],
        stride: usize,
        codes: &mut [[i8; GROUP]],
        split: &mut [[i8; GROUP]],
        totals: &mut [GroupTotals],
    ) {
        // SAFETY: the processor has the room's instruction set.
        unsafe { (self.table.quantise_row)(x, stride, codes, split, totals) }
    }
}

#[cfg(target_arch = "x86_64")]
fn table_of(isa: Isa) -> &'static Table {
    match isa {
        Isa::Avx2 => &crate::x86::avx2::TABLE,
        Isa::Avx512 => &crate::x86::avx512::TABLE,
        _ => &scalar::TABLE,
    }
}

#[cfg(target_arch = "aarch64")]
fn table_of(isa: Isa) -> &'static Table {
    match isa {
        Isa::Neon => &crate::arm::neon::TABLE,
        Isa::NeonDot => &crate::arm::dotprod::TABLE,
        Isa::NeonI8mm => &crate::arm::i8mm::TABLE,
        _ => &scalar::TABLE,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn table_of(_isa: Isa) -> &'static Table {
    &scalar::TABLE
}
