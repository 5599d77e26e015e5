//! One weight of the source: where it is, and its rows as f32 (conversion spec section 2).

use std::ops::Range;

use forebay_core::format::{FP8_BLOCK, Format};
use forebay_core::nvfp4::{self, NVFP4_GROUP};
use forebay_core::quant::decode_row;
use forebay_core::{MatrixView, ViewError};
use forebay_store::catalog::{Catalog, TensorEntry};
use forebay_store::layout::{self, Extent, LayoutError, WeightLayout};
use forebay_store::shard::Dtype;

use super::error::ConvertError;
use super::gguf::names::SPLIT;
use super::input::Inputs;
use crate::gguf::{Kind, blocks};

/// What is done with every row: its number and its weights.
pub type EachRow<'a> = dyn FnMut(usize, &[f32]) -> Result<(), ConvertError> + 'a;

/// A matrix of the source.
#[derive(Clone, Debug, PartialEq)]
pub enum Weight {
    /// Floats, or FP8 with a multiplier per block of 128 x 128.
    Stored(WeightLayout),
    /// NVFP4.
    Nvfp4 {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Two columns a byte.
        codes: Extent,
        /// An FP8 number for every 16 columns.
        scales: Extent,
        /// One f32.
        scale_2: Extent,
        /// Its name.
        scale_2_name: String,
    },
    /// Blocks of a GGUF file.
    Blocks(Blocks),
    /// Attention's `kv_b_proj` in two parts of a GGUF file: a head's rows are those of `keys`, turned, then `values`.
    Split {
        /// Columns of the whole, which are the rows of `keys` by head.
        cols: usize,
        /// A matrix of `cols` rows for every head, one below the other.
        keys: Blocks,
        /// The values' rows of all heads.
        values: Blocks,
    },
}

/// A matrix of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks {
    /// The type of its weights.
    pub kind: Kind,
    /// Columns.
    pub cols: usize,
    /// Rows.
    pub rows: usize,
    /// Where it is.
    pub bytes: Extent,
}

/// Finds the matrix `name`, `rows x cols`.
pub fn matrix(catalog: &Catalog, name: &str, rows: usize, cols: usize) -> Result<Weight, ConvertError> {
    if let (Some(entry), true) = (catalog.get(name), catalog.get(&format!("{name}.qs")).is_some()) {
        let file = catalog.shard_name(entry.shard);
        return Err(ConvertError::Quantised { file, tensor: name.to_owned() });
    }
    if let Some(found) = split(catalog, name, rows, cols)? {
        return Ok(found);
    }
    if let Some(found) = blocks(catalog, name, &[rows, cols])? {
        return Ok(Weight::Blocks(found));
    }
    if let (Some(entry), Some(scales)) = (catalog.get(name), catalog.get(&format!("{name}_scale")))
        && matches!(entry.dtype, Dtype::U8 | Dtype::I8)
    {
        return nvfp4(catalog, name, [rows, cols], entry, scales);
    }
    stored(layout::weight(catalog, name, rows, cols))
}

/// Finds a matrix or vector that is computed with as floats, such as a router or a norm.
pub fn floats(catalog: &Catalog, name: &str, shape: &[usize]) -> Result<Weight, ConvertError> {
    if let Some(found) = blocks(catalog, name, shape)? {
        return Ok(Weight::Blocks(found));
    }
    match *shape {
        [rows, cols] => stored(layout::float_matrix(catalog, name, rows, cols)),
        _ => stored(layout::vector(catalog, name, shape.first().copied().unwrap_or(0))),
    }
}

/// A weight as `forebay-store` describes it.
pub fn stored(found: Result<WeightLayout, LayoutError>) -> Result<Weight, ConvertError> {
    found.map(Weight::Stored).map_err(|first| ConvertError::Layout { first, count: 1 })
}

/// The tensor `name` if it is quantised as GGUF files are, of this shape.
fn blocks(catalog: &Catalog, name: &str, shape: &[usize]) -> Result<Option<Blocks>, ConvertError> {
    let Some(entry) = catalog.get(name) else { return Ok(None) };
    let Dtype::Other(kind) = &entry.dtype else { return Ok(None) };
    let Some(kind) = Kind::from_name(kind) else { return Ok(None) };
    block_matrix(catalog, name, entry, kind, shape).map(Some)
}

