//! `forebay plan`: how memory would be divided, and what to expect of that. Also how other verbs show a plan.

mod json;
mod text;

use forebay_core::ByteSize;
use forebay_engine::{EngineOptions, Inspection, inspect_for};
use forebay_io::{Pressure, is_wsl};

use crate::args::PlanArgs;
use crate::console::Output;
use crate::failure::Failure;
use crate::settings;
use crate::tune;

pub use json::{memory_json, plan_json};
pub use text::short;

/// Runs the verb.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.dir.as_deref().or(args.engine.model.as_deref()))?;
    let mut options = args.options();
    // Of another machine nothing was measured.
    if let Some(tuned) = args.machine_memory.is_none().then(|| tune::stored(&dir)).flatten() {
        options.rates.disk = options.rates.disk.or(tuned.rates.disk);
        options.rates.memory = options.rates.memory.or(tuned.rates.memory);
    }
    let what_if = forebay_engine::WhatIf { machine: args.machine_memory, mtp: args.mtp };
    let found = inspect_for(&dir, &options, what_if)?;
    let assumed = args.machine_memory.is_some();
    let warnings = warnings(&found, &options, assumed);
    let mut out = Output::new();
    match args.json {
        true => out.json(&json::report(&found, &options, assumed, &warnings))?,
        false => out.write(&text::report(&found, assumed, &warnings))?,
    }
    // What would be is shown either way; the status says whether it would run.
    found.plan.map(drop).map_err(Failure::from)
}

/// What a user should know before running this plan, each with a next step.
fn warnings(found: &Inspection, options: &EngineOptions, assumed: bool) -> Vec<String> {
    let mut all = found.snapshot.notes.clone();
    let memory = &found.memory;
    if memory.available.is_none() {
        all.push(
            "this system does not say how much memory is available, so a cautious budget is used; set --memory"
                .to_owned(),
        );
    }
    if !assumed && is_wsl() {
        all.push(
            "this is the Windows Subsystem for Linux: its memory is what Windows lends it; lend more with \
             memory= in .wslconfig"
                .to_owned(),
        );
    }
    if memory.pressure.is_some_and(|pressure| pressure > Pressure::Normal) {
        all.push("other programs need memory right now; close some before starting".to_owned());
    }
    let swap = memory.swap_total.zip(memory.swap_free).map_or(0, |(all, free)| all.saturating_sub(free));
    if swap > 1 << 30 {
        all.push(format!(
            "{} of swap are in use: memory has been short; close programs or lower --memory",
            ByteSize(swap)
        ));
    }
    let Ok(plan) = &found.plan else { return all };
    if found.snapshot.experts.total > 0 && plan.resident_slots() < plan.slots.quotas.len() {
        all.push(
            "some layers keep no expert in memory: every token reads theirs from disk; raise --memory or lower \
             --context"
                .to_owned(),
        );
    }
    let longest = found.snapshot.spec.max_context.filter(|longest| *longest > plan.context);
    if let Some(longest) = longest.filter(|_| options.context.is_none()) {
        all.push(format!(
            "the context is {} tokens of the {longest} that the model allows, to leave room for experts; \
             --context sets another",
            plan.context
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_io::MemoryInfo;

    #[test]
    fn what_a_machine_lacks_is_said_with_a_next_step() {
        let dir = tempfile::tempdir().unwrap();
        forebay_testkit::toy::write(dir.path()).unwrap();
        let options = EngineOptions { context: Some(64), ..EngineOptions::default() };
        let what_if = forebay_engine::WhatIf { machine: Some(ByteSize(24_000_000_000)), mtp: false };
        let mut found = inspect_for(dir.path(), &options, what_if).unwrap();
        assert_eq!(warnings(&found, &options, true), Vec::<String>::new());
        found.memory = MemoryInfo {
            pressure: Some(Pressure::Warning),
            swap_total: Some(9 << 30),
            swap_free: Some(4 << 30),
            ..MemoryInfo::default()
        };
        let all = warnings(&found, &options, true);
        for (line, step) in all.iter().zip(["set --memory", "close some", "5.37 GB of swap"]) {
            assert!(line.contains(step), "{line}");
        }
        assert_eq!(all.len(), 3);
    }
}
