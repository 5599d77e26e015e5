//! Which expert lives where: the forebay itself.
//!
//! [`budget`] divides memory into slots, [`cache`] decides which experts keep
//! them (both are pure and can be replayed), and [`store`] carries the decisions
//! out: it hands the compute thread one expert after another, residents first,
//! while the rest arrive. [`counters`] says what it cost.
//!
//! [`expect`] says how often a cache of a given size is expected to hit, and
//! [`governor`] how many slots to give up while other programs need the memory.
//!
//! What is computed never depends on any of this. Which experts are resident
//! changes how long a step takes and the order in which experts become ready;
//! whoever sums their outputs does so in a fixed order.

pub mod budget;
pub mod cache;
pub mod counters;
pub mod expect;
pub mod governor;
pub mod history;
pub mod look_ahead;
pub mod routes;
pub mod sim;
pub mod store;

pub use budget::{BudgetError, ClassDemand, LayerDemand, SlotDemand, SlotSplit};
pub use cache::{LayerCache, Policy, Resize, StepPlan};
pub use counters::{Counters, Histogram};
pub use governor::{Governor, GovernorPlan, Machine, Target, ThisMachine};
pub use look_ahead::LookAhead;
pub use store::{
    ConfigError, ExpertError, ExpertStore, LayerExperts, Order, Ready, Step, StoreConfig, recording_bytes,
};