/// A tensor of a GGUF file, of this shape, as a matrix with the rows of all dimensions but the last.
fn block_matrix(
    catalog: &Catalog,
    name: &str,
    entry: &TensorEntry,
    kind: Kind,
    shape: &[usize],
) -> Result<Blocks, ConvertError> {
    let wanted: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
    let (cols, rows) = match shape.split_last() {
        Some((cols, rest)) => {
            (*cols, rest.iter().try_fold(1usize, |n, size| n.checked_mul(*size)).unwrap_or(0))
        }
        None => (0, 0),
    };
    let bytes = kind.row_bytes(cols as u64).and_then(|row| row.checked_mul(rows as u64));
    if *entry.shape != *wanted || bytes != Some(entry.len) {
        let (file, tensor) = (catalog.shard_name(entry.shard), name.to_owned());
        let first = LayoutError::Shape { file, tensor, found: entry.shape.to_vec(), expected: wanted };
        return Err(ConvertError::Layout { first, count: 1 });
    }
    let bytes = Extent { shard: entry.shard, offset: entry.offset, len: entry.len };
    Ok(Blocks { kind, cols, rows, bytes })
}

/// Both parts of the `kv_b_proj` called `name`, if it is not there as a whole and they are.
fn split(catalog: &Catalog, name: &str, rows: usize, cols: usize) -> Result<Option<Weight>, ConvertError> {
    let Some(prefix) = name.strip_suffix("kv_b_proj.weight") else { return Ok(None) };
    if catalog.get(name).is_some() {
        return Ok(None);
    }
    let parts = SPLIT.map(|part| format!("{prefix}{part}"));
    let [Some(keys), Some(values)] = [&parts[0], &parts[1]].map(|part| catalog.get(part)) else {
        return Ok(None);
    };
    let size = |entry: &TensorEntry, at: usize| {
        let size = entry.shape.get(at).and_then(|size| usize::try_from(*size).ok());
        size.filter(|size| *size <= rows).unwrap_or(0)
    };
    // What does not fit is found by comparing the shapes with these.
    let (heads, nope) = (size(keys, 0), size(keys, 2));
    let value = rows.checked_div(heads).unwrap_or(0).saturating_sub(nope);
    let heads = if heads * (nope + value) == rows { heads } else { 0 };
    let part = |name: &str, entry: &TensorEntry, shape: [usize; 3]| {
        let kind = match &entry.dtype {
            Dtype::F32 => Some(Kind::F32),
            Dtype::F16 => Some(Kind::F16),
            Dtype::Bf16 => Some(Kind::Bf16),
            Dtype::Other(name) => Kind::from_name(name),
            _ => None,
        };
        let (file, tensor) = (catalog.shard_name(entry.shard), name.to_owned());
        let kind = kind.ok_or_else(|| ConvertError::Layout {
            first: LayoutError::Dtype {
                file,
                tensor,
                found: entry.dtype.clone(),
                expected: "a type of GGUF files",
            },
            count: 1,
        })?;
        block_matrix(catalog, name, entry, kind, &shape)
    };
    let keys = part(&parts[0], keys, [heads, cols, nope])?;
    let values = part(&parts[1], values, [heads, value, cols])?;
    Ok(Some(Weight::Split { cols, keys, values }))
}

