//! How one weight is stored: its format and where its bytes are (docs/format.md section 6).
//!
//! The logical shape comes from the caller (role and config). The format comes
//! from what lies in the files: a `.qs` companion makes a quantised weight, a
//! `_scale_inv` companion an FP8 one, anything else must be plain floats.
//! Byte counts have to match exactly; nothing is guessed.

use std::ops::Range;

use forebay_core::ExpertKey;
use forebay_core::format::{FP8_BLOCK, Format, GroupSize};

use crate::catalog::{Catalog, TensorEntry};
use crate::shard::{Declared, Dtype};

/// A run of bytes in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// Index into [`Catalog::shards`].
    pub shard: u32,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One matrix (or vector, as a single row) in the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightLayout {
    /// Storage format.
    pub format: Format,
    /// Rows (outputs).
    pub rows: usize,
    /// Columns (inputs).
    pub cols: usize,
    /// The codes, [`Format::payload_bytes`] of them.
    pub codes: Extent,
    /// The f32 scales, [`Format::scale_count`] of them; `None` for plain floats.
    pub scales: Option<Extent>,
    /// More than one group size fits the scale count. The smallest was taken, as the reference does.
    pub ambiguous_groups: bool,
}

impl WeightLayout {
    /// Bytes of codes and scales together.
    pub fn total_bytes(&self) -> u64 {
        self.codes.len + self.scales.map_or(0, |scales| scales.len)
    }

    /// Tensors in the files: two if there are scales.
    pub fn tensors(&self) -> usize {
        1 + usize::from(self.scales.is_some())
    }
}

/// Why a weight cannot be used. `Display` is complete on its own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No shard has the tensor.
    #[error("tensor {tensor} is missing; the download is incomplete, or this is another kind of model")]
    Missing {
        /// The tensor.
        tensor: String,
    },
    /// The tensor is there and its scales are not.
    #[error(
        "{file}: tensor {tensor} is {dtype} and its scales {scales} are missing; the download is incomplete"
    )]
    MissingScales {
        /// File name of the shard with the codes.
        file: String,
        /// The tensor with the codes.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Name of the tensor that should hold the scales.
        scales: String,
    },
    /// The element type cannot serve.
    #[error("{file}: tensor {tensor} is {found}, expected {expected}; convert the model first")]
    Dtype {
        /// File name of the shard.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// The types that could serve.
        expected: &'static str,
    },
    /// The shape is not the one the model needs.
    #[error(
        "{file}: tensor {tensor} has shape {found:?}, expected {expected:?}; it does not fit config.json"
    )]
    Shape {
        /// File name of the shard.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape needed.
        expected: Vec<u64>,
    },
    /// No format stores the matrix in this many bytes.
    #[error(
        "{file}: tensor {tensor} has {found} bytes; a {rows} x {cols} matrix takes {int8} as int8, {int4} as int4 \
         or {int2} as int2; it does not fit config.json or is damaged"
    )]
    Payload {
        /// File name of the shard.
        file: String,
        /// The tensor.
        tensor: String,
        /// Rows needed.
        rows: usize,
        /// Columns needed.
        cols: usize,
        /// Bytes found.
        found: u64,
        /// Bytes as int8.
        int8: u64,
        /// Bytes as int4, with one scale per row or per group.
        int4: u64,
        /// Bytes as int2.
        int2: u64,
    },
    /// The scales do not fit the format of the codes.
    #[error("{file}: tensor {tensor} has {found} bytes of scales, expected {expected}; the file is damaged")]
    Scales {
        /// File name of the shard.
        file: String,
        /// The tensor that holds the scales.
        tensor: String,
        /// Bytes found.
        found: u64,
        /// Bytes that would fit.
        expected: String,
    },
    /// The writer says that the tensor is something else.
    #[error(
        "{file}: tensor {tensor} is described as {declared} and has {codes} bytes and {scales} bytes of scales, but \
         config.json asks for {rows} x {cols}; the file is damaged, or of another model"
    )]
    Declared {
        /// File name of the shard.
        file: String,
        /// The tensor.
        tensor: String,
        /// What its file says it is.
        declared: Declared,
        /// Bytes of codes found.
        codes: u64,
        /// Bytes of scales found.
        scales: u64,
        /// Rows needed.
        rows: usize,
        /// Columns needed.
        cols: usize,
    },
    /// A shape that is empty or too large for this machine to address.
    #[error("tensor {tensor}: a {rows} x {cols} matrix is empty or too large to address; check config.json")]
    Unaddressable {
        /// The tensor.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
}

impl LayoutError {
    /// Whether something is absent, rather than there and wrong.
    pub fn is_missing(&self) -> bool {
        matches!(self, LayoutError::Missing { .. } | LayoutError::MissingScales { .. })
    }
}

