//! CPU arithmetic of Forebay: one scalar truth and its bit-identical SIMD twins.
