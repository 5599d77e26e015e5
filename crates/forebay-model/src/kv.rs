//! The compressed KV cache of one sequence, in blocks that sequences can share.
//!
//! Per layer and position: the normalised latent (`kv_rank` values) and the rotated shared rope key (`rope`
//! values); full-indexer layers also keep an index key. A block has all of it for [`BLOCK`] positions. Blocks come
//! from a [`KvPool`] whose size the plan has paid for; one that several sequences hold is copied before it is written
//! to. Rows past the logical length are stale and never read.

mod block;

use std::ops::Range;
use std::sync::Arc;

use forebay_kernels::{Blocks, KeyRows};

pub use block::{BLOCK, CARRIES, KvBlock, KvDtype, KvLayout, KvParts, KvPool, NoBlock, SPARE_BLOCKS};
use block::{Rows, Values};

use crate::mtp::MtpState;

/// The cache of one sequence: fixed capacity, moving length.
#[derive(Clone, Debug)]
pub struct KvCache {
    pool: Arc<KvPool>,
    blocks: Vec<Arc<KvBlock>>,
    capacity: usize,
    len: usize,
    /// Rows of the MTP layer, from position 0 on, that stem from verified tokens and hidden states.
    drafting: usize,
    pub(crate) mtp: MtpState,
}

/// Where the rows of one kind and layer lie, block by block.
pub(crate) enum KeyBlocks<'a> {
    Bf16(Vec<&'a [u16]>, Shape),
    F32(Vec<&'a [f32]>, Shape),
}

/// Width of a row, and the place of position 0.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    dim: usize,
    shift: usize,
}

impl KeyBlocks<'_> {
    /// The rows of the first `positions` positions.
    pub(crate) fn rows(&self, positions: usize) -> KeyRows<'_> {
        match self {
            Self::Bf16(blocks, Shape { dim, shift }) => {
                KeyRows::Bf16Blocks(Blocks::new(blocks, *dim, *shift, positions))
            }
            Self::F32(blocks, Shape { dim, shift }) => {
                KeyRows::F32Blocks(Blocks::new(blocks, *dim, *shift, positions))
            }
        }
    }

    /// Bytes that the lists of two kinds of rows take at once.
    pub(crate) fn planned_bytes(positions: usize) -> usize {
        2 * size_of::<&[f32]>() * (positions.div_ceil(BLOCK) + 1)
    }
}

impl KvCache {
    /// An empty cache for up to `capacity` positions. Takes its blocks from `pool` as it grows.
    pub fn new(pool: Arc<KvPool>, capacity: usize) -> Self {
        Self { pool, blocks: Vec::new(), capacity, len: 0, drafting: 0, mtp: MtpState::default() }
    }

    /// Positions that are valid; the next one to be written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is valid.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The blocks of the valid positions, the first one first.
    pub fn blocks(&self) -> &[Arc<KvBlock>] {
        &self.blocks[..self.len.div_ceil(BLOCK)]
    }

    /// The blocks that there are of `positions`.
    pub fn blocks_at(&self, positions: &Range<usize>) -> &[Arc<KvBlock>] {
        let end = positions.end.div_ceil(BLOCK).min(self.blocks.len());
        &self.blocks[(positions.start / BLOCK).min(end)..end]
    }

    /// Becomes the sequence that `blocks` hold: `len` positions, and `drafting` rows of the MTP layer. If these are as
    /// many, the last one stands with the token behind the last position, in its block.
    ///
    /// # Panics
    /// If there are too few blocks, or more positions than the capacity.
    pub fn adopt(&mut self, blocks: Vec<Arc<KvBlock>>, len: usize, drafting: usize) {
        assert!(len <= self.capacity && drafting <= len, "positions that fit, and their MTP rows");
        self.blocks = blocks;
        (self.len, self.drafting) = (len, drafting);
        assert!(self.blocks.len() >= self.needed(), "as many blocks as positions need");
        self.blocks.truncate(self.needed());
    }

    /// Blocks that valid rows are in.
    fn needed(&self) -> usize {
        let behind = usize::from(self.len > 0 && self.drafting == self.len);
        (self.len + behind).div_ceil(BLOCK)
    }

    /// Makes sure that the rows of `positions`, which begin no later than behind the last valid one, can be written:
    /// takes blocks, and copies those that others hold too.
    ///
    /// # Errors
    /// If the pool has none left. What was taken by then stays.
    pub fn prepare(&mut self, positions: Range<usize>) -> Result<(), NoBlock> {
        debug_assert!(positions.start <= self.len, "no holes");
        for at in positions.start / BLOCK..positions.end.min(self.capacity).div_ceil(BLOCK) {
            match self.blocks.get_mut(at) {
                None => self.blocks.push(Arc::new(KvPool::take(&self.pool)?)),
                Some(block) => {
                    if Arc::get_mut(block).is_none() {
                        let mut own = KvPool::take(&self.pool)?;
                        own.copy_from(block);
                        *block = Arc::new(own);
                    }
                }
            }
        }
        Ok(())
    }

