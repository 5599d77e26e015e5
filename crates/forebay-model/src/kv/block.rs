//! Blocks of the KV cache, how their values lie, and the pool they come from.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_core::float::{bf16_to_f32, f32_to_bf16};

use crate::spec::{IndexerKind, ModelSpec};

/// Positions of a block: those of an attention tile, so that a tile lies in one block.
pub const BLOCK: usize = forebay_kernels::TILE;

/// Blocks beside those of every whole context: copies of a conversation's end while it is continued.
pub const SPARE_BLOCKS: usize = 2;

/// Hidden states that a block may carry, for drafts that go on from there.
pub const CARRIES: usize = 2;

/// Precision of cached values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvDtype {
    /// bfloat16, the precision of the published checkpoint. The default.
    #[default]
    Bf16,
    /// Single precision, for comparison with an f32 oracle.
    F32,
}

impl KvDtype {
    /// Bytes per value.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        }
    }
}

impl std::fmt::Display for KvDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            KvDtype::Bf16 => "bf16",
            KvDtype::F32 => "f32",
        })
    }
}

/// What a cache holds besides latents and rope keys of the decoder layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvParts {
    /// Index keys, when sparse attention is active.
    pub index: bool,
    /// Rows of the MTP layer, when it drafts.
    pub mtp: bool,
}

/// How the values of a block lie: layer after layer its latents, rope keys, and index keys if it selects, each
/// `[BLOCK, width]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    dtype: KvDtype,
    kv_rank: usize,
    rope: usize,
    index_dim: usize,
    hidden: usize,
    /// Decoder layers; the MTP layer, if it drafts, comes behind them.
    decoder: usize,
    /// Per layer: its first value, and whether it keeps index keys.
    layers: Vec<(usize, bool)>,
    values: usize,
}

/// Where the rows of one kind are in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) first: usize,
    pub(super) dim: usize,
    /// The row that position 0 of a sequence has. A row of the MTP layer stands one further, with the token that it
    /// needs beside its position: so a block depends on nothing behind it.
    pub(super) shift: usize,
}

impl Rows {
    pub(super) fn place(self, row: usize) -> Range<usize> {
        self.first + row * self.dim..self.first + (row + 1) * self.dim
    }

    fn all(self) -> Range<usize> {
        self.first..self.first + BLOCK * self.dim
    }
}

impl KvLayout {
    /// The layout for a model. `None` if its sizes overflow.
    pub fn new(spec: &ModelSpec, dtype: KvDtype, parts: KvParts) -> Option<Self> {
        let (kv_rank, rope) = (spec.attention.kv_rank, spec.attention.rope);
        let index_dim = spec.indexer.filter(|_| parts.index).map_or(0, |i| i.dim);
        // The MTP layer attends to everything, so it needs no index keys.
        let selects = spec.layers.iter().map(|layer| index_dim > 0 && layer.indexer == IndexerKind::Full);
        let mut values = 0usize;
        let mut layers = Vec::new();
        for selects in selects.chain(parts.mtp.then_some(false)) {
            layers.push((values, selects));
            let width = kv_rank.checked_add(rope)?.checked_add(if selects { index_dim } else { 0 })?;
            values = values.checked_add(width.checked_mul(BLOCK)?)?;
        }
        values.checked_mul(dtype.bytes())?;
        let (decoder, hidden) = (spec.layers.len(), spec.hidden);
        Some(Self { dtype, kv_rank, rope, index_dim, hidden, decoder, layers, values })
    }

    /// Precision of the values.
    pub fn dtype(&self) -> KvDtype {
        self.dtype
    }

    /// Width of a hidden state.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Whether there are rows of an MTP layer.
    pub fn has_mtp(&self) -> bool {
        self.layers.len() > self.decoder
    }

    /// What a reader of stored blocks compares: decoder layers, latent width, rope width, index width, layers with
    /// index keys, layers that draft, hidden width.
    pub fn shape(&self) -> [usize; 7] {
        let selecting = self.layers.iter().filter(|(_, selects)| *selects).count();
        let drafting = self.layers.len() - self.decoder;
        [self.decoder, self.kv_rank, self.rope, self.index_dim, selecting, drafting, self.hidden]
    }

    /// Bytes of one position's rows.
    pub fn position_bytes(&self) -> usize {
        self.values / BLOCK * self.dtype.bytes()
    }

    /// Bytes of memory that a block may take, with the hidden states that go with it.
    pub fn block_bytes(&self) -> u64 {
        let carries = if self.has_mtp() { CARRIES * self.hidden * 4 } else { 0 };
        (self.values * self.dtype.bytes() + carries) as u64
    }

    /// Bytes that caches of `contexts` sequences of `capacity` positions take, and a copy of one block while it is
    /// written to a file or read from one; `None` on overflow.
    pub fn planned_bytes(&self, capacity: usize, contexts: usize) -> Option<u64> {
        (Self::planned_blocks(capacity, contexts)? as u64 + 1).checked_mul(self.block_bytes())
    }

    /// Blocks for `contexts` sequences of `capacity` positions; `None` on overflow.
    pub fn planned_blocks(capacity: usize, contexts: usize) -> Option<usize> {
        capacity.div_ceil(BLOCK).checked_add(SPARE_BLOCKS)?.checked_mul(contexts)
    }

    pub(super) fn latents(&self, layer: usize) -> Rows {
        let shift = usize::from(layer == self.decoder);
        Rows { first: self.layers[layer].0, dim: self.kv_rank, shift }
    }

    pub(super) fn rope_keys(&self, layer: usize) -> Rows {
        let latents = self.latents(layer);
        Rows { first: latents.all().end, dim: self.rope, ..latents }
    }

