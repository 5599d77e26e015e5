//! What the page shows, as JSON: measured, counted or planned, and null where nobody knows.

use std::fmt::Write;
use std::time::Duration;

use forebay_engine::scheduler::{About, Cell, EndedJob, Forecast, Health, JobState, SeenPass, View};
use forebay_engine::{Bound, Consumer, Expectation, Finish, Outlook};
use forebay_tiers::Counters;
use serde_json::{Value, json};

use crate::app::App;

/// Everything but the experts.
pub fn state(app: &App, about: &About, view: &View) -> Value {
    let (model, totals) = (&app.model, &view.state.totals);
    let (health, reason) = match &view.state.health {
        Health::Ready => ("ready", None),
        Health::Draining => ("draining", None),
        Health::Failed { reason } => ("failed", Some(reason)),
    };
    let (backend, access, depth) = &about.way;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "health": health,
        "reason": reason,
        "keeping": view.state.keeping,
        "model": {
            "id": model.id,
            "family": model.family,
            "context": model.context,
            "bytes": model.bytes,
            "layers": about.decoder_layers,
            "top_k": about.top_k,
            "think": app.settings.think,
            "temperature": model.sampling.temperature,
        },
        "machine": {
            "isa": about.isa,
            "threads": about.threads,
            "reads": {"by": backend, "access": access, "at_a_time": depth},
            "drafting": about.drafting.to_string(),
            "disk_bytes_per_second": about.rates.disk,
            "memory_bytes_per_second": about.rates.memory,
        },
        "memory": memory(about, view),
        "experts": experts(&view.state.experts),
        "totals": {
            "submitted": totals.submitted,
            "refused": totals.refused,
            "completed": totals.completed,
            "cancelled": totals.cancelled,
            "failed": totals.failed,
            "prompt_tokens": totals.prompt_tokens,
            "reused_tokens": totals.reused_tokens,
            "new_tokens": totals.new_tokens,
            "passes": totals.passes,
        },
        "outlook": {
            "context": about.plan.outlook.context,
            "now": expectation(&about.plan.outlook.now),
            "half": about.plan.outlook.half.as_ref().map(expectation),
            "twice": about.plan.outlook.twice.as_ref().map(expectation),
        },
        "prefill": view.prefill.as_ref().map(pass),
        "decode": view.decode.as_ref().map(pass),
        "reuse": reuse(view, &about.plan.outlook),
        "queue": view.state.queue,
        "layers_done": [view.layers_done.0, view.layers_done.1],
        "jobs": view.jobs.iter().map(|found| job(found, view.layers_done)).collect::<Vec<_>>(),
        "recent": view.recent.iter().map(ended).collect::<Vec<_>>(),
    })
}

/// The experts: two hexadecimal digits each, one layer after the other. Of the byte, bit 7 says that it is in memory,
/// bit 6 that the last pass used it, and the rest is how many bits the count of its uses has.
pub fn map(about: &About, view: &View) -> Value {
    let layers: Vec<Value> = about
        .layers
        .iter()
        .map(|layer| {
            let is_mtp = layer.layer as usize >= about.decoder_layers;
            json!({"layer": layer.layer, "experts": layer.experts, "slots": layer.slots, "mtp": is_mtp})
        })
        .collect();
    let cells = view.cells.as_ref().map(|cells| {
        cells.iter().fold(String::with_capacity(2 * cells.len()), |mut text, cell| {
            let _ = write!(text, "{:02x}", byte(*cell));
            text
        })
    });
    json!({"layers": layers, "cells": cells, "passes": view.watched})
}

fn byte(cell: Cell) -> u8 {
    let bits = (u32::BITS - cell.uses.leading_zeros()) as u8;
    u8::from(cell.resident) << 7 | u8::from(cell.used) << 6 | bits
}

fn millis(time: Duration) -> f64 {
    // A hundredth of a millisecond is more than clocks tell.
    (time.as_secs_f64() * 1e5).round() / 1e2
}

fn memory(about: &About, view: &View) -> Value {
    let plan = &about.plan;
    let lines: Vec<Value> = plan
        .lines()
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(consumer, bytes)| json!({"name": name(*consumer), "bytes": bytes}))
        .collect();
    let slot_bytes = plan.lines().into_iter().find(|(consumer, _)| *consumer == Consumer::Slots);
    json!({
        "budget": plan.budget,
        "lines": lines,
        "experts": about.layers.iter().map(|layer| layer.experts).sum::<usize>(),
        "slots": view.state.slots,
        "planned_slots": plan.resident_slots(),
        "slot_bytes": slot_bytes.map(|(_, bytes)| bytes),
        "resident": view.cells.as_ref().map(|cells| cells.iter().filter(|cell| cell.resident).count()),
        "kv_blocks": {"used": view.state.kv_blocks.0, "all": view.state.kv_blocks.1, "tokens": about.block_tokens},
        // Nothing runs on a GPU yet.
        "vram": null,
    })
}

fn name(consumer: Consumer) -> &'static str {
    match consumer {
        Consumer::Weights => "dense weights",
        Consumer::Embedding => "embeddings",
        Consumer::RowChecks => "checksums of embeddings",
        Consumer::Norms => "norms and routers",
        Consumer::Mtp => "MTP layer",
        Consumer::Kv => "KV cache",
        Consumer::Work => "work buffers",
        Consumer::Reading => "read buffers",
        Consumer::Staging => "experts passing through",
        Consumer::Slots => "expert slots",
        Consumer::Recording => "recorded routes",
        Consumer::Process => "the process itself",
    }
}

