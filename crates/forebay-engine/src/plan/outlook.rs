//! What a division of memory is expected to give: bytes from disk and tokens per second.
//!
//! The formulas of docs/planning.md. They count decoding without drafts, with disk
//! and memory overlapping perfectly: an upper bound, against which a run can be measured.
//! Coded experts add the time of decoding them (docs/planning.md, "Coded experts").

use forebay_io::Rates;
use forebay_model::experts::ExpertLayer;
use forebay_model::{EmbeddingPlace, LoadedParts, ModelSpec, SlotCodes, Snapshot};
use forebay_tiers::expect::hit_rate;

use super::PlanRequest;
use super::codes::Decoder;

/// Cached tokens that the expectation is made for: a conversation of some length.
pub const TYPICAL_CONTEXT: usize = 4096;

/// What sets the speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Reading experts from disk.
    Disk,
    /// Reading weights from memory.
    Memory,
    /// Decoding experts.
    Decoder,
}

/// What to expect of one budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expectation {
    /// The budget in bytes.
    pub budget: u64,
    /// Slots per sparse layer, on average.
    pub slots_per_layer: f64,
    /// Share of all experts that fit, 0 to 1.
    pub held: f64,
    /// Share of expert requests answered from memory once the cache is warm, 0 to 1.
    pub hit_rate: f64,
    /// Bytes of experts read from disk per token.
    pub disk_bytes: u64,
    /// Bytes that pass through memory per token.
    pub memory_bytes: u64,
    /// Bytes of panels that are decoded per token.
    pub decoded_bytes: u64,
    /// Most tokens per second, if the bandwidths that it depends on are known.
    pub tokens_per_second: Option<f64>,
    /// What sets that speed.
    pub bound: Option<Bound>,
}

/// The plan's expectation, and that of other machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Cached tokens assumed.
    pub context: usize,
    /// With the plan's budget.
    pub now: Expectation,
    /// With half of it; `None` if the model does not run then.
    pub half: Option<Expectation>,
    /// With twice as much.
    pub twice: Option<Expectation>,
}

/// What one token touches, whatever the budget.
#[derive(Clone, Debug)]
pub(super) struct Token {
    /// Weights that every token reads from memory.
    weights: u64,
    /// The decoder's sparse layers.
    layers: Vec<Routed>,
    /// Bytes of a cached value.
    kv_bytes: usize,
    /// What the slots of coded experts hold.
    slots: SlotCodes,
    decoder: Decoder,
    spec: ModelSpec,
}

/// The routed experts of one layer.
#[derive(Clone, Copy, Debug)]
struct Routed {
    experts: usize,
    /// Bytes read for one, on average.
    read: f64,
    /// Bytes of one in its slot, on average.
    held: f64,
    /// Bytes of one that come out of the decoder, on average; 0 if none is coded.
    decoded: f64,
}

impl Token {
    /// `spec` is the model as it runs: its indexer is there only if it is used.
    pub fn new(snapshot: &Snapshot, spec: &ModelSpec, request: &PlanRequest, slots: SlotCodes) -> Self {
        let routed = |layer: &ExpertLayer| {
            let experts = layer.segments.len();
            let reads = layer.segments.iter().flat_map(|reads| reads.iter());
            let all: usize = reads.map(|read| read.len).sum();
            let read = all as f64 / experts.max(1) as f64;
            let (held, decoded) = match (layer.coded(), slots) {
                (0, _) => (layer.slab_len(slots) as f64, 0.0),
                (_, SlotCodes::Coded) => (read, layer.mean_decoded()),
                (_, SlotCodes::Decoded) => (layer.mean_decoded(), layer.mean_decoded()),
            };
            Routed { experts, read, held, decoded }
        };
        let parts = LoadedParts { embedding: EmbeddingPlace::Disk, mtp: false };
        Self {
            weights: snapshot.loaded(parts).map(|tensor| tensor.loaded_bytes()).sum(),
            layers: snapshot.experts.iter().map(|(_, layer)| routed(layer)).collect(),
            kv_bytes: request.kv_dtype.bytes(),
            slots,
            decoder: Decoder::new(request.rates.decode, request.decodes_fast, request.threads),
            spec: spec.clone(),
        }
    }