    pub(super) fn index_keys(&self, layer: usize) -> Option<Rows> {
        let rope_keys = self.rope_keys(layer);
        self.layers[layer].1.then_some(Rows { first: rope_keys.all().end, dim: self.index_dim, ..rope_keys })
    }

    /// All kinds of rows, in the order in which they lie.
    fn kinds(&self) -> impl Iterator<Item = Rows> {
        let layers = 0..self.layers.len();
        layers.flat_map(|layer| {
            [Some(self.latents(layer)), Some(self.rope_keys(layer)), self.index_keys(layer)]
                .into_iter()
                .flatten()
        })
    }
}

/// The values of a block.
#[derive(Debug)]
pub(super) enum Values {
    /// bfloat16 bits.
    Bf16(Vec<u16>),
    /// Single precision.
    F32(Vec<f32>),
}

impl Values {
    fn new(layout: &KvLayout) -> Self {
        match layout.dtype {
            KvDtype::Bf16 => Values::Bf16(vec![0; layout.values]),
            KvDtype::F32 => Values::F32(vec![0.0; layout.values]),
        }
    }

    pub(super) fn write(&mut self, at: Range<usize>, row: &[f32]) {
        match self {
            Values::Bf16(all) => {
                for (slot, value) in all[at].iter_mut().zip(row) {
                    *slot = f32_to_bf16(*value);
                }
            }
            Values::F32(all) => all[at].copy_from_slice(row),
        }
    }

    pub(super) fn to_f32(&self, at: Range<usize>) -> Vec<f32> {
        match self {
            Values::Bf16(all) => all[at].iter().map(|b| bf16_to_f32(*b)).collect(),
            Values::F32(all) => all[at].to_vec(),
        }
    }
}

/// The rows of [`BLOCK`] positions in all layers.
#[derive(Debug)]
pub struct KvBlock {
    values: Values,
    pool: Arc<KvPool>,
}

impl Drop for KvBlock {
    fn drop(&mut self) {
        self.pool.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

impl KvBlock {
    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    pub(super) fn values_mut(&mut self) -> &mut Values {
        &mut self.values
    }

    pub(super) fn copy_from(&mut self, other: &Self) {
        match (&mut self.values, &other.values) {
            (Values::Bf16(own), Values::Bf16(other)) => own.copy_from_slice(other),
            (Values::F32(own), Values::F32(other)) => own.copy_from_slice(other),
            _ => unreachable!("blocks of one pool have one precision"),
        }
    }

    pub(super) fn bf16(&self, rows: Rows) -> &[u16] {
        match &self.values {
            Values::Bf16(all) => &all[rows.all()],
            Values::F32(_) => unreachable!("the layout says which precision it is"),
        }
    }

    pub(super) fn f32(&self, rows: Rows) -> &[f32] {
        match &self.values {
            Values::F32(all) => &all[rows.all()],
            Values::Bf16(_) => unreachable!("the layout says which precision it is"),
        }
    }

    /// Appends the first `rows` rows of every kind to `out`, little-endian: [`KvLayout::position_bytes`] for each row.
    pub fn write_rows(&self, rows: usize, out: &mut Vec<u8>) {
        for kind in self.pool.layout.kinds() {
            let place = kind.first..kind.first + rows * kind.dim;
            match &self.values {
                Values::Bf16(all) => out.extend(all[place].iter().flat_map(|v| v.to_le_bytes())),
                Values::F32(all) => out.extend(all[place].iter().flat_map(|v| v.to_le_bytes())),
            }
        }
    }

    /// Takes the first `rows` rows of every kind from what [`write_rows`](Self::write_rows) made of them. `false`,
    /// and nothing changed, if that has another length.
    pub fn read_rows(&mut self, rows: usize, bytes: &[u8]) -> bool {
        if rows > BLOCK || bytes.len() != rows * self.pool.layout.position_bytes() {
            return false;
        }
        let mut rest = bytes;
        for kind in self.pool.layout.kinds() {
            let place = kind.first..kind.first + rows * kind.dim;
            let (part, after) = rest.split_at(place.len() * self.pool.layout.dtype.bytes());
            rest = after;
            match &mut self.values {
                Values::Bf16(all) => {
                    let (values, _) = part.as_chunks();
                    all[place].iter_mut().zip(values).for_each(|(slot, v)| *slot = u16::from_le_bytes(*v));
                }
                Values::F32(all) => {
                    let (values, _) = part.as_chunks();
                    all[place].iter_mut().zip(values).for_each(|(slot, v)| *slot = f32::from_le_bytes(*v));
                }
            }
        }
        true
    }
}

/// Blocks that may exist at the same time. They are allocated when they are taken.
#[derive(Debug)]
pub struct KvPool {
    layout: KvLayout,
    blocks: usize,
    taken: AtomicUsize,
}

/// All blocks of a pool are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "all {blocks} blocks of the KV cache are in use; end another sequence, or plan for more with --context"
)]
pub struct NoBlock {
    /// Blocks that the pool may give.
    pub blocks: usize,
}

impl KvPool {
    /// A pool that gives up to `blocks` blocks.
    pub fn new(layout: KvLayout, blocks: usize) -> Arc<Self> {
        Arc::new(Self { layout, blocks, taken: AtomicUsize::new(0) })
    }

    /// How the values of its blocks lie.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Blocks that it gives at most.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Blocks that are in use.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    /// A block of zeros.
    ///
    /// # Errors
    /// If as many as there may be are in use.
    pub fn take(pool: &Arc<Self>) -> Result<KvBlock, NoBlock> {
        let more = |taken: usize| (taken < pool.blocks).then_some(taken + 1);
        if pool.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_err() {
            return Err(NoBlock { blocks: pool.blocks });
        }
        Ok(KvBlock { values: Values::new(&pool.layout), pool: pool.clone() })
    }
}