/// The layout of the linear weight `name`, `rows x cols`.
pub fn weight(catalog: &Catalog, name: &str, rows: usize, cols: usize) -> Result<WeightLayout, LayoutError> {
    let site = Site { catalog, name, rows, cols };
    let sizes = site.sizes()?;
    let entry = site.get(name)?;
    let scales_name = format!("{name}.qs");
    if let Some(scales) = catalog.get(&scales_name) {
        return site.quantised(&sizes, entry, &scales_name, scales);
    }
    match &entry.dtype {
        Dtype::F8E4m3 => site.fp8(entry),
        Dtype::U8 | Dtype::I8 => Err(site.missing_scales(entry, scales_name)),
        _ => site.floats(entry, &[rows as u64, cols as u64]),
    }
}

/// The layout of the vector `name` of `len` floats (F32, BF16 or F16), as a matrix of one row.
pub fn vector(catalog: &Catalog, name: &str, len: usize) -> Result<WeightLayout, LayoutError> {
    let site = Site { catalog, name, rows: 1, cols: len };
    site.sizes()?;
    site.floats(site.get(name)?, &[len as u64])
}

/// The layout of a matrix that must be stored as plain floats (F32, BF16 or F16), such as a router.
pub fn float_matrix(
    catalog: &Catalog,
    name: &str,
    rows: usize,
    cols: usize,
) -> Result<WeightLayout, LayoutError> {
    let site = Site { catalog, name, rows, cols };
    site.sizes()?;
    site.floats(site.get(name)?, &[rows as u64, cols as u64])
}

/// The layout of a tensor that holds all experts' matrices as plain floats, of shape
/// `[experts, rows, cols]`: as one matrix of `experts * rows` rows.
pub fn fused(
    catalog: &Catalog,
    name: &str,
    [experts, rows, cols]: [usize; 3],
) -> Result<WeightLayout, LayoutError> {
    let all_rows = experts.checked_mul(rows);
    let unaddressable = || LayoutError::Unaddressable { tensor: name.to_owned(), rows, cols };
    let site = Site { catalog, name, rows: all_rows.ok_or_else(unaddressable)?, cols };
    site.sizes()?;
    site.floats(site.get(name)?, &[experts as u64, rows as u64, cols as u64])
}

/// The layout of rows `row_range` of expert `expert` within a tensor as of [`fused`].
pub fn fused_slice(
    catalog: &Catalog,
    name: &str,
    [experts, rows, cols]: [usize; 3],
    expert: usize,
    row_range: Range<usize>,
) -> Result<WeightLayout, LayoutError> {
    let whole = fused(catalog, name, [experts, rows, cols])?;
    if expert >= experts || row_range.is_empty() || row_range.end > rows {
        let (tensor, rows) = (name.to_owned(), row_range.len());
        return Err(LayoutError::Unaddressable { tensor, rows, cols });
    }
    // The tensor as a whole can be addressed, so no part of it overflows.
    let row_bytes = whole.codes.len / whole.rows as u64;
    let first = (expert * rows + row_range.start) as u64;
    let codes = Extent {
        shard: whole.codes.shard,
        offset: whole.codes.offset + first * row_bytes,
        len: row_range.len() as u64 * row_bytes,
    };
    Ok(WeightLayout { rows: row_range.len(), codes, ..whole })
}

/// The layout of matrix `part` (0 gate, 1 up, 2 down) of an expert that has a record in a Forebay
/// container; `name` is what errors call it. Scales that lie among the codes are counted with them.
pub fn recorded(
    catalog: &Catalog,
    key: ExpertKey,
    part: usize,
    name: &str,
    [rows, cols]: [usize; 2],
) -> Result<WeightLayout, LayoutError> {
    let found = catalog.native().and_then(|native| native.record(key.layer as usize, key.expert as usize));
    let Some((shard, record, kind)) = found else {
        return Err(LayoutError::Missing { tensor: name.to_owned() });
    };
    let matrix = &kind.matrices[part];
    let (weight, expected) = (&matrix.weight, vec![rows as u64, cols as u64]);
    let found = vec![weight.rows, weight.cols];
    if found != expected {
        let file = catalog.shard_name(shard);
        return Err(LayoutError::Shape { file, tensor: name.to_owned(), found, expected });
    }
    // Checked with the header: a record and all in it can be addressed.
    let extent =
        |at: u64, len: Option<u64>| Extent { shard, offset: record.offset + at, len: len.unwrap_or(0) };
    let mut scales = Some(extent(matrix.scales, matrix.scales_len())).filter(|scales| scales.len > 0);
    let mut codes = extent(matrix.codes, matrix.codes_len());
    if let Some(places) = record.coded.and_then(|coded| coded.places(record.len)) {
        let Range { start, end } = places[part];
        (codes, scales) = (extent(start, Some(end - start)), None);
    }
    Ok(WeightLayout { format: weight.format, rows, cols, codes, scales, ambiguous_groups: false })
}

