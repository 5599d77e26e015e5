//! What each consumer of memory takes.

use forebay_io::slot_bytes;
use forebay_model::experts::{ExpertLayer, Rooms, SlotCodes};
use forebay_model::families::roles::Role;
use forebay_model::snapshot::ResidentTensor;
use forebay_model::{
    Arith, EmbeddingPlace, KvLayout, KvParts, LoadedParts, Model, ModelSpec, PassSize, Snapshot, Workspace,
};
use forebay_tiers::{ClassDemand, LayerDemand, SlotDemand, recording_bytes};

use super::PlanRequest;
use super::outlook::Token;
use crate::session::Session;

// The four figures below are measured: peaks of runs on the bundled model (20 to 51 MB planned, all within
// 9 MB of what was planned), of `forebay plan` on GLM-5.2's 118,478 tensors and 19,456 experts (44.7 MB), and
// of tokenizers of 0.5 to 8.4 MB.

/// Memory that a process takes whatever the model: code in use (9 MB unoptimised), stacks, allocator slack.
const PROCESS_BYTES: u64 = 11_000_000;
/// Book-keeping per tensor, until it is loaded: its name and its place in the catalogue.
const BYTES_PER_TENSOR: u64 = 280;
/// Book-keeping per routed expert: its reads and where its matrices lie.
const BYTES_PER_EXPERT: u64 = 480;
/// Memory of a parsed tokenizer, and of parsing it, per byte of its file.
const TOKENIZER_FACTOR: u64 = 11;

/// How a prompt goes through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pass {
    /// Rows that share the reading of experts.
    pub chunk: usize,
    /// Rows that go through everything else at once.
    pub block: usize,
}

/// Prefill rows per pass, unless memory is short: each pass reads every expert that it needs once.
const DEFAULT_CHUNK: usize = 4096;
/// Rows of a pass that go through everything but experts at once, unless memory is short.
const DEFAULT_BLOCK: usize = 256;
/// With fewer rows, the weights' way from memory is felt.
const SMALLEST_BLOCK: usize = 32;
/// Blocks become smaller where the work buffers would take more.
const WORK_LIMIT: u64 = 200_000_000;

/// Loaded bytes of the tensors that stay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loaded {
    pub weights: u64,
    pub embedding: u64,
    pub norms: u64,
    pub mtp: u64,
}

/// Everything that does not depend on budget, context and chunk.
pub(super) struct Costs<'a> {
    pub snapshot: &'a Snapshot,
    pub request: &'a PlanRequest,
    pub loaded: Loaded,
    pub demand: SlotDemand,
    pub io: u64,
    /// Panels that are decoded while they are multiplied.
    panels: u64,
    pub recording: u64,
    pub process: u64,
    pub token: Token,
    /// The model as it runs: without an indexer if it has none of its tensors.
    spec: ModelSpec,
    select: bool,
    /// Whether the MTP layer drafts.
    mtp: bool,
    /// Whether experts take their inputs as floats.
    floats: bool,
}

impl<'a> Costs<'a> {
    pub fn new(snapshot: &'a Snapshot, request: &'a PlanRequest, slots: SlotCodes) -> Self {
        let mtp = snapshot.mtp_part.as_ref().filter(|_| request.mtp);
        let mut loaded = Loaded::default();
        for tensor in &snapshot.resident {
            *loaded.of(tensor) += tensor.loaded_bytes();
        }
        loaded.mtp = mtp.map_or(0, |part| part.resident.iter().map(ResidentTensor::loaded_bytes).sum());
        let select = snapshot.sparse_attention.is_active();
        let mut spec = snapshot.spec.clone();
        spec.indexer = spec.indexer.filter(|_| select);
        let experts = snapshot.experts.iter().chain(mtp.iter().flat_map(|part| part.experts.iter()));
        let layers: Vec<&ExpertLayer> = experts.map(|(_, layer)| layer).collect();
        let count = layers.iter().map(|layer| layer.segments.len() as u64).sum();
        Self {
            // A token's experts of one layer, and as many that are read ahead for the next.
            demand: demand(&layers, slots, request.staging.unwrap_or(2 * spec.moe.top_k).max(2)),
            io: request.io_workers as u64 * scratch_per_worker(snapshot, mtp.is_some()) as u64
                + rooms(&layers, request.io_workers, slots),
            panels: decoded_panels(&layers, request.threads, slots),
            recording: recording_bytes(snapshot.experts.iter().count(), snapshot.spec.moe.top_k),
            process: process_bytes(snapshot, count),
            token: Token::new(snapshot, &spec, request, slots),
            spec,
            select,
            floats: request.arith == Arith::Exact || !snapshot.experts_take_integers(),
            loaded,
            mtp: mtp.is_some(),
            snapshot,
            request,
        }
    }