    /// Bytes of cached keys that a token attends to behind `cached` others.
    fn cache_bytes(&self, cached: usize) -> usize {
        let indexer = self.spec.indexer;
        let attended = indexer.map_or(cached, |indexer| cached.min(indexer.top_k));
        let keys =
            indexer.map_or(0, |indexer| self.spec.full_indexer_layers().count() * cached * indexer.dim);
        (self.spec.layers.len() * attended * self.spec.kv_width() + keys) * self.kv_bytes
    }
}

/// What to expect of `quotas` slots per layer. A layer behind the decoder's, the MTP layer, is no
/// part of a token without drafts.
pub(super) fn expect(
    token: &Token,
    quotas: &[usize],
    budget: u64,
    context: usize,
    rates: &Rates,
) -> Expectation {
    let top_k = token.spec.moe.top_k as f64;
    let (mut disk, mut hit_bytes, mut hits, mut experts, mut slots) = (0.0, 0.0, 0.0, 0, 0);
    // Panels that are decoded whenever they are multiplied, and what comes out where they are decoded on arrival.
    let (mut decoded, mut arriving) = (0.0, 0.0);
    for (layer, &quota) in token.layers.iter().zip(quotas) {
        let hit = hit_rate(quota as f64, layer.experts);
        disk += (1.0 - hit) * top_k * layer.read;
        hit_bytes += hit * top_k * layer.held;
        match token.slots {
            SlotCodes::Coded => decoded += top_k * layer.decoded,
            SlotCodes::Decoded => arriving += (1.0 - hit) * top_k * layer.decoded,
        }
        hits += hit;
        experts += layer.experts;
        slots += quota;
    }
    let layers = token.layers.len().max(1) as f64;
    let always = token.weights as f64 + token.cache_bytes(context.min(TYPICAL_CONTEXT)) as f64;
    // What is read from disk is written to memory and read from there; so is what the reading threads decode.
    let memory = always + hit_bytes + 2.0 * disk + 2.0 * arriving;
    let routed = hit_bytes + 2.0 * disk;
    let decode = Decode {
        fused: (decoded > 0.0).then(|| (token.decoder.seconds(decoded), routed)),
        apart: token.decoder.seconds(arriving),
    };
    let (tokens_per_second, bound) = speed(disk, memory, decode, rates);
    Expectation {
        budget,
        slots_per_layer: slots as f64 / layers,
        held: if experts == 0 { 1.0 } else { slots as f64 / experts as f64 },
        hit_rate: if experts == 0 { 1.0 } else { hits / layers },
        disk_bytes: disk.round() as u64,
        memory_bytes: memory.round() as u64,
        decoded_bytes: (decoded + arriving).round() as u64,
        tokens_per_second,
        bound,
    }
}

/// What decoding adds to a token.
#[derive(Clone, Copy, Debug, Default)]
struct Decode {
    /// Seconds in which all cores decode while they multiply, and the bytes that they read from memory meanwhile.
    fused: Option<(f64, f64)>,
    /// Seconds in which they decode what arrives and do nothing else.
    apart: f64,
}

