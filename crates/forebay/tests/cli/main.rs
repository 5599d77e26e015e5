//! The real binary, as people and scripts use it.

mod chat;
mod errors;
mod inspect;
mod run;
mod score;
mod support;
