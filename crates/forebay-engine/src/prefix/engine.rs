//! What an engine has to do with prefixes: the pool that its plan pays for, and where they are kept.

use std::sync::Arc;

use forebay_model::{KvLayout, KvParts, KvPool, ModelSpec};
use sha2::{Digest, Sha256};

use super::{KeepError, PrefixConfig, Saved};
use crate::engine::{Engine, OpenError};
use crate::options::EngineOptions;
use crate::plan::Plan;

/// The version of docs/numerics.md: raised whenever a bit of a result changes, so that nobody goes on from older rows.
const NUMERICS: u32 = 1;

impl Engine {
    /// Goes on, from now on, from prefixes that are kept on disk, and keeps those of this engine there when it is
    /// [asked to](Self::save_prefixes). `model` is a hash that tells this model from all others.
    ///
    /// # Errors
    /// If the folder cannot be used. No reason not to run.
    pub fn keep_prefixes(&mut self, config: PrefixConfig, model: [u8; 32]) -> Result<(), KeepError> {
        let identity = self.prefix_identity(model);
        self.prefixes.attach(config, identity)
    }

    /// Writes what the store does not hold yet of the sequences so far. Nothing without a store.
    ///
    /// # Errors
    /// If something cannot be written. What is in the store stays right.
    pub fn save_prefixes(&mut self) -> Result<Saved, KeepError> {
        self.save_prefixes_while(&mut || true)
    }

    /// The same, as long as `goes_on` says so, which is asked before every block; what is left is for the next time.
    ///
    /// # Errors
    /// As [`save_prefixes`](Self::save_prefixes).
    pub fn save_prefixes_while(&mut self, goes_on: &mut dyn FnMut() -> bool) -> Result<Saved, KeepError> {
        self.prefixes.save(goes_on)
    }

    /// KV blocks that hold earlier sequences, and KV blocks that there may be.
    pub fn prefix_blocks(&self) -> (usize, usize) {
        self.prefixes.blocks()
    }

    /// A hash of everything that changes a bit of a cached row.
    fn prefix_identity(&self, model: [u8; 32]) -> [u8; 32] {
        let EngineOptions { arith, kv_dtype, quantise, .. } = self.options();
        let spec = self.spec();
        let mut digest = Sha256::new();
        digest.update(model);
        let settings = format!(
            "{} numerics {NUMERICS} {arith:?} {kv_dtype} {quantise:?} {:08x} sparse {} mtp {}",
            env!("CARGO_PKG_VERSION"),
            spec.low_rank_norm_eps.to_bits(),
            self.sparse_attention().is_active(),
            self.has_mtp(),
        );
        digest.update(settings);
        digest.finalize().into()
    }
}

/// The blocks that `plan` has room for.
pub(crate) fn kv_pool(
    spec: &ModelSpec,
    plan: &Plan,
    options: &EngineOptions,
    parts: KvParts,
) -> Result<Arc<KvPool>, OpenError> {
    let refused = OpenError::NoMemory { bytes: plan.kv };
    let Some(layout) = KvLayout::new(spec, options.kv_dtype, parts) else { return Err(refused) };
    let blocks = KvLayout::planned_blocks(plan.context, options.sequences.max(1)).ok_or(refused)?;
    Ok(KvPool::new(layout, blocks))
}
