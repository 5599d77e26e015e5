//! What the header of a Forebay container says. docs/format.md is the source of truth; the names here are its names.

use std::ops::Range;

use forebay_core::format::FP8_BLOCK;
use forebay_core::panel::PanelShape;
use forebay_core::{DIRECT_ALIGN, Format};

use crate::shard::Dtype;

/// Tensors, and the parts of a record, begin at a multiple of this many bytes.
pub const TENSOR_ALIGN: u64 = 64;
/// Records begin at a multiple of this many bytes and have a multiple of it.
pub const PAGE: u64 = DIRECT_ALIGN as u64;

/// Everything in a header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Tells models apart: a SHA-256 over the source's config, tokenizer and shard headers.
    pub identity: [u8; 32],
    /// What was packed.
    pub source: Source,
    /// The configuration files beside the weights.
    pub side_files: Vec<SideFile>,
    /// The weight files: the resident one, then one per layer of experts.
    pub files: Vec<DataFile>,
    /// The tensors of the resident file, in file order.
    pub tensors: Vec<Tensor>,
    /// The ways in which records are laid out.
    pub kinds: Vec<RecordKind>,
    /// The layers of experts, in file order.
    pub layers: Vec<Layer>,
}

/// Where a container came from, as far as is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The repository; empty if it is not known.
    pub repository: String,
    /// The commit; empty if it is not known.
    pub revision: String,
    /// Its weight files.
    pub files: Vec<SourceFile>,
}

/// A weight file of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Its digest, if it was known without reading it.
    pub sha256: Option<[u8; 32]>,
}

/// A small file that is copied as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideFile {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Its CRC32C, checked when the model is opened.
    pub crc: u32,
    /// Its digest.
    pub sha256: [u8; 32],
}

/// A weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// The layer whose experts it holds; `None` for the resident file.
    pub layer: Option<u32>,
}

/// A tensor of the resident file, bytes as in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in the source.
    pub name: String,
    /// Element type in the source.
    pub dtype: Dtype,
    /// Dimensions in the source.
    pub shape: Vec<u64>,
    /// What a weight is stored as; `None` for scales and for what the model does not use.
    pub weight: Option<Weight>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// CRC32C of these bytes.
    pub crc: u32,
    /// A checksum for each row, for a matrix whose rows are read one by one.
    pub row_checks: Option<RowChecks>,
}

/// The logical shape and the format of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Named, never guessed.
    pub format: Format,
    /// Rows (outputs).
    pub rows: u64,
    /// Columns (inputs).
    pub cols: u64,
}

/// A table of CRC32C in the resident file, right behind its tensor: one for each row, over the row's codes and then
/// its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowChecks {
    /// First byte in the file.
    pub offset: u64,
    /// CRC32C of the table itself.
    pub crc: u32,
}

/// How the codes of a matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As in the source: row after row, scales apart.
    Rows,
    /// In panels, scales among the codes ([`forebay_core::panel`]).
    Panels,
}

/// One matrix of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Format, rows and columns.
    pub weight: Weight,
    /// How its codes lie.
    pub layout: Layout,
    /// First byte of the codes (or panels) in the record.
    pub codes: u64,
    /// First byte of the scales in the record; where the codes end if it has none there.
    pub scales: u64,
    /// Element type of the codes in the source.
    pub dtype: Dtype,
    /// Dimensions of the codes in the source.
    pub shape: Vec<u64>,
    /// Dimensions of the scales in the source; empty without scales.
    pub scales_shape: Vec<u64>,
}

/// How a record is laid out: gate, up, down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordKind {
    /// Its matrices.
    pub matrices: [Matrix; 3],
    /// Bytes of the record, in whole pages.
    pub len: u64,
}

/// One expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// First byte in its file.
    pub offset: u64,
    /// Bytes, in whole pages.
    pub len: u64,
    /// CRC32C of all of them.
    pub crc: u32,
    /// Index into [`Header::kinds`].
    pub kind: u16,
    /// How its matrices are coded; `None` if they lie as the kind says.
    pub coded: Option<Coded>,
}

