//! The resident tensors of a model, in memory.

use forebay_core::panel::PANEL_ROWS;
use forebay_core::quant::{self, EncodeError};
use forebay_core::{Format, MatrixView, PanelShape, PanelView};
use forebay_io::{ReadError, Shard, read_exact_at};
use forebay_kernels::{Buffer, Rope, RopeError, Weights};
use forebay_store::catalog::Catalog;
use forebay_store::layout::{Extent, WeightLayout};

use crate::arith::Arith;
use crate::embedding::{DiskRows, Embedding, EmbeddingPlace};
use crate::families::roles::Role;
use crate::snapshot::{ResidentTensor, Snapshot};
use crate::spec::{FfnKind, ModelSpec};

/// One weight matrix that this process owns.
#[derive(Debug)]
pub struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: Bytes,
}

/// The two layouts of a resident matrix.
#[derive(Debug)]
enum Bytes {
    /// As in the container.
    Rows { codes: Vec<u8>, scales: Vec<f32> },
    /// In panels, on large pages where the system grants them.
    Panels { shape: PanelShape, bytes: Buffer },
}

impl Matrix {
    /// The matrix as products take it.
    pub fn weights(&self) -> Weights<'_> {
        match &self.bytes {
            Bytes::Rows { .. } => self.view().into(),
            Bytes::Panels { shape, bytes } => PanelView::new(*shape, bytes)
                .expect("a Matrix is only built from panels of the right length")
                .into(),
        }
    }

    /// The rows as the container has them.
    ///
    /// # Panics
    /// If the matrix is in panels: only roles that are multiplied whole are
    /// (see [`ResidentTensor::panels`]).
    pub fn view(&self) -> MatrixView<'_> {
        let Bytes::Rows { codes, scales } = &self.bytes else {
            panic!("this role is kept in rows");
        };
        MatrixView::new(self.format, self.rows, self.cols, codes, scales)
            .expect("a Matrix is only built from codes and scales of the right length")
    }

    /// Row `row` as f32.
    ///
    /// # Panics
    /// As [`view`](Self::view).
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        quant::decode_row(&self.view(), row, out);
    }

    /// Storage format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows (outputs).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (inputs).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match &self.bytes {
            Bytes::Rows { codes, scales } => codes.len() + 4 * scales.len(),
            Bytes::Panels { bytes, .. } => bytes.len(),
        }
    }
}

