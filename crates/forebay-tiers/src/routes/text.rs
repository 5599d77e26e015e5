//! A recording as lines of words, for other tools (docs/cache.md, "The file of a recording"):
//! `<call> <row> <layer> <id>:<weight> <id>:<weight> ...`.

use std::io::{BufRead, Write};

use super::file::{RouteFileError, RouteReader};

/// Writes every record of a recording as a line, and returns how many there were.
///
/// A call is a layer of a forward pass; calls count from 0, rows from 0 in each call. Experts come best first, with
/// their final weights to four decimals.
pub fn write_text<R: BufRead>(input: R, out: &mut impl Write) -> Result<u64, RouteFileError> {
    let mut reader = RouteReader::new(input)?;
    let (mut lines, mut call, mut row) = (0u64, 0u64, 0u64);
    let mut at = None;
    while let Some(record) = reader.next_record()? {
        let place = (record.pass, record.layer);
        match at {
            Some(before) if before == place => row += 1,
            None => {}
            Some(_) => (call, row) = (call + 1, 0),
        }
        at = Some(place);
        write!(out, "{call} {row} {}", record.layer)?;
        for (id, weight) in record.ids.iter().zip(&record.weights) {
            write!(out, " {id}:{weight:.4}")?;
        }
        writeln!(out)?;
        lines += 1;
    }
    out.flush()?;
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::file::{Header, Phase, Record, RouteWriter};

    /// A call of one row as the reference writes it, and a call of two rows after it.
    #[test]
    fn lines_are_those_of_the_reference() {
        let mut writer = RouteWriter::new(Vec::new(), Header::new("tiny", 256, 4)).unwrap();
        let mut write = |pass, position, layer, ids: &[u32], weights: &[f32]| {
            let (ids, weights) = (ids.to_vec(), weights.to_vec());
            let phase = Phase::Prefill;
            writer.write(&Record { pass, phase, position, layer, ids, weights, resident: None }).unwrap();
        };
        write(0, 0, 1, &[49, 73, 226, 24], &[0.6233, 0.6231, 0.6346, 0.6190]);
        write(0, 0, 2, &[1, 2, 3, 4], &[1.0, 0.5, 0.5, 0.5]);
        write(0, 1, 2, &[9], &[2.5]);
        write(1, 2, 1, &[7], &[0.000_04]);
        let mut text = Vec::new();
        assert_eq!(write_text(writer.finish().unwrap().as_slice(), &mut text).unwrap(), 4);
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "0 0 1 49:0.6233 73:0.6231 226:0.6346 24:0.6190\n\
             1 0 2 1:1.0000 2:0.5000 3:0.5000 4:0.5000\n\
             1 1 2 9:2.5000\n\
             2 0 1 7:0.0000\n"
        );
    }
}
