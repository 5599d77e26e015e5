//! Writes model folders for tests: real headers in front of sparse, unwritten data.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

/// One tensor to write: name, type as the header spells it, shape.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
}

pub fn tensor(name: &str, dtype: &'static str, shape: &[u64]) -> Tensor {
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

/// A quantised weight as the reference converter stores it: a row of bytes and a row of scales.
pub fn quantised(name: &str, codes: u64, scales: u64) -> [Tensor; 2] {
    [tensor(name, "U8", &[codes]), tensor(&format!("{name}.qs"), "F32", &[scales])]
}

impl Tensor {
    pub fn bytes(&self) -> u64 {
        let size = match self.dtype {
            "F32" => 4,
            "BF16" | "F16" => 2,
            "F64" | "I64" => 8,
            _ => 1,
        };
        self.shape.iter().product::<u64>() * size
    }
}

/// Writes `tensors` in the order given, without gaps.
pub fn write_shard(path: &Path, tensors: &[Tensor]) {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes();
        let body = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), body);
        at = end;
    }
    let mut text = Value::Object(header).to_string();
    // Writers pad with spaces so that the data start at a multiple of eight.
    text.push_str(&" ".repeat((8 - text.len() % 8) % 8));
    let mut file = File::create(path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.set_len(8 + text.len() as u64 + at).unwrap();
}

/// Sorts as the reference converter does: F32 first, then by name, bytewise.
pub fn converter_order(tensors: &mut [Tensor]) {
    tensors.sort_by(|a, b| (a.dtype != "F32", &a.name).cmp(&(b.dtype != "F32", &b.name)));
}
