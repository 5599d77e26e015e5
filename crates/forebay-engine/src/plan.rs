//! What will fit, decided before anything is allocated.
//!
//! A budget covers everything: weights, KV cache, work buffers, expert slots, and what
//! the process itself takes. Whatever is left after the rest becomes expert slots.

use forebay_core::ByteSize;
use forebay_io::{MemoryInfo, slot_bytes};
use forebay_model::{KvCache, KvDtype, Model, Snapshot, Workspace};
use forebay_tiers::{BudgetError, ClassDemand, LayerDemand, SlotDemand, SlotSplit};

/// Memory that a process takes whatever the model: code, stacks, allocator slack.
const PROCESS_BYTES: u64 = 24_000_000;
/// Book-keeping per tensor: its name, its place in the catalogue, its share of a record.
const BYTES_PER_TENSOR: u64 = 640;
/// Book-keeping per routed expert: its reads and where its matrices lie.
const BYTES_PER_EXPERT: u64 = 480;
/// Memory of a parsed tokenizer, per byte of its file.
const TOKENIZER_FACTOR: u64 = 12;
/// Share of the available memory that an automatic budget takes.
const AUTOMATIC_SHARE: f64 = 0.88;
/// Budget when the machine does not say how much memory it has.
const UNKNOWN_BUDGET: u64 = 8_000_000_000;
/// Context when the config names no maximum.
const DEFAULT_CONTEXT: usize = 8192;
/// Prefill rows per pass, unless memory is short.
const DEFAULT_CHUNK: usize = 256;
/// Slots per layer that an automatic context leaves room for.
const COMFORTABLE_SLOTS: usize = 4;

/// What the caller wants; `None` leaves the choice to the planner.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest {
    /// Bytes for the whole process.
    pub memory: Option<ByteSize>,
    /// Positions of the KV cache.
    pub context: Option<usize>,
    /// Rows per prefill pass.
    pub chunk: Option<usize>,
    /// Precision of the KV cache.
    pub kv_dtype: KvDtype,
    /// Compute threads.
    pub threads: usize,
    /// Reading threads.
    pub io_workers: usize,
}

/// Where the budget came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetFrom {
    /// The caller named it.
    Explicit,
    /// A share of the memory available.
    Available,
    /// The machine does not say; a cautious constant.
    Unknown,
}

/// A division of memory that the engine keeps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Bytes the process may take.
    pub budget: u64,
    /// Where that number came from.
    pub budget_from: BudgetFrom,
    /// Resident weights.
    pub weights: u64,
    /// KV cache of `context` positions.
    pub kv: u64,
    /// Work buffers for passes of `chunk` rows.
    pub work: u64,
    /// Raw buffers of the reading threads.
    pub io: u64,
    /// The process itself: code, tokenizer, book-keeping.
    pub process: u64,
    /// Expert slots.
    pub slots: SlotSplit,
    /// Positions of the KV cache.
    pub context: usize,
    /// Rows per prefill pass.
    pub chunk: usize,
    /// The smallest budget that runs with this context.
    pub minimum: u64,
    /// The budget that holds every expert with this context.
    pub everything: u64,
    /// The sparse layers' class demands, for building the store.
    pub demand: SlotDemand,
}

impl Plan {
    /// Bytes that the process is expected to take at most.
    pub fn total(&self) -> u64 {
        self.fixed() + self.slots.bytes
    }

    fn fixed(&self) -> u64 {
        self.weights + self.kv + self.work + self.io + self.process
    }

    /// Slots for experts that stay, over all layers.
    pub fn resident_slots(&self) -> usize {
        self.slots.quotas.iter().sum()
    }
}

