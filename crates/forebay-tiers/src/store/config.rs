//! What a store is made of, and the checks that let the rest of it trust that.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_core::{ExpertKey, ReadSegment};
use forebay_io::{Arena, Reader, Transform};

use crate::cache::Policy;
use crate::governor::{GovernorPlan, Machine};
use crate::look_ahead::LookAhead;

/// Everything a store needs to know about a model.
pub struct StoreConfig {
    /// The layers with routed experts, by decoder layer.
    pub layers: BTreeMap<u32, LayerExperts>,
    /// Per slab class: staging slabs, shared by the layers of the class.
    pub staging: Vec<usize>,
    /// Who stays in memory.
    pub policy: Policy,
    /// Whether experts are read before their step begins.
    pub look_ahead: LookAhead,
    /// What the number of slots is adapted to, and where the machine's figures come from.
    pub governed: Option<(GovernorPlan, Box<dyn Machine>)>,
}

/// The experts of one layer.
pub struct LayerExperts {
    /// Slab class of the layer.
    pub class: usize,
    /// Experts that may stay in memory; 0 streams every one.
    pub quota: usize,
    /// Bytes of one expert in its slab, at most.
    pub slab_len: usize,
    /// Per expert, what to read. Destinations count in the slab or, with a
    /// transform of its own, in its raw bytes.
    pub experts: Vec<Arc<[ReadSegment]>>,
    /// CRC32C of what each expert's one read brings; empty if the files have none.
    pub checks: Vec<u32>,
    /// By expert, what is done to its bytes on their way into the slab. Those behind the last one come as they are.
    pub transforms: Vec<Option<Arc<dyn Transform>>>,
}

/// A configuration that cannot work. All but [`ArenaTooSmall`](Self::ArenaTooSmall)
/// mean that whoever wrote it did not follow its own plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A layer's class does not exist.
    #[error("layer {layer} wants slab class {class}, which does not exist; please report this as a bug")]
    UnknownClass {
        /// The layer.
        layer: u32,
        /// The class it names.
        class: usize,
    },
    /// Slabs of the class are smaller than the layer's experts.
    #[error(
        "experts of layer {layer} take {slab_len} bytes, slabs of class {class} have {slab_bytes}; \
         please report this as a bug"
    )]
    SlabTooSmall {
        /// The layer.
        layer: u32,
        /// Its class.
        class: usize,
        /// Bytes of one of its experts.
        slab_len: usize,
        /// Bytes of a slab.
        slab_bytes: usize,
    },
    /// The layer may have to stream and has nothing to stream through.
    #[error(
        "layer {layer} keeps {quota} of {experts} experts and class {class} has no staging slab for the others; \
         please report this as a bug"
    )]
    NoStaging {
        /// The layer.
        layer: u32,
        /// Its class.
        class: usize,
        /// Experts it keeps.
        quota: usize,
        /// Experts it has.
        experts: usize,
    },
    /// An expert has nothing to read.
    #[error("{key} has no bytes to read; please report this as a bug")]
    NoSegments {
        /// The expert.
        key: ExpertKey,
    },
    /// Checksums that do not go with the reads.
    #[error("layer {layer} has checksums that do not fit its reads; please report this as a bug")]
    BadChecks {
        /// The layer.
        layer: u32,
    },
    /// A read of an expert is empty, names no open shard or ends outside its buffer.
    #[error(
        "{key}: {segment:?} is not a read from one of {shards} shards into {room} bytes; please report this as a bug"
    )]
    BadSegment {
        /// The expert.
        key: ExpertKey,
        /// The read.
        segment: ReadSegment,
        /// Shards that are open.
        shards: usize,
        /// Bytes of the buffer.
        room: usize,
    },
    /// A transform of the layer needs more scratch than the reader's workers may hold.
    #[error(
        "layer {layer} needs {needed} bytes of scratch per read worker, the limit is {limit}; please report this as a bug"
    )]
    ScratchTooSmall {
        /// The layer.
        layer: u32,
        /// Bytes its transform reads.
        needed: usize,
        /// Bytes a worker may hold.
        limit: usize,
    },
    /// The arena has fewer slabs than staging and quotas add up to.
    #[error(
        "{needed} slabs of class {class} are needed and {available} are free; lower the memory budget of experts"
    )]
    ArenaTooSmall {
        /// The class.
        class: usize,
        /// Slabs needed.
        needed: usize,
        /// Slabs free.
        available: usize,
    },
}

impl StoreConfig {
    pub(super) fn check(&self, arena: &Arena, reader: &Reader) -> Result<(), ConfigError> {
        let mut needed = self.staging.clone();
        for (&layer, experts) in &self.layers {
            let class = experts.class;
            let slab_bytes = arena.slab_bytes(class).filter(|_| class < needed.len());
            let slab_bytes = slab_bytes.ok_or(ConfigError::UnknownClass { layer, class })?;
            experts.check(layer, slab_bytes, self.staging[class], reader, self.governed.is_some())?;
            needed[class] = needed[class].saturating_add(experts.quota);
        }
        for (class, needed) in needed.into_iter().enumerate() {
            let available = arena.available(class);
            if needed > available {
                return Err(ConfigError::ArenaTooSmall { class, needed, available });
            }
        }
        Ok(())
    }
}

impl LayerExperts {
    fn check(
        &self,
        layer: u32,
        slab_bytes: usize,
        staging: usize,
        reader: &Reader,
        governed: bool,
    ) -> Result<(), ConfigError> {
        let Self { class, quota, slab_len, .. } = *self;
        if slab_len > slab_bytes {
            return Err(ConfigError::SlabTooSmall { layer, class, slab_len, slab_bytes });
        }
        if (quota < self.experts.len() || governed) && staging == 0 {
            return Err(ConfigError::NoStaging { layer, class, quota, experts: self.experts.len() });
        }
        let one_each =
            self.checks.len() == self.experts.len() && self.experts.iter().all(|reads| reads.len() == 1);
        if !self.checks.is_empty() && !one_each {
            return Err(ConfigError::BadChecks { layer });
        }
        let shards = reader.shards().len();
        for (expert, segments) in (0..).zip(&self.experts) {
            let key = ExpertKey { layer, expert };
            if segments.is_empty() {
                return Err(ConfigError::NoSegments { key });
            }
            let transform = self.transforms.get(expert as usize).and_then(Option::as_ref);
            let room = transform.map_or(slab_len, |transform| transform.raw_len());
            let limit = reader.scratch_per_worker();
            let in_slab = transform.is_some_and(|transform| transform.reads_into_slab());
            if in_slab && room > slab_len {
                return Err(ConfigError::SlabTooSmall { layer, class, slab_len: room, slab_bytes: slab_len });
            }
            if transform.is_some() && !in_slab && room > limit {
                return Err(ConfigError::ScratchTooSmall { layer, needed: room, limit });
            }
            for &segment in segments.iter() {
                let end = segment.dst.checked_add(segment.len);
                let fits = end.is_some_and(|end| end <= room);
                if segment.len == 0 || segment.shard as usize >= shards || !fits {
                    return Err(ConfigError::BadSegment { key, segment, shards, room });
                }
            }
        }
        Ok(())
    }
}