/// Where the matrices of a coded record lie. Each is a [coded matrix](forebay_core::coded) of the shape that the
/// record's kind states; gate comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// Some of its scales are stored as indices.
    pub index_scales: bool,
    /// First byte of up, in units of [`TENSOR_ALIGN`].
    pub up: u32,
    /// First byte of down, in units of [`TENSOR_ALIGN`].
    pub down: u32,
}

impl Coded {
    /// The places of gate, up and down in a record of `len` bytes, padding included. `None` if one of them is empty.
    pub fn places(&self, len: u64) -> Option<[Range<u64>; 3]> {
        let (up, down) = (u64::from(self.up) * TENSOR_ALIGN, u64::from(self.down) * TENSOR_ALIGN);
        (0 < up && up < down && down < len).then_some([0..up, up..down, down..len])
    }
}

/// The experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Decoder layer.
    pub layer: u32,
    /// Index into [`Header::files`].
    pub file: u32,
    /// In the source all experts were in two tensors: gate over up, and down.
    pub fused: bool,
    /// Names of gate, up and down in the source, `{e}` standing for the expert; of a fused layer, the names of the
    /// tensors that they are in.
    pub names: [String; 3],
    /// By expert.
    pub records: Vec<Record>,
}

/// A run of bytes with a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Their CRC32C.
    pub crc: u32,
}

impl Header {
    /// The index into [`layers`](Self::layers) of the layer in weight file `number`.
    pub fn layer_in(&self, number: usize) -> Option<usize> {
        self.layers.iter().position(|layer| layer.file as usize == number)
    }

    /// Everything in weight file `number` that has a checksum, in file order: records, or tensors, each followed by
    /// its row checksums. Between them are zeros.
    pub fn checked(&self, number: usize) -> Vec<Checked> {
        if let Some(at) = self.layer_in(number) {
            let records = self.layers[at].records.iter();
            return records.map(|&Record { offset, len, crc, .. }| Checked { offset, len, crc }).collect();
        }
        let mut all = Vec::new();
        for tensor in self.tensors.iter().filter(|_| number == 0) {
            all.push(Checked { offset: tensor.offset, len: tensor.len, crc: tensor.crc });
            if let (Some(RowChecks { offset, crc }), Some(weight)) = (tensor.row_checks, tensor.weight) {
                all.push(Checked { offset, len: 4 * weight.rows, crc });
            }
        }
        all
    }

    /// Puts checksums into the places from which [`checked`](Self::checked) takes them.
    pub fn set_checks(&mut self, number: usize, crcs: &[u32]) {
        let mut crcs = crcs.iter().copied();
        let mut set = |crc: &mut u32| *crc = crcs.next().unwrap_or(*crc);
        if let Some(at) = self.layer_in(number) {
            self.layers[at].records.iter_mut().for_each(|record| set(&mut record.crc));
            return;
        }
        for tensor in self.tensors.iter_mut().filter(|_| number == 0) {
            set(&mut tensor.crc);
            if let Some(checks) = &mut tensor.row_checks {
                set(&mut checks.crc);
            }
        }
    }
}

impl Weight {
    /// Bytes of the codes in rows.
    pub fn payload(&self) -> Option<u64> {
        let (rows, cols) = self.sizes()?;
        self.format.payload_bytes(rows, cols).map(|n| n as u64).filter(|n| *n > 0)
    }

    /// Bytes of the scales.
    pub fn scales(&self) -> Option<u64> {
        let (rows, cols) = self.sizes()?;
        self.format.scale_count(rows, cols)?.checked_mul(4).map(|n| n as u64)
    }

    /// The panels of it, if packing it into panels loses nothing: odd rows of int4 end in half a byte that belongs
    /// to no column, has no place in panels, and may be anything in the source.
    pub fn panels(&self) -> Option<PanelShape> {
        let (rows, cols) = self.sizes()?;
        let half_byte = matches!(self.format, Format::Int4Row | Format::Int4Group(_)) && cols % 2 == 1;
        PanelShape::new(self.format, rows, cols).filter(|_| !half_byte)
    }