/// Why resident tensors could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// A file could not be read.
    #[error("tensor {tensor} could not be loaded: {cause}")]
    Read {
        /// The tensor.
        tensor: String,
        /// File, place and reason.
        cause: ReadError,
    },
    /// The system has no memory for a tensor.
    #[error("no memory for tensor {tensor} ({bytes} bytes); close other programs or use a smaller model")]
    NoMemory {
        /// The tensor.
        tensor: String,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The wanted format cannot be written.
    #[error("tensor {tensor}: {cause}")]
    Encode {
        /// The tensor.
        tensor: String,
        /// Why.
        cause: EncodeError,
    },
    /// The rotary table cannot be made.
    #[error(transparent)]
    Rope(#[from] RopeError),
}

/// Dense or shared MLP.
#[derive(Debug)]
pub struct Mlp {
    /// `[width, hidden]`
    pub gate: Matrix,
    /// `[width, hidden]`
    pub up: Matrix,
    /// `[hidden, width]`
    pub down: Matrix,
}

impl Mlp {
    /// Gate, up and down.
    pub(crate) fn matrices(&self) -> [&Matrix; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// The attention weights of one layer.
#[derive(Debug)]
pub struct AttentionWeights {
    /// Query compression.
    pub q_a: Matrix,
    /// Norm of the compressed query.
    pub q_a_norm: Vec<f32>,
    /// Query expansion.
    pub q_b: Matrix,
    /// Key/value compression, then the shared rope key.
    pub kv_a: Matrix,
    /// Norm of the latent.
    pub kv_a_norm: Vec<f32>,
    /// Key/value expansion, per head keys then values.
    pub kv_b: Matrix,
    /// Output projection.
    pub o: Matrix,
    /// The indexer, in layers that select while sparse attention is active.
    pub indexer: Option<IndexerWeights>,
}

/// The lightning indexer of one layer.
#[derive(Debug)]
pub struct IndexerWeights {
    /// Queries from the compressed query.
    pub q: Matrix,
    /// The shared key from the layer's input.
    pub k: Matrix,
    /// Head weights from the layer's input.
    pub head_weights: Matrix,
    /// Layer norm of the key: weight.
    pub k_norm: Vec<f32>,
    /// Layer norm of the key: bias.
    pub k_norm_bias: Vec<f32>,
}

/// A layer's feed-forward weights, routed experts apart.
#[derive(Debug)]
pub enum Ffn {
    /// One MLP for every token.
    Dense(Mlp),
    /// A router over streamed experts, and the shared expert.
    Sparse {
        /// `[experts, hidden]`
        router: Matrix,
        /// Added to the scores for selection only.
        bias: Vec<f32>,
        /// Absent when the config has no shared expert.
        shared: Option<Mlp>,
    },
}

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// Norm before attention.
    pub input_norm: Vec<f32>,
    /// Norm before the feed-forward part.
    pub post_norm: Vec<f32>,
    /// Attention.
    pub attention: AttentionWeights,
    /// Feed-forward part.
    pub ffn: Ffn,
}

/// The layer that drafts tokens (multi-token prediction), its routed experts apart.
#[derive(Debug)]
pub struct Mtp {
    /// `[hidden, 2 * hidden]`: joins the next token's embedding, which comes first, and a hidden state.
    pub join: Matrix,
    /// Norm of the embedding.
    pub embedding_norm: Vec<f32>,
    /// Norm of the hidden state.
    pub hidden_norm: Vec<f32>,
    /// Norm before the head.
    pub final_norm: Vec<f32>,
    /// A sparse layer without an indexer.
    pub layer: LayerWeights,
}

/// What of a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedParts {
    /// Where the embeddings are.
    pub embedding: EmbeddingPlace,
    /// Whether the MTP layer is loaded, if the snapshot has one that can be used.
    pub mtp: bool,
}

/// Everything of a model that stays in memory.
#[derive(Debug)]
pub struct Model {
    /// What the model is.
    pub spec: ModelSpec,
    /// `[vocab, hidden]`
    pub embedding: Embedding,
    /// The decoder layers.
    pub layers: Vec<LayerWeights>,
    /// The layer behind them, if it drafts.
    pub mtp: Option<Mtp>,
    /// Norm before the head.
    pub final_norm: Vec<f32>,
    /// `[vocab, hidden]`
    pub head: Matrix,
    /// Rotary positions of queries and keys.
    pub rope: Rope,
}

impl Model {
    /// Loads the resident tensors of a checked snapshot.
    ///
    /// Float weights are re-encoded as the snapshot's options ask; `progress` is called with the
    /// bytes read so far, of [`bytes_to_read`](Self::bytes_to_read).
    pub fn load(
        snapshot: &Snapshot,
        shards: &[Shard],
        parts: LoadedParts,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, WeightError> {
        let spec = snapshot.spec.clone();
        let files = Files { shards, catalog: &snapshot.catalog };
        let mut loader = Loader { tensors: snapshot.resident.iter(), files, done: 0, progress };
        let embedding = match parts.embedding {
            EmbeddingPlace::Memory => Embedding::Memory(loader.matrix()?),
            EmbeddingPlace::Disk => Embedding::Disk(DiskRows::new(loader.next(), files)?),
        };
        let head = loader.matrix()?;
        let final_norm = loader.vector()?;
        let select = snapshot.sparse_attention.is_active();
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            let indexed = select && layer.indexer == crate::spec::IndexerKind::Full;
            layers.push(loader.layer(&spec, layer.ffn, indexed)?);
        }
        let mtp = match snapshot.mtp_part.as_ref().filter(|_| parts.mtp) {
            Some(part) => {
                loader.tensors = part.resident.iter();
                Some(loader.mtp(&spec)?)
            }
            None => None,
        };
        let rope = Rope::new(spec.attention.rope, spec.attention.rope_theta)?;
        Ok(Self { spec, embedding, layers, mtp, final_norm, head, rope })
    }

    /// Layer `layer`; the one behind the decoder's is the MTP layer.
    ///
    /// # Panics
    /// If there is no such layer, or the MTP layer was not loaded.
    pub(crate) fn layer(&self, layer: usize) -> &LayerWeights {
        match self.layers.get(layer) {
            Some(layer) => layer,
            None => &self.mtp.as_ref().expect("only a loaded MTP layer is asked for").layer,
        }
    }

    /// Bytes that [`load`](Self::load) holds for a moment beside the loaded tensors.
    pub fn load_transient_bytes(snapshot: &Snapshot, parts: LoadedParts) -> u64 {
        snapshot.loaded(parts).map(ResidentTensor::transient_bytes).max().unwrap_or(0)
    }

    /// Bytes that [`load`](Self::load) reads.
    pub fn bytes_to_read(snapshot: &Snapshot, parts: LoadedParts) -> u64 {
        snapshot.loaded(parts).map(|tensor| tensor.layout.total_bytes()).sum()
    }
}

/// Takes tensors in the order in which the snapshot lists them.
struct Loader<'a> {
    tensors: std::slice::Iter<'a, ResidentTensor>,
    files: Files<'a>,
    done: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> Loader<'a> {
    fn layer(&mut self, spec: &ModelSpec, ffn: FfnKind, indexed: bool) -> Result<LayerWeights, WeightError> {
        let input_norm = self.vector()?;
        let post_norm = self.vector()?;
        let mut attention = AttentionWeights {
            q_a: self.matrix()?,
            q_a_norm: self.vector()?,
            q_b: self.matrix()?,
            kv_a: self.matrix()?,
            kv_a_norm: self.vector()?,
            kv_b: self.matrix()?,
            o: self.matrix()?,
            indexer: None,
        };
        let ffn = match ffn {
            FfnKind::Dense => Ffn::Dense(self.mlp()?),
            FfnKind::Sparse => Ffn::Sparse {
                router: self.matrix()?,
                bias: self.vector()?,
                shared: if spec.moe.shared_width > 0 { Some(self.mlp()?) } else { None },
            },
        };
        if indexed {
            attention.indexer = Some(IndexerWeights {
                q: self.matrix()?,
                k: self.matrix()?,
                head_weights: self.matrix()?,
                k_norm: self.vector()?,
                k_norm_bias: self.vector()?,
            });
        }
        Ok(LayerWeights { input_norm, post_norm, attention, ffn })
    }

    fn mtp(&mut self, spec: &ModelSpec) -> Result<Mtp, WeightError> {
        Ok(Mtp {
            join: self.matrix()?,
            embedding_norm: self.vector()?,
            hidden_norm: self.vector()?,
            final_norm: self.vector()?,
            layer: self.layer(spec, FfnKind::Sparse, false)?,
        })
    }

    fn mlp(&mut self) -> Result<Mlp, WeightError> {
        Ok(Mlp { gate: self.matrix()?, up: self.matrix()?, down: self.matrix()? })
    }

    fn vector(&mut self) -> Result<Vec<f32>, WeightError> {
        let matrix = self.matrix()?;
        let mut values = vec![0.0; matrix.cols];
        matrix.decode_row(0, &mut values);
        Ok(values)
    }

    fn next(&mut self) -> &'a ResidentTensor {
        self.tensors.next().expect("the snapshot lists every resident tensor in loading order")
    }

    fn matrix(&mut self) -> Result<Matrix, WeightError> {
        let tensor = self.next();
        let matrix = load_matrix(tensor, self.files)?;
        self.done += tensor.layout.total_bytes();
        (self.progress)(self.done);
        Ok(matrix)
    }
}

