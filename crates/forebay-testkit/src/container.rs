//! Writes safetensors files in the layout of the reference converter: F32 tensors
//! before byte tensors, names in byte order.

use std::io::{self, Write};
use std::path::Path;

use forebay_core::Format;
use forebay_core::quant::{Encoded, encode};
use serde_json::{Map, json};

/// One tensor to be written.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// safetensors dtype, such as `F32` or `U8`.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes, little-endian.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// An F32 tensor.
    pub fn f32(name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { name: name.to_owned(), dtype: "F32", shape: shape.to_vec(), bytes }
    }

    /// A tensor of raw bytes.
    pub fn u8(name: &str, bytes: Vec<u8>) -> Self {
        Self { name: name.to_owned(), dtype: "U8", shape: vec![bytes.len()], bytes }
    }

    /// A `rows x cols` matrix in an integer format: codes and their `.qs` scales.
    ///
    /// # Panics
    /// If `format` has no codes of its own (FP8) or no scales.
    pub fn quantised(name: &str, format: Format, rows: usize, cols: usize, values: &[f32]) -> [Self; 2] {
        assert!(format.is_integer(), "only integer formats have scales");
        let Encoded { codes, scales } =
            encode(format, rows, cols, values).expect("integer formats can be written");
        [Self::u8(name, codes), Self::f32(&format!("{name}.qs"), &[scales.len()], &scales)]
    }
}

/// Writes `tensors` to the file `path`, in the converter's order.
pub fn write(path: &Path, tensors: &[Tensor]) -> io::Result<()> {
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|t| (t.dtype != "F32", &t.name));
    let mut header = Map::new();
    let mut offset = 0;
    for t in &order {
        let end = offset + t.bytes.len();
        header.insert(
            t.name.clone(),
            json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, end]}),
        );
        offset = end;
    }
    let mut text = serde_json::to_string(&header)?;
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut out = io::BufWriter::new(std::fs::File::create(path)?);
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())?;
    for t in order {
        out.write_all(&t.bytes)?;
    }
    out.flush()
}
