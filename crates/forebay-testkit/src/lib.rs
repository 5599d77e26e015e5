//! Small worlds for tests: containers, toy models, goldens, faulty disks, a hub.

pub mod container;
pub mod fault;
pub mod glm52;
pub mod hub;
pub mod toy;