/// Rows that are read, and put into panels, at a time.
const LOAD_ROWS: usize = 512;

/// The files of a model, and what is known of their bytes.
#[derive(Clone, Copy)]
pub(crate) struct Files<'a> {
    pub shards: &'a [Shard],
    pub catalog: &'a Catalog,
}

impl Files<'_> {
    /// Reads the whole of a tensor's codes or scales, and checks it where the container has a checksum.
    fn read(&self, tensor: &ResidentTensor, extent: Extent) -> Result<Vec<u8>, WeightError> {
        let bytes = read_extent(tensor, self.shards, extent)?;
        self.compare(tensor, extent, || crc32c::crc32c(&bytes))?;
        Ok(bytes)
    }

    /// An error if the checksum of what was read of `extent` is not the container's.
    pub fn compare(
        &self,
        tensor: &ResidentTensor,
        extent: Extent,
        found: impl FnOnce() -> u32,
    ) -> Result<(), WeightError> {
        match self.catalog.checksum(extent) {
            Some(expected) => compare(tensor, &self.shards[extent.shard as usize], extent, expected, found()),
            None => Ok(()),
        }
    }
}

/// An error if two checksums of the bytes of `extent` differ.
pub(crate) fn compare(
    tensor: &ResidentTensor,
    shard: &Shard,
    extent: Extent,
    expected: u32,
    found: u32,
) -> Result<(), WeightError> {
    if found == expected {
        return Ok(());
    }
    let (path, offset, len) = (shard.path.clone(), extent.offset, extent.len as usize);
    let cause = ReadError::Checksum { path, offset, len, expected, found };
    Err(WeightError::Read { tensor: tensor.name.clone(), cause })
}

