//! Small worlds for tests: tiny models, goldens, faulty disks.

pub mod fault;