    pub fn kv(&self, context: usize) -> u64 {
        let dtype = self.request.kv_dtype;
        let parts = KvParts { index: self.select, mtp: self.mtp };
        let layout = KvLayout::new(&self.spec, dtype, parts);
        let bytes = layout.and_then(|layout| layout.planned_bytes(context, self.request.sequences.max(1)));
        // Half of all, so that sums of it do not wrap.
        bytes.unwrap_or(u64::MAX / 2)
    }

    pub fn work(&self, pass: Pass, context: usize, embedding: EmbeddingPlace) -> u64 {
        // Loading comes before the first pass, so its largest transient shares the passes' buffers.
        let parts = LoadedParts { embedding, mtp: self.mtp };
        let loading = Model::load_transient_bytes(self.snapshot, parts);
        self.buffers(pass, context).max(loading).saturating_add(self.sequences(context))
    }

    /// What sequences keep beside their KV blocks: ids of tokens, and what the choice of the next one takes.
    fn sequences(&self, context: usize) -> u64 {
        let each = Session::planned_bytes(self.spec.vocab, context) as u64;
        each.saturating_mul(self.request.sequences.max(1) as u64)
    }

    fn buffers(&self, pass: Pass, context: usize) -> u64 {
        let size = PassSize {
            rows: pass.chunk,
            block: pass.block,
            sequences: self.request.sequences.max(1),
            floats: self.floats,
            mtp: self.mtp,
        };
        Workspace::planned_bytes(&self.spec, size, context, self.request.threads) + self.panels
    }

    /// The passes that can be planned, the best first: long ones before short ones, in large blocks
    /// before small ones. What the caller named is not varied.
    pub fn passes(&self, context: usize) -> Vec<Pass> {
        let longest = self.request.chunk.unwrap_or(DEFAULT_CHUNK).clamp(1, context);
        let halves = |from: usize, to: usize| {
            std::iter::successors(Some(from), move |n| (*n > to).then_some((n / 2).max(to)))
        };
        let chunks = halves(longest, if self.request.chunk.is_some() { longest } else { 1 });
        let blocks = |chunk: usize| match self.request.block {
            Some(block) => halves(block.clamp(1, chunk), block.clamp(1, chunk)),
            None => halves(DEFAULT_BLOCK.min(chunk), SMALLEST_BLOCK.min(chunk)),
        };
        let small = |pass: &Pass| {
            pass.block <= SMALLEST_BLOCK
                || self.request.block.is_some()
                || self.buffers(*pass, context) <= WORK_LIMIT
        };
        let all = chunks.flat_map(|chunk| blocks(chunk).map(move |block| Pass { chunk, block }));
        all.filter(small).collect()
    }