/// Why no plan exists.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The budget is below the minimum.
    #[error(
        "a memory budget of {} is too small: this model needs at least {} with a context of {context} \
         (weights {}, KV cache {}, work buffers {}, experts passing through and the program {}); \
         raise --memory or lower --context",
        ByteSize(*budget), ByteSize(*minimum), ByteSize(*weights), ByteSize(*kv), ByteSize(*work),
        ByteSize(minimum.saturating_sub(weights + kv + work))
    )]
    TooSmall {
        /// Bytes offered.
        budget: u64,
        /// Bytes needed.
        minimum: u64,
        /// Positions planned for.
        context: usize,
        /// Resident weights.
        weights: u64,
        /// KV cache.
        kv: u64,
        /// Work buffers.
        work: u64,
    },
    /// The budget is more than there is.
    #[error(
        "the plan takes {} but only {} of memory are available (the least it can do with is {}); \
         close other programs, give a smaller --memory, or lower --context",
        ByteSize(*planned), ByteSize(*available), ByteSize(*minimum)
    )]
    MoreThanAvailable {
        /// Bytes the plan would take.
        planned: u64,
        /// Bytes available.
        available: u64,
        /// Bytes needed at least.
        minimum: u64,
    },
    /// The context is zero or beyond what the model was made for.
    #[error("a context of {wanted} tokens is not possible with this model; use 1 to {maximum}")]
    Context {
        /// Positions wanted.
        wanted: usize,
        /// Positions the model was made for.
        maximum: usize,
    },
    /// The expert slots cannot be divided.
    #[error(transparent)]
    Slots(#[from] BudgetError),
}

/// Plans a run of `snapshot` on a machine with memory `memory`.
pub fn plan(snapshot: &Snapshot, request: &PlanRequest, memory: &MemoryInfo) -> Result<Plan, PlanError> {
    let (budget, budget_from) = budget(request, memory);
    let maximum = snapshot.spec.max_context.unwrap_or(1 << 20);
    let context = match request.context {
        Some(wanted) if wanted == 0 || wanted > maximum => {
            return Err(PlanError::Context { wanted, maximum });
        }
        Some(wanted) => wanted,
        None => automatic_context(snapshot, request, budget, maximum)?,
    };
    let plan = with_context(snapshot, request, budget, budget_from, context)?;
    match memory.available {
        Some(available) if plan.total() > available => {
            Err(PlanError::MoreThanAvailable { planned: plan.total(), available, minimum: plan.minimum })
        }
        _ => Ok(plan),
    }
}

fn budget(request: &PlanRequest, memory: &MemoryInfo) -> (u64, BudgetFrom) {
    if let Some(ByteSize(bytes)) = request.memory {
        return (bytes, BudgetFrom::Explicit);
    }
    let Some(available) = memory.available else { return (UNKNOWN_BUDGET, BudgetFrom::Unknown) };
    let share = (available as f64 * AUTOMATIC_SHARE) as u64;
    // The machine keeps 4 GB or 15 %, but never more than half of a small one.
    let kept = |total: u64| (total / 100 * 15).max(4_000_000_000).min(total / 2);
    let bytes = memory.ceiling().map_or(share, |total| share.min(total - kept(total)));
    (bytes, BudgetFrom::Available)
}

