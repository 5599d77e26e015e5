//! The real binary, as people and scripts use it.

mod answers;
mod bench;
mod chat;
mod convert;
mod convert_hub;
mod damage;
mod doctor;
mod drafts;
mod errors;
mod files;
mod get;
mod inspect;
mod memory;
mod pack;
mod plan;
mod run;
mod score;
mod sessions;
mod state;
mod support;
mod synth;
mod tune;
