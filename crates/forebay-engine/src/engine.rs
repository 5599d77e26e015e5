//! A loaded model: weights, expert store, threads, and the plan they keep to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::{ByteSize, Format};
use forebay_io::probe::Way;
use forebay_io::{
    Access, Arena, ArenaError, Backend, MemoryInfo, MirrorError, Reader, ReaderConfig, Roots, Shard,
    StartError, open_files,
};
use forebay_kernels::{Isa, IsaUnavailable, Kernels, Team};
use forebay_model::experts::Rooms;
use forebay_model::{
    Arith, Capability, Context, EmbeddingPlace, ExpertTable, KvCache, KvDtype, KvParts, KvPool, LoadedParts,
    Model, ModelSpec, Phase, Profile, SlotCodes, Snapshot, SnapshotError, SnapshotOptions, WeightError, Work,
    Workspace,
};
use forebay_tiers::{
    ConfigError, Counters, ExpertStore, LayerExperts, LookAhead, Machine, Policy, StoreConfig, ThisMachine,
};

use crate::draft::{Controller, Drafting};
use crate::plan::{self, ModelFacts, Plan, PlanError, PlanRequest, Rates};
use crate::prefix::{Prefixes, kv_pool};

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
    fn way(&self, all_stay: bool) -> Way {
        let usual = ReaderConfig::default();
        let access = if all_stay || self.throttle.is_some() { Access::Buffered } else { Access::Direct };
        Way {
            backend: self.backend.unwrap_or(usual.backend),
            access: self.access.unwrap_or(access),
            depth: self.depth.unwrap_or(usual.workers),
        }
    }

    fn reader(&self, way: Way, scratch_per_worker: usize) -> ReaderConfig {
        ReaderConfig {
            workers: way.depth,
            scratch_per_worker,
            backend: way.backend,
            throttle: self.throttle,
            ..ReaderConfig::default()
        }
    }

    /// Workers that may hold a raw buffer at the same time.
    fn workers(&self) -> usize {
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
    /// next best, which [`Engine::way`] tells.
    pub fn way(&self, plan: &Plan) -> Way {
        self.io.way(plan.holds_everything())
    }

    /// The same with everything decided that depends on what the machine has.
    fn settled(self, snapshot: &Snapshot, memory: &MemoryInfo) -> Self {
        if !self.serving || self.sequences > 0 {
            return self;
        }
        let (context, sequences) = plan::sequences_for(snapshot, &self.plan_request(snapshot), memory);
        Self { context: self.context.or(context), sequences, ..self }
    }

    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(Team::default_threads).max(1)
    }

    /// The plan of a run. Where tokens need not be drafted and there is no room for the MTP layer, it stays out.
    fn plan(&self, snapshot: &Snapshot, memory: &MemoryInfo) -> Result<Plan, PlanError> {
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

    fn kernels(&self) -> Result<Kernels, IsaUnavailable> {
        self.isa.map_or(Ok(Kernels::detect()), Kernels::with_isa)
    }

    fn plan_request(&self, snapshot: &Snapshot) -> PlanRequest {
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

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The folder is not a usable model.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// It does not fit.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A shard could not be opened.
    #[error(transparent)]
    Files(#[from] forebay_io::OpenError),
    /// A folder with copies of the files is not usable.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
    /// A resident tensor could not be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The slots could not be allocated.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The reading threads could not be started.
    #[error(transparent)]
    Reader(#[from] StartError),
    /// The expert store refused its configuration.
    #[error(transparent)]
    Store(#[from] ConfigError),
    /// The system does not give the memory that was planned for the KV cache and the work buffers.
    #[error("the system refuses {} for the KV cache and work buffers; lower --context", ByteSize(*bytes))]
    NoMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The wanted instruction set is not there.
    #[error(transparent)]
    Isa(#[from] IsaUnavailable),
    /// The compute threads could not be started.
    #[error("could not start {threads} compute threads: {cause}; try --threads 1")]
    Threads {
        /// Threads wanted.
        threads: usize,
        /// What the system said.
        cause: std::io::Error,
    },
}

/// A model folder looked at without loading it.
pub struct Inspection {
    /// The checked folder.
    pub snapshot: Snapshot,
    /// How it would run, or why it would not.
    pub plan: Result<Plan, PlanError>,
    /// Memory of the machine: this one, or the one assumed.
    pub memory: MemoryInfo,
}

/// What to plan for instead of a run here and now.
#[derive(Clone, Copy, Debug, Default)]
pub struct WhatIf {
    /// A machine with this much memory on which nothing else runs.
    pub machine: Option<ByteSize>,
}

/// Checks a folder and plans a run here, reading headers only.
pub fn inspect(dir: &Path, options: &EngineOptions) -> Result<Inspection, SnapshotError> {
    inspect_for(dir, options, WhatIf::default())
}

/// Checks a folder and plans another run than one here and now, reading headers only.
pub fn inspect_for(
    dir: &Path,
    options: &EngineOptions,
    what_if: WhatIf,
) -> Result<Inspection, SnapshotError> {
    Ok(Inspection::of(Snapshot::open(dir, options.snapshot_options())?, options, what_if))
}

impl Inspection {
    /// Plans a run of a folder that was opened with these options.
    pub fn of(snapshot: Snapshot, options: &EngineOptions, what_if: WhatIf) -> Self {
        let memory =
            what_if.machine.map_or_else(MemoryInfo::read, |ByteSize(total)| MemoryInfo::assumed(total));
        let plan =
            options.settled(&snapshot, &memory).plan(&snapshot, &memory).map_err(|error| match error {
                // On an assumed machine nothing runs that could be closed.
                PlanError::MoreThanAvailable { planned, available, minimum } if what_if.machine.is_some() => {
                    PlanError::MoreThanMachine { planned, machine: available, minimum }
                }
                other => other,
            });
        Self { snapshot, plan, memory }
    }
}

/// A loaded model, ready to run one pass at a time.
pub struct Engine {
    model: Model,
    table: ExpertTable,
    pub(crate) store: ExpertStore,
    kernels: Kernels,
    team: Team,
    options: EngineOptions,
    way: Way,
    loaded_bytes: u64,
    largest_expert: u64,
    plan: Plan,
    sparse_attention: Capability,
    mtp: Capability,
    stop_ids: Vec<u32>,
    notes: Vec<String>,
    /// How many tokens to draft.
    pub(crate) drafting: Controller,
    kv_pool: Arc<KvPool>,
    /// What earlier sequences left to go on from.
    pub(crate) prefixes: Prefixes,
    /// The buffers of passes, whichever sequences they are for.
    pub(crate) workspace: Workspace,
}

impl Engine {
    /// Checks, plans and loads the model in `dir`.
    ///
    /// `progress` is called with resident bytes loaded and to load.
    pub fn open(
        dir: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, OpenError> {
        Self::open_mirrored(dir, &[], options, progress)
    }

    /// The same, reading experts also from folders that hold copies of the model's files, or of
    /// some of them: each from where it is expected first. Changes no bit.
    pub fn open_mirrored(
        dir: &Path,
        mirrors: &[PathBuf],
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, OpenError> {
        Self::load(Snapshot::open(dir, options.snapshot_options())?, mirrors, options, progress)
    }

    /// The same for a folder that was opened before, with the same
    /// [`snapshot_options`](EngineOptions::snapshot_options): its headers are not read again.
    pub fn load(
        snapshot: Snapshot,
        mirrors: &[PathBuf],
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, OpenError> {
        let mut notes = Vec::new();
        let engine = Self::load_over(snapshot, options, progress, &mut |shards, access| {
            let mut roots = Roots::from(shards);
            for dir in mirrors {
                notes.extend(roots.add_dir(dir, access)?);
            }
            Ok(roots)
        })?;
        Ok(engine.with_notes(notes))
    }

    /// The same, reading experts from what `files` makes of the model's own files: copies beside
    /// them, or something that stands before them.
    pub fn open_over(
        dir: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
        files: &mut dyn FnMut(Vec<Shard>, Access) -> Result<Roots, MirrorError>,
    ) -> Result<Self, OpenError> {
        Self::load_over(Snapshot::open(dir, options.snapshot_options())?, options, progress, files)
    }

    fn load_over(
        mut snapshot: Snapshot,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
        files: &mut dyn FnMut(Vec<Shard>, Access) -> Result<Roots, MirrorError>,
    ) -> Result<Self, OpenError> {
        let kernels = options.kernels()?;
        let memory = MemoryInfo::read();
        let options = options.settled(&snapshot, &memory);
        let plan = options.plan(&snapshot, &memory)?;
        snapshot.experts.slots = plan.expert_slots();
        reserve(plan.kv.saturating_add(plan.work))?;
        let paths: Vec<_> = snapshot.catalog.shards().iter().map(|shard| &shard.path).collect();
        let mut way = options.way(&plan);
        let opened = open_files(&paths, way.access)?;
        if way.access == Access::Direct && !opened.shards.iter().any(|shard| shard.file.is_direct()) {
            way.access = Access::Uncached;
        }
        let mut notes = opened.notes;
        if options.drafting == Drafting::Auto && snapshot.mtp_part.is_some() && plan.mtp == 0 {
            notes.push(
                "the MTP layer does not fit into the memory budget and is left out; drafts come from the text only"
                    .to_owned(),
            );
        }
        let parts = LoadedParts { embedding: plan.embedding_place, mtp: plan.mtp > 0 };
        let total = Model::bytes_to_read(&snapshot, parts);
        let model = Model::load(&snapshot, &opened.shards, parts, &mut |done| progress(done, total))?;
        let largest_expert = ModelFacts::of(&snapshot).largest_expert;
        let threads = options.threads();
        let team = Team::new(threads).map_err(|cause| OpenError::Threads { threads, cause })?;
        let roots = files(opened.shards, way.access)?;
        let config = options.io.reader(way, plan::scratch_per_worker(&snapshot, parts.mtp));
        if let Some(part) = snapshot.mtp_part.take_if(|_| parts.mtp) {
            snapshot.experts.join(part.experts);
        }
        let reader = Reader::with_roots(roots, config)?;
        way = Way { backend: reader.backend(), depth: reader.workers(), ..way };
        notes.extend_from_slice(reader.notes());
        let arena = Arena::new(&plan.slots.slabs)?;
        let store = ExpertStore::new(
            store_config(&snapshot.experts, &plan, &memory, &options, kernels),
            &arena,
            reader,
        )?;
        let parts = KvParts { index: snapshot.sparse_attention.is_active(), mtp: model.mtp.is_some() };
        let kv_pool = kv_pool(&model.spec, &plan, &options, parts)?;
        Ok(Self {
            workspace: Workspace::new(plan.block),
            prefixes: Prefixes::new(kv_pool.clone()),
            kv_pool,
            model,
            table: snapshot.experts,
            store,
            kernels,
            team,
            options,
            way,
            loaded_bytes: total,
            largest_expert,
            plan,
            sparse_attention: snapshot.sparse_attention,
            mtp: snapshot.mtp,
            stop_ids: snapshot.stop_ids,
            notes: snapshot.notes.into_iter().chain(notes).collect(),
            drafting: Controller::default(),
        })
    }

    fn with_notes(mut self, notes: Vec<String>) -> Self {
        self.notes.extend(notes);
        self
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.model.spec
    }

    /// The files that the weights are read from.
    pub fn weight_files(&self) -> Vec<PathBuf> {
        self.store.reader().shards().iter().map(|shard| shard.path.clone()).collect()
    }

    /// Names and sizes of the model's files: with its config, what tells it from other models.
    pub fn fingerprint(&self) -> Vec<u8> {
        let shards = self.store.reader().shards();
        let one = |shard: &Shard| {
            let name = shard.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            format!("{name}\0{}\0", shard.file.size().unwrap_or(0))
        };
        shards.iter().map(one).collect::<String>().into_bytes()
    }

    /// The weights that one token goes through, by phase (indexed as [`Phase::ALL`]).
    pub fn work(&self) -> [Work; Phase::ALL.len()] {
        let slots = self.table.slots;
        self.model.work(&|layer| self.table.layer(layer).map_or(0, |experts| experts.slab_len(slots) as u64))
    }

    /// The instruction set's arithmetic.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// The compute threads.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// The memory plan in force.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The options in force.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The way in which experts are read.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Bytes of the largest expert in the files: one read, where its matrices lie together.
    pub fn largest_expert(&self) -> u64 {
        self.largest_expert
    }

    /// Bytes of resident weights that were read when the model was opened.
    pub fn loaded_bytes(&self) -> u64 {
        self.loaded_bytes
    }

    /// Bytes of token embeddings that were read from disk so far, row by row.
    pub fn embedding_bytes_read(&self) -> u64 {
        self.model.embedding.bytes_read()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// Compute threads in use.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Whether sparse attention runs.
    pub fn sparse_attention(&self) -> &Capability {
        &self.sparse_attention
    }

    /// Whether an MTP layer could draft.
    pub fn mtp(&self) -> &Capability {
        &self.mtp
    }

    /// Drafts like this from now on, knowing nothing about it yet. An MTP layer that was not loaded, because drafting was
    /// off, stays out.
    pub fn set_drafting(&mut self, drafting: Drafting) {
        self.options.drafting = drafting;
        self.drafting = Controller::default();
    }

    /// Goes on drafting with what is known from elsewhere.
    pub fn set_controller(&mut self, controller: Controller) {
        self.drafting = controller;
    }

    /// What is known about drafting with this model so far.
    pub fn drafting(&self) -> &Controller {
        &self.drafting
    }

    /// Stop tokens named by the model's config files.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Facts about the snapshot that a user should know.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What expert streaming cost so far.
    pub fn counters(&self) -> Counters {
        self.store.counters()
    }

    /// Where the time of passes went.
    pub fn profile(&mut self) -> &mut Profile {
        &mut self.workspace.profile
    }

    /// Hidden state (before the final norm) of row `row` of the last pass.
    pub fn hidden(&self, row: usize) -> &[f32] {
        self.workspace.hidden(self.spec(), row)
    }

    /// The expert store, for measurements.
    pub fn store(&mut self) -> &mut ExpertStore {
        &mut self.store
    }

    /// Forgets every expert in memory, as if the model had just been opened.
    pub fn drop_experts(&mut self) {
        self.store.reset_residency();
    }

    /// Whether the MTP layer drafts.
    pub(crate) fn has_mtp(&self) -> bool {
        self.model.mtp.is_some()
    }

    /// KV blocks that there may be.
    pub(crate) fn kv_blocks(&self) -> usize {
        self.kv_pool.blocks()
    }

    pub(crate) fn new_kv(&self) -> KvCache {
        KvCache::new(self.kv_pool.clone(), self.plan.context)
    }

    /// What a pass computes with, the store it streams from, and its buffers.
    pub(crate) fn split(&mut self) -> (Context<'_>, &mut ExpertStore, &mut Workspace) {
        let ctx = Context {
            model: &self.model,
            table: &self.table,
            kernels: self.kernels,
            team: &self.team,
            arith: self.options.arith,
            force_selection: self.options.force_selection,
        };
        (ctx, &mut self.store, &mut self.workspace)
    }
}

/// An error, instead of the abort that a later allocation would be, if the system refuses to
/// promise `bytes` of memory.
fn reserve(bytes: u64) -> Result<(), OpenError> {
    let refused = OpenError::NoMemory { bytes };
    let Ok(len) = usize::try_from(bytes) else { return Err(refused) };
    Vec::<u8>::new().try_reserve_exact(len).map_err(|_| refused)
}

fn store_config(
    table: &ExpertTable,
    plan: &Plan,
    memory: &MemoryInfo,
    options: &EngineOptions,
    kernels: Kernels,
) -> StoreConfig {
    let demands = plan.demand.layers.iter().zip(&plan.slots.quotas);
    let rooms = Arc::new(Rooms::new(options.io.workers(), options.threads()));
    let layers: BTreeMap<u32, LayerExperts> = table
        .iter()
        .zip(demands)
        .map(|((layer, experts), (demand, &quota))| {
            let entry = LayerExperts {
                class: demand.class,
                quota,
                slab_len: experts.slab_len(table.slots),
                experts: experts.segments.clone(),
                checks: experts.checks.clone(),
                transforms: experts.transforms(table.slots, kernels, &rooms),
            };
            (layer as u32, entry)
        })
        .collect();
    let staging = plan.demand.classes.iter().map(|class| class.staging).collect();
    let governed = (plan.governed(memory), Box::new(ThisMachine::default()) as Box<dyn Machine>);
    StoreConfig {
        layers,
        staging,
        policy: options.policy,
        look_ahead: options.look_ahead,
        // Elsewhere slots that are given up do not go back to the system yet.
        governed: cfg!(target_os = "linux").then_some(governed),
    }
}
