//! Words every Forebay crate shares: ids, units, numeric formats and their scalar packing.