    fn sizes(&self) -> Option<(usize, usize)> {
        Some((usize::try_from(self.rows).ok()?, usize::try_from(self.cols).ok()?))
    }

    /// Name of the tensor of scales beside the weight `name`.
    pub fn scales_name(&self, name: &str) -> Option<String> {
        match self.format {
            Format::F32 | Format::Bf16 | Format::F16 => None,
            Format::Fp8Block => Some(format!("{name}_scale_inv")),
            _ => Some(format!("{name}.qs")),
        }
    }
}

impl Matrix {
    /// Bytes at [`codes`](Self::codes): those of the panels, or of the codes in rows.
    pub fn codes_len(&self) -> Option<u64> {
        match self.layout {
            Layout::Rows => self.weight.payload(),
            Layout::Panels => self.weight.panels().map(|panels| panels.bytes() as u64),
        }
    }

    /// Bytes at [`scales`](Self::scales).
    pub fn scales_len(&self) -> Option<u64> {
        match self.layout {
            Layout::Rows => self.weight.scales(),
            Layout::Panels => Some(0),
        }
    }
}

impl RecordKind {
    /// The one way to lay these matrices out: one behind the other, every part at a multiple of [`TENSOR_ALIGN`].
    /// Their places are overwritten. `None` if they cannot be addressed, or a layout does not exist.
    pub fn place(mut matrices: [Matrix; 3]) -> Option<Self> {
        let mut at = 0u64;
        for matrix in &mut matrices {
            matrix.codes = at;
            let end = at.checked_add(matrix.codes_len()?)?;
            let scales = matrix.scales_len()?;
            matrix.scales = if scales == 0 { end } else { end.checked_next_multiple_of(TENSOR_ALIGN)? };
            at = matrix.scales.checked_add(scales)?.checked_next_multiple_of(TENSOR_ALIGN)?;
        }
        let len = at.checked_next_multiple_of(PAGE).filter(|len| usize::try_from(*len).is_ok())?;
        Some(Self { matrices, len })
    }

    /// The panels of its matrices, if all of them are int4 in panels: then a record may be coded.
    pub fn codable(&self) -> Option<[PanelShape; 3]> {
        let int4 = |matrix: &Matrix| {
            let is_int4 = matches!(matrix.weight.format, Format::Int4Row | Format::Int4Group(_));
            matrix.weight.panels().filter(|_| is_int4 && matrix.layout == Layout::Panels)
        };
        let [gate, up, down] = self.matrices.each_ref().map(int4);
        Some([gate?, up?, down?])
    }

    /// Whether scales of a coded record may be stored as indices: groups of a matrix lie within FP8's blocks.
    pub fn may_have_index_scales(&self) -> bool {
        let within = |matrix: &Matrix| match matrix.weight.format {
            Format::Int4Group(size) => FP8_BLOCK.is_multiple_of(size.get()),
            _ => false,
        };
        self.codable().is_some() && self.matrices.iter().any(within)
    }
}

impl Layer {
    /// Name in the source of matrix `part` of expert `expert`, or of the tensor that it is in.
    pub fn name(&self, part: usize, expert: usize) -> String {
        self.names[part].replacen(EXPERT_PLACE, &expert.to_string(), 1)
    }
}

/// What stands for the expert's number in the names of a layer.
pub const EXPERT_PLACE: &str = "{e}";

/// Where the tensors of a resident file go: a rule, so that there are no gaps to hide things in.
#[derive(Clone, Copy, Debug)]
pub struct Placer(u64);

impl Default for Placer {
    fn default() -> Self {
        Self(PAGE)
    }
}

impl Placer {
    /// The place of the next `len` bytes; `None` when it cannot be counted.
    pub fn place(&mut self, len: u64) -> Option<u64> {
        let at = self.0;
        self.0 = at.checked_add(len)?.checked_next_multiple_of(TENSOR_ALIGN)?;
        Some(at)
    }

    /// The size of the file: whole pages.
    pub fn end(&self) -> Option<u64> {
        self.0.checked_next_multiple_of(PAGE)
    }
}
