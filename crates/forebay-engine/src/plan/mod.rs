//! What will fit, decided before anything is allocated (docs/planning.md).
//!
//! A budget covers everything: weights, KV cache, work buffers, expert slots, and what
//! the process itself takes. Whatever is left after the rest becomes expert slots. One
//! function, [`plan`], serves the engine and everything that only looks.

mod codes;
mod cost;
mod error;
mod facts;
mod outlook;

use forebay_core::ByteSize;
use forebay_io::{MemoryInfo, slot_bytes};
use forebay_model::{Arith, EmbeddingPlace, KvDtype, SlotCodes, Snapshot};
use forebay_tiers::{GovernorPlan, SlotDemand, SlotSplit};

pub use codes::{Decoder, SlotChoice};
pub(crate) use cost::scratch_per_worker;
use cost::{Costs, Pass};
pub use error::PlanError;
pub use facts::ModelFacts;
pub use forebay_io::Rates;
pub use outlook::{Bound, Expectation, Outlook, TYPICAL_CONTEXT};

/// Share of the available memory that an automatic budget takes.
const AUTOMATIC_SHARE: f64 = 0.88;
/// Budget when the machine does not say how much memory it has.
const UNKNOWN_BUDGET: u64 = 8_000_000_000;
/// Context when the config names no maximum.
const DEFAULT_CONTEXT: usize = 8192;
/// One part in so many of the memory for experts may go to longer passes.
const PASS_SHARE: u64 = 4;
/// Whole contexts that a server's KV cache has room for at most: as many as run at once.
pub const MOST_SEQUENCES: usize = 8;
/// One slot in so many of a layer may go to the contexts of further sequences.
const SLOTS_FOR_SEQUENCES: usize = 16;
/// Slots per layer that an automatic context leaves room for.
const COMFORTABLE_SLOTS: usize = 4;

/// What the caller wants; `None` leaves the choice to the planner.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest {
    /// Bytes for the whole process.
    pub memory: Option<ByteSize>,
    /// Positions of a sequence at most.
    pub context: Option<usize>,
    /// Whole contexts that the KV cache has room for; 0 counts as 1.
    pub sequences: usize,
    /// Rows per prefill pass.
    pub chunk: Option<usize>,
    /// Rows of a pass that go through everything but experts at once.
    pub block: Option<usize>,
    /// Arithmetic of integer weights.
    pub arith: Arith,
    /// Precision of the KV cache.
    pub kv_dtype: KvDtype,
    /// Compute threads.
    pub threads: usize,
    /// Reading threads.
    pub io_workers: usize,
    /// Staging slabs per size class, for experts that pass through.
    pub staging: Option<usize>,
    /// Where the embeddings are.
    pub embedding: Option<EmbeddingPlace>,
    /// Plan the MTP layer too, if there is one that can draft.
    pub mtp: bool,
    /// What the slots of coded experts hold.
    pub expert_slots: Option<SlotCodes>,
    /// Whether coded experts are decoded in registers.
    pub decodes_fast: bool,
    /// What was measured of this machine; it changes the outlook, and what the slots of coded experts hold.
    pub rates: Rates,
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

/// A consumer of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumer {
    /// Weights that every token uses: attention, dense and shared MLPs, the head.
    Weights,
    /// Token embeddings, unless they stay on disk.
    Embedding,
    /// Checksums of the rows of token embeddings that stay on disk, where the container has them.
    RowChecks,
    /// Norms and routers.
    Norms,
    /// The MTP layer without its experts, if planned.
    Mtp,
    /// KV cache.
    Kv,
    /// Work buffers of a pass.
    Work,
    /// Raw buffers of the reading threads.
    Reading,
    /// Slabs for experts that pass through.
    Staging,
    /// Slots for experts that stay.
    Slots,
    /// The experts that a run chose, kept to its end.
    Recording,
    /// The process itself.
    Process,
}

