//! How bytes get from disk into aligned memory: positioned reads, worker pool, slabs.