fn load_matrix(tensor: &ResidentTensor, files: Files<'_>) -> Result<Matrix, WeightError> {
    let &WeightLayout { format, rows, cols, codes, scales, .. } = &tensor.layout;
    let scales = match scales {
        Some(extent) => files
            .read(tensor, extent)?
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        None => Vec::new(),
    };
    let fail = |cause| WeightError::Encode { tensor: tensor.name.clone(), cause };
    if tensor.loaded_format != format {
        let codes = files.read(tensor, codes)?;
        let stored = Matrix { format, rows, cols, bytes: Bytes::Rows { codes, scales } };
        let encoded = reencode(&stored.view(), tensor.loaded_format).map_err(fail)?;
        return match tensor.panels() {
            Some(shape) => pack(tensor, shape, |panels| {
                shape.pack(&encoded.view(), panels);
                Ok(())
            }),
            None => Ok(encoded),
        };
    }
    let Some(shape) = tensor.panels() else {
        let codes = files.read(tensor, codes)?;
        return Ok(Matrix { format, rows, cols, bytes: Bytes::Rows { codes, scales } });
    };
    pack(tensor, shape, |panels| {
        let (row_bytes, row_scales) = (codes.len / rows as u64, scales.len() / rows);
        let mut crc = 0;
        let pieces = panels.chunks_mut(LOAD_ROWS / PANEL_ROWS * shape.panel_bytes());
        for (first, panels) in (0..rows).step_by(LOAD_ROWS).zip(pieces) {
            let here = first..rows.min(first + LOAD_ROWS);
            let offset = codes.offset + first as u64 * row_bytes;
            let piece = Extent { offset, len: here.len() as u64 * row_bytes, ..codes };
            let piece = read_extent(tensor, files.shards, piece)?;
            crc = crc32c::crc32c_append(crc, &piece);
            let scales = &scales[here.start * row_scales..here.end * row_scales];
            let view = MatrixView::new(format, here.len(), cols, &piece, scales)
                .expect("whole rows of a checked layout");
            shape.slice_rows(here).pack(&view, panels);
        }
        files.compare(tensor, codes, || crc)
    })
}

/// A matrix in panels, whose bytes `fill` writes.
fn pack(
    tensor: &ResidentTensor,
    shape: PanelShape,
    fill: impl FnOnce(&mut [u8]) -> Result<(), WeightError>,
) -> Result<Matrix, WeightError> {
    let mut bytes = Buffer::zeroed(shape.bytes())
        .ok_or_else(|| WeightError::NoMemory { tensor: tensor.name.clone(), bytes: shape.bytes() as u64 })?;
    fill(&mut bytes)?;
    let (format, rows, cols) = (shape.format(), shape.rows(), shape.cols());
    Ok(Matrix { format, rows, cols, bytes: Bytes::Panels { shape, bytes } })
}

