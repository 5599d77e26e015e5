//! Headers of safetensors files, as the reference's writer makes them.

use serde_json::{Map, json};

/// A tensor to be written.
pub trait Describe {
    /// Its name.
    fn name(&self) -> &str;
    /// Its element type, by the name that headers give it.
    fn dtype(&self) -> &str;
    /// Its dimensions.
    fn shape(&self) -> Vec<u64>;
    /// Its bytes.
    fn bytes(&self) -> u64;
}

/// Sorts tensors as they lie in a file: F32 before all others, each by name, so that an expert's three matrices lie
/// side by side.
pub fn sort<T: Describe>(tensors: &mut [T]) {
    tensors.sort_by(|a, b| (a.dtype() != "F32", a.name()).cmp(&(b.dtype() != "F32", b.name())));
}

/// The first bytes of a file with these tensors, in this order: the length of the header and the header. An error is
/// the tensor whose end cannot be counted.
pub fn header<T: Describe>(tensors: &[T]) -> Result<Vec<u8>, &T> {
    let mut entries = Map::new();
    let mut at = 0u64;
    for tensor in tensors {
        let end = at.checked_add(tensor.bytes()).ok_or(tensor)?;
        let entry = json!({"dtype": tensor.dtype(), "shape": tensor.shape(), "data_offsets": [at, end]});
        entries.insert(tensor.name().to_owned(), entry);
        at = end;
    }
    let mut text = serde_json::Value::Object(entries).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text.as_bytes());
    Ok(header)
}
