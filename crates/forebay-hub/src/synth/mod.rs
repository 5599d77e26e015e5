//! Models of random weights with the true shape of GLM-5.2, for measuring without the real one.
//!
//! - [`spec`]: what is asked for. [`tune`]: how large every part is, so that the result behaves.
//! - [`random`], [`pool`], [`matrix`]: weights, at the speed of a disk.
//! - [`plan`]: every byte's place, before the first is written. `shard`, `folder`: writing, and going on
//!   where a run ended.
//!
//! docs/synth.md says what the models are like, and what they are not good for.

mod error;
mod folder;
pub mod matrix;
pub mod plan;
pub mod pool;
pub mod random;
mod shard;
pub mod spec;
pub mod tune;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use forebay_core::CancelToken;

pub use error::SynthError;
pub use folder::STAMP;
pub use plan::Plan;
pub use spec::{Dims, SynthSpec, TextFiles};

use folder::Folder;
use plan::Shard;
use pool::{Pool, PoolKey};
use shard::Maker;

/// Grows when the same options give other bytes.
pub const VERSION: u32 = 2;

/// What a run did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Bytes of weight files written by this run.
    pub bytes: u64,
    /// Weight files written by this run.
    pub shards: usize,
    /// Weight files that were there.
    pub kept: usize,
}

/// Writes the planned model into `dir`, or what is missing of it, with `threads` threads.
///
/// The bytes do not depend on `threads`, nor on how often the work was interrupted. `progress` gets the bytes
/// that are there and those there will be. `config.json` comes last: until then the folder is no model.
///
/// # Errors
/// Nothing is written if `dir` holds anything else, or if its disk has too little room. After any other error
/// complete files stay, and the next call goes on behind them.
pub fn write(
    dir: &Path,
    spec: &SynthSpec,
    text: &TextFiles,
    threads: usize,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Written, SynthError> {
    let plan = Plan::new(spec, text)?;
    let folder = Folder::take(dir, &spec.stamp(text), plan.bytes())?;
    let missing = folder.missing(&plan)?;
    let bytes = missing.iter().map(|number| plan.shards[*number].bytes).sum();
    folder.check_room(bytes)?;
    let (total, mut done) = (plan.bytes(), plan.bytes() - bytes);
    let mut pools = BTreeMap::new();
    for number in &missing {
        let shard = &plan.shards[*number];
        keep_pools(&mut pools, shard, &plan, spec.seed, threads, cancel)?;
        let maker = Maker { pools: &pools, seed: spec.seed, threads };
        maker.write(dir, shard, cancel, &mut |bytes| {
            done += bytes;
            progress(done, total);
        })?;
    }
    folder.finish(text, &spec.config(text))?;
    Ok(Written { bytes, shards: missing.len(), kept: plan.shards.len() - missing.len() })
}

/// Makes `pools` hold what `shard` needs and nothing else.
fn keep_pools(
    pools: &mut BTreeMap<PoolKey, Pool>,
    shard: &Shard,
    plan: &Plan,
    seed: u64,
    threads: usize,
    cancel: &CancelToken,
) -> Result<(), SynthError> {
    let mut needed = BTreeSet::new();
    for tensor in &shard.tensors {
        if let plan::Source::Codes(matrix) | plan::Source::Scales(matrix) = &tensor.source {
            needed.extend(matrix.segments.iter().filter(|s| s.rows > 0).map(|segment| segment.pool));
        }
    }
    pools.retain(|key, _| needed.contains(key));
    for key in needed {
        if cancel.is_cancelled() {
            return Err(SynthError::Cancelled);
        }
        if let Entry::Vacant(place) = pools.entry(key) {
            place.insert(Pool::build(key, plan.pools[&key], seed, threads)?);
        }
    }
    Ok(())
}
