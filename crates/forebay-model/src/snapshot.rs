//! One model folder, checked as a whole before anything is allocated.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_core::{ExpertKey, Format};
use forebay_store::catalog::{Catalog, CatalogError};
use forebay_store::census::{self, Census, Group, Incomplete, Kind, Requirement};
use forebay_store::config::{ConfigError, ConfigFile, stop_ids};
use forebay_store::layout::{self, LayoutError, WeightLayout};

use crate::arith::Arith;
use crate::embedding::EmbeddingPlace;
use crate::experts::{ExpertTable, ExpertTableError, is_fused};
use crate::families::glm;
use crate::families::roles::{Role, Shape, TensorNeed};
use crate::spec::{Capability, IndexerKind, ModelSpec};
use crate::weights::LoadedParts;

/// Choices that decide how a snapshot is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct SnapshotOptions {
    /// Re-encode float weights to this format while loading.
    pub quantise: Option<Format>,
    /// Epsilon of the low-rank norms; `None` takes `rms_norm_eps`
    /// (transformers uses [`glm::TRANSFORMERS_LOW_RANK_EPS`]).
    pub low_rank_norm_eps: Option<f32>,
    /// Leave sparse attention off even if the snapshot has an indexer.
    pub dense_attention: bool,
    /// The arithmetic the model will run in: it decides how resident weights lie in memory,
    /// never what comes out.
    pub arith: Arith,
}

/// Why a folder cannot be used as a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// `config.json` or `generation_config.json` is not usable.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The shards cannot be listed or are inconsistent.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// Tensors are missing or malformed.
    #[error(transparent)]
    Incomplete(#[from] Incomplete),
    /// The head is missing because the config ties it to the embedding.
    #[error(
        "config.json: tie_word_embeddings is true and {} is missing; this family has a head of its own, \
         so the snapshot is incomplete or of another family",
        glm::HEAD
    )]
    TiedHead,
    /// A resident tensor cannot be used.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The experts cannot be streamed.
    #[error(transparent)]
    Experts(#[from] ExpertTableError),
}

/// A resident tensor: where it is and what it becomes.
#[derive(Clone, Debug)]
pub struct ResidentTensor {
    /// What it is for.
    pub role: Role,
    /// Its name.
    pub name: String,
    /// Where its bytes are.
    pub layout: WeightLayout,
    /// The format it has in memory.
    pub loaded_format: Format,
    /// The arithmetic of its products.
    pub arith: Arith,
}

/// What a multi-token-prediction layer takes.
#[derive(Clone)]
pub struct MtpPart {
    /// Its resident tensors.
    pub resident: Vec<ResidentTensor>,
    /// Its routed experts.
    pub experts: ExpertTable,
}

/// A model folder that passed every check.
pub struct Snapshot {
    /// The folder.
    pub dir: PathBuf,
    /// What the model is.
    pub spec: ModelSpec,
    /// The tensors found.
    pub catalog: Catalog,
    /// Resident tensors in loading order: globals, then layer by layer.
    pub resident: Vec<ResidentTensor>,
    /// The routed experts.
    pub experts: ExpertTable,
    /// Whether sparse attention (DSA) runs.
    pub sparse_attention: Capability,
    /// Whether a multi-token-prediction layer could draft.
    pub mtp: Capability,
    /// What that layer takes, if it could.
    pub mtp_part: Option<MtpPart>,
    /// Stop tokens of the two config files, in order.
    pub stop_ids: Vec<u32>,
    /// Facts a user should know, one sentence each.
    pub notes: Vec<String>,
    /// The options it was read with.
    pub options: SnapshotOptions,
}

impl Snapshot {
    /// Whether every routed and shared expert has integer weights once it is in memory.
    pub fn experts_take_integers(&self) -> bool {
        let shared = self.resident.iter().filter(|tensor| tensor.role == Role::SharedExpert);
        self.experts.iter().all(|(_, experts)| experts.all_integer)
            && shared.into_iter().all(|tensor| tensor.loaded_format.is_integer())
    }

    /// Reads configs and shard headers and checks the complete set of tensors.
    pub fn open(dir: &Path, options: SnapshotOptions) -> Result<Self, SnapshotError> {
        let config = ConfigFile::read(dir)?;
        let generation = ConfigFile::read_optional(dir, "generation_config.json")?;
        Self::of(dir, &config, generation.as_ref(), || Catalog::open(dir), options)
    }

