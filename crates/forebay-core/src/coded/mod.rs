//! Coded matrices: int4 panels in fewer bytes, without loss (docs/format.md, "Coded matrices").
//!
//! The codes of a panel go through a range coder of sixty-four small states that fit the registers of a processor
//! (performance spec 2.6), each panel by itself, so that panels can be decoded alone, by several threads, and some of
//! them side by side. Scales that are points of an FP8 lattice become indices. Decoding gives the bytes of
//! [`PanelShape`](crate::PanelShape) back, every bit of them.
//!
//! [`encode`] makes a coded matrix, [`CodedView`] checks one and decodes it. This is the readable truth;
//! `forebay-kernels` has the fast decoder, which is compared with it.

mod encode;
mod places;
mod rans;
mod scales;
mod table;
mod view;

#[cfg(test)]
mod tests;

pub use encode::encode;
pub use places::{CodedError, code_runs};
pub use scales::{EXCEPTION, IndexScales, Scales};
pub use table::Slots;
pub use view::{Chain, CodedView};

/// States of a chain: one for each byte of a line of a panel.
pub const STATES: usize = 64;
/// Bytes of the states of a chain.
pub const STATE_BYTES: usize = 2 * STATES;
/// States that read from one stream: those of the even or of the odd bytes of a line.
pub const STREAM_STATES: usize = STATES / 2;
/// Streams of a chain.
pub const STREAMS: usize = 2;
/// A state below this one takes a byte from its stream.
pub const LEAST_STATE: u16 = 256;
/// Bits of a frequency: all of them together make `1 << FREQUENCY_BITS`.
pub const FREQUENCY_BITS: u32 = 7;
/// Side of the blocks that share a value where scales are indices.
pub const SCALE_BLOCK: usize = crate::format::FP8_BLOCK;