fn experts(counters: &Counters) -> Value {
    json!({
        "hits": counters.hits,
        "misses": counters.misses,
        "bytes": counters.step_bytes(),
        "warm_up_bytes": counters.warm_up_bytes,
        "ahead_ready": counters.ahead_ready,
        "ahead_late": counters.ahead_late,
        "wasted_bytes": counters.ahead_wasted_bytes,
        "wait_ms": counters.wait_ns as f64 / 1e6,
        "failures": counters.failures,
        "read_p50_us": counters.service.quantile(0.5).map(|time| time.as_micros() as u64),
        "read_p99_us": counters.service.quantile(0.99).map(|time| time.as_micros() as u64),
    })
}

fn expectation(of: &Expectation) -> Value {
    json!({
        "budget": of.budget,
        "slots_per_layer": of.slots_per_layer,
        "held": of.held,
        "hit_rate": of.hit_rate,
        "disk_bytes": of.disk_bytes,
        "memory_bytes": of.memory_bytes,
        "tokens_per_second": of.tokens_per_second,
        "bound": of.bound.map(|bound| match bound {
            Bound::Disk => "disk",
            Bound::Memory => "memory",
            Bound::Decoder => "decoder",
        }),
    })
}

/// What a cache that keeps the experts used last would have found in memory of the uses that were watched, with as many
/// slots as the outlook has.
fn reuse(view: &View, outlook: &Outlook) -> Value {
    let rate = |of: &Expectation| view.reuse.hit_rate(of.slots_per_layer.round() as usize);
    json!({
        "known": view.reuse.known(),
        "first": view.reuse.first,
        "now": rate(&outlook.now),
        "half": outlook.half.as_ref().and_then(rate),
        "twice": outlook.twice.as_ref().and_then(rate),
    })
}

fn pass(pass: &SeenPass) -> Value {
    let stats = &pass.stats;
    let known: Duration = pass.phases().map(|(_, time)| time).sum();
    let phases: Vec<Value> = pass
        .phases()
        .chain([("everything else", stats.time.saturating_sub(known))])
        .filter(|(_, time)| !time.is_zero())
        .map(|(name, time)| json!({"name": name, "ms": millis(time)}))
        .collect();
    json!({
        "number": pass.number,
        "ms": millis(stats.time),
        "rows": stats.rows,
        "prompt_rows": pass.prompt,
        "sequences": pass.sequences,
        "tokens": pass.tokens,
        "hits": stats.experts.hits,
        "misses": stats.experts.misses,
        "bytes": stats.experts.step_bytes(),
        "phases": phases,
    })
}

fn forecast(of: &Forecast) -> Value {
    json!({
        "prefill_ms": of.prefill.map(millis),
        "first_token_ms": of.first_token.map(millis),
        "tokens_per_second": of.tokens_per_second,
    })
}

fn job(job: &JobState, (layers_done, layers): (usize, usize)) -> Value {
    let running = job.running.as_ref().map(|(since, run)| {
        // What the layers of a pass have done counts as tokens; between two passes both may hold the same rows.
        let in_pass = (run.rows * layers_done).checked_div(layers).unwrap_or(0);
        json!({
            "ms": millis(*since),
            "reused": run.reused,
            "prompt": run.prompt,
            "done": (run.done + in_pass).min(run.prompt),
            "new_tokens": run.new_tokens,
            "prefill_ms": millis(run.prefill),
            "first_token_ms": run.first_token.map(millis),
            "forecast": forecast(&run.forecast),
        })
    });
    json!({
        "id": job.id.number(),
        "batch": job.batch,
        "prompt_tokens": job.prompt,
        "max_tokens": job.max_tokens,
        "waited_ms": millis(job.waited),
        "expected_ms": job.expected.map(millis),
        "running": running,
    })
}

fn ended(job: &EndedJob) -> Value {
    let outcome = job.outcome.as_ref();
    let how = outcome.map_or("failed", |outcome| match outcome.finish {
        Finish::Stop => "complete",
        Finish::Ended => "ended",
        Finish::Length => "length",
        Finish::Context => "context full",
        Finish::Cancelled => "cancelled",
    });
    let stats = outcome.map(|outcome| {
        let stats = &outcome.stats;
        json!({
            "computed": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "prefill_ms": millis(stats.prefill),
            "decode_ms": millis(stats.decode),
            "first_token_ms": stats.first_token.map(millis),
            "bytes": stats.experts.step_bytes(),
            "hits": stats.experts.hits,
            "misses": stats.experts.misses,
            "decode_bytes": stats.decode_experts.step_bytes(),
            "drafts": {"verified": stats.drafts.verified, "accepted": stats.drafts.accepted},
        })
    });
    json!({
        "id": job.id.number(),
        "batch": job.batch,
        "how": how,
        "prompt_tokens": job.prompt,
        "reused": job.reused,
        "waited_ms": millis(job.waited),
        "took_ms": millis(job.took),
        "expected_ms": job.expected.map(millis),
        "forecast": forecast(&job.forecast),
        "stats": stats,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_a_byte() {
        let cell = |resident, used, uses| byte(Cell { resident, used, uses });
        assert_eq!(cell(false, false, 0), 0);
        assert_eq!(cell(true, false, 0), 0x80);
        assert_eq!(cell(false, true, 1), 0x41);
        assert_eq!(cell(true, true, 4), 0xc3);
        assert_eq!(cell(true, true, u32::MAX), 0xe0);
    }

    #[test]
    fn times_are_milliseconds() {
        assert_eq!(millis(Duration::from_micros(1234)), 1.23);
        assert_eq!(millis(Duration::from_secs(3)), 3000.0);
    }
}
