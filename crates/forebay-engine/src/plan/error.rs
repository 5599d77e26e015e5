//! Why no plan exists.

use forebay_core::ByteSize;
use forebay_tiers::BudgetError;

/// Why no plan exists. Refusals name the number that would work.
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
        /// Resident weights of every kind.
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
    /// The budget is more than the machine that is planned for has.
    #[error(
        "the plan takes {} and the machine would have {} (the least it can do with is {}); give a larger \
         --machine-memory, a smaller --memory, or lower --context",
        ByteSize(*planned), ByteSize(*machine), ByteSize(*minimum)
    )]
    MoreThanMachine {
        /// Bytes the plan would take.
        planned: u64,
        /// Bytes of the machine.
        machine: u64,
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
