//! The bytes of one file of the result: header, order, fillers.

use forebay_core::DIRECT_ALIGN;
use forebay_core::format::Format;
use forebay_store::shard::{CONTAINER_KEY, CONTAINER_VERSION, Declared};
use serde_json::{Map, Value, json};

use super::error::ConvertError;
use super::plan::{Item, Output, Piece};

/// About how many weights a thread converts at a time.
const PIECE_WEIGHTS: usize = 1 << 20;
/// Multiple of bytes at which every tensor of words begins.
const WORD: u64 = 4;
/// What the name of a filler begins with.
pub const FILLER: &str = "forebay.filler.";

/// A file being laid out.
struct Draft {
    entries: Map<String, Value>,
    declared: Map<String, Value>,
    items: Vec<Item>,
    pieces: Vec<Piece>,
    at: u64,
    fillers: usize,
    source: usize,
}

/// Lays out one file: floats, then matrices, then experts.
pub fn output(source: usize, mut units: Vec<Vec<Item>>) -> Result<Output, ConvertError> {
    units.sort_by_key(|unit| {
        let first = unit.first().map(|item| (item.format != Format::F32, item.name.clone()));
        (unit.len() > 1, first)
    });
    let mut draft = Draft {
        entries: Map::new(),
        declared: Map::from_iter([(CONTAINER_KEY.to_owned(), json!(CONTAINER_VERSION))]),
        items: Vec::new(),
        pieces: Vec::new(),
        at: 0,
        fillers: 0,
        source,
    };
    for unit in units {
        draft.align(if unit.len() > 1 { DIRECT_ALIGN as u64 } else { WORD })?;
        draft.add(unit)?;
    }
    let Draft { mut entries, declared, items, pieces, at, .. } = draft;
    entries.insert("__metadata__".to_owned(), Value::Object(declared));
    let mut header = Value::Object(entries).to_string();
    // The data begin at a whole page, so that experts do.
    let padding = (8 + header.len()).next_multiple_of(DIRECT_ALIGN) - 8 - header.len();
    header.push_str(&" ".repeat(padding));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let name = format!("out-{source:05}.safetensors");
    let size = at.checked_add(bytes.len() as u64);
    let size = size.ok_or_else(|| ConvertError::TooLarge { tensor: name.clone() })?;
    Ok(Output { source, name, items, pieces, header: bytes, bytes: size })
}

impl Draft {
    /// Items side by side: first all codes, then all scales.
    fn add(&mut self, unit: Vec<Item>) -> Result<(), ConvertError> {
        let first = self.items.len();
        for item in unit {
            let too_large = || ConvertError::TooLarge { tensor: item.name.clone() };
            let codes = item.format.payload_bytes(item.rows, item.cols).ok_or_else(too_large)?;
            let (dtype, shape) = match item.format {
                _ if item.is_vector => ("F32", vec![item.cols]),
                Format::F32 => ("F32", vec![item.rows, item.cols]),
                Format::Bf16 => ("BF16", vec![item.rows, item.cols]),
                Format::F16 => ("F16", vec![item.rows, item.cols]),
                _ => ("U8", vec![codes]),
            };
            if item.format.is_integer() {
                let declared = Declared { format: item.format, rows: item.rows, cols: item.cols };
                self.declared.insert(item.name.clone(), json!(declared.to_string()));
            }
            self.entry(item.name.clone(), dtype, &shape, codes as u64)?;
            let step = (PIECE_WEIGHTS / item.cols).max(1);
            let ranges = (0..item.rows).step_by(step).map(|at| at..item.rows.min(at + step));
            let number = self.items.len();
            self.pieces.extend(ranges.map(|rows| Piece::Rows { item: number, rows }));
            self.items.push(item);
        }
        self.align(WORD)?;
        let mut scaled = false;
        for number in first..self.items.len() {
            let Item { name, format, rows, cols, .. } = &self.items[number];
            let too_large = || ConvertError::TooLarge { tensor: name.clone() };
            let count = format.scale_count(*rows, *cols).ok_or_else(too_large)?;
            if count > 0 {
                let (name, bytes) = (format!("{name}.qs"), count.checked_mul(4).ok_or_else(too_large)?);
                self.entry(name, "F32", &[count], bytes as u64)?;
                scaled = true;
            }
        }
        if scaled {
            self.pieces.push(Piece::Scales);
        }
        Ok(())
    }

    fn entry(&mut self, name: String, dtype: &str, shape: &[usize], bytes: u64) -> Result<(), ConvertError> {
        let end =
            self.at.checked_add(bytes).ok_or_else(|| ConvertError::TooLarge { tensor: name.clone() })?;
        self.entries.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [self.at, end]}));
        self.at = end;
        Ok(())
    }

    /// Fills up to a multiple of `align`. Readers of safetensors may refuse holes, so a filler is a tensor.
    fn align(&mut self, align: u64) -> Result<(), ConvertError> {
        let missing = self.at.next_multiple_of(align) - self.at;
        if missing > 0 {
            let name = format!("{FILLER}{}.{}", self.source, self.fillers);
            self.fillers += 1;
            self.entry(name, "U8", &[missing as usize], missing)?;
            self.pieces.push(Piece::Zeros(missing));
        }
        Ok(())
    }
}
