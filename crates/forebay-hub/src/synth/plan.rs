//! Which tensor goes into which file, byte for byte, before anything is written.
//!
//! As the reference's writer does: F32 tensors before all others, each sorted by name,
//! so that an expert's three matrices lie side by side and can be read at once. An expert is never split.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_core::Format;
use forebay_core::format::FP8_BLOCK;
use forebay_model::ModelSpec;
use forebay_model::families::glm;
use forebay_model::families::roles::{Shape, TensorNeed};

use super::error::SynthError;
use super::matrix::Matrix;
use super::pool::PoolKey;
use super::spec::{SynthSpec, TextFiles};
use super::tune::{Filling, Tuner};
use crate::safetensors::{self, Describe};

/// Weights of the smallest and the largest pool; in between, a pool is a 64th of what is made from it.
const POOL_WEIGHTS: std::ops::RangeInclusive<usize> = 1 << 24..=1 << 26;

/// Most weight files that every reader of this container takes.
const MAX_SHARDS: usize = 512;

/// What one stored tensor is filled with.
#[derive(Clone, Debug)]
pub enum Source {
    /// The codes of a matrix.
    Codes(Arc<Matrix>),
    /// The scales of a matrix.
    Scales(Arc<Matrix>),
    /// Normal numbers.
    Normal {
        /// Their mean.
        mean: f64,
        /// Their standard deviation.
        std: f64,
    },
}

/// One stored tensor.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its name.
    pub name: String,
    /// Its filling.
    pub source: Source,
    /// Its bytes.
    pub bytes: u64,
    dtype: &'static str,
    shape: Vec<usize>,
}

impl Describe for Stored {
    fn name(&self) -> &str {
        &self.name
    }

    fn dtype(&self) -> &str {
        self.dtype
    }

    fn shape(&self) -> Vec<u64> {
        self.shape.iter().map(|size| *size as u64).collect()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// One file.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Its name.
    pub name: String,
    /// Its tensors, in the order in which they lie in the file.
    pub tensors: Vec<Stored>,
    /// Its first bytes: the length of the header, and the header.
    pub header: Vec<u8>,
    /// Its size.
    pub bytes: u64,
}

/// A whole model.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What the config says.
    pub model: ModelSpec,
    /// The weight files.
    pub shards: Vec<Shard>,
    /// Bands of every pool.
    pub pools: BTreeMap<PoolKey, usize>,
}

impl Plan {
    /// Plans the files of `spec`.
    pub fn new(spec: &SynthSpec, text: &TextFiles) -> Result<Self, SynthError> {
        let model = spec.model(text)?;
        let tuner = Tuner { spec: &model, format: spec.format, tokens: text.tokens };
        let mut files = Files { tuner, most: spec.shard_bytes, shards: Vec::new() };

        files.start("out-");
        files.add_each(glm::global_needs(&model), 0)?;
        for layer in 0..model.layers.len() {
            files.add_each(glm::layer_needs(&model, layer), layer)?;
        }
        for layer in model.sparse_layers() {
            files.start("out-");
            for expert in 0..model.moe.experts {
                files.add(glm::expert_needs(&model, layer, expert).into(), layer)?;
            }
        }
        if spec.mtp {
            files.start("out-mtp-");
            // Routed experts come last and are three matrices each.
            let mut needs = glm::mtp_needs(&model);
            let experts = needs.split_off(needs.len() - 3 * model.moe.experts);
            files.add_each(needs, model.layers.len())?;
            for expert in experts.chunks(3) {
                files.add(expert.to_vec(), model.layers.len())?;
            }
        }
        if let (true, Some(indexer)) = (spec.dsa, &model.indexer) {
            files.start("out-idx-");
            for layer in model.full_indexer_layers() {
                files.add_each(glm::indexer_needs(&model, indexer, layer), layer)?;
            }
        }
        let shards = files.finish()?;
        let pools = pools(&shards);
        Ok(Self { model, shards, pools })
    }

    /// Bytes of all weight files.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// Stored tensors, scales included.
    pub fn tensors(&self) -> usize {
        self.shards.iter().map(|shard| shard.tensors.len()).sum()
    }
}

/// Files being filled.
struct Files<'a> {
    tuner: Tuner<'a>,
    /// Bytes that a file should not exceed.
    most: u64,
    /// Prefix and tensors of each.
    shards: Vec<(&'static str, Vec<Stored>)>,
}

