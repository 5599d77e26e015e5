//! `forebay plan`: how memory would be divided, and what to expect of that. Also how other verbs show a plan.

mod json;
mod text;

use std::path::Path;

use forebay_core::ByteSize;
use forebay_engine::{EngineOptions, Inspection, WhatIf};
use forebay_io::{Pressure, is_wsl};
use forebay_model::Snapshot;

use crate::args::PlanArgs;
use crate::console::Output;
use crate::failure::Failure;
use crate::settings;
use crate::tune;

pub use json::{memory_json, plan_json};
pub use text::short;

/// A model folder looked at, and the options of the run that is planned.
pub struct Look {
    /// The folder and the plan.
    pub found: Inspection,
    /// What was asked for, completed by what `forebay tune` found.
    pub options: EngineOptions,
    /// Whether the way to read experts is what `forebay tune` found.
    pub tuned: bool,
}

/// Looks at a folder as a run would, headers only. What `forebay tune` found on this machine says nothing about
/// an assumed one.
pub fn look(dir: &Path, mut options: EngineOptions, what_if: WhatIf) -> Result<Look, Failure> {
    let snapshot = Snapshot::open(dir, options.snapshot_options())?;
    let tuned = what_if.machine.is_none().then(|| tune::stored(&snapshot)).flatten();
    if let Some(tuned) = tuned {
        tuned.apply(&mut options);
    }
    let found = Inspection::of(snapshot, &options, what_if);
    Ok(Look { found, options, tuned: tuned.is_some() })
}

/// Runs the verb.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.folder.named())?;
    let what_if = WhatIf { machine: args.machine_memory };
    let look = look(&dir, args.options(), what_if)?;
    let assumed = args.machine_memory.is_some();
    let warnings = warnings(&look.found, &look.options, assumed);
    let mut out = Output::new();
    match args.json {
        true => out.json(&json::report(&look, assumed, &warnings))?,
        false => out.write(&text::report(&look, assumed, &warnings))?,
    }
    // What would be is shown either way; the status says whether it would run.
    look.found.plan.map(drop).map_err(Failure::from)
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
        let what_if = WhatIf { machine: Some(ByteSize(24_000_000_000)) };
        let Ok(Look { mut found, .. }) = look(dir.path(), options, what_if) else { panic!() };
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