    /// Checks a model that is known by its configs and the headers of its files; `catalog` is asked for once the
    /// configs are known to be sound.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn of(
        dir: &Path,
        config: &ConfigFile,
        generation: Option<&ConfigFile>,
        catalog: impl FnOnce() -> Result<Catalog, CatalogError>,
        options: SnapshotOptions,
    ) -> Result<Self, SnapshotError> {
        let mut spec = glm::spec(config)?;
        if let Some(eps) = options.low_rank_norm_eps {
            spec.low_rank_norm_eps = eps;
        }
        let stop_ids = stop_ids(config, generation)?;
        let catalog = catalog()?;
        if glm::ties_embeddings(config)? && catalog.get(glm::HEAD).is_none() {
            return Err(SnapshotError::TiedHead);
        }
        let census = census::check(&catalog, requirements(&spec, &catalog)).require_complete()?;
        let sparse_attention = sparse_attention(&spec, &catalog, options);
        let mtp = mtp(&spec, &catalog);
        let needs = resident_needs(&spec, sparse_attention.is_active());
        let resident = resident(needs, &catalog, &options)?;
        let experts = ExpertTable::build(&spec, &catalog, options.quantise)?;
        let mtp_part = mtp.is_active().then(|| mtp_part(&spec, &catalog, &options)).transpose()?;
        let mut notes = notes(&census, &catalog, &experts);
        if spec.indexer.is_some() && !options.dense_attention && !sparse_attention.is_active() {
            notes.insert(
                0,
                format!("sparse attention is {sparse_attention}: every token attends to all earlier ones"),
            );
        }
        let dir = dir.to_owned();
        Ok(Self {
            dir,
            spec,
            catalog,
            resident,
            experts,
            sparse_attention,
            mtp,
            mtp_part,
            stop_ids,
            notes,
            options,
        })
    }

    /// The resident tensors that are loaded.
    pub fn loaded(&self, parts: LoadedParts) -> impl Iterator<Item = &ResidentTensor> {
        let on_disk = parts.embedding == EmbeddingPlace::Disk;
        let mtp = self.mtp_part.iter().filter(move |_| parts.mtp).flat_map(|part| &part.resident);
        self.resident.iter().filter(move |tensor| !(on_disk && tensor.role == Role::Embedding)).chain(mtp)
    }

    /// Formats in use by role, each with its number of matrices, as stored.
    pub fn formats(&self) -> BTreeMap<Role, BTreeMap<String, usize>> {
        let mut roles: BTreeMap<Role, BTreeMap<String, usize>> = BTreeMap::new();
        for tensor in &self.resident {
            *roles.entry(tensor.role).or_default().entry(tensor.layout.format.to_string()).or_default() += 1;
        }
        if !self.experts.formats.is_empty() {
            roles.insert(Role::RoutedExpert, self.experts.formats.clone());
        }
        roles
    }
}

/// Every tensor the decoder needs, routed experts included.
pub fn requirements<'a>(spec: &'a ModelSpec, catalog: &'a Catalog) -> impl Iterator<Item = Requirement> + 'a {
    let global = glm::global_needs(spec).into_iter().map(|need| requirement(need, Group::Global));
    let layers = (0..spec.layers.len()).flat_map(move |layer| {
        let group = Group::Layer(layer as u32);
        glm::layer_needs(spec, layer).into_iter().map(move |need| requirement(need, group))
    });
    let experts = spec.sparse_layers().flat_map(move |layer| expert_requirements(spec, catalog, layer));
    global.chain(layers).chain(experts)
}

fn expert_requirements(spec: &ModelSpec, catalog: &Catalog, layer: usize) -> Vec<Requirement> {
    let group = Group::Layer(layer as u32);
    let recorded = catalog.native().is_some_and(|native| native.experts(layer).is_some());
    if is_fused(catalog, layer) {
        let (experts, width, hidden) = (spec.moe.experts, spec.moe.expert_width, spec.hidden);
        let [gate_up, down] = glm::fused_expert_names(layer);
        let fused = |name, rows, cols| Requirement { name, kind: Kind::Fused { experts, rows, cols }, group };
        return vec![fused(gate_up, 2 * width, hidden), fused(down, hidden, width)];
    }
    (0..spec.moe.experts)
        .flat_map(|expert| {
            let key = ExpertKey { layer: layer as u32, expert: expert as u32 };
            let mut part = 0;
            glm::expert_needs(spec, layer, expert).map(|need| {
                let mut found = requirement(need, Group::Expert(key));
                if let (true, Kind::Weight { rows, cols }) = (recorded, found.kind) {
                    found.kind = Kind::Recorded { key, part, rows, cols };
                }
                part += 1;
                found
            })
        })
        .collect()
}

fn requirement(need: TensorNeed, group: Group) -> Requirement {
    let kind = match need.shape {
        Shape::Matrix { rows, cols } => Kind::Weight { rows, cols },
        Shape::FloatMatrix { rows, cols } => Kind::FloatMatrix { rows, cols },
        Shape::Vector { len } => Kind::Vector { len },
    };
    Requirement { name: need.name, kind, group }
}

/// Every tensor of the indexer that the config declares; none if it declares none.
pub fn indexer_requirements(spec: &ModelSpec) -> impl Iterator<Item = Requirement> + '_ {
    let indexed = spec.indexer.as_ref().into_iter();
    indexed.flat_map(|indexer| spec.full_indexer_layers().map(move |layer| (indexer, layer))).flat_map(
        |(indexer, layer)| {
            let group = Group::Layer(layer as u32);
            glm::indexer_needs(spec, indexer, layer).into_iter().map(move |need| requirement(need, group))
        },
    )
}

