//! Recorded routes: one JSON object a line (docs/cache.md, "The file of a recording").
//!
//! The first line is the [`Header`], the others are [`Record`]s in the order in which the
//! model ran: passes in order, within a pass layer after layer, within a layer row after
//! row. Reading trusts nothing: lines, sizes and order are checked, and memory is bounded.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufWriter, Read, Write};

use serde::{Deserialize, Serialize};

use super::{Routes, Union};

/// What [`Header::format`] says.
pub const FORMAT: &str = "forebay-routes";
/// The version that is written and read.
pub const VERSION: u32 = 2;
/// Longest line, in bytes.
const MAX_LINE: usize = 1 << 20;
/// Most experts of a layer, most experts of a token, most layers.
const MAX_EXPERTS: usize = 65_536;
const MAX_TOP_K: usize = 1024;
const MAX_LAYERS: usize = 4096;
/// Selections that [`read_routes`] holds at most: 25,000 tokens of GLM-5.2.
const MAX_SELECTIONS: usize = 16 << 20;
/// Experts of all layers together that any recording may have: more than any model.
const FREE_EXPERTS: usize = 1 << 20;
/// Experts beyond these that a selection pays for: what is counted per expert stays in proportion to the file.
const EXPERTS_PER_SELECTION: usize = 16;

/// Whose routes they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// Which model: a hash, or its folder's name.
    pub model: String,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// How the model was run, as names and values: seed, prompt, memory.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
}

/// What a pass was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Reading a prompt.
    Prefill,
    /// One token after another.
    Decode,
    /// Guessing ahead.
    Draft,
    /// Bringing the guesser up to date.
    Absorb,
    /// Checking guesses.
    Verify,
}

/// One row's choice in one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Number of the forward pass, from 0; never falls.
    pub pass: u64,
    /// What the pass was for.
    pub phase: Phase,
    /// Absolute position of the token.
    pub position: u64,
    /// Decoder layer.
    pub layer: u32,
    /// The chosen experts, best first.
    pub ids: Vec<u32>,
    /// Their final weights.
    pub weights: Vec<f32>,
    /// Which of the chosen were in memory when the router of this layer chose; absent if nobody looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<Vec<u32>>,
}

/// Why a recording cannot be used, or not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteFileError {
    /// Reading or writing failed.
    #[error("the route trace cannot be read or written: {0}; check the disk and the path")]
    Io(#[from] io::Error),
    /// A line is longer than any that is written.
    #[error("line {line} of the route trace is longer than {MAX_LINE} bytes; record it again")]
    LongLine {
        /// Line, from 1.
        line: u64,
    },
    /// A line is not what belongs there.
    #[error("line {line} of the route trace: {what}; record it again")]
    Line {
        /// Line, from 1.
        line: u64,
        /// What is wrong.
        what: String,
    },
    /// The file is of another kind or version.
    #[error(
        "expected {FORMAT} version {VERSION}, found {format:?} version {version}; record the trace again"
    )]
    Version {
        /// Its format.
        format: String,
        /// Its version.
        version: u32,
    },
    /// The recording is too long to be replayed.
    #[error(
        "the route trace has more than {MAX_SELECTIONS} selections; replay its first lines (head -n 1000000)"
    )]
    TooLong,
    /// So many experts that counting them takes more memory than the recording accounts for.
    #[error(
        "the route trace has {layers} layers of {experts} experts and chooses only {selections} times; it is no \
         recording of a model: record it again"
    )]
    TooWide {
        /// Layers.
        layers: usize,
        /// Experts of each.
        experts: usize,
        /// Experts chosen, over all tokens and layers.
        selections: usize,
    },
    /// A record that does not fit its header was to be written.
    #[error("a route that cannot be recorded: {what}; please report this as a bug")]
    Unfit {
        /// What is wrong.
        what: String,
    },
}