fn nvfp4(
    catalog: &Catalog,
    name: &str,
    [rows, cols]: [usize; 2],
    entry: &TensorEntry,
    scales: &TensorEntry,
) -> Result<Weight, ConvertError> {
    let (scales_name, scale_2_name) = (format!("{name}_scale"), format!("{name}_scale_2"));
    let scale_2 = catalog.get(&scale_2_name).ok_or_else(|| ConvertError::Layout {
        first: LayoutError::MissingScales {
            file: catalog.shard_name(entry.shard),
            tensor: name.to_owned(),
            dtype: entry.dtype.clone(),
            scales: scale_2_name.clone(),
        },
        count: 1,
    })?;
    let check = |tensor: &str, entry: &TensorEntry, dtype: &Dtype, shape: &[u64], advice| {
        let (file, tensor) = (catalog.shard_name(entry.shard), tensor.to_owned());
        let same_type = entry.dtype == *dtype || (*dtype == Dtype::U8 && entry.dtype == Dtype::I8);
        if same_type && *entry.shape == *shape {
            return Ok(());
        }
        let found = format!("{} {:?}", entry.dtype, entry.shape);
        Err(ConvertError::Nvfp4 { file, tensor, found, expected: format!("{dtype} {shape:?}"), advice })
    };
    let (tall, wide) = (rows as u64, cols as u64);
    check(name, entry, &Dtype::U8, &[tall, wide.div_ceil(2)], "it does not fit config.json")?;
    let swizzled =
        "its scales may be in the order of a GPU's kernels; convert a checkpoint with plain scales";
    let groups = [tall, wide.div_ceil(NVFP4_GROUP as u64)];
    check(&scales_name, scales, &Dtype::F8E4m3, &groups, swizzled)?;
    let one: &[u64] = if scale_2.shape.is_empty() { &[] } else { &[1] };
    check(&scale_2_name, scale_2, &Dtype::F32, one, "it must be a single number")?;
    let extent = |entry: &TensorEntry| Extent { shard: entry.shard, offset: entry.offset, len: entry.len };
    let (codes, scales, scale_2) = (extent(entry), extent(scales), extent(scale_2));
    Ok(Weight::Nvfp4 { rows, cols, codes, scales, scale_2, scale_2_name })
}

impl Weight {
    /// Everything that has to be read.
    pub fn extents(&self) -> Vec<Extent> {
        match self {
            Weight::Stored(layout) => [Some(layout.codes), layout.scales].into_iter().flatten().collect(),
            Weight::Nvfp4 { codes, scales, scale_2, .. } => vec![*codes, *scales, *scale_2],
            Weight::Blocks(blocks) => vec![blocks.bytes],
            Weight::Split { keys, values, .. } => vec![keys.bytes, values.bytes],
        }
    }

    /// The most memory that reading `rows` rows takes besides the row that is handed on, in bytes.
    pub fn read_bytes(&self, rows: u64) -> u64 {
        match self {
            // The keys of a head at once, as they are and as f32; a row of values.
            Weight::Split { cols, keys, values } => {
                let head = keys.row_bytes() as u64 + 4 * keys.cols as u64;
                values.row_bytes() as u64 + (*cols as u64).saturating_mul(head)
            }
            _ => self.row_bytes() as u64 * rows,
        }
    }

    /// Bytes of one row, scales apart.
    fn row_bytes(&self) -> usize {
        match self {
            Weight::Stored(layout) => layout.format.row_bytes(layout.cols).unwrap_or(usize::MAX),
            Weight::Nvfp4 { cols, .. } => cols.div_ceil(2),
            Weight::Blocks(blocks) => blocks.row_bytes(),
            Weight::Split { values, .. } => values.row_bytes(),
        }
    }

    fn cols(&self) -> usize {
        match self {
            Weight::Stored(layout) => layout.cols,
            Weight::Nvfp4 { cols, .. } | Weight::Split { cols, .. } => *cols,
            Weight::Blocks(blocks) => blocks.cols,
        }
    }

