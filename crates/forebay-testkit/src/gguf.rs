//! Writes GGUF files of version 3, small ones and wrong ones.

/// A GGUF file being put together.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// The version it says it has.
    pub version: u32,
    /// Keys and their values, type number first, as bytes of the file.
    pub metadata: Vec<(String, Vec<u8>)>,
    /// The tensors, in the order of their data.
    pub tensors: Vec<GgufTensor>,
    /// What `general.alignment` is if it is among the metadata, else 32.
    pub alignment: usize,
}

/// One tensor of a [`Gguf`].
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Its shape, outermost dimension first.
    pub shape: Vec<u64>,
    /// The number of its type.
    pub kind: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

impl Default for Gguf {
    fn default() -> Self {
        Self { version: 3, metadata: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }
}

impl Gguf {
    /// Adds a value: the number of its type, then its bytes.
    pub fn value(&mut self, key: &str, kind: u32, bytes: &[u8]) {
        self.metadata.push((key.to_owned(), [&kind.to_le_bytes(), bytes].concat()));
    }

    /// Adds a 32-bit integer.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.value(key, 4, &value.to_le_bytes());
    }

    /// Adds a 16-bit integer.
    pub fn u16(&mut self, key: &str, value: u16) {
        self.value(key, 2, &value.to_le_bytes());
    }

    /// Adds a number in single precision.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.value(key, 6, &value.to_le_bytes());
    }

    /// Adds a truth value.
    pub fn bool(&mut self, key: &str, value: bool) {
        self.value(key, 7, &[u8::from(value)]);
    }

    /// Adds a text.
    pub fn text(&mut self, key: &str, value: &str) {
        self.value(key, 8, &text(value));
    }

    /// Adds a list of texts.
    pub fn texts(&mut self, key: &str, values: &[String]) {
        let mut bytes = 8u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(text(value)));
        self.value(key, 9, &bytes);
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            out.extend(text(key));
            out.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            out.extend(text(&tensor.name));
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}