impl Header {
    /// A header of the present version, without settings.
    pub fn new(model: &str, experts: usize, top_k: usize) -> Self {
        let (format, settings) = (FORMAT.to_owned(), BTreeMap::new());
        Self { format, version: VERSION, model: model.to_owned(), experts, top_k, settings }
    }

    fn check(&self) -> Result<(), String> {
        match self {
            Self { experts, .. } if !(1..=MAX_EXPERTS).contains(experts) => {
                Err(format!("{experts} experts; 1 to {MAX_EXPERTS} are possible"))
            }
            Self { top_k, experts, .. } if *top_k < 1 || *top_k > MAX_TOP_K.min(*experts) => {
                Err(format!("{top_k} of {experts} experts per token"))
            }
            _ => Ok(()),
        }
    }
}

impl Record {
    /// Whether the record can follow one of pass `pass` under `header`.
    fn check(&self, header: &Header, pass: u64) -> Result<(), String> {
        if self.pass < pass {
            return Err(format!("pass {} after pass {pass}", self.pass));
        }
        if self.layer as usize >= MAX_LAYERS {
            return Err(format!("layer {}; there are at most {MAX_LAYERS}", self.layer));
        }
        if self.ids.is_empty() || self.ids.len() > header.top_k {
            return Err(format!("{} experts; 1 to {} are possible", self.ids.len(), header.top_k));
        }
        if self.ids.len() != self.weights.len() {
            return Err(format!("{} experts and {} weights", self.ids.len(), self.weights.len()));
        }
        if let Some(weight) = self.weights.iter().find(|weight| !weight.is_finite()) {
            return Err(format!("a weight of {weight}"));
        }
        let sorted = distinct(&self.ids)?;
        let resident = distinct(self.resident.as_deref().unwrap_or_default())?;
        if let Some(other) = resident.iter().find(|expert| sorted.binary_search(expert).is_err()) {
            return Err(format!("expert {other} in memory, which was not chosen"));
        }
        match sorted.last() {
            Some(&last) if last as usize >= header.experts => {
                Err(format!("expert {last} of {}", header.experts))
            }
            _ => Ok(()),
        }
    }
}

/// The experts in ascending order.
fn distinct(experts: &[u32]) -> Result<Vec<u32>, String> {
    let mut sorted = experts.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("expert {} twice", pair[0])),
        None => Ok(sorted),
    }
}

/// Writes a recording, a few pages at a time.
pub struct RouteWriter<W: Write> {
    out: BufWriter<W>,
    header: Header,
    pass: u64,
}

impl<W: Write> RouteWriter<W> {
    /// Writes the header.
    pub fn new(out: W, header: Header) -> Result<Self, RouteFileError> {
        header.check().map_err(|what| RouteFileError::Unfit { what })?;
        let mut writer = Self { out: BufWriter::with_capacity(64 << 10, out), header, pass: 0 };
        let header = serde_json::to_string(&writer.header).map_err(io::Error::from)?;
        writeln!(writer.out, "{header}")?;
        Ok(writer)
    }

    /// Adds a record.
    pub fn write(&mut self, record: &Record) -> Result<(), RouteFileError> {
        record.check(&self.header, self.pass).map_err(|what| RouteFileError::Unfit { what })?;
        self.pass = record.pass;
        serde_json::to_writer(&mut self.out, record).map_err(io::Error::from)?;
        self.out.write_all(b"\n")?;
        Ok(())
    }

    /// Writes what is left and hands back the sink: an error here means that the recording
    /// is incomplete.
    pub fn finish(self) -> Result<W, RouteFileError> {
        self.out.into_inner().map_err(|error| error.into_error().into())
    }
}