/// A division of memory that the engine keeps to.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Bytes the process may take.
    pub budget: u64,
    /// Where that number came from.
    pub budget_from: BudgetFrom,
    /// Resident weights; embeddings, norms, routers and MTP apart.
    pub weights: u64,
    /// Embeddings in memory.
    pub embedding: u64,
    /// Checksums of rows of embeddings on disk.
    pub row_checks: u64,
    /// Norms and routers.
    pub norms: u64,
    /// Resident weights of the MTP layer.
    pub mtp: u64,
    /// KV cache: blocks for as many contexts as were asked for, and some to spare.
    pub kv: u64,
    /// Work buffers for passes of `chunk` rows.
    pub work: u64,
    /// Raw buffers of the reading threads.
    pub io: u64,
    /// What a run chose, kept to look back at it.
    pub recording: u64,
    /// The process itself: code, tokenizer, book-keeping.
    pub process: u64,
    /// Expert slots.
    pub slots: SlotSplit,
    /// Positions of a sequence at most.
    pub context: usize,
    /// Rows per prefill pass.
    pub chunk: usize,
    /// Rows of a pass that go through everything but experts at once.
    pub block: usize,
    /// Where the embeddings are.
    pub embedding_place: EmbeddingPlace,
    /// Bytes that embeddings take, or would take, in memory.
    pub embedding_bytes: u64,
    /// The smallest budget that runs with this context.
    pub minimum: u64,
    /// The budget that holds every expert with this context.
    pub everything: u64,
    /// The sparse layers' class demands, for building the store.
    pub demand: SlotDemand,
    /// What to expect of it.
    pub outlook: Outlook,
    /// What the slots of coded experts hold; `None` if no expert is coded.
    pub codes: Option<SlotChoice>,
}

impl Plan {
    /// What the slots of coded experts hold.
    pub fn expert_slots(&self) -> SlotCodes {
        self.codes.map_or(SlotCodes::default(), |choice| choice.slots)
    }