/// Every tensor of the MTP layer, its routed experts last.
pub fn mtp_requirements(spec: &ModelSpec, catalog: &Catalog) -> impl Iterator<Item = Requirement> {
    let layer = spec.layers.len();
    let group = Group::Layer(layer as u32);
    let own = glm::mtp_resident_needs(spec).into_iter().map(move |need| requirement(need, group));
    own.chain(expert_requirements(spec, catalog, layer))
}

/// Whether sparse attention can run with what the catalogue has.
pub fn sparse_attention(spec: &ModelSpec, catalog: &Catalog, options: SnapshotOptions) -> Capability {
    if spec.indexer.is_none() {
        return Capability::Absent {
            reason: "the config declares no usable indexer; attention is dense".into(),
        };
    }
    let capability = capability(
        census::check(catalog, indexer_requirements(spec)),
        "the config declares an indexer but the snapshot has none of its tensors; attention is dense",
    );
    match capability {
        Capability::Active if options.dense_attention => {
            Capability::Absent { reason: "dense attention was asked for".into() }
        }
        other => other,
    }
}

/// Whether the MTP layer could draft with what the catalogue has.
pub fn mtp(spec: &ModelSpec, catalog: &Catalog) -> Capability {
    let found = capability(
        census::check(catalog, mtp_requirements(spec, catalog)),
        "the snapshot has none of its tensors",
    );
    let join = glm::mtp_join_name(spec);
    let join = layout::weight(catalog, &join, spec.hidden, 2 * spec.hidden);
    match (found, join) {
        (Capability::Active, Ok(layout)) if layout.format == Format::Int4Row => Capability::Unusable {
            reason: "eh_proj is int4 with one scale per row, which rounds its embedding half to zero; \
                     drafts would never be accepted"
                .into(),
        },
        (found, _) => found,
    }
}

fn capability(census: Census, absent: &str) -> Capability {
    if census.is_absent() {
        Capability::Absent { reason: absent.into() }
    } else if let Some(malformed) = census.malformed.first() {
        Capability::Unusable { reason: malformed.to_string() }
    } else if let Some(missing) = &census.first_missing {
        let first_missing = match missing {
            LayoutError::Missing { tensor } => tensor.clone(),
            LayoutError::MissingScales { scales, .. } => scales.clone(),
            other => other.to_string(),
        };
        Capability::Incomplete { first_missing, missing: census.missing }
    } else {
        Capability::Active
    }
}

/// What the MTP layer takes. Float matrices of it never go below int8.
fn mtp_part(
    spec: &ModelSpec,
    catalog: &Catalog,
    options: &SnapshotOptions,
) -> Result<MtpPart, SnapshotError> {
    let quantise = options.quantise.map(|wanted| Role::Mtp.quantised(Format::F32, wanted));
    let options = SnapshotOptions { quantise, ..*options };
    let resident = resident(glm::mtp_resident_needs(spec), catalog, &options)?;
    let experts = ExpertTable::of_layers(spec, catalog, [spec.layers.len()], quantise)?;
    Ok(MtpPart { resident, experts })
}

/// The decoder's resident tensors in the order in which [`crate::weights::Model::load`] takes them.
fn resident_needs(spec: &ModelSpec, select: bool) -> Vec<TensorNeed> {
    let mut needs = glm::global_needs(spec);
    for (layer, kind) in spec.layers.iter().enumerate() {
        needs.extend(glm::layer_needs(spec, layer));
        if let Some(indexer) = spec.indexer.filter(|_| select && kind.indexer == IndexerKind::Full) {
            needs.extend(glm::indexer_needs(spec, &indexer, layer));
        }
    }
    needs
}

fn resident(
    needs: Vec<TensorNeed>,
    catalog: &Catalog,
    options: &SnapshotOptions,
) -> Result<Vec<ResidentTensor>, LayoutError> {
    needs
        .into_iter()
        .map(|TensorNeed { role, name, shape }| {
            let layout = match shape {
                Shape::Matrix { rows, cols } => layout::weight(catalog, &name, rows, cols)?,
                Shape::FloatMatrix { rows, cols } => layout::float_matrix(catalog, &name, rows, cols)?,
                Shape::Vector { len } => layout::vector(catalog, &name, len)?,
            };
            let loaded_format =
                options.quantise.map_or(layout.format, |wanted| role.quantised(layout.format, wanted));
            let arith = role.arith(options.arith);
            Ok(ResidentTensor { role, name, layout, loaded_format, arith })
        })
        .collect()
}

fn notes(census: &Census, catalog: &Catalog, experts: &ExpertTable) -> Vec<String> {
    let mut notes = Vec::new();
    if census.ambiguous_groups > 0 {
        notes.push(format!(
            "{} int4 matrices fit more than one group size; the smallest that fits is used",
            census.ambiguous_groups
        ));
    }
    for (dtype, count) in catalog.unknown_dtypes() {
        notes.push(format!("{count} tensors of type {dtype} are not needed and were ignored"));
    }
    if experts.total > 0 && experts.coalesced * 100 < experts.total * 99 {
        notes.push(format!(
            "only {} of {} experts can be read in one piece; the others take several reads each, \
             which makes streaming slower, not different",
            experts.coalesced, experts.total
        ));
    }
    notes
}