/// What codes and scales of these byte counts are, if they store a `rows x cols` matrix.
///
/// Tried in this order: int8, int4, int2; with int4 codes and more scales than rows, the smallest
/// group size that fits. The flag tells whether a larger one would fit as well.
/// Exactly the byte counts of the format pass.
pub fn detect(codes: u64, scales: u64, rows: usize, cols: usize) -> Option<(Format, bool)> {
    let fits = |format: &Format| {
        bytes_of(*format, rows, cols) == Some(codes) && scale_bytes(*format, rows, cols) == Some(scales)
    };
    // By codes alone, so that scales that do not fit are never taken for those of another format.
    let by_codes = |format: &Format| bytes_of(*format, rows, cols) == Some(codes);
    let format = [Format::Int8Row, Format::Int4Row, Format::Int2Row].into_iter().find(by_codes)?;
    if fits(&format) {
        return Some((format, false));
    }
    if format != Format::Int4Row || Some(scales) < scale_bytes(format, rows, cols) {
        return None;
    }
    let within = GroupSize::ALL.into_iter().take_while(|size| size.get() <= cols);
    let mut grouped = within.map(Format::Int4Group).filter(fits);
    Some((grouped.next()?, grouped.next().is_some()))
}

fn bytes_of(format: Format, rows: usize, cols: usize) -> Option<u64> {
    format.payload_bytes(rows, cols).map(|n| n as u64)
}

fn scale_bytes(format: Format, rows: usize, cols: usize) -> Option<u64> {
    format.scale_count(rows, cols)?.checked_mul(4).map(|n| n as u64)
}

/// One question to the catalogue, with what its errors need.
struct Site<'a> {
    catalog: &'a Catalog,
    name: &'a str,
    rows: usize,
    cols: usize,
}

/// Byte counts of the integer formats.
struct Sizes {
    int8: u64,
    int4: u64,
    int2: u64,
}

const FLOATS: &str = "F32, BF16 or F16";
const CODES: &str = "U8 or I8 (it has a .qs companion)";

impl<'a> Site<'a> {
    /// Checks that the matrix can be addressed in every format, so that later arithmetic cannot overflow.
    fn sizes(&self) -> Result<Sizes, LayoutError> {
        let Site { rows, cols, .. } = *self;
        let size = |format| bytes_of(format, rows, cols).filter(|&n| n > 0);
        let all = || {
            // f32 is the largest payload, groups of 16 the most scales.
            size(Format::F32)?;
            scale_bytes(Format::Int4Group(GroupSize::ALL[0]), rows, cols)?;
            let (int8, int4, int2) = (Format::Int8Row, Format::Int4Row, Format::Int2Row);
            Some(Sizes { int8: size(int8)?, int4: size(int4)?, int2: size(int2)? })
        };
        all().ok_or_else(|| LayoutError::Unaddressable { tensor: self.name.to_owned(), rows, cols })
    }

