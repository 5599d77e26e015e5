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
use super::input::Inputs;

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
}

/// Finds the matrix `name`, `rows x cols`.
pub fn matrix(catalog: &Catalog, name: &str, rows: usize, cols: usize) -> Result<Weight, ConvertError> {
    if let (Some(entry), true) = (catalog.get(name), catalog.get(&format!("{name}.qs")).is_some()) {
        let file = catalog.shard_name(entry.shard);
        return Err(ConvertError::Quantised { file, tensor: name.to_owned() });
    }
    if let (Some(entry), Some(scales)) = (catalog.get(name), catalog.get(&format!("{name}_scale")))
        && matches!(entry.dtype, Dtype::U8 | Dtype::I8)
    {
        return nvfp4(catalog, name, [rows, cols], entry, scales);
    }
    let found = layout::weight(catalog, name, rows, cols);
    Ok(Weight::Stored(found.map_err(|first| ConvertError::Layout { first, count: 1 })?))
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
        }
    }

    /// Bytes of one row, scales apart.
    pub fn row_bytes(&self) -> usize {
        match self {
            Weight::Stored(layout) => layout.format.row_bytes(layout.cols).unwrap_or(usize::MAX),
            Weight::Nvfp4 { cols, .. } => cols.div_ceil(2),
        }
    }

    fn cols(&self) -> usize {
        match self {
            Weight::Stored(layout) => layout.cols,
            Weight::Nvfp4 { cols, .. } => *cols,
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
