//! Small worlds for tests: containers, GGUF files, toy models, goldens, faulty disks, a hub.

pub mod container;
pub mod disk;
pub mod fault;
pub mod gguf;
pub mod glm52;
pub mod hub;
pub mod toy;
