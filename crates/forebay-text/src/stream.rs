//! Bytes to text as they arrive: one decoder per answer, shared by the stream and
//! the final text, so both say the same.

use std::str;

/// Incremental UTF-8 decoder. A character split over tokens is held back (at most 3 bytes) until it is whole;
/// bytes that can never become a character give U+FFFD, one per maximal ill-formed sequence.
///
/// The outputs joined equal `String::from_utf8_lossy` of all bytes.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// A proper prefix of some character, or empty.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// A decoder that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes more bytes and returns the text that is now certain.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let mut pending = std::mem::take(&mut self.held);
        pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(pending.len());
        let mut rest = pending.as_slice();
        loop {
            match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let (valid, tail) = rest.split_at(error.valid_up_to());
                    text.push_str(str::from_utf8(valid).unwrap_or_default());
                    match error.error_len() {
                        Some(ill_formed) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &tail[ill_formed..];
                        }
                        None => {
                            self.held = tail.to_vec();
                            return text;
                        }
                    }
                }
            }
        }
    }

    /// Ends the answer: a character that was never completed becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        if self.held.is_empty() {
            return String::new();
        }
        self.held.clear();
        char::REPLACEMENT_CHARACTER.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn t06_stream_decode() {
        let mut stream = Utf8Stream::new();
        let chunks: [&[u8]; 6] = [&[0xE4, 0xB8], &[0xAD], &[0xF0, 0x9F], b"A", &[0xFF], &[0xE4, 0xB8]];
        let outputs: Vec<String> = chunks.iter().map(|chunk| stream.push(chunk)).collect();
        assert_eq!(outputs, ["", "中", "", "\u{FFFD}A", "\u{FFFD}", ""]);
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.finish(), "");
    }

    /// Bytes in which broken and whole characters are both common.
    fn messy_bytes() -> impl Strategy<Value = Vec<u8>> {
        let lump = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| {
                let mut bytes = c.to_string().into_bytes();
                bytes.pop();
                bytes
            }),
            proptest::collection::vec(any::<u8>(), 0..4),
            proptest::sample::select(vec![
                vec![0xE0, 0x80],
                vec![0xED, 0xA0, 0x80],
                vec![0xF4, 0x90],
                vec![0xC0],
                vec![0xF8]
            ]),
        ];
        proptest::collection::vec(lump, 0..20).prop_map(|lumps| lumps.concat())
    }

    proptest! {
        #[test]
        fn joined_output_equals_decoding_once(
            bytes in messy_bytes(),
            cuts in proptest::collection::vec(0usize..6, 0..80),
        ) {
            let mut stream = Utf8Stream::new();
            let (mut text, mut rest) = (String::new(), bytes.as_slice());
            for cut in cuts {
                let (chunk, later) = rest.split_at(cut.min(rest.len()));
                text += &stream.push(chunk);
                prop_assert!(stream.held.len() <= 3);
                rest = later;
            }
            text += &stream.push(rest);
            text += &stream.finish();
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
