//! The real binary, as people and scripts use it.

mod bench;
mod chat;
mod damage;
mod doctor;
mod errors;
mod inspect;
mod memory;
mod pack;
mod plan;
mod run;
mod score;
mod support;
mod synth;
mod tune;