    /// Forgets every position from `len` on. Longer than the current length changes nothing.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.len = len;
            // The row of the last position left belongs to the token behind it, which may be another now.
            self.drafting = self.drafting.min(len.saturating_sub(1));
        }
        self.blocks.truncate(self.needed());
    }

    /// Forgets positions whose tokens will be run again as they were, and those behind them.
    pub(crate) fn rewind(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.drafting = self.drafting.min(len);
    }

    /// Rows of the MTP layer that are valid: as many as positions only where the token behind the last one is known.
    pub fn drafting(&self) -> usize {
        self.drafting
    }

    /// Declares the MTP layer's rows before `rows` valid.
    pub(crate) fn drafting_reaches(&mut self, rows: usize) {
        self.drafting = self.drafting.max(rows);
    }

    /// Declares the row of the last position invalid: another token than the one it was made with comes next.
    pub fn another_token_comes(&mut self) {
        self.drafting = self.drafting.min(self.len.saturating_sub(1));
    }

    /// Declares `rows` more positions valid, after all layers wrote them.
    ///
    /// # Panics
    /// If that exceeds the capacity.
    pub(crate) fn advance(&mut self, rows: usize) {
        assert!(self.len + rows <= self.capacity, "the caller checked the room");
        self.len += rows;
    }

    /// The latents of layer `layer`.
    pub(crate) fn latents(&self, layer: usize) -> KeyBlocks<'_> {
        self.rows(self.pool.layout().latents(layer))
    }

    /// The rotated rope keys of layer `layer`.
    pub(crate) fn rope_keys(&self, layer: usize) -> KeyBlocks<'_> {
        self.rows(self.pool.layout().rope_keys(layer))
    }

    /// The index keys of layer `layer`, if it keeps any.
    pub(crate) fn index_keys(&self, layer: usize) -> Option<KeyBlocks<'_>> {
        Some(self.rows(self.pool.layout().index_keys(layer)?))
    }

    fn rows(&self, rows: Rows) -> KeyBlocks<'_> {
        let shape = Shape { dim: rows.dim, shift: rows.shift };
        match self.pool.layout().dtype() {
            KvDtype::Bf16 => {
                KeyBlocks::Bf16(self.blocks.iter().map(|block| block.bf16(rows)).collect(), shape)
            }
            KvDtype::F32 => KeyBlocks::F32(self.blocks.iter().map(|block| block.f32(rows)).collect(), shape),
        }
    }

    /// The latent of one position as f32, for tests and dumps.
    pub fn latent(&self, layer: usize, position: usize) -> Vec<f32> {
        self.row(self.pool.layout().latents(layer), position)
    }

    /// The rotated rope key of one position as f32, for tests and dumps.
    pub fn rope_key(&self, layer: usize, position: usize) -> Vec<f32> {
        self.row(self.pool.layout().rope_keys(layer), position)
    }

    /// The index key of one position as f32, if the layer keeps any.
    pub fn index_key(&self, layer: usize, position: usize) -> Option<Vec<f32>> {
        Some(self.row(self.pool.layout().index_keys(layer)?, position))
    }

    fn row(&self, rows: Rows, position: usize) -> Vec<f32> {
        let at = position + rows.shift;
        self.blocks[at / BLOCK].values().to_f32(rows.place(at % BLOCK))
    }

    /// Writes the latent and the rotated rope key of `position`, which was [prepared](Self::prepare).
    pub(crate) fn write(&mut self, layer: usize, position: usize, latent: &[f32], rope_key: &[f32]) {
        let layout = self.pool.layout();
        let (latents, rope_keys) = (layout.latents(layer), layout.rope_keys(layer));
        let at = position + latents.shift;
        let values = self.values_mut(at / BLOCK);
        values.write(latents.place(at % BLOCK), latent);
        values.write(rope_keys.place(at % BLOCK), rope_key);
    }

    /// Writes the index key of `position`; a no-op for layers that keep none.
    pub(crate) fn write_index(&mut self, layer: usize, position: usize, key: &[f32]) {
        if let Some(keys) = self.pool.layout().index_keys(layer) {
            self.values_mut(position / BLOCK).write(keys.place(position % BLOCK), key);
        }
    }

    fn values_mut(&mut self, block: usize) -> &mut Values {
        let block =
            Arc::get_mut(&mut self.blocks[block]).expect("positions are prepared before they are written");
        block.values_mut()
    }
}