impl Files<'_> {
    /// Begins a new file.
    fn start(&mut self, prefix: &'static str) {
        self.shards.push((prefix, Vec::new()));
    }

    /// Adds tensors that need not stay together.
    fn add_each(&mut self, needs: Vec<TensorNeed>, layer: usize) -> Result<(), SynthError> {
        needs.into_iter().try_for_each(|need| self.add(vec![need], layer))
    }

    /// Adds tensors that must not be split over two files.
    fn add(&mut self, needs: Vec<TensorNeed>, layer: usize) -> Result<(), SynthError> {
        let mut tensors = Vec::new();
        for need in &needs {
            tensors.extend(stored(&self.tuner, need, layer)?);
        }
        let size = |tensors: &[Stored]| tensors.iter().map(|tensor| tensor.bytes).sum::<u64>();
        let Some((prefix, held)) = self.shards.last_mut() else { return Ok(()) };
        if !held.is_empty() && size(held).saturating_add(size(&tensors)) > self.most {
            let prefix = *prefix;
            self.shards.push((prefix, tensors));
        } else {
            held.extend(tensors);
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Shard>, SynthError> {
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let filled: Vec<_> = self.shards.into_iter().filter(|(_, tensors)| !tensors.is_empty()).collect();
        if filled.len() > MAX_SHARDS {
            return Err(SynthError::TooManyShards { shards: filled.len(), limit: MAX_SHARDS });
        }
        let named = filled.into_iter().map(|(prefix, tensors)| {
            let number = numbers.entry(prefix).or_default();
            let name = format!("{prefix}{number:05}.safetensors");
            *number += 1;
            shard(name, tensors)
        });
        named.collect()
    }
}

/// The one or two tensors that hold what `need` asks for.
fn stored(tuner: &Tuner<'_>, need: &TensorNeed, layer: usize) -> Result<Vec<Stored>, SynthError> {
    let too_large = || SynthError::TooLarge { tensor: need.name.clone() };
    let (rows, cols, shape) = match need.shape {
        Shape::Matrix { rows, cols } | Shape::FloatMatrix { rows, cols } => (rows, cols, vec![rows, cols]),
        Shape::Vector { len } => (1, len, vec![len]),
    };
    let name = need.name.clone();
    let matrix = match tuner.filling(need, rows, cols, layer) {
        Filling::Normal { mean, std } => {
            let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(4)).ok_or_else(too_large)? as u64;
            return Ok(vec![Stored {
                name,
                source: Source::Normal { mean, std },
                bytes,
                dtype: "F32",
                shape,
            }]);
        }
        Filling::Matrix(matrix) => Arc::new(matrix),
    };
    let format = matrix.format;
    check_groups(format, cols)?;
    let payload = format.payload_bytes(rows, cols).ok_or_else(too_large)?;
    let scales = format.scale_count(rows, cols).ok_or_else(too_large)?;
    let scale_bytes = scales.checked_mul(4).ok_or_else(too_large)? as u64;
    let (dtype, shape) = match format {
        Format::F32 => ("F32", shape),
        Format::Bf16 => ("BF16", shape),
        Format::F16 => ("F16", shape),
        Format::Fp8Block => ("F8_E4M3", shape),
        _ => ("U8", vec![payload]),
    };
    let (scale_name, scale_shape) = match format {
        Format::Fp8Block => {
            (format!("{name}_scale_inv"), vec![rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)])
        }
        _ => (format!("{name}.qs"), vec![scales]),
    };
    let source = Source::Codes(matrix.clone());
    let mut stored = vec![Stored { name, source, bytes: payload as u64, dtype, shape }];
    if scales > 0 {
        let source = Source::Scales(matrix);
        stored.push(Stored {
            name: scale_name,
            source,
            bytes: scale_bytes,
            dtype: "F32",
            shape: scale_shape,
        });
    }
    Ok(stored)
}

/// Readers know the size of groups from their number alone. One group is a row,
/// whatever its size.
fn check_groups(asked: Format, cols: usize) -> Result<(), SynthError> {
    match asked.as_inferred(cols) {
        Format::Int4Row => Ok(()),
        read if read != asked => Err(SynthError::Ambiguous { asked, read, cols }),
        _ => Ok(()),
    }
}

fn shard(name: String, mut tensors: Vec<Stored>) -> Result<Shard, SynthError> {
    safetensors::sort(&mut tensors);
    let header = safetensors::header(&tensors);
    let header = header.map_err(|tensor| SynthError::TooLarge { tensor: tensor.name.clone() })?;
    let bytes = tensors.iter().map(|tensor| tensor.bytes).sum::<u64>() + header.len() as u64;
    Ok(Shard { name, tensors, header, bytes })
}

/// How many bands each pool needs.
fn pools(shards: &[Shard]) -> BTreeMap<PoolKey, usize> {
    let mut rows: BTreeMap<PoolKey, usize> = BTreeMap::new();
    for tensor in shards.iter().flat_map(|shard| &shard.tensors) {
        let Source::Codes(matrix) = &tensor.source else { continue };
        for segment in matrix.segments.iter().filter(|segment| segment.rows > 0) {
            *rows.entry(segment.pool).or_default() += segment.rows;
        }
    }
    for (key, rows) in &mut rows {
        let wanted = (*rows / 64).saturating_mul(key.cols).clamp(*POOL_WEIGHTS.start(), *POOL_WEIGHTS.end());
        *rows = rows.div_ceil(FP8_BLOCK).min((wanted / FP8_BLOCK / key.cols).max(1));
    }
    rows
}