    /// Everything but expert slots.
    pub fn fixed(&self, pass: Pass, context: usize, embedding: EmbeddingPlace) -> u64 {
        let Loaded { weights, norms, mtp, .. } = self.loaded;
        let parts = [
            weights,
            norms,
            mtp,
            self.embedding(embedding),
            self.row_checks(embedding),
            self.kv(context),
            self.work(pass, context, embedding),
            self.io,
            self.recording,
            self.process,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    pub fn embedding(&self, place: EmbeddingPlace) -> u64 {
        if place == EmbeddingPlace::Memory { self.loaded.embedding } else { 0 }
    }

    /// A container with checksums has one of four bytes for each row of the embeddings; they are needed as long as rows
    /// come from disk.
    pub fn row_checks(&self, place: EmbeddingPlace) -> u64 {
        let Some(native) = self.snapshot.catalog.native().filter(|_| place == EmbeddingPlace::Disk) else {
            return 0;
        };
        let rows = |tensor: &ResidentTensor| {
            let stored = native.tensor_at(tensor.layout.codes)?;
            stored.row_checks.map(|_| 4 * tensor.layout.rows as u64)
        };
        let embeddings = self.snapshot.resident.iter().filter(|tensor| tensor.role == Role::Embedding);
        embeddings.filter_map(rows).sum()
    }
}

impl Loaded {
    fn of(&mut self, tensor: &ResidentTensor) -> &mut u64 {
        match tensor.role {
            Role::Embedding => &mut self.embedding,
            Role::Norm | Role::Router | Role::RouterBias => &mut self.norms,
            _ => &mut self.weights,
        }
    }
}

/// Slab classes by size, and which class each sparse layer uses.
fn demand(layers: &[&ExpertLayer], slots: SlotCodes, staging: usize) -> SlotDemand {
    let mut sizes: Vec<usize> = layers.iter().map(|layer| slot_bytes(layer.slab_len(slots))).collect();
    sizes.sort_unstable();
    // Sizes within a percent of a larger one share its class: padding is cheaper than staging slabs.
    let mut classes: Vec<ClassDemand> = Vec::new();
    for slab_bytes in sizes.into_iter().rev() {
        if classes.last().is_none_or(|class| slab_bytes < class.slab_bytes - class.slab_bytes / 100) {
            classes.push(ClassDemand { slab_bytes, staging });
        }
    }
    let class_of = |slab_len| classes.iter().rposition(|c| c.slab_bytes >= slab_len).unwrap_or(0);
    let layers = layers
        .iter()
        .map(|layer| LayerDemand { class: class_of(layer.slab_len(slots)), experts: layer.segments.len() })
        .collect();
    SlotDemand { classes, layers }
}

/// Room for the experts that reading threads decode at a time.
fn rooms(layers: &[&ExpertLayer], workers: usize, slots: SlotCodes) -> u64 {
    let largest = layers.iter().map(|layer| layer.room_len(slots)).max().unwrap_or(0);
    Rooms::count(workers) as u64 * largest as u64
}

/// Room for the panels that each thread multiplies at the moment, where slots hold them coded.
fn decoded_panels(layers: &[&ExpertLayer], threads: usize, slots: SlotCodes) -> u64 {
    let largest = layers.iter().map(|layer| layer.decoded_panels(slots)).max().unwrap_or(0);
    threads as u64 * largest as u64
}

/// Raw buffer that a reading thread may need, for experts quantised as they arrive.
pub(crate) fn scratch_per_worker(snapshot: &Snapshot, mtp: bool) -> usize {
    let drafting = snapshot.mtp_part.iter().filter(|_| mtp).flat_map(|part| part.experts.iter());
    snapshot.experts.iter().chain(drafting).map(|(_, layer)| layer.raw_len()).max().unwrap_or(0)
}

fn process_bytes(snapshot: &Snapshot, experts: u64) -> u64 {
    let tokenizer = std::fs::metadata(snapshot.dir.join("tokenizer.json")).map_or(0, |m| m.len());
    PROCESS_BYTES
        + snapshot.catalog.len() as u64 * BYTES_PER_TENSOR
        + experts * BYTES_PER_EXPERT
        + tokenizer.saturating_mul(TOKENIZER_FACTOR)
}
