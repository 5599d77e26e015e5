//! The compressed KV cache of one sequence.
//!
//! Per layer and position: the normalised latent (`kv_rank` values) and the
//! rotated shared rope key (`rope` values); full-indexer layers also keep an
//! index key. Rows past the logical length are stale and never read.

use forebay_core::float::{bf16_to_f32, f32_to_bf16};

use crate::spec::{IndexerKind, ModelSpec};

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

/// Rows of `width` values, one per position.
#[derive(Clone, Debug)]
pub enum Rows {
    /// bfloat16 bits.
    Bf16(Vec<u16>),
    /// Single precision.
    F32(Vec<f32>),
}

impl Rows {
    fn new(dtype: KvDtype, values: usize) -> Self {
        match dtype {
            KvDtype::Bf16 => Rows::Bf16(vec![0; values]),
            KvDtype::F32 => Rows::F32(vec![0.0; values]),
        }
    }

    fn write(&mut self, at: usize, row: &[f32]) {
        match self {
            Rows::Bf16(all) => {
                for (slot, value) in all[at..at + row.len()].iter_mut().zip(row) {
                    *slot = f32_to_bf16(*value);
                }
            }
            Rows::F32(all) => all[at..at + row.len()].copy_from_slice(row),
        }
    }

    /// The values from `at` on, `len` of them, as f32.
    pub fn to_f32(&self, at: usize, len: usize) -> Vec<f32> {
        match self {
            Rows::Bf16(all) => all[at..at + len].iter().map(|b| bf16_to_f32(*b)).collect(),
            Rows::F32(all) => all[at..at + len].to_vec(),
        }
    }
}

/// One layer's cache.
#[derive(Clone, Debug)]
pub struct LayerKv {
    /// `[capacity, kv_rank]`
    pub latents: Rows,
    /// `[capacity, rope]`
    pub rope_keys: Rows,
    /// `[capacity, index dim]`, for layers that select.
    pub index_keys: Option<Rows>,
}

/// The cache of one sequence: fixed capacity, moving length.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<LayerKv>,
    kv_rank: usize,
    rope: usize,
    index_dim: usize,
    capacity: usize,
    len: usize,
    /// Rows of the MTP layer, from position 0 on, that stem from verified tokens and hidden states.
    drafting: usize,
}

/// What a cache holds besides latents and rope keys of the decoder layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvParts {
    /// Index keys, when sparse attention is active.
    pub index: bool,
    /// Rows of the MTP layer, when it drafts.
    pub mtp: bool,
}

impl KvCache {
    /// An empty cache for `capacity` positions.
    pub fn new(spec: &ModelSpec, capacity: usize, dtype: KvDtype, parts: KvParts) -> Self {
        let (kv_rank, rope) = (spec.attention.kv_rank, spec.attention.rope);
        let index_dim = spec.indexer.filter(|_| parts.index).map_or(0, |i| i.dim);
        // The MTP layer attends to everything, so it needs no index keys.
        let selects = spec.layers.iter().map(|layer| index_dim > 0 && layer.indexer == IndexerKind::Full);
        let layers = selects.chain(parts.mtp.then_some(false)).map(|selects| LayerKv {
            latents: Rows::new(dtype, capacity * kv_rank),
            rope_keys: Rows::new(dtype, capacity * rope),
            index_keys: selects.then(|| Rows::new(dtype, capacity * index_dim)),
        });
        Self { layers: layers.collect(), kv_rank, rope, index_dim, capacity, len: 0, drafting: 0 }
    }

    /// Bytes that a cache of `capacity` positions takes; `None` on overflow.
    pub fn planned_bytes(spec: &ModelSpec, capacity: usize, dtype: KvDtype, parts: KvParts) -> Option<u64> {
        let index_dim = spec.indexer.filter(|_| parts.index).map_or(0, |i| i.dim);
        let per_token = (spec.layers.len() + usize::from(parts.mtp))
            .checked_mul(spec.kv_width())?
            .checked_add(spec.full_indexer_layers().count().checked_mul(index_dim)?)?;
        (capacity as u64).checked_mul(per_token as u64)?.checked_mul(dtype.bytes() as u64)
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

    /// Forgets every position from `len` on. Longer than the current length changes nothing.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.len = len;
            // The row of the last position left belongs to the token behind it, which may be another now.
            self.drafting = self.drafting.min(len.saturating_sub(1));
        }
    }

    /// Forgets positions whose tokens will be run again as they were, and those behind them.
    pub(crate) fn rewind(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.drafting = self.drafting.min(len);
    }

    /// Rows of the MTP layer that are valid.
    pub fn drafting(&self) -> usize {
        self.drafting
    }

    /// Declares the MTP layer's rows before `rows` valid.
    pub(crate) fn drafting_reaches(&mut self, rows: usize) {
        self.drafting = self.drafting.max(rows);
    }

    /// Declares `rows` more positions valid, after all layers wrote them.
    ///
    /// # Panics
    /// If that exceeds the capacity.
    pub(crate) fn advance(&mut self, rows: usize) {
        assert!(self.len + rows <= self.capacity, "the caller checked the room");
        self.len += rows;
    }

    /// Layer `layer`'s rows.
    pub fn layer(&self, layer: usize) -> &LayerKv {
        &self.layers[layer]
    }

    /// The latent of one position as f32, for tests and dumps.
    pub fn latent(&self, layer: usize, position: usize) -> Vec<f32> {
        self.layers[layer].latents.to_f32(position * self.kv_rank, self.kv_rank)
    }

    /// The rotated rope key of one position as f32, for tests and dumps.
    pub fn rope_key(&self, layer: usize, position: usize) -> Vec<f32> {
        self.layers[layer].rope_keys.to_f32(position * self.rope, self.rope)
    }

    /// The index key of one position as f32, if the layer keeps any.
    pub fn index_key(&self, layer: usize, position: usize) -> Option<Vec<f32>> {
        let keys = self.layers[layer].index_keys.as_ref()?;
        Some(keys.to_f32(position * self.index_dim, self.index_dim))
    }

    /// Writes the latent and the rotated rope key of `position`.
    pub(crate) fn write(&mut self, layer: usize, position: usize, latent: &[f32], rope_key: &[f32]) {
        let kv = &mut self.layers[layer];
        kv.latents.write(position * self.kv_rank, latent);
        kv.rope_keys.write(position * self.rope, rope_key);
    }

    /// Writes the index key of `position`; a no-op for layers that keep none.
    pub(crate) fn write_index(&mut self, layer: usize, position: usize, key: &[f32]) {
        if let Some(keys) = &mut self.layers[layer].index_keys {
            keys.write(position * self.index_dim, key);
        }
    }
}
