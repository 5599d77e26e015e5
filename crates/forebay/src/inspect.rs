//! `forebay inspect`: what a model folder holds, and how it would run here.

use std::collections::BTreeMap;
use std::fmt::Write;

use forebay_core::{ByteSize, Format};
use forebay_engine::{EngineOptions, Inspection, WhatIf};
use forebay_kernels::Isa;
use forebay_model::families::roles::Role;
use forebay_model::spec::FfnKind;
use forebay_model::{Capability, ExpertTable, Snapshot};
use serde_json::{Value, json};

use crate::args::InspectArgs;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::plan::{self, Look};
use crate::settings;

/// Matrices per format, per role.
type Formats = BTreeMap<Role, BTreeMap<String, usize>>;

/// Runs the verb.
pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.folder.named())?;
    let isa = settings::kernels(args.numbers.cpu_features)?.isa();
    let Look { found, options, .. } = plan::look(&dir, args.options(), WhatIf::default())?;
    let mut out = Output::new();
    match args.json {
        true => out.json(&report_json(&found, isa))?,
        false => out.write(&report(&found, &options, isa))?,
    }
    // The description is complete either way; the status says whether it would run.
    found.plan.map(drop).map_err(Failure::from)
}

/// Bytes of experts that one token reads when none is in memory.
fn cold_bytes_per_token(snapshot: &Snapshot) -> u64 {
    let top_k = snapshot.spec.moe.top_k as f64;
    let layers = snapshot.experts.iter().map(|(_, layer)| {
        let bytes: usize = layer.segments.iter().flat_map(|reads| reads.iter()).map(|read| read.len).sum();
        bytes as f64 / layer.segments.len().max(1) as f64 * top_k
    });
    layers.sum::<f64>().round() as u64
}

/// Formats after re-encoding while loading.
fn loaded_formats(snapshot: &Snapshot, wanted: Format) -> Formats {
    let mut formats = Formats::new();
    for tensor in &snapshot.resident {
        let name = tensor.loaded_format.to_string();
        *formats.entry(tensor.role).or_default().entry(name).or_default() += 1;
    }
    for (stored, count) in &snapshot.experts.formats {
        let name = stored.parse().map_or_else(
            |_| stored.clone(),
            |stored| Role::RoutedExpert.quantised(stored, wanted).to_string(),
        );
        *formats.entry(Role::RoutedExpert).or_default().entry(name).or_default() += count;
    }
    formats
}

/// Whether re-encoding to `wanted` while loading changes any matrix.
pub fn is_requantised(snapshot: &Snapshot, wanted: Format) -> bool {
    loaded_formats(snapshot, wanted) != snapshot.formats()
}

fn files_bytes(snapshot: &Snapshot) -> u64 {
    snapshot.catalog.shards().iter().map(|shard| shard.size).sum()
}

fn coalescible(snapshot: &Snapshot) -> Option<f64> {
    let experts = &snapshot.experts;
    (experts.total > 0).then(|| 100.0 * experts.coalesced as f64 / experts.total as f64)
}

/// Bytes of all experts if none were coded.
fn decoded_bytes(experts: &ExpertTable) -> u64 {
    experts.iter().map(|(_, layer)| (layer.mean_decoded() * layer.segments.len() as f64).round() as u64).sum()
}

fn coded_share(experts: &ExpertTable) -> String {
    let decoded = decoded_bytes(experts);
    let share = 100.0 * experts.file_bytes as f64 / decoded.max(1) as f64;
    format!("{share:.1} % of {}", ByteSize(decoded))
}

/// Aligned text.
struct Text(String);

impl Text {
    fn row(&mut self, name: &str, value: impl std::fmt::Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{name:<20}{}", console::one_line(&value.to_string()));
    }
}

fn report(found: &Inspection, options: &EngineOptions, isa: Isa) -> String {
    let snapshot = &found.snapshot;
    let spec = &snapshot.spec;
    let (attention, moe) = (&spec.attention, &spec.moe);
    let dense = spec.layers.iter().filter(|layer| layer.ffn == FfnKind::Dense).count();
    let mut text = Text(String::new());
    text.row("model", snapshot.dir.display());
    text.row("family", &spec.family);
    let files = snapshot.catalog.shards().len();
    let tensors = snapshot.catalog.stored_tensors();
    text.row("files", format!("{files}, {}; {tensors} tensors", ByteSize(files_bytes(snapshot))));
    let sparse = spec.layers.len() - dense;
    if let Some(native) = snapshot.catalog.native() {
        let (version, from) = (forebay_store::native::VERSION, native.header().source.files.len());
        text.row("container", format!("Forebay, version {version}, packed from {from} weight files"));
    }
    text.row("layers", format!("{}: {dense} dense, {sparse} with experts", spec.layers.len()));
    let longest = spec.max_context.map_or("not stated".to_owned(), |n| format!("up to {n} tokens"));
    text.row("sizes", format!("hidden {}, vocabulary {}, context {longest}", spec.hidden, spec.vocab));
    text.row(
        "attention",
        format!(
            "{} heads, query rank {}, key/value rank {}, {} rotary of {}, values {}",
            attention.heads,
            attention.q_rank,
            attention.kv_rank,
            attention.rope,
            attention.qk(),
            attention.value
        ),
    );
    text.row(
        "experts",
        format!(
            "{} a layer, {} used per token, width {}; shared width {}",
            moe.experts, moe.top_k, moe.expert_width, moe.shared_width
        ),
    );
    if let Some(share) = coalescible(snapshot) {
        let experts = &snapshot.experts;
        let bytes = ByteSize(experts.file_bytes);
        text.row("", format!("{} in all, {bytes}; {share:.1} % can be read in one piece", experts.total));
        if experts.coded > 0 {
            text.row("", format!("{} of them coded, lossless: {}", experts.coded, coded_share(experts)));
        }
    }
    text.row("sparse attention", &snapshot.sparse_attention);
    text.row("MTP layer", mtp_state(&snapshot.mtp));
    let stops: Vec<String> = snapshot.stop_ids.iter().map(u32::to_string).collect();
    text.row("stop ids", if stops.is_empty() { "none in the config".to_owned() } else { stops.join(", ") });
    format_rows(&mut text, snapshot, options.quantise);
    text.row("instruction set", isa);
    memory_rows(&mut text, found);
    for note in &snapshot.notes {
        text.row("note", note);
    }
    text.0
}

