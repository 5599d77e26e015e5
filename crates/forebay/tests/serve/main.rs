//! The real server, as programs use it: every interface, its errors, its limits, and its end.

mod anthropic;
mod batches;
mod batches_end;
mod chat;
mod client;
mod config;
mod dashboard;
mod end;
mod errors;
mod files;
mod fleet;
mod formats;
mod hostile;
mod limits;
mod mutated;
mod ollama;
mod openapi;
mod responses;
mod secure;
mod tools;
