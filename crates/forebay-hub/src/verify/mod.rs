//! Whether a folder holds a whole model.
//!
//! - [`mod@census`]: by its headers, in seconds. [`mod@hash`]: by every byte, against recorded digests.
//! - [`report`]: what both of them found.
//!
//! docs/convert.md says what is a problem and what is only worth knowing.

pub mod census;
pub mod hash;
pub mod report;

pub use census::census;
pub use report::{Kind, Problem, Report};
