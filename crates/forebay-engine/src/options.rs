//! How a model is run: what was asked for, and what is decided where nothing was.

use forebay_core::{ByteSize, Format};
use forebay_io::probe::Way;
use forebay_io::{Access, Backend, MemoryInfo, ReaderConfig};
use forebay_kernels::{Isa, IsaUnavailable, Kernels, Team};
use forebay_model::{Arith, EmbeddingPlace, KvDtype, SlotCodes, Snapshot, SnapshotOptions};
use forebay_tiers::{LookAhead, Policy};

use crate::draft::Drafting;
use crate::plan::{self, Plan, PlanError, PlanRequest, Rates};

/// How experts are read. The default suits most disks; `forebay bench io` measures yours. Changes no bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoOptions {
    /// Who reads; `None` takes worker threads.
    pub backend: Option<Backend>,
    /// Through the page cache or past it; `None` goes past it unless every expert has a slot, when
    /// nothing is read twice and the page cache helps the next start.
    pub access: Option<Access>,
    /// Experts that are read at a time; `None` takes 8.
    pub depth: Option<usize>,
    /// Bytes per second that are not exceeded, to try what a slower disk would do.
    pub throttle: Option<u64>,
}

impl IoOptions {
    /// The way to read where nothing else was asked for; `all_stay` if every expert has a slot.
    pub(crate) fn way(&self, all_stay: bool) -> Way {
        let usual = ReaderConfig::default();
        let access = if all_stay || self.throttle.is_some() { Access::Buffered } else { Access::Direct };
        Way {
            backend: self.backend.unwrap_or(usual.backend),
            access: self.access.unwrap_or(access),
            depth: self.depth.unwrap_or(usual.workers),
        }
    }

    pub(crate) fn reader(&self, way: Way, scratch_per_worker: usize) -> ReaderConfig {
        ReaderConfig {
            workers: way.depth,
            scratch_per_worker,
            backend: way.backend,
            throttle: self.throttle,
            ..ReaderConfig::default()
        }
    }

    /// Workers that may hold a raw buffer at the same time.
    pub(crate) fn workers(&self) -> usize {
        self.way(false).depth + ReaderConfig::default().ahead
    }
}

/// How a model is run. The default is the tuned setting.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineOptions {
    /// Bytes for the whole process; `None` takes a share of what is available.
    pub memory: Option<ByteSize>,
    /// Compute threads; `None` takes the cores this process may use.
    pub threads: Option<usize>,
    /// Positions of a sequence; `None` takes as many as fit comfortably.
    pub context: Option<usize>,
    /// Sequences of that length that the KV cache has room for at once; 0 counts as 1. What they do not use holds
    /// earlier ones, to go on from.
    pub sequences: usize,
    /// Whether a server asks: where `sequences` is 0, it is then as many as cost hardly any expert slot
    /// ([`sequences_for`](plan::sequences_for)).
    pub serving: bool,
    /// Rows per prefill pass; `None` takes as many as fit.
    pub chunk: Option<usize>,
    /// Rows of a pass that go through everything but experts at once; `None` takes what is fast.
    pub block: Option<usize>,
    /// Which experts stay in memory.
    pub policy: Policy,
    /// Whether experts are read before it is certain that they are wanted.
    pub look_ahead: LookAhead,
    /// How experts are read.
    pub io: IoOptions,
    /// Precision of the KV cache.
    pub kv_dtype: KvDtype,
    /// Arithmetic of integer weights.
    pub arith: Arith,
    /// Instruction set; `None` takes the best there is. Never changes a bit.
    pub isa: Option<Isa>,
    /// Re-encode float weights while loading.
    pub quantise: Option<Format>,
    /// Epsilon of the low-rank norms; `None` takes the config's `rms_norm_eps`.
    pub low_rank_norm_eps: Option<f32>,
    /// Leave sparse attention off.
    pub dense_attention: bool,
    /// Where the embeddings are; `None` takes what is better here. Never changes a bit.
    pub embedding: Option<EmbeddingPlace>,
    /// What the slots of coded experts hold; `None` takes what is expected to be faster. Never changes a bit.
    pub expert_slots: Option<SlotCodes>,
    /// What was measured of this machine; it changes what is expected and, by that, what
    /// [`expert_slots`](Self::expert_slots) does not say.
    pub rates: Rates,
    /// Whether tokens are drafted and then verified. Never changes what is generated.
    pub drafting: Drafting,
    /// Run the key selection even where it keeps everything; changes no result.
    pub force_selection: bool,
}

impl EngineOptions {
    /// What of these matters when a folder is opened.
    pub fn snapshot_options(&self) -> SnapshotOptions {
        SnapshotOptions {
            quantise: self.quantise,
            low_rank_norm_eps: self.low_rank_norm_eps,
            dense_attention: self.dense_attention,
            arith: self.arith,
        }
    }

    /// The way in which a run with this plan asks for experts; a system that cannot do it takes the
    /// next best, which [`Engine::way`](crate::Engine::way) tells.
    pub fn way(&self, plan: &Plan) -> Way {
        self.io.way(plan.holds_everything())
    }

    /// The same with everything decided that depends on what the machine has.
    pub(crate) fn settled(self, snapshot: &Snapshot, memory: &MemoryInfo) -> Self {
        if !self.serving || self.sequences > 0 {
            return self;
        }
        let (context, sequences) = plan::sequences_for(snapshot, &self.plan_request(snapshot), memory);
        Self { context: self.context.or(context), sequences, ..self }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.unwrap_or_else(Team::default_threads).max(1)
    }

    /// The plan of a run. Where tokens need not be drafted and there is no room for the MTP layer, it stays out.
    pub(crate) fn plan(&self, snapshot: &Snapshot, memory: &MemoryInfo) -> Result<Plan, PlanError> {
        let request = self.plan_request(snapshot);
        let planned = plan::plan(snapshot, &request, memory);
        if !request.mtp || self.drafting != Drafting::Auto {
            return planned;
        }
        let without = plan::plan(snapshot, &PlanRequest { mtp: false, ..request }, memory);
        let (Ok(mut planned), Ok(Plan { minimum, .. })) = (planned, &without) else { return without };
        planned.minimum = planned.minimum.min(*minimum);
        Ok(planned)
    }

    pub(crate) fn kernels(&self) -> Result<Kernels, IsaUnavailable> {
        self.isa.map_or(Ok(Kernels::detect()), Kernels::with_isa)
    }

    pub(crate) fn plan_request(&self, snapshot: &Snapshot) -> PlanRequest {
        PlanRequest {
            memory: self.memory,
            context: self.context,
            sequences: self.sequences,
            chunk: self.chunk,
            block: self.block,
            arith: self.arith,
            kv_dtype: self.kv_dtype,
            threads: self.threads(),
            io_workers: self.io.workers(),
            staging: None,
            embedding: self.embedding,
            mtp: snapshot.mtp_part.is_some() && self.drafting != Drafting::Off,
            expert_slots: self.expert_slots,
            // An instruction set that is not there is refused elsewhere.
            decodes_fast: self.kernels().is_ok_and(Kernels::decodes_fast),
            rates: self.rates(),
        }
    }

    /// What was measured; a disk that is held back gives no more than that.
    pub(crate) fn rates(&self) -> Rates {
        let throttle = self.io.throttle.map(|rate| rate as f64);
        let disk = match (self.rates.disk, throttle) {
            (Some(disk), Some(throttle)) => Some(disk.min(throttle)),
            (disk, throttle) => disk.or(throttle),
        };
        Rates { disk, ..self.rates }
    }
}
