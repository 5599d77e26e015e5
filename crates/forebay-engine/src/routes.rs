//! Records which experts a sequence used, while it runs.

use std::io::Write;

use forebay_model::Trace;
use forebay_tiers::routes::file::{Header, Phase, Record, RouteFileError, RouteWriter};

/// Writes every choice of a router to a route file.
///
/// A trace cannot stop a pass: after a failed write nothing more is written, and
/// [`finish`](Self::finish) says so.
pub struct RouteRecorder<W: Write> {
    writer: Result<RouteWriter<W>, RouteFileError>,
    /// Passes that began.
    passes: u64,
    /// Positions below this belong to a prompt.
    prompt_end: usize,
    /// The experts in memory of the layer that is being routed.
    resident: Vec<u32>,
}

impl<W: Write> RouteRecorder<W> {
    /// Writes the header. Tokens at positions below `prompt_end` are recorded as read, the
    /// others as generated; another prompt [ends elsewhere](Self::prompt_ends).
    pub fn new(out: W, header: Header, prompt_end: usize) -> Result<Self, RouteFileError> {
        Ok(Self { writer: Ok(RouteWriter::new(out, header)?), passes: 0, prompt_end, resident: Vec::new() })
    }

    /// From now on, tokens at positions below `end` are recorded as read.
    pub fn prompt_ends(&mut self, end: usize) {
        self.prompt_end = end;
    }

    /// Writes what is left; an error means that the recording is incomplete.
    pub fn finish(self) -> Result<W, RouteFileError> {
        self.writer?.finish()
    }
}

impl<W: Write> Trace for RouteRecorder<W> {
    fn began(&mut self, _start: usize, _rows: usize) {
        self.passes += 1;
    }

    fn resident(&mut self, _layer: usize, experts: &[u32]) {
        self.resident.clear();
        self.resident.extend_from_slice(experts);
    }

    fn routed(&mut self, layer: usize, position: usize, experts: &[u32], weights: &[f32]) {
        let Ok(writer) = &mut self.writer else { return };
        let is_resident = |expert: &&u32| self.resident.binary_search(expert).is_ok();
        let resident = experts.iter().filter(is_resident).copied().collect();
        let record = Record {
            pass: self.passes.saturating_sub(1),
            phase: if position < self.prompt_end { Phase::Prefill } else { Phase::Decode },
            position: position as u64,
            layer: u32::try_from(layer).unwrap_or(u32::MAX),
            ids: experts.to_vec(),
            weights: weights.to_vec(),
            resident: Some(resident),
        };
        if let Err(error) = writer.write(&record) {
            self.writer = Err(error);
        }
    }
}