/// Reads a recording record by record.
pub struct RouteReader<R: BufRead> {
    input: R,
    header: Header,
    line: u64,
    pass: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> RouteReader<R> {
    /// Reads the header.
    pub fn new(mut input: R) -> Result<Self, RouteFileError> {
        /// What can be said of any version.
        #[derive(Deserialize)]
        struct Kind {
            format: String,
            version: u32,
        }
        let mut buffer = Vec::new();
        if !read_line(&mut input, &mut buffer, 1)? {
            return Err(RouteFileError::Line { line: 1, what: "the file is empty".to_owned() });
        }
        let kind: Kind = parse(&buffer, 1)?;
        if (kind.format.as_str(), kind.version) != (FORMAT, VERSION) {
            let format = kind.format.chars().take(40).collect();
            return Err(RouteFileError::Version { format, version: kind.version });
        }
        let header: Header = parse(&buffer, 1)?;
        header.check().map_err(|what| RouteFileError::Line { line: 1, what })?;
        Ok(Self { input, header, line: 1, pass: 0, buffer })
    }

    /// Whose routes they are.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The next record; `None` at the end. After an error there is no use in going on.
    pub fn next_record(&mut self) -> Result<Option<Record>, RouteFileError> {
        self.line += 1;
        if !read_line(&mut self.input, &mut self.buffer, self.line)? {
            return Ok(None);
        }
        let record: Record = parse(&self.buffer, self.line)?;
        let wrong = |what| RouteFileError::Line { line: self.line, what };
        record.check(&self.header, self.pass).map_err(wrong)?;
        self.pass = record.pass;
        Ok(Some(record))
    }
}

/// One line without its end; false at the end of the input. A line that is cut off is one.
fn read_line(input: &mut impl BufRead, buffer: &mut Vec<u8>, line: u64) -> Result<bool, RouteFileError> {
    buffer.clear();
    input.take(MAX_LINE as u64 + 1).read_until(b'\n', buffer)?;
    if buffer.len() > MAX_LINE {
        return Err(RouteFileError::LongLine { line });
    }
    Ok(!buffer.is_empty())
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8], line: u64) -> Result<T, RouteFileError> {
    serde_json::from_slice(bytes).map_err(|error| RouteFileError::Line { line, what: error.to_string() })
}

/// Reads a whole recording as what a simulator replays: one union per pass and layer.
pub fn read_routes(input: impl BufRead) -> Result<(Header, Routes), RouteFileError> {
    read_routes_seen(input, &mut |_| ())
}

/// The same, showing every record as it is read.
pub fn read_routes_seen(
    input: impl BufRead,
    on_record: &mut dyn FnMut(&Record),
) -> Result<(Header, Routes), RouteFileError> {
    let mut reader = RouteReader::new(input)?;
    let mut layers: BTreeMap<u32, Vec<Union>> = BTreeMap::new();
    let mut rows: Vec<Vec<u32>> = Vec::new();
    let mut at = None;
    let mut selections = 0;
    let mut close = |at: Option<(u64, u32)>, rows: &mut Vec<Vec<u32>>| {
        if let Some((_, layer)) = at {
            layers.entry(layer).or_default().push(Union::of(rows.iter().map(Vec::as_slice)));
        }
        rows.clear();
    };
    while let Some(record) = reader.next_record()? {
        selections += record.ids.len();
        if selections > MAX_SELECTIONS {
            return Err(RouteFileError::TooLong);
        }
        let place = (record.pass, record.layer);
        if at != Some(place) {
            // Within a pass layers rise, so that no union comes in two parts.
            if at.is_some_and(|before| before > place) {
                let what = format!("layer {} after a later layer of its pass", record.layer);
                return Err(RouteFileError::Line { line: reader.line, what });
            }
            close(at, &mut rows);
            at = Some(place);
        }
        on_record(&record);
        rows.push(record.ids);
    }
    close(at, &mut rows);
    let header = reader.header;
    let (layer_count, experts) = (layers.len(), header.experts);
    if layer_count.saturating_mul(experts) > FREE_EXPERTS.max(EXPERTS_PER_SELECTION * selections) {
        return Err(RouteFileError::TooWide { layers: layer_count, experts, selections });
    }
    let routes =
        Routes { experts: header.experts, top_k: header.top_k, layers: layers.into_values().collect() };
    Ok((header, routes))
}

#[cfg(test)]
mod tests;
