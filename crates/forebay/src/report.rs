//! Measurements and settings, as a line for people and as JSON for programs.

use std::path::Path;
use std::time::Duration;

use forebay_core::ByteSize;
use forebay_engine::{DraftStats, Engine, EngineOptions, Finish, Sampling, Stats, Token};
use forebay_io::probe::Way;
use forebay_text::Tokenizer;
use forebay_tiers::{Counters, Histogram, LookAhead};
use serde_json::{Map, Value, json};

use crate::hindsight;

/// Things per second, if time has passed.
pub fn rate(count: usize, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (count > 0 && seconds > 0.0).then(|| count as f64 / seconds)
}

/// Tokens per second while generating. The first token comes from the prompt's pass and is not counted.
pub fn decode_rate(stats: &Stats) -> Option<f64> {
    rate(stats.decoded(), stats.decode)
}

/// The options that change what is computed, where they are not the usual ones: "; computed with ...".
pub fn deviations(options: &EngineOptions) -> String {
    let usual = EngineOptions::default();
    let arith = (options.arith != usual.arith).then(|| format!("--arith {}", options.arith));
    let kv_dtype = (options.kv_dtype != usual.kv_dtype).then(|| format!("--kv-dtype {}", options.kv_dtype));
    let quantise = options.quantise.map(|format| format!("--quantize {format}"));
    let eps = options.low_rank_norm_eps.map(|eps| format!("--low-rank-norm-eps {eps:e}"));
    let all: Vec<String> = [arith, kv_dtype, quantise, eps].into_iter().flatten().collect();
    if all.is_empty() { String::new() } else { format!("; computed with {}", all.join(" ")) }
}

/// What an answer cost beside its speed, in a few words.
pub fn summary(stats: &Stats) -> String {
    let tokens = |count: usize| format!("{count} token{}", if count == 1 { "" } else { "s" });
    let mut drafts = match stats.drafts.verified {
        0 => String::new(),
        verified => format!(", {} of {verified} drafts right", stats.drafts.accepted),
    };
    if stats.drafts.forced > 0 {
        drafts += &format!(", {} tokens forced by the grammar", stats.drafts.forced_accepted);
    }
    format!(
        "prompt of {} in {:.2} s, answer of {} in {:.2} s{drafts}",
        tokens(stats.prompt_tokens),
        stats.prefill.as_secs_f64(),
        tokens(stats.new_tokens),
        stats.decode.as_secs_f64(),
    )
}

/// What streaming experts cost, in a few words.
pub fn experts_summary(experts: &Counters) -> String {
    let resolved = experts.hits + experts.misses;
    let share = if resolved > 0 {
        format!(" ({:.1} % in memory)", 100.0 * experts.hits as f64 / resolved as f64)
    } else {
        String::new()
    };
    let waited = Duration::from_nanos(experts.wait_ns).as_secs_f64();
    format!(
        "experts: {} hits, {} misses{share}, {} read, {waited:.2} s waited",
        experts.hits,
        experts.misses,
        ByteSize(experts.bytes)
    )
}

/// What became of drafts.
fn drafts_json(drafts: &DraftStats) -> Value {
    json!({
        "proposed": drafts.proposed,
        "verified": drafts.verified,
        "accepted": drafts.accepted,
        "passes_by_accepted": drafts.passes,
        "looked_up": drafts.looked_up,
        "looked_up_accepted": drafts.looked_up_accepted,
        "forced": drafts.forced,
        "forced_accepted": drafts.forced_accepted,
    })
}

/// The same numbers for programs; unknown ones are null.
pub fn stats_json(stats: &Stats, load_time: Duration) -> Value {
    json!({
        "load_s": load_time.as_secs_f64(),
        "prefill_s": stats.prefill.as_secs_f64(),
        "first_token_s": stats.first_token.map(|time| time.as_secs_f64()),
        "decode_s": stats.decode.as_secs_f64(),
        "decode_passes": stats.decode_passes,
        "drafts": drafts_json(&stats.drafts),
        "prefill_tokens_per_s": rate(stats.prompt_tokens, stats.prefill),
        "decode_tokens_per_s": decode_rate(stats),
    })
}

/// Expert streaming for programs.
pub fn experts_json(experts: &Counters) -> Value {
    json!({
        "requests": experts.requests,
        "hits": experts.hits,
        "misses": experts.misses,
        "evictions": experts.evictions,
        "ahead": {
            "asked": experts.ahead_asked,
            "ready": experts.ahead_ready,
            "late": experts.ahead_late,
            "dropped": experts.ahead_dropped,
            "wasted": experts.ahead_wasted,
            "useful_bytes": experts.ahead_useful_bytes,
            "late_bytes": experts.ahead_late_bytes,
            "wasted_bytes": experts.ahead_wasted_bytes,
        },
        "demand_bytes": experts.demand_bytes(),
        "warm_up": {
            "loads": experts.warm_up_loads,
            "bytes": experts.warm_up_bytes,
            "wasted_bytes": experts.warm_up_wasted_bytes,
        },
        "loads": experts.loads,
        "reads": experts.reads,
        "direct_reads": experts.direct_reads,
        "fallbacks": experts.fallbacks,
        "retries": experts.retries,
        "bytes_read": experts.bytes,
        "read_s": Duration::from_nanos(experts.service_ns).as_secs_f64(),
        "checked_bytes": experts.checked_bytes,
        "check_s": Duration::from_nanos(experts.check_ns).as_secs_f64(),
        "wait_s": Duration::from_nanos(experts.wait_ns).as_secs_f64(),
        "read_times": histogram_json(&experts.service),
        "wait_times": histogram_json(&experts.wait),
        "failures": experts.failures,
        "slots_released": experts.slots_released,
        "slots_regained": experts.slots_regained,
    })
}

