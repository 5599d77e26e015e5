//! Absorbed MLA attention over cached latents.

use crate::Kernels;
use crate::portable::attend::{BLOCK_ROWS, Layout, Run};
use crate::portable::lanes::Bf16Bits;
use crate::portable::registers::Line;
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
    /// Single precision, in blocks.
    F32Blocks(Blocks<'a, f32>),
    /// The bits of bfloat16 numbers, in blocks.
    Bf16Blocks(Blocks<'a, u16>),
}

impl<'a> KeyRows<'a> {
    /// The numbers of `range`.
    ///
    /// # Panics
    /// If it does not lie inside, or starts in the middle of a block.
    pub fn slice(self, range: Range<usize>) -> KeyRows<'a> {
        match self {
            KeyRows::F32(values) => KeyRows::F32(&values[range]),
            KeyRows::Bf16(values) => KeyRows::Bf16(&values[range]),
            KeyRows::F32Blocks(blocks) => KeyRows::F32Blocks(blocks.slice(range)),
            KeyRows::Bf16Blocks(blocks) => KeyRows::Bf16Blocks(blocks.slice(range)),
        }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        match self {
            KeyRows::F32(values) => values.len(),
            KeyRows::Bf16(values) => values.len(),
            KeyRows::F32Blocks(blocks) => blocks.len,
            KeyRows::Bf16Blocks(blocks) => blocks.len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `other` has the same type of numbers, in the same form.
    fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

/// Rows of [`TILE`] positions each, wherever they lie: row `t` is in block `(t + shift) / TILE`.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a, T> {
    blocks: &'a [&'a [T]],
    shift: usize,
    /// Numbers there are, from row 0 on.
    len: usize,
}

impl<'a, T> Blocks<'a, T> {
    /// The first `rows` rows of `dim` numbers; the one at position 0 is row `shift` of the first block.
    ///
    /// # Panics
    /// If a block is no [`TILE`] rows, or there are too few of them.
    pub fn new(blocks: &'a [&'a [T]], dim: usize, shift: usize, rows: usize) -> Self {
        assert!(blocks.iter().all(|block| block.len() == TILE * dim), "a block has {TILE} rows");
        assert!(rows == 0 || rows + shift <= blocks.len() * TILE, "position beyond the blocks");
        Self { blocks, shift, len: rows * dim }
    }

    fn slice(self, range: Range<usize>) -> Self {
        let block = self.blocks.first().map_or(1, |block| block.len().max(1));
        assert!(range.start.is_multiple_of(block), "a part starts with a block");
        assert!(range.start <= range.end && range.end <= self.len, "a part lies inside");
        Self { blocks: &self.blocks[range.start / block..], len: range.len(), ..self }
    }

    /// The row of position `t`, `dim` numbers.
    #[inline(always)]
    pub(crate) fn row(&self, t: usize, dim: usize) -> &'a [T] {
        let t = t + self.shift;
        &self.blocks[t / TILE][t % TILE * dim..][..dim]
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
    /// All positions of a range (the row's own position is the last: `start..pos + 1`). Of several
    /// query rows it is the range of the first; each further row attends to one position more.
    Range(Range<usize>),
    /// These positions, strictly ascending, for a single query row. A list of a whole range
    /// gives the same bits.
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

/// Where the vectors of several rows and heads lie: that of head `h` of row `r` starts at
/// `values[r * row + h * head]`.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    /// The numbers.
    pub values: &'a [f32],
    /// Numbers from one row to the next.
    pub row: usize,
    /// Numbers from one head to the next.
    pub head: usize,
}

impl<'a> HeadRows<'a> {
    /// The vector of `dim` numbers of one row and head.
    ///
    /// # Panics
    /// If it does not lie inside.
    pub fn get(&self, row: usize, head: usize, dim: usize) -> &'a [f32] {
        &self.values[row * self.row + head * self.head..][..dim]
    }
}

/// Neighbouring query rows with all, or some, of their heads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRows<'a> {
    /// Absorbed queries.
    pub latent_queries: HeadRows<'a>,
    /// Rotated queries.
    pub rope_queries: HeadRows<'a>,
    /// Number of rows.
    pub rows: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width of a latent.
    pub latent_dim: usize,
    /// Width of a rope key.
    pub rope_dim: usize,
    /// What scores are multiplied by.
    pub scale: f32,
}

