//! A loaded model: weights, expert store, threads, and the plan they keep to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::ByteSize;
use forebay_io::probe::Way;
use forebay_io::{
    Access, Arena, ArenaError, MemoryInfo, MirrorError, Reader, Roots, Shard, StartError, open_files,
};
use forebay_kernels::{Isa, IsaUnavailable, Kernels, Team};
use forebay_model::experts::Rooms;
use forebay_model::uses::Uses;
use forebay_model::{
    Capability, Context, ExpertTable, KvCache, KvParts, KvPool, LoadedParts, Model, ModelSpec, Phase,
    Profile, Snapshot, SnapshotError, WeightError, Work, Workspace,
};
use forebay_tiers::{ConfigError, Counters, ExpertStore, LayerExperts, Machine, StoreConfig, ThisMachine};

use crate::draft::{Controller, Drafting};
use crate::options::EngineOptions;
use crate::plan::{self, ModelFacts, Plan, PlanError};
use crate::prefix::{Prefixes, kv_pool};

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

    /// Which experts the texts so far used, by layer of the decoder: every token that stayed counts once.
    pub fn uses(&self) -> &Uses {
        self.workspace.uses()
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
