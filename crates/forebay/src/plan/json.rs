//! Plans for programs. Unknown figures are null.

use forebay_engine::{Bound, BudgetFrom, Consumer, Expectation, ModelFacts, Plan, SlotChoice};
use forebay_io::{MemoryInfo, Pressure};
use serde_json::{Map, Value, json};

use super::Look;
use crate::report;

/// Version of the object that `forebay plan --json` prints; it changes when a field changes its meaning.
const SCHEMA_VERSION: u32 = 1;

/// The whole report.
pub fn report(look: &Look, assumed: bool, warnings: &[String]) -> Value {
    let Look { found, options, .. } = look;
    let facts = ModelFacts::of(&found.snapshot);
    let mut memory = memory_json(&found.memory);
    memory["assumed"] = json!(assumed);
    json!({
        "schema_version": SCHEMA_VERSION,
        "model": {
            "folder": found.snapshot.dir.display().to_string(),
            "family": found.snapshot.spec.family,
            "files": facts.files,
            "file_bytes": facts.file_bytes,
            "tensors": facts.tensors,
            "dense_bytes": facts.dense_bytes,
            "mtp_dense_bytes": facts.mtp_dense_bytes,
            "expert_bytes": facts.expert_bytes,
            "mtp_expert_bytes": facts.mtp_expert_bytes,
            "experts": facts.experts,
            "mtp_experts": facts.mtp_experts,
            "largest_expert_bytes": facts.largest_expert,
            "row_bytes": facts.row_bytes,
            "mtp_row_bytes": facts.mtp_row_bytes,
        },
        "machine": memory,
        "rates": {"disk": options.rates.disk, "memory": options.rates.memory},
        "reading": found.plan.as_ref().ok().map(|plan| reading(look, plan, facts.largest_expert)),
        "plan": found.plan.as_ref().ok().map(plan_json),
        "plan_error": found.plan.as_ref().err().map(ToString::to_string),
        "warnings": warnings,
    })
}

/// How a run with this plan would read experts.
fn reading(look: &Look, plan: &Plan, block: u64) -> Value {
    let mut reading = report::way_json(look.options.way(plan), block);
    reading["tuned"] = json!(look.tuned);
    reading
}

/// A machine's memory.
pub fn memory_json(memory: &MemoryInfo) -> Value {
    json!({
        "total": memory.total,
        "available": memory.available,
        "limit": memory.limit,
        "swap_total": memory.swap_total,
        "swap_free": memory.swap_free,
        "pressure": memory.pressure.map(|pressure| match pressure {
            Pressure::Normal => "normal",
            Pressure::Warning => "warning",
            Pressure::Critical => "critical",
        }),
    })
}

/// One plan: every consumer in bytes, what they add up to, and what to expect.
pub fn plan_json(plan: &Plan) -> Value {
    let mut all: Map<String, Value> =
        plan.lines().into_iter().map(|(consumer, bytes)| (name(consumer).to_owned(), json!(bytes))).collect();
    let outlook = &plan.outlook;
    let rest = json!({
        "budget": plan.budget,
        "budget_from": match plan.budget_from {
            BudgetFrom::Explicit => "asked",
            BudgetFrom::Available => "available",
            BudgetFrom::Unknown => "unknown",
        },
        "total": plan.total(),
        "slots_per_layer": plan.slots.quotas,
        "slot_row": plan.slot_row(),
        "context": plan.context,
        "chunk": plan.chunk,
        "embedding_place": plan.embedding_place.to_string(),
        "embedding_bytes": plan.embedding_bytes,
        "minimum": plan.minimum,
        "everything": plan.everything,
        "codes": plan.codes.as_ref().map(codes),
        "outlook": {
            "context": outlook.context,
            "this_budget": expectation(&outlook.now),
            "half": outlook.half.as_ref().map(expectation),
            "twice": outlook.twice.as_ref().map(expectation),
        },
    });
    if let Value::Object(rest) = rest {
        all.extend(rest);
    }
    Value::Object(all)
}

/// What is held of coded experts, and what it was chosen by.
fn codes(choice: &SlotChoice) -> Value {
    json!({
        "slots": choice.slots.to_string(),
        "asked": choice.asked,
        "tokens_per_s": choice.tokens_per_second,
        "tokens_per_s_other_way": choice.other,
        "disk": choice.rates.disk,
        "memory": choice.rates.memory,
        "decoder_per_core": choice.decoder.per_core,
        "cores": choice.decoder.cores,
        "assumed": choice.assumed,
    })
}

fn name(consumer: Consumer) -> &'static str {
    match consumer {
        Consumer::Weights => "weights",
        Consumer::Embedding => "embedding",
        Consumer::RowChecks => "embedding_row_checksums",
        Consumer::Norms => "norms_and_routers",
        Consumer::Mtp => "mtp",
        Consumer::Kv => "kv_cache",
        Consumer::Work => "work",
        Consumer::Reading => "reading",
        Consumer::Staging => "staging",
        Consumer::Slots => "slots",
        Consumer::Recording => "recording",
        Consumer::Process => "process",
    }
}

fn expectation(expected: &Expectation) -> Value {
    json!({
        "budget": expected.budget,
        "slots_per_layer": expected.slots_per_layer,
        "held": expected.held,
        "hit_rate": expected.hit_rate,
        "disk_bytes_per_token": expected.disk_bytes,
        "memory_bytes_per_token": expected.memory_bytes,
        "decoded_bytes_per_token": expected.decoded_bytes,
        "tokens_per_s": expected.tokens_per_second,
        "bound": expected.bound.map(|bound| match bound {
            Bound::Disk => "disk",
            Bound::Memory => "memory",
            Bound::Decoder => "decoder",
        }),
    })
}