    /// Bytes that the process is expected to take at most.
    pub fn total(&self) -> u64 {
        self.lines().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Every consumer and what it takes; they add up to [`total`](Self::total).
    pub fn lines(&self) -> [(Consumer, u64); 12] {
        [
            (Consumer::Weights, self.weights),
            (Consumer::Embedding, self.embedding),
            (Consumer::RowChecks, self.row_checks),
            (Consumer::Norms, self.norms),
            (Consumer::Mtp, self.mtp),
            (Consumer::Kv, self.kv),
            (Consumer::Work, self.work),
            (Consumer::Reading, self.io),
            (Consumer::Staging, self.staging()),
            (Consumer::Slots, self.slots.bytes - self.staging()),
            (Consumer::Recording, self.recording),
            (Consumer::Process, self.process),
        ]
    }

    fn staging(&self) -> u64 {
        self.demand.min_bytes()
    }

    /// Slots for experts that stay, over all layers.
    pub fn resident_slots(&self) -> usize {
        self.slots.quotas.iter().sum()
    }

    /// Whether every expert has a slot, so that none is read twice.
    pub fn holds_everything(&self) -> bool {
        self.demand.layers.iter().zip(&self.slots.quotas).all(|(layer, quota)| layer.experts == *quota)
    }

    /// Bytes of one slot in every layer.
    pub fn slot_row(&self) -> u64 {
        let slot = |class: usize| slot_bytes(self.demand.classes[class].slab_bytes) as u64;
        self.demand.layers.iter().map(|layer| slot(layer.class)).sum()
    }

    /// Slots per layer that embeddings on disk leave room for.
    pub fn embedding_in_slots(&self) -> Option<f64> {
        let row = self.slot_row();
        (row > 0).then(|| self.embedding_bytes as f64 / row as f64)
    }

    /// What a governor of a process with this plan keeps to; `memory` is what the plan was made with.
    ///
    /// It never gives up more than all but one slot per layer. It leaves half of what an automatic
    /// budget leaves to the machine, or half of what is left beside this plan if that is less: a
    /// budget that somebody asked for is no shortage by itself.
    pub fn governed(&self, memory: &MemoryInfo) -> GovernorPlan {
        let slots = self.resident_slots();
        let bytes = self.slots.bytes - self.staging();
        let usual = memory.ceiling().map_or(0, kept);
        let beside = memory.available.map_or(u64::MAX, |available| available.saturating_sub(self.total()));
        GovernorPlan {
            slots,
            floor: self.slots.quotas.iter().map(|&quota| quota.min(1)).sum(),
            slot_bytes: bytes.checked_div(slots as u64).unwrap_or(0),
            planned_bytes: self.total(),
            reserve_bytes: usual.min(beside) / 2,
        }
    }
}

/// Plans a run of `snapshot` on a machine with memory `memory`.
pub fn plan(snapshot: &Snapshot, request: &PlanRequest, memory: &MemoryInfo) -> Result<Plan, PlanError> {
    if snapshot.experts.coded == 0 {
        return plan_with(snapshot, request, memory, SlotCodes::default());
    }
    let decoder = Decoder::new(request.rates.decode, request.decodes_fast, request.threads);
    let rates = decoder.complete(&request.rates);
    // Chosen by rates that are all there, some of them assumed; what is expected is shown by those that are known.
    let complete = PlanRequest { rates, ..*request };
    let tries: Vec<_> = match request.expert_slots {
        Some(slots) => vec![(slots, plan_with(snapshot, &complete, memory, slots))],
        None => SlotCodes::ALL.map(|slots| (slots, plan_with(snapshot, &complete, memory, slots))).into(),
    };
    let expected = |wanted: SlotCodes| {
        let found = tries.iter().find(|(slots, _)| *slots == wanted);
        found.and_then(|(_, plan)| Some(&plan.as_ref().ok()?.outlook.now))
    };
    let [coded, decoded] = SlotCodes::ALL.map(expected);
    // Coded slots take less: where neither fits, they say what would.
    let usual = request.expert_slots.unwrap_or_default();
    let slots = SlotChoice::between(coded, decoded).unwrap_or(usual);
    let speed = |of: Option<&Expectation>| of.and_then(|of| of.tokens_per_second);
    let (mine, other) = match slots {
        SlotCodes::Coded => (speed(coded), speed(decoded)),
        SlotCodes::Decoded => (speed(decoded), speed(coded)),
    };
    let choice = SlotChoice {
        slots,
        asked: request.expert_slots.is_some(),
        tokens_per_second: mine,
        other,
        rates,
        decoder,
        assumed: [request.rates.disk, request.rates.memory, request.rates.decode].contains(&None),
    };
    Ok(Plan { codes: Some(choice), ..plan_with(snapshot, request, memory, slots)? })
}

/// Whole contexts that the KV cache of a server has room for, unless it is told, and their length: up to
/// [`MOST_SEQUENCES`], as long as the layer with the fewest slots keeps nearly all of those that it has beside one
/// context, which is as long as it is then.
///
/// Slots are worth multiples of speed. What sequences run at once is another matter: those that need less than a whole
/// context share the blocks.
pub fn sequences_for(
    snapshot: &Snapshot,
    request: &PlanRequest,
    memory: &MemoryInfo,
) -> (Option<usize>, usize) {
    let with = |context, sequences| plan(snapshot, &PlanRequest { context, sequences, ..*request }, memory);
    // What does not fit is said where the plan is made.
    let Ok(one) = with(request.context, 1) else { return (None, 1) };
    let context = Some(one.context);
    let slots = |plan: &Plan| plan.slots.quotas.iter().min().copied().unwrap_or(usize::MAX);
    let enough = slots(&one) - slots(&one) / SLOTS_FOR_SEQUENCES;
    let fits = |sequences: &usize| {
        with(context, *sequences).is_ok_and(|plan| plan.chunk >= one.chunk && slots(&plan) >= enough)
    };
    let halves = std::iter::successors(Some(MOST_SEQUENCES), |n| Some(n / 2));
    (context, halves.take_while(|n| *n > 1).find(fits).unwrap_or(1))
}

/// The plan with coded experts held in one way.
fn plan_with(
    snapshot: &Snapshot,
    request: &PlanRequest,
    memory: &MemoryInfo,
    slots: SlotCodes,
) -> Result<Plan, PlanError> {
    let (budget, budget_from) = budget(request, memory);
    let costs = Costs::new(snapshot, request, slots);
    let maximum = snapshot.spec.max_context.unwrap_or(1 << 20);
    let context = match request.context {
        Some(wanted) if wanted == 0 || wanted > maximum => {
            return Err(PlanError::Context { wanted, maximum });
        }
        Some(wanted) => wanted,
        None => automatic_context(&costs, budget, maximum)?,
    };
    let mut plan = divide(&costs, budget, budget_from, context)?;
    if let Some(available) = memory.available.filter(|available| plan.total() > *available) {
        let (planned, minimum) = (plan.total(), plan.minimum);
        return Err(PlanError::MoreThanAvailable { planned, available, minimum });
    }
    let other = |budget| divide(&costs, budget, budget_from, context).ok().map(|plan| plan.outlook.now);
    plan.outlook.half = other(budget / 2);
    plan.outlook.twice = other(budget.saturating_mul(2));
    Ok(plan)
}

fn budget(request: &PlanRequest, memory: &MemoryInfo) -> (u64, BudgetFrom) {
    if let Some(ByteSize(bytes)) = request.memory {
        return (bytes, BudgetFrom::Explicit);
    }
    let Some(available) = memory.available else { return (UNKNOWN_BUDGET, BudgetFrom::Unknown) };
    let share = (available as f64 * AUTOMATIC_SHARE) as u64;
    let bytes = memory.ceiling().map_or(share, |total| share.min(total - kept(total)));
    (bytes, BudgetFrom::Available)
}

/// What an automatic budget leaves to the machine: 4 GB or 15 %, but never more than half of a small one.
fn kept(total: u64) -> u64 {
    (total / 100 * 15).max(4_000_000_000).min(total / 2)
}

/// The longest context, by halves of the model's own, that leaves comfortable room for experts.
fn automatic_context(costs: &Costs<'_>, budget: u64, maximum: usize) -> Result<usize, PlanError> {
    let shortest = maximum.min(4096);
    // Slots of the poorest layer, or `None` if the context does not fit at all.
    let slots_at = |context| -> Result<Option<usize>, PlanError> {
        match divide(costs, budget, BudgetFrom::Available, context) {
            Ok(plan) => Ok(Some(plan.slots.quotas.iter().min().copied().unwrap_or(usize::MAX))),
            Err(PlanError::TooSmall { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    };
    let Some(most) = slots_at(shortest)? else { return Ok(shortest) };
    let wanted = most.min(COMFORTABLE_SLOTS);
    let mut context = costs.snapshot.spec.max_context.unwrap_or(DEFAULT_CONTEXT);
    while context > shortest {
        if slots_at(context)?.is_some_and(|slots| slots >= wanted) {
            return Ok(context);
        }
        context = (context / 2).max(shortest);
    }
    Ok(shortest)
}

/// Divides `budget` for a given context.
///
/// The outlook is that of this budget alone.
fn divide(
    costs: &Costs<'_>,
    budget: u64,
    budget_from: BudgetFrom,
    context: usize,
) -> Result<Plan, PlanError> {
    let Costs { request, loaded, demand, io, recording, process, .. } = costs;
    let all_experts = demand.all_bytes()?;
    let passes = costs.passes(context);
    // There is one at least: a request for a pass of some size is taken as it is.
    let (usual, least) = (passes[0], passes[passes.len() - 1]);
    let with_all = |place| costs.fixed(usual, context, place).saturating_add(all_experts);
    // Embeddings cost a small read per token on disk: worth it unless everything fits anyway.
    let embedding = request.embedding.unwrap_or(match budget >= with_all(EmbeddingPlace::Memory) {
        true => EmbeddingPlace::Memory,
        false => EmbeddingPlace::Disk,
    });
    let everything = with_all(request.embedding.unwrap_or(EmbeddingPlace::Memory));
    let with_none = |pass, place| costs.fixed(pass, context, place).saturating_add(demand.min_bytes());
    let minimum = with_none(least, request.embedding.unwrap_or(EmbeddingPlace::Disk));
    // Short memory takes smaller passes: a long one is worth some slots, not most of them.
    let smallest = with_none(least, embedding);
    let share = budget.saturating_sub(smallest) / PASS_SHARE;
    let fits = |pass: &Pass| with_none(*pass, embedding).saturating_sub(smallest) <= share;
    let pass = passes.iter().copied().find(fits).unwrap_or(least);
    let (kv, work) = (costs.kv(context), costs.work(pass, context, embedding));
    let in_memory = costs.embedding(embedding);
    if budget < minimum {
        let weights = loaded.weights + loaded.norms + loaded.mtp + in_memory;
        return Err(PlanError::TooSmall { budget, minimum, context, weights, kv, work });
    }
    let slots = demand.split(budget - costs.fixed(pass, context, embedding))?;
    let now = outlook::expect(&costs.token, &slots.quotas, budget, context, &request.rates);
    Ok(Plan {
        budget,
        budget_from,
        weights: loaded.weights,
        embedding: in_memory,
        row_checks: costs.row_checks(embedding),
        norms: loaded.norms,
        mtp: loaded.mtp,
        kv,
        work,
        io: *io,
        recording: *recording,
        process: *process,
        slots,
        context,
        chunk: pass.chunk,
        block: pass.block,
        embedding_place: embedding,
        embedding_bytes: loaded.embedding,
        minimum,
        everything,
        demand: demand.clone(),
        outlook: Outlook { context: context.min(TYPICAL_CONTEXT), now, half: None, twice: None },
        codes: None,
    })
}
