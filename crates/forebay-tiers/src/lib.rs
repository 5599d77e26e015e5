//! Which expert lives where: the forebay itself.
//!
//! [`budget`] divides memory into slots, [`cache`] decides which experts keep
//! them (both are pure and can be replayed), and [`store`] carries the decisions
//! out: it hands the compute thread one expert after another, residents first,
//! while the rest arrive. [`counters`] says what it cost.
//!
//! What is computed never depends on any of this. Which experts are resident
//! changes how long a step takes and the order in which experts become ready;
//! whoever sums their outputs does so in a fixed order.

pub mod budget;
pub mod cache;
pub mod counters;
pub mod store;

pub use budget::{BudgetError, ClassDemand, LayerDemand, SlotDemand, SlotSplit};
pub use cache::{LayerCache, StepPlan};
pub use counters::Counters;
pub use store::{ConfigError, ExpertError, ExpertStore, LayerExperts, Ready, Step, StoreConfig};