    /// Reads `rows` and hands every row to `each`, with its number.
    pub fn decode(
        &self,
        inputs: &Inputs,
        rows: Range<usize>,
        each: &mut EachRow<'_>,
    ) -> Result<(), ConvertError> {
        let mut values = vec![0.0; self.cols()];
        match self {
            Weight::Stored(layout) => {
                let codes = inputs.read(&slice(layout.codes, self.row_bytes(), &rows))?;
                let lines = scale_lines(layout, inputs, &rows)?;
                let per_line = layout.cols.div_ceil(FP8_BLOCK);
                for (row, codes) in rows.clone().zip(codes.chunks_exact(self.row_bytes())) {
                    let line = match layout.format {
                        Format::Fp8Block => row / FP8_BLOCK - rows.start / FP8_BLOCK,
                        _ => 0,
                    };
                    let scales = if lines.is_empty() { &[] } else { &lines[line * per_line..][..per_line] };
                    let view = MatrixView::new(layout.format, 1, layout.cols, codes, scales);
                    decode_row(&view.map_err(|error| inner(&error))?, 0, &mut values);
                    each(row, &values)?;
                }
            }
            Weight::Nvfp4 { cols, codes, scales, scale_2, scale_2_name, .. } => {
                let factor = factor(inputs, scale_2, scale_2_name)?;
                let groups = cols.div_ceil(NVFP4_GROUP);
                let codes = inputs.read(&slice(*codes, self.row_bytes(), &rows))?;
                let scales = inputs.read(&slice(*scales, groups, &rows))?;
                let lines = codes.chunks_exact(self.row_bytes()).zip(scales.chunks_exact(groups));
                for (row, (codes, scales)) in rows.zip(lines) {
                    nvfp4::decode_row(codes, scales, factor, &mut values);
                    each(row, &values)?;
                }
            }
            Weight::Blocks(blocks) => blocks.decode(inputs, rows, each)?,
            Weight::Split { cols, keys, values: parts } => {
                let (nope, heads) = (keys.cols, keys.rows / cols);
                let width = parts.rows / heads;
                let mut head_keys = vec![0.0; cols * nope];
                let mut loaded = None;
                for row in rows {
                    let (head, at) = (row / (nope + width), row % (nope + width));
                    if at >= nope {
                        let from = head * width + at - nope;
                        let each = &mut |_, values: &[f32]| each(row, values);
                        parts.decode(inputs, from..from + 1, each)?;
                        continue;
                    }
                    if loaded != Some(head) {
                        keys.decode(inputs, head * cols..(head + 1) * cols, &mut |n, line| {
                            head_keys[(n % cols) * nope..][..nope].copy_from_slice(line);
                            Ok(())
                        })?;
                        loaded = Some(head);
                    }
                    values
                        .iter_mut()
                        .zip(head_keys.chunks_exact(nope))
                        .for_each(|(out, line)| *out = line[at]);
                    each(row, &values)?;
                }
            }
        }
        Ok(())
    }
}

impl Blocks {
    /// Bytes of one row.
    fn row_bytes(&self) -> usize {
        let bytes = self.kind.row_bytes(self.cols as u64);
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    /// Reads `rows` and hands every row to `each`, with its number.
    fn decode(
        &self,
        inputs: &Inputs,
        rows: Range<usize>,
        each: &mut EachRow<'_>,
    ) -> Result<(), ConvertError> {
        let mut values = vec![0.0; self.cols];
        let bytes = inputs.read(&slice(self.bytes, self.row_bytes(), &rows))?;
        for (row, bytes) in rows.zip(bytes.chunks_exact(self.row_bytes())) {
            blocks::decode_row(self.kind, bytes, &mut values);
            each(row, &values)?;
        }
        Ok(())
    }
}

/// The bytes of some rows.
fn slice(whole: Extent, row_bytes: usize, rows: &Range<usize>) -> Extent {
    let (first, len) = (rows.start as u64 * row_bytes as u64, rows.len() as u64 * row_bytes as u64);
    Extent { offset: whole.offset + first, len, ..whole }
}

/// The multipliers of the FP8 blocks that `rows` lie in; none for floats.
fn scale_lines(
    layout: &WeightLayout,
    inputs: &Inputs,
    rows: &Range<usize>,
) -> Result<Vec<f32>, ConvertError> {
    let Some(scales) = layout.scales else { return Ok(Vec::new()) };
    let lines = rows.start / FP8_BLOCK..rows.end.div_ceil(FP8_BLOCK);
    let bytes = inputs.read(&slice(scales, 4 * layout.cols.div_ceil(FP8_BLOCK), &lines))?;
    Ok(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

fn factor(inputs: &Inputs, scale_2: &Extent, name: &str) -> Result<f32, ConvertError> {
    let bytes = inputs.read(scale_2)?;
    let value = bytes.first_chunk().map_or(f32::NAN, |word| f32::from_le_bytes(*word));
    match value > 0.0 && value < 1.0 {
        true => Ok(value),
        false => Err(ConvertError::Nvfp4Scale { tensor: name.to_owned(), value }),
    }
}

/// The catalogue checked sizes, so a view that does not fit cannot happen; it is an error all the same.
fn inner(error: &ViewError) -> ConvertError {
    ConvertError::Source { name: "a weight".to_owned(), what: error.to_string() }
}
