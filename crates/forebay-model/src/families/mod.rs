//! Model families. One file per family: its config first, then its tensor names.
//!
//! Adding a family means adding a file here that turns `config.json` into a
//! [`ModelSpec`](crate::spec::ModelSpec) and names its tensors; store, tiers
//! and kernels stay as they are.

pub mod glm;
pub mod roles;
