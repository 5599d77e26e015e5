//! Absorbed MLA attention over cached latents.

use crate::Kernels;
use crate::portable::lanes::Bf16Bits;
use std::ops::Range;

/// Absolute positions per softmax tile: tile `i` holds positions `64 i .. 64 i + 63`.
pub const TILE: usize = 64;

/// Rows of cached numbers, one per position, row-major.
#[derive(Clone, Copy, Debug)]
pub enum KeyRows<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// The bits of bfloat16 numbers.
    Bf16(&'a [u16]),
}

impl KeyRows<'_> {
    /// How many numbers there are.
    pub fn len(&self) -> usize {
        match self {
            KeyRows::F32(values) => values.len(),
            KeyRows::Bf16(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The cache of one layer of one sequence: row `t` belongs to absolute position `t`.
/// Both parts have the same number type.
#[derive(Clone, Copy, Debug)]
pub struct KeyCache<'a> {
    /// `[positions, latent width]`: keys of the latent part, and the values.
    pub latents: KeyRows<'a>,
    /// `[positions, rope width]`: rotated keys, shared by all heads.
    pub rope_keys: KeyRows<'a>,
}

/// The positions a row attends to.
#[derive(Clone, Debug)]
pub enum Attended<'a> {
    /// All positions of a range (the row's own position is the last: `start..pos + 1`).
    Range(Range<usize>),
    /// These positions, strictly ascending. A list of a whole range gives the same bits.
    List(&'a [u32]),
}

/// One query row with all, or some, of its heads.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Absorbed queries `[heads, latent width]`.
    pub latent_queries: &'a [f32],
    /// Rotated queries `[heads, rope width]`.
    pub rope_queries: &'a [f32],
    /// Number of heads.
    pub heads: usize,
    /// What scores are multiplied by.
    pub scale: f32,
}

/// Work space of [`attend`], reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct AttendScratch {
    max: Vec<f32>,
    sum: Vec<f32>,
}

/// [`Attention`] with its widths worked out.
pub(crate) struct Heads<'a> {
    pub latent: &'a [f32],
    pub rope: &'a [f32],
    pub latent_dim: usize,
    pub rope_dim: usize,
    pub scale: f32,
}

/// Softmax attention in the latent space, for every head of one query row:
/// `out[h] = sum_t softmax_t((q_h . latent_t + q_rope_h . rope_key_t) * scale) latent_t`,
/// `out` being `[heads, latent width]`.
///
/// Every head is computed for itself: calls with some of the heads give the same bits.
/// If nothing is attended, or a score is NaN, the output is NaN.
///
/// # Panics
/// If the shapes do not fit, the two caches differ in type, a position lies beyond the
/// cache, or a list is not strictly ascending.
pub fn attend(
    kernels: Kernels,
    query: &Attention<'_>,
    keys: KeyCache<'_>,
    attended: Attended<'_>,
    scratch: &mut AttendScratch,
    out: &mut [f32],
) {
    let heads = query.heads;
    if heads == 0 {
        assert!(out.is_empty(), "no heads, no output");
        return;
    }
    let (latent_dim, rope_dim) = (out.len() / heads, query.rope_queries.len() / heads);
    assert!(latent_dim > 0 && out.len() == heads * latent_dim, "the output must be whole heads");
    assert_eq!(query.latent_queries.len(), out.len(), "queries and output must have one shape");
    assert_eq!(query.rope_queries.len(), heads * rope_dim, "rope queries must be whole heads");
    let end = match &attended {
        Attended::Range(range) => range.end,
        Attended::List(list) => {
            assert!(list.is_sorted_by(|a, b| a < b), "attended positions must be strictly ascending");
            list.last().map_or(0, |t| *t as usize + 1)
        }
    };
    assert!(end.saturating_mul(latent_dim) <= keys.latents.len(), "position beyond the latent cache");
    assert!(end.saturating_mul(rope_dim) <= keys.rope_keys.len(), "position beyond the rope-key cache");
    scratch.max.resize(heads, 0.0);
    scratch.sum.resize(heads, 0.0);
    let shape = Heads {
        latent: query.latent_queries,
        rope: query.rope_queries,
        latent_dim,
        rope_dim,
        scale: query.scale,
    };
    let table = kernels.table();
    let (max, sum) = (&mut scratch.max, &mut scratch.sum);
    match (keys.latents, keys.rope_keys) {
        // SAFETY: the processor has the instruction set (see `Kernels::table`).
        (KeyRows::F32(latents), KeyRows::F32(rope_keys)) => unsafe {
            (table.attend_f32)(&shape, latents, rope_keys, attended, max, sum, out)
        },
        (KeyRows::Bf16(latents), KeyRows::Bf16(rope_keys)) => {
            let (latents, rope_keys) = (bf16(latents), bf16(rope_keys));
            // SAFETY: as above.
            unsafe { (table.attend_bf16)(&shape, latents, rope_keys, attended, max, sum, out) }
        }
        _ => panic!("latents and rope keys must have one number type"),
    }
}

/// The same bits under their name.
pub(crate) fn bf16(bits: &[u16]) -> &[Bf16Bits] {
    bytemuck::cast_slice(bits)
}
