//! The byte-level alphabet: how vocabulary strings and merges spell bytes.
//!
//! Printable Latin-1 bytes spell themselves; the other 68 bytes, ascending, are U+0100, U+0101, ...

/// The byte that `symbol` spells, or `None` when the character is outside the alphabet.
pub(super) fn byte_of(symbol: char) -> Option<u8> {
    let code = u32::from(symbol);
    let byte = match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x100..=0x120 => code - 0x100,
        0x121 => 0x7F,
        0x122..=0x142 => code - 0x122 + 0x80,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes that a vocabulary string spells; characters outside the alphabet are skipped. The flag says
/// whether there were none: only such a string can ever be produced by encoding.
pub(super) fn bytes_of(text: &str) -> (Vec<u8>, bool) {
    let mut bytes = Vec::with_capacity(text.len());
    let mut complete = true;
    for symbol in text.chars() {
        match byte_of(symbol) {
            Some(byte) => bytes.push(byte),
            None => complete = false,
        }
    }
    (bytes, complete)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corners_of_the_table_are_where_the_spec_puts_them() {
        for (symbol, byte) in [
            ('\u{100}', 0x00),
            ('\u{10A}', 0x0A),
            ('\u{120}', 0x20),
            ('!', 0x21),
            ('~', 0x7E),
            ('\u{121}', 0x7F),
            ('\u{122}', 0x80),
            ('\u{142}', 0xA0),
            ('\u{A1}', 0xA1),
            ('\u{AC}', 0xAC),
            ('\u{143}', 0xAD),
            ('\u{AE}', 0xAE),
            ('\u{FF}', 0xFF),
        ] {
            assert_eq!(byte_of(symbol), Some(byte), "{symbol:?}");
        }
        for outside in [' ', '\n', '\u{7F}', '\u{A0}', '\u{AD}', '\u{144}', '中'] {
            assert_eq!(byte_of(outside), None, "{outside:?}");
        }
    }

    #[test]
    fn every_byte_has_exactly_one_symbol() {
        let mut seen = [0u32; 256];
        for symbol in '\0'..='\u{FFFF}' {
            if let Some(byte) = byte_of(symbol) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert!(seen.iter().all(|&n| n == 1));
    }

    #[test]
    fn characters_outside_the_alphabet_are_skipped_and_reported() {
        assert_eq!(bytes_of("Ġhi"), (b" hi".to_vec(), true));
        assert_eq!(bytes_of("h 中i"), (b"hi".to_vec(), false));
    }
}