    fn get(&self, tensor: &str) -> Result<&'a TensorEntry, LayoutError> {
        self.catalog.get(tensor).ok_or_else(|| LayoutError::Missing { tensor: tensor.to_owned() })
    }

    fn quantised(
        &self,
        sizes: &Sizes,
        entry: &TensorEntry,
        scales_name: &str,
        scales: &TensorEntry,
    ) -> Result<WeightLayout, LayoutError> {
        if !matches!(entry.dtype, Dtype::U8 | Dtype::I8) {
            return Err(self.wrong_dtype(self.name, entry, CODES));
        }
        if scales.dtype != Dtype::F32 {
            return Err(self.wrong_dtype(scales_name, scales, "F32 (scales)"));
        }
        let Site { rows, cols, .. } = *self;
        // A format that the container names is taken or refused, never guessed again.
        let found = match self.catalog.named_weight(self.name) {
            Some(named) => {
                let sizes = (bytes_of(named.format, rows, cols), scale_bytes(named.format, rows, cols));
                let fits = sizes == (Some(entry.len), Some(scales.len))
                    && (named.rows, named.cols) == (rows as u64, cols as u64);
                fits.then_some((named.format, false))
            }
            None => match entry.declared {
                Some(declared) => return self.declared(declared, entry, scales),
                None => detect(entry.len, scales.len, rows, cols),
            },
        };
        if let Some((format, ambiguous_groups)) = found {
            let (codes, scales) = (extent(entry), Some(extent(scales)));
            return Ok(WeightLayout { format, rows, cols, codes, scales, ambiguous_groups });
        }
        let &Sizes { int8, int4, int2 } = sizes;
        if ![int8, int4, int2].contains(&entry.len) {
            let (file, tensor) = (self.file(entry), self.name.to_owned());
            return Err(LayoutError::Payload {
                file,
                tensor,
                rows,
                cols,
                found: entry.len,
                int8,
                int4,
                int2,
            });
        }
        let mut expected = format!("{} (one per row)", rows * 4);
        if entry.len == int4 && int4 != int8 {
            expected.push_str(" or one per row and group of 16, 32, 48, 64, 96, 128, 192 or 256 columns");
        }
        let (file, tensor) = (self.file(scales), scales_name.to_owned());
        Err(LayoutError::Scales { file, tensor, found: scales.len, expected })
    }

    /// Nothing is inferred where the writer says what it wrote; all of it has to fit.
    fn declared(
        &self,
        declared: Declared,
        entry: &TensorEntry,
        scales: &TensorEntry,
    ) -> Result<WeightLayout, LayoutError> {
        let Site { rows, cols, .. } = *self;
        let Declared { format, .. } = declared;
        let fits = (declared.rows, declared.cols) == (rows, cols)
            && format.is_integer()
            && bytes_of(format, rows, cols) == Some(entry.len)
            && scale_bytes(format, rows, cols) == Some(scales.len);
        if fits {
            let (codes, scales) = (extent(entry), Some(extent(scales)));
            return Ok(WeightLayout { format, rows, cols, codes, scales, ambiguous_groups: false });
        }
        let (file, tensor, codes, scales) = (self.file(entry), self.name.to_owned(), entry.len, scales.len);
        Err(LayoutError::Declared { file, tensor, declared, codes, scales, rows, cols })
    }

    fn fp8(&self, entry: &TensorEntry) -> Result<WeightLayout, LayoutError> {
        let Site { rows, cols, .. } = *self;
        self.exact_shape(self.name, entry, &[rows as u64, cols as u64])?;
        let scales_name = format!("{}_scale_inv", self.name);
        let Some(scales) = self.catalog.get(&scales_name) else {
            return Err(self.missing_scales(entry, scales_name));
        };
        if scales.dtype != Dtype::F32 {
            return Err(self.wrong_dtype(
                &scales_name,
                scales,
                "F32 (one multiplier per block of 128 x 128)",
            ));
        }
        let blocks = [rows.div_ceil(FP8_BLOCK) as u64, cols.div_ceil(FP8_BLOCK) as u64];
        self.exact_shape(&scales_name, scales, &blocks)?;
        let (codes, scales) = (extent(entry), Some(extent(scales)));
        Ok(WeightLayout { format: Format::Fp8Block, rows, cols, codes, scales, ambiguous_groups: false })
    }

    fn floats(&self, entry: &TensorEntry, shape: &[u64]) -> Result<WeightLayout, LayoutError> {
        let format = match entry.dtype {
            Dtype::F32 => Format::F32,
            Dtype::Bf16 => Format::Bf16,
            Dtype::F16 => Format::F16,
            _ => return Err(self.wrong_dtype(self.name, entry, FLOATS)),
        };
        // The header check tied shape to bytes, so the shape alone decides.
        self.exact_shape(self.name, entry, shape)?;
        let (rows, cols, codes) = (self.rows, self.cols, extent(entry));
        Ok(WeightLayout { format, rows, cols, codes, scales: None, ambiguous_groups: false })
    }

    fn exact_shape(&self, tensor: &str, entry: &TensorEntry, expected: &[u64]) -> Result<(), LayoutError> {
        if *entry.shape == *expected {
            return Ok(());
        }
        let (found, expected) = (entry.shape.to_vec(), expected.to_vec());
        Err(LayoutError::Shape { file: self.file(entry), tensor: tensor.to_owned(), found, expected })
    }

    fn wrong_dtype(&self, tensor: &str, entry: &TensorEntry, expected: &'static str) -> LayoutError {
        let (file, found) = (self.file(entry), entry.dtype.clone());
        LayoutError::Dtype { file, tensor: tensor.to_owned(), found, expected }
    }

    fn missing_scales(&self, entry: &TensorEntry, scales: String) -> LayoutError {
        let (file, dtype) = (self.file(entry), entry.dtype.clone());
        LayoutError::MissingScales { file, tensor: self.name.to_owned(), dtype, scales }
    }

    fn file(&self, entry: &TensorEntry) -> String {
        self.catalog.shard_name(entry.shard)
    }
}

fn extent(entry: &TensorEntry) -> Extent {
    Extent { shard: entry.shard, offset: entry.offset, len: entry.len }
}
