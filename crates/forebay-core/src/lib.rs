//! Words every Forebay crate shares: ids, units, cancellation, and the numeric
//! formats with their scalar packing.
//!
//! This crate does no I/O and holds no fast arithmetic. Start reading at
//! [`mod@format`] (how many bytes a weight matrix takes), then [`view`] (a checked
//! window on such bytes) and [`quant`] (what the bytes mean, one row at a time).

pub mod bytes;
pub mod cancel;
pub mod coded;
pub mod constraint;
pub mod float;
pub mod format;
pub mod ids;
pub mod nvfp4;
pub mod panel;
pub mod quant;
pub mod segment;
pub mod view;

pub use bytes::ByteSize;
pub use cancel::CancelToken;
pub use coded::{CodedError, CodedView};
pub use constraint::{Constraint, ConstraintError, Ending, TokenSet};
pub use format::{Format, GroupSize};
pub use ids::ExpertKey;
pub use panel::{PanelError, PanelShape, PanelView};
pub use segment::{DIRECT_ALIGN, ReadSegment};
pub use view::{MatrixView, ViewError};