fn format_rows(text: &mut Text, snapshot: &Snapshot, quantise: Option<Format>) {
    let stored = snapshot.formats();
    let loaded = quantise.map(|wanted| loaded_formats(snapshot, wanted));
    let list = |formats: &BTreeMap<String, usize>| {
        formats.iter().map(|(name, count)| format!("{name} x {count}")).collect::<Vec<_>>().join(", ")
    };
    text.row("formats", "");
    for (role, formats) in &stored {
        let now = loaded.as_ref().and_then(|all| all.get(role)).filter(|now| *now != formats);
        let becomes = now.map_or(String::new(), |now| format!(" -> {}", list(now)));
        text.row(&format!("  {role}"), format!("{}{becomes}", list(formats)));
    }
}

fn memory_rows(text: &mut Text, found: &Inspection) {
    let known = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
    let memory = &found.memory;
    let limit = memory.limit.map_or(String::new(), |limit| format!(", limited to {}", ByteSize(limit)));
    text.row("memory", format!("{}, {} available{limit}", known(memory.total), known(memory.available)));
    let cold = ByteSize(cold_bytes_per_token(&found.snapshot));
    match &found.plan {
        Ok(plan) => {
            for (name, value) in plan::short(plan) {
                text.row(&name, value);
            }
            text.row("", format!("{cold} of experts read when none is in memory"));
        }
        Err(error) => {
            text.row("per token", format!("{cold} of experts read when none is in memory"));
            text.row("plan", format!("none: {error}"));
        }
    }
}

fn report_json(found: &Inspection, isa: Isa) -> Value {
    let snapshot = &found.snapshot;
    let spec = &snapshot.spec;
    let attention = &spec.attention;
    let dense = spec.layers.iter().filter(|layer| layer.ffn == FfnKind::Dense).count();
    json!({
        "folder": snapshot.dir.display().to_string(),
        "family": spec.family,
        "files": snapshot.catalog.shards().len(),
        "file_bytes": files_bytes(snapshot),
        "tensors": snapshot.catalog.stored_tensors(),
        "container": snapshot.catalog.native().map(|_| json!({"version": forebay_store::native::VERSION})),
        "layers": {"total": spec.layers.len(), "dense": dense, "sparse": spec.layers.len() - dense},
        "hidden": spec.hidden,
        "vocabulary": spec.vocab,
        "max_context": spec.max_context,
        "attention": {
            "heads": attention.heads,
            "query_rank": attention.q_rank,
            "kv_rank": attention.kv_rank,
            "rotary": attention.rope,
            "query_width": attention.qk(),
            "value_width": attention.value,
        },
        "experts": {
            "per_layer": spec.moe.experts,
            "per_token": spec.moe.top_k,
            "width": spec.moe.expert_width,
            "shared_width": spec.moe.shared_width,
            "total": snapshot.experts.total,
            "file_bytes": snapshot.experts.file_bytes,
            "coded": snapshot.experts.coded,
            "decoded_bytes": decoded_bytes(&snapshot.experts),
            "coalescible_percent": coalescible(snapshot),
            "cold_bytes_per_token": cold_bytes_per_token(snapshot),
        },
        "sparse_attention": capability_json(&snapshot.sparse_attention),
        "mtp": {"complete": snapshot.mtp.is_active(), "detail": mtp_state(&snapshot.mtp)},
        "stop_ids": snapshot.stop_ids,
        "formats": formats_json(&snapshot.formats()),
        "loaded_formats": snapshot.options.quantise.map(|to| formats_json(&loaded_formats(snapshot, to))),
        "cpu_features": isa.name(),
        "memory": plan::memory_json(&found.memory),
        "plan": found.plan.as_ref().ok().map(plan::plan_json),
        "plan_error": found.plan.as_ref().err().map(ToString::to_string),
        "notes": snapshot.notes,
    })
}

fn capability_json(capability: &Capability) -> Value {
    json!({"active": capability.is_active(), "detail": capability.to_string()})
}

/// Whether the layer could draft; whether it does is chosen when the model is run.
fn mtp_state(mtp: &Capability) -> String {
    if mtp.is_active() { "complete; drafts unless --draft off".to_owned() } else { mtp.to_string() }
}

fn formats_json(formats: &Formats) -> Value {
    formats.iter().map(|(role, formats)| (role.to_string(), json!(formats))).collect()
}