/// The same matrix in another format, one row at a time.
fn reencode(view: &MatrixView<'_>, format: Format) -> Result<Matrix, EncodeError> {
    let (rows, cols) = (view.rows(), view.cols());
    // A format that can be written takes no more bytes than the f32 matrix it came from.
    let mut codes = vec![0; format.payload_bytes(rows, cols).unwrap_or(0)];
    let mut scales = vec![0.0; format.scale_count(rows, cols).unwrap_or(0)];
    encode_into(view, format, &mut codes, &mut scales)?;
    Ok(Matrix { format, rows, cols, bytes: Bytes::Rows { codes, scales } })
}

/// Re-encodes `view`, one row at a time, into buffers of exactly the right length.
pub(crate) fn encode_into(
    view: &MatrixView<'_>,
    format: Format,
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<(), EncodeError> {
    let (rows, cols) = (view.rows(), view.cols());
    let (row_bytes, row_scales) = (codes.len() / rows, scales.len() / rows);
    let mut row = vec![0.0; cols];
    for r in 0..rows {
        quant::decode_row(view, r, &mut row);
        let encoded = quant::encode(format, 1, cols, &row)?;
        codes[r * row_bytes..(r + 1) * row_bytes].copy_from_slice(&encoded.codes);
        scales[r * row_scales..(r + 1) * row_scales].copy_from_slice(&encoded.scales);
    }
    Ok(())
}

pub(crate) fn read_extent(
    tensor: &ResidentTensor,
    shards: &[Shard],
    extent: Extent,
) -> Result<Vec<u8>, WeightError> {
    let no_memory = || WeightError::NoMemory { tensor: tensor.name.clone(), bytes: extent.len };
    let len = usize::try_from(extent.len).map_err(|_| no_memory())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| no_memory())?;
    bytes.resize(len, 0);
    let shard = &shards[extent.shard as usize];
    read_exact_at(&*shard.file, &shard.path, &mut bytes, extent.offset)
        .map_err(|cause| WeightError::Read { tensor: tensor.name.clone(), cause })?;
    Ok(bytes)
}

impl ResidentTensor {
    /// The panels it is loaded into: integer weights that are multiplied whole with int8
    /// activations. Everything else stays in rows.
    pub fn panels(&self) -> Option<PanelShape> {
        let &WeightLayout { rows, cols, .. } = &self.layout;
        PanelShape::new(self.loaded_format, rows, cols).filter(|_| self.arith == Arith::Int8)
    }

    /// Bytes this tensor takes in memory once loaded.
    pub fn loaded_bytes(&self) -> u64 {
        let &WeightLayout { rows, cols, .. } = &self.layout;
        if let Some(panels) = self.panels() {
            return panels.bytes() as u64;
        }
        let format = if self.role == Role::Norm || self.role == Role::RouterBias {
            Format::F32
        } else {
            self.loaded_format
        };
        // The stored form was checked to be addressable, and no loaded form is more than 4 times as large.
        format.total_bytes(rows, cols).map_or(u64::MAX, |b| b as u64)
    }

    /// Bytes held for a moment, beside the loaded tensor, while it is loaded.
    fn transient_bytes(&self) -> u64 {
        let &WeightLayout { format, rows, cols, .. } = &self.layout;
        let encoded = self.loaded_format != format;
        let in_rows = |format: Format, rows| format.total_bytes(rows, cols).map_or(u64::MAX, |b| b as u64);
        match (encoded, self.panels()) {
            (false, None) => 0,
            // The scales, as they were read and as numbers, and one piece of the codes.
            (false, Some(_)) => {
                let scales = format.scale_count(rows, cols).map_or(u64::MAX, |n| 8 * n as u64);
                in_rows(format, rows.min(LOAD_ROWS)).saturating_add(scales)
            }
            (true, None) => self.layout.total_bytes(),
            (true, Some(_)) => self.layout.total_bytes().saturating_add(in_rows(self.loaded_format, rows)),
        }
    }
}