/// How many durations were shorter than each of some bounds, and not than the one before.
fn histogram_json(histogram: &Histogram) -> Value {
    let ranges = histogram.counts().iter().enumerate().filter(|(_, count)| **count > 0);
    let range = |(range, count): (usize, &u64)| json!({ "below_s": Histogram::end(range).map(|end| end.as_secs_f64()), "count": count });
    ranges.map(range).collect()
}

/// Which model it was.
pub fn model_json(dir: &Path, engine: &Engine) -> Value {
    json!({
        "folder": dir.display().to_string(),
        "family": engine.spec().family,
        "sparse_attention": engine.sparse_attention().to_string(),
    })
}

/// A way to read experts, of at most `block` bytes each.
pub fn way_json(way: Way, block: u64) -> Value {
    json!({
        "backend": way.backend.to_string(),
        "access": way.access.to_string(),
        "depth": way.depth,
        "block_bytes": block,
    })
}

fn look_ahead_name(mode: LookAhead) -> &'static str {
    match mode {
        LookAhead::Auto => "auto",
        LookAhead::On => "on",
        LookAhead::Off => "off",
    }
}

/// The engine's settings in force.
pub fn engine_json(engine: &Engine) -> Map<String, Value> {
    let (options, plan) = (engine.options(), engine.plan());
    let entries = [
        ("memory_budget", json!(plan.budget)),
        ("memory_planned", json!(plan.total())),
        ("expert_slots", json!(plan.resident_slots())),
        ("slots_hold", json!(plan.codes.map(|choice| choice.slots.to_string()))),
        ("context", json!(plan.context)),
        ("chunk", json!(plan.chunk)),
        ("block", json!(plan.block)),
        ("embedding", json!(plan.embedding_place.to_string())),
        ("cache_policy", json!(hindsight::policy_name(options.policy))),
        ("look_ahead", json!(look_ahead_name(options.look_ahead))),
        ("draft", json!(options.drafting.to_string())),
        ("reading", way_json(engine.way(), engine.largest_expert())),
        ("throttle_disk", json!(options.io.throttle)),
        ("threads", json!(engine.threads())),
        ("cpu_features", json!(engine.isa().name())),
        ("kv_dtype", json!(options.kv_dtype.to_string())),
        ("low_rank_norm_eps", json!(options.low_rank_norm_eps)),
        ("arith", json!(options.arith.to_string())),
        ("quantize", json!(options.quantise.map(|format| format.to_string()))),
    ];
    entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The engine's settings and those of an answer.
pub fn settings_json(engine: &Engine, sampling: &Sampling, max_tokens: usize) -> Map<String, Value> {
    let mut settings = engine_json(engine);
    settings.insert("temperature".to_owned(), short(sampling.temperature));
    settings.insert("top_p".to_owned(), short(sampling.top_p));
    settings.insert("top_k".to_owned(), json!(sampling.top_k));
    settings.insert("min_p".to_owned(), short(sampling.min_p));
    settings.insert("repetition_penalty".to_owned(), short(sampling.repetition_penalty));
    settings.insert("presence_penalty".to_owned(), short(sampling.presence_penalty));
    settings.insert("frequency_penalty".to_owned(), short(sampling.frequency_penalty));
    let biases = sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), short(*bias)));
    settings.insert("logit_bias".to_owned(), Value::Object(biases.collect()));
    settings.insert("max_tokens".to_owned(), json!(max_tokens));
    settings
}

/// A single-precision number as people wrote it: 0.7, not 0.699999988.
fn short(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// The log-probabilities of an answer's tokens, where they were asked for.
pub fn logprobs_json(tokens: &[Token], tokenizer: &Tokenizer) -> Value {
    let named = |id: u32, logprob: f64| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        let text = String::from_utf8_lossy(bytes);
        json!({ "id": id, "token": text, "bytes": bytes, "logprob": logprob })
    };
    let one = |token: &Token| {
        let logprobs = token.logprobs.as_ref()?;
        let mut all = named(token.id, logprobs.chosen);
        all["top"] = logprobs.top.iter().map(|&(id, logprob)| named(id, logprob)).collect();
        Some(all)
    };
    tokens.iter().map(one).collect::<Option<Vec<_>>>().map_or(Value::Null, Value::from)
}

/// The name of a finish reason.
pub fn finish_name(finish: Finish) -> &'static str {
    match finish {
        // Only a stop string ends an answer from outside.
        Finish::Stop | Finish::Ended => "stop",
        Finish::Length => "length",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_rates_are_left_out() {
        let stats = Stats { prompt_tokens: 10, prefill: Duration::from_secs(2), ..Stats::default() };
        assert_eq!(summary(&stats), "prompt of 10 tokens in 2.00 s, answer of 0 tokens in 0.00 s");
        assert_eq!(stats_json(&stats, Duration::ZERO)["decode_tokens_per_s"], Value::Null);
    }

    #[test]
    fn what_changes_the_function_is_named() {
        let usual = EngineOptions::default();
        assert_eq!(deviations(&usual), "");
        let (arith, kv_dtype) = (forebay_model::Arith::Exact, forebay_model::KvDtype::F32);
        let other = EngineOptions { arith, kv_dtype, quantise: "int4-g64".parse().ok(), ..usual };
        assert_eq!(deviations(&other), "; computed with --arith exact --kv-dtype f32 --quantize int4-g64");
    }

    #[test]
    fn decode_counts_passes() {
        let stats =
            Stats { new_tokens: 6, decode_passes: 5, decode: Duration::from_secs(2), ..Stats::default() };
        assert_eq!(decode_rate(&stats), Some(2.5));
    }

    #[test]
    fn settings_read_as_they_were_written() {
        assert_eq!(short(0.7), json!(0.7));
    }
}
