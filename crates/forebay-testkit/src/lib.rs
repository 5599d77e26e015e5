//! Small worlds for tests: containers, toy models, goldens, faulty disks.

pub mod container;
pub mod fault;
pub mod glm52;
pub mod toy;