/// Work space of [`attend`] and [`attend_rows`], reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct AttendScratch {
    /// One row per query row and head.
    pub(crate) queries: Vec<Line>,
    /// The keys of a block.
    pub(crate) tile: Vec<Line>,
    /// Scores, then softmax weights, of one query row: `[heads][BLOCK_ROWS]`.
    pub(crate) scores: Vec<f32>,
    /// Per query row and head: the largest score so far.
    pub(crate) max: Vec<f32>,
    /// Per query row and head: the sum of the weights so far.
    pub(crate) sum: Vec<f32>,
    /// Per query row and head: the weighted latents so far.
    pub(crate) values: Vec<Line>,
    pub(crate) runs: Vec<Run>,
}

impl AttendScratch {
    /// Makes room for that many query rows times heads, and starts their state.
    pub(crate) fn begin(&mut self, pairs: usize, layout: Layout) {
        self.queries.resize(pairs * layout.stride, Line::ZERO);
        self.tile.resize(BLOCK_ROWS * layout.stride, Line::ZERO);
        self.scores.resize(pairs * BLOCK_ROWS, 0.0);
        self.max.clear();
        self.max.resize(pairs, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(pairs, 0.0);
        self.values.clear();
        self.values.resize(pairs * layout.latent_lines, Line::ZERO);
    }

    /// Four-byte values that it holds after calls with up to `pairs` query rows times heads.
    pub fn planned_values(pairs: usize, latent_dim: usize, rope_dim: usize) -> usize {
        let layout = Layout::new(latent_dim, rope_dim);
        let lines = (pairs + BLOCK_ROWS) * layout.stride + pairs * layout.latent_lines;
        16 * lines + pairs * (BLOCK_ROWS + 2)
    }
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
    assert!(out.len() == heads * latent_dim, "the output must be whole heads");
    assert_eq!(query.latent_queries.len(), out.len(), "queries and output must have one shape");
    assert_eq!(query.rope_queries.len(), heads * rope_dim, "rope queries must be whole heads");
    let query = AttentionRows {
        latent_queries: HeadRows { values: query.latent_queries, row: 0, head: latent_dim },
        rope_queries: HeadRows { values: query.rope_queries, row: 0, head: rope_dim },
        rows: 1,
        heads,
        latent_dim,
        rope_dim,
        scale: query.scale,
    };
    attend_rows(kernels, &query, keys, attended, scratch, out);
}

/// As [`attend`] for neighbouring query rows, which share the reading of the cache:
/// `out` is `[rows, heads, latent width]`. The same bits as a call per row.
///
/// # Panics
/// As [`attend`], and if a list comes with more than one row.
pub fn attend_rows(
    kernels: Kernels,
    query: &AttentionRows<'_>,
    keys: KeyCache<'_>,
    attended: Attended<'_>,
    scratch: &mut AttendScratch,
    out: &mut [f32],
) {
    let AttentionRows { rows, heads, latent_dim, rope_dim, .. } = *query;
    assert_eq!(out.len(), rows * heads * latent_dim, "one output per row, head and latent column");
    if rows == 0 || heads == 0 {
        return;
    }
    assert!(latent_dim > 0, "a latent has at least one element");
    let end = match &attended {
        Attended::Range(range) => range.end.checked_add(rows - 1).expect("positions are small numbers"),
        Attended::List(list) => {
            assert_eq!(rows, 1, "a list of positions belongs to one row");
            assert!(list.is_sorted_by(|a, b| a < b), "attended positions must be strictly ascending");
            list.last().map_or(0, |t| *t as usize + 1)
        }
    };
    assert!(end.saturating_mul(latent_dim) <= keys.latents.len(), "position beyond the latent cache");
    assert!(end.saturating_mul(rope_dim) <= keys.rope_keys.len(), "position beyond the rope-key cache");
    let one_type = keys.latents.is_like(&keys.rope_keys);
    assert!(one_type, "latents and rope keys must have one number type");
    // SAFETY: the processor has the instruction set (see `Kernels::table`).
    unsafe { (kernels.table().attend)(query, keys, attended, scratch, out) }
}

/// The same bits under their name.
pub(crate) fn bf16(bits: &[u16]) -> &[Bf16Bits] {
    bytemuck::cast_slice(bits)
}