/// `1 / max(disk bytes / Bs, compute)`, where compute is memory bytes / Br, or longer where it waits for the decoder:
/// what is decoded while it is multiplied takes the longer of its two times, what is decoded on arrival takes the
/// cores away.
fn speed(disk: f64, memory: f64, decode: Decode, rates: &Rates) -> (Option<f64>, Option<Bound>) {
    let seconds = |bytes: f64, rate: Option<f64>| rate.filter(|rate| *rate > 0.0).map(|rate| bytes / rate);
    // Nothing to read takes no time, at whatever speed.
    let io = if disk > 0.0 { seconds(disk, rates.disk) } else { Some(0.0) };
    let (Some(io), Some(ram)) = (io, seconds(memory, rates.memory)) else { return (None, None) };
    let waits = decode
        .fused
        .map_or(0.0, |(time, bytes)| (time - seconds(bytes, rates.memory).unwrap_or(0.0)).max(0.0));
    let decoding = waits + decode.apart;
    let time = io.max(ram + decoding);
    let bound = match (io > ram + decoding, decoding > ram) {
        (true, _) => Bound::Disk,
        (false, true) => Bound::Decoder,
        (false, false) => Bound::Memory,
    };
    if time > 0.0 { (Some(1.0 / time), Some(bound)) } else { (None, None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: f64 = 1e9;
    /// By hand: always-read and routed bytes per token, GLM-5.2 in row-scaled int4.
    const D: f64 = 9.14 * GB;
    const X: f64 = 11.349 * GB;

    /// A table that was computed elsewhere, from the same formula.
    #[test]
    fn the_published_table_comes_out() {
        for (memory, disk, row) in [
            (55.0, 0.9, [0.08, 0.11, 0.13, 0.20, 0.40, 0.79, 2.7]),
            (55.0, 3.0, [0.26, 0.35, 0.44, 0.66, 1.32, 2.5, 2.7]),
            (90.0, 7.0, [0.62, 0.82, 1.03, 1.54, 3.1, 4.2, 4.4]),
            (250.0, 25.0, [2.2, 2.9, 3.7, 5.5, 11.0, 11.6, 12.2]),
        ] {
            for (hit, expected) in [0.0, 0.25, 0.4, 0.6, 0.8, 0.9, 1.0].into_iter().zip(row) {
                let rates = Rates { disk: Some(disk * GB), memory: Some(memory * GB), decode: None };
                let misses = (1.0 - hit) * X;
                let (found, _) = speed(misses, D + hit * X + 2.0 * misses, Decode::default(), &rates);
                let found = found.unwrap();
                assert!(
                    (found - expected).abs() <= 0.02 * expected + 0.005,
                    "{memory} {disk} {hit}: {found}"
                );
            }
        }
    }

    #[test]
    fn unknown_is_unknown() {
        let measured = Rates { disk: Some(2.0), memory: Some(10.0), decode: None };
        let speed = |disk, memory, rates: &Rates| super::speed(disk, memory, Decode::default(), rates);
        assert_eq!(speed(4.0, 10.0, &measured), (Some(0.5), Some(Bound::Disk)));
        assert_eq!(speed(1.0, 10.0, &measured), (Some(1.0), Some(Bound::Memory)));
        assert_eq!(speed(4.0, 10.0, &Rates { disk: None, ..measured }), (None, None));
        assert_eq!(speed(4.0, 10.0, &Rates { memory: None, ..measured }), (None, None));
        assert_eq!(speed(4.0, 10.0, &Rates { memory: Some(0.0), ..measured }), (None, None));
        assert_eq!(speed(0.0, 10.0, &Rates { disk: None, ..measured }), (Some(1.0), Some(Bound::Memory)));
    }
    #[test]
    fn decoding_takes_its_time() {
        let rates = Rates { disk: Some(1.0), memory: Some(10.0), decode: None };
        // Ten bytes of memory traffic are one second, five of them fused with decoding.
        let fused = |time| Decode { fused: Some((time, 5.0)), apart: 0.0 };
        let speed = |disk, decode| super::speed(disk, 10.0, decode, &rates);
        // As fast as memory, the decoder costs nothing; beyond that, every second counts.
        assert_eq!(speed(0.5, fused(0.5)), (Some(1.0), Some(Bound::Memory)));
        assert_eq!(speed(0.5, fused(1.5)), (Some(0.5), Some(Bound::Memory)));
        assert_eq!(speed(0.5, fused(3.5)), (Some(0.25), Some(Bound::Decoder)));
        // Behind a slower disk it is free.
        assert_eq!(speed(4.0, fused(2.5)), (Some(0.25), Some(Bound::Disk)));
        assert_eq!(speed(0.5, Decode { fused: None, apart: 1.0 }), (Some(0.5), Some(Bound::Memory)));
    }
}
