//! A loaded model: weights, expert store, threads, and the plan they keep to.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_core::{ByteSize, Format};
use forebay_io::{Arena, ArenaError, MemoryInfo, Reader, ReaderConfig, StartError, Transform, open_files};
use forebay_kernels::{Isa, IsaUnavailable, Kernels, Team};
use forebay_model::{
    Arith, Capability, Context, ExpertTable, KvCache, KvDtype, Model, ModelSpec, Phase, Snapshot,
    SnapshotError, SnapshotOptions, WeightError, Work,
};
use forebay_tiers::{ConfigError, Counters, ExpertStore, LayerExperts, StoreConfig};

use crate::plan::{self, Plan, PlanError, PlanRequest};

/// Reading threads, which is also how many reads are in flight.
const IO_WORKERS: usize = 8;

/// How a model is run. The default is the tuned setting.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineOptions {
    /// Bytes for the whole process; `None` takes a share of what is available.
    pub memory: Option<ByteSize>,
    /// Compute threads; `None` takes the cores this process may use.
    pub threads: Option<usize>,
    /// Positions of the KV cache; `None` takes as many as fit comfortably.
    pub context: Option<usize>,
    /// Rows per prefill pass; `None` takes as many as fit.
    pub chunk: Option<usize>,
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
    /// Run the key selection even where it keeps everything; changes no result.
    pub force_selection: bool,
}

impl EngineOptions {
    fn snapshot_options(&self) -> SnapshotOptions {
        SnapshotOptions {
            quantise: self.quantise,
            low_rank_norm_eps: self.low_rank_norm_eps,
            dense_attention: self.dense_attention,
            arith: self.arith,
        }
    }

    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(Team::default_threads).max(1)
    }

    fn plan_request(&self) -> PlanRequest {
        PlanRequest {
            memory: self.memory,
            context: self.context,
            chunk: self.chunk,
            kv_dtype: self.kv_dtype,
            threads: self.threads(),
            io_workers: IO_WORKERS,
        }
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
    /// How it would run here, or why it would not.
    pub plan: Result<Plan, PlanError>,
    /// Memory of this machine.
    pub memory: MemoryInfo,
}

/// Checks a folder and plans a run, reading headers only.
pub fn inspect(dir: &Path, options: &EngineOptions) -> Result<Inspection, SnapshotError> {
    let snapshot = Snapshot::open(dir, options.snapshot_options())?;
    let memory = MemoryInfo::read();
    let plan = plan::plan(&snapshot, &options.plan_request(), &memory);
    Ok(Inspection { snapshot, plan, memory })
}

/// A loaded model, ready to run one pass at a time.
pub struct Engine {
    model: Model,
    table: ExpertTable,
    pub(crate) store: ExpertStore,
    kernels: Kernels,
    team: Team,
    options: EngineOptions,
    plan: Plan,
    sparse_attention: Capability,
    mtp: Capability,
    stop_ids: Vec<u32>,
    notes: Vec<String>,
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
        let kernels = options.isa.map_or(Ok(Kernels::detect()), Kernels::with_isa)?;
        let snapshot = Snapshot::open(dir, options.snapshot_options())?;
        let plan = plan::plan(&snapshot, &options.plan_request(), &MemoryInfo::read())?;
        reserve(plan.kv.saturating_add(plan.work))?;
        let paths: Vec<_> = snapshot.catalog.shards().iter().map(|shard| &shard.path).collect();
        let shards = open_files(&paths)?;
        let total = snapshot.resident.iter().map(|t| t.layout.total_bytes()).sum();
        let model = Model::load(&snapshot, &shards, &mut |done| progress(done, total))?;
        let threads = options.threads();
        let team = Team::new(threads).map_err(|cause| OpenError::Threads { threads, cause })?;
        let scratch_per_worker = plan::scratch_per_worker(&snapshot);
        let reader = Reader::new(shards, ReaderConfig { workers: IO_WORKERS, scratch_per_worker })?;
        let arena = Arena::new(&plan.slots.slabs)?;
        let store = ExpertStore::new(store_config(&snapshot.experts, &plan), &arena, reader)?;
        Ok(Self {
            model,
            table: snapshot.experts,
            store,
            kernels,
            team,
            options,
            plan,
            sparse_attention: snapshot.sparse_attention,
            mtp: snapshot.mtp,
            stop_ids: snapshot.stop_ids,
            notes: snapshot.notes,
        })
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.model.spec
    }

    /// The weights that one token goes through, by phase (indexed as [`Phase::ALL`]).
    pub fn work(&self) -> [Work; Phase::ALL.len()] {
        self.model.work(&|layer| self.table.layer(layer).map_or(0, |experts| experts.slab_len as u64))
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

    /// Forgets every expert in memory, as if the model had just been opened.
    pub fn drop_experts(&mut self) {
        self.store.reset_residency();
    }

    pub(crate) fn new_kv(&self) -> KvCache {
        let select = self.sparse_attention.is_active();
        KvCache::new(&self.model.spec, self.plan.context, self.options.kv_dtype, select)
    }

    /// What a pass computes with, and the store it streams from.
    pub(crate) fn split(&mut self) -> (Context<'_>, &mut ExpertStore) {
        let ctx = Context {
            model: &self.model,
            table: &self.table,
            kernels: self.kernels,
            team: &self.team,
            arith: self.options.arith,
            force_selection: self.options.force_selection,
        };
        (ctx, &mut self.store)
    }
}

/// An error, instead of the abort that a later allocation would be, if the system refuses to
/// promise `bytes` of memory.
fn reserve(bytes: u64) -> Result<(), OpenError> {
    let refused = OpenError::NoMemory { bytes };
    let Ok(len) = usize::try_from(bytes) else { return Err(refused) };
    Vec::<u8>::new().try_reserve_exact(len).map_err(|_| refused)
}

fn store_config(table: &ExpertTable, plan: &Plan) -> StoreConfig {
    let demands = plan.demand.layers.iter().zip(&plan.slots.quotas);
    let layers: BTreeMap<u32, LayerExperts> = table
        .iter()
        .zip(demands)
        .map(|((layer, experts), (demand, &quota))| {
            let transform = experts.transform.clone().map(|t| t as std::sync::Arc<dyn Transform>);
            let entry = LayerExperts {
                class: demand.class,
                quota,
                slab_len: experts.slab_len,
                experts: experts.segments.clone(),
                transform,
            };
            (layer as u32, entry)
        })
        .collect();
    StoreConfig { layers, staging: plan.demand.classes.iter().map(|class| class.staging).collect() }
}