/// The longest context, by halves of the model's own, that leaves comfortable room for experts.
fn automatic_context(
    snapshot: &Snapshot,
    request: &PlanRequest,
    budget: u64,
    maximum: usize,
) -> Result<usize, PlanError> {
    let shortest = maximum.min(4096);
    // Slots of the poorest layer, or `None` if the context does not fit at all.
    let slots_at = |context| -> Result<Option<usize>, PlanError> {
        match with_context(snapshot, request, budget, BudgetFrom::Available, context) {
            Ok(plan) => Ok(Some(plan.slots.quotas.iter().min().copied().unwrap_or(usize::MAX))),
            Err(PlanError::TooSmall { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    };
    let Some(most) = slots_at(shortest)? else { return Ok(shortest) };
    let wanted = most.min(COMFORTABLE_SLOTS);
    let mut context = snapshot.spec.max_context.unwrap_or(DEFAULT_CONTEXT);
    while context > shortest {
        if slots_at(context)?.is_some_and(|slots| slots >= wanted) {
            return Ok(context);
        }
        context = (context / 2).max(shortest);
    }
    Ok(shortest)
}

fn with_context(
    snapshot: &Snapshot,
    request: &PlanRequest,
    budget: u64,
    budget_from: BudgetFrom,
    context: usize,
) -> Result<Plan, PlanError> {
    let spec = &snapshot.spec;
    let select = snapshot.sparse_attention.is_active();
    let demand = demand(snapshot);
    let weights = Model::planned_bytes(snapshot);
    let kv = KvCache::planned_bytes(spec, context, request.kv_dtype, select).unwrap_or(u64::MAX / 2);
    let io = request.io_workers as u64 * scratch_per_worker(snapshot) as u64;
    let process = process_bytes(snapshot);
    // Loading comes before the first pass, so its largest transient shares the passes' buffers.
    let loading = Model::load_transient_bytes(snapshot);
    let work_of = |chunk| Workspace::planned_bytes(spec, chunk, context, request.threads).max(loading);
    // A pass never has more rows than the context; short memory takes smaller passes.
    let mut chunk = request.chunk.unwrap_or(DEFAULT_CHUNK).clamp(1, context);
    let fixed = |chunk| [weights, kv, io, process, work_of(chunk)].into_iter().fold(0, u64::saturating_add);
    while request.chunk.is_none() && chunk > 1 && fixed(chunk).saturating_add(demand.min_bytes()) > budget {
        chunk /= 2;
    }
    let minimum_chunk = request.chunk.map_or(1, |chunk| chunk.clamp(1, context));
    let minimum = fixed(minimum_chunk).saturating_add(demand.min_bytes());
    let everything = fixed(chunk).saturating_add(demand.all_bytes()?);
    let work = work_of(chunk);
    if budget < minimum {
        return Err(PlanError::TooSmall { budget, minimum, context, weights, kv, work });
    }
    let slots = demand.split(budget - fixed(chunk))?;
    Ok(Plan {
        budget,
        budget_from,
        weights,
        kv,
        work,
        io,
        process,
        slots,
        context,
        chunk,
        minimum,
        everything,
        demand,
    })
}

/// Slab classes by size, and which class each sparse layer uses.
fn demand(snapshot: &Snapshot) -> SlotDemand {
    let staging = snapshot.spec.moe.top_k.max(2);
    let mut sizes: Vec<usize> =
        snapshot.experts.iter().map(|(_, layer)| slot_bytes(layer.slab_len)).collect();
    sizes.sort_unstable();
    // Sizes within a percent of a larger one share its class: padding is cheaper than staging slabs.
    let mut classes: Vec<ClassDemand> = Vec::new();
    for slab_bytes in sizes.into_iter().rev() {
        if classes.last().is_none_or(|class| slab_bytes < class.slab_bytes - class.slab_bytes / 100) {
            classes.push(ClassDemand { slab_bytes, staging });
        }
    }
    let class_of = |slab_len| classes.iter().rposition(|c| c.slab_bytes >= slab_len).unwrap_or(0);
    let layers = snapshot
        .experts
        .iter()
        .map(|(_, layer)| LayerDemand { class: class_of(layer.slab_len), experts: layer.segments.len() })
        .collect();
    SlotDemand { classes, layers }
}

/// Raw buffer that a reading thread may need, for experts quantised as they arrive.
pub(crate) fn scratch_per_worker(snapshot: &Snapshot) -> usize {
    use forebay_io::Transform;
    let raw = |transform: &std::sync::Arc<forebay_model::experts::QuantiseExpert>| transform.raw_len();
    snapshot.experts.iter().filter_map(|(_, layer)| layer.transform.as_ref().map(raw)).max().unwrap_or(0)
}

fn process_bytes(snapshot: &Snapshot) -> u64 {
    let tokenizer = std::fs::metadata(snapshot.dir.join("tokenizer.json")).map_or(0, |m| m.len());
    PROCESS_BYTES
        + snapshot.catalog.len() as u64 * BYTES_PER_TENSOR
        + snapshot.experts.total as u64 * BYTES_PER_EXPERT
        + tokenizer.saturating_mul(TOKENIZER_FACTOR)
}
