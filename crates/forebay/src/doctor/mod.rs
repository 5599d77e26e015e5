//! `forebay doctor`: what this machine has, what Forebay would use of it, and what costs speed.

mod machine;

use std::fmt::Write;

use forebay_core::ByteSize;
use forebay_engine::{Drafting, EngineOptions, Plan, PlanError, WhatIf};
use forebay_kernels::{Isa, Kernels, Team};
use serde_json::json;

use crate::args::DoctorArgs;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::plan;
use crate::settings;

pub use machine::Machine;

/// Runs the verb.
pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let machine = Machine::read();
    let kernels = Kernels::detect();
    let advice = advice(&machine, kernels.isa(), Team::default_threads(), cfg!(debug_assertions));
    let model = settings::named_model(args.model.as_deref());
    let usual = EngineOptions { drafting: Drafting::Auto, ..EngineOptions::default() };
    let look = model.map(|dir| plan::look(&dir, usual, WhatIf::default())).transpose()?;
    let plan = look.map(|look| look.found.plan);
    let mut out = Output::new();
    match args.json {
        true => out.json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": machine.json(kernels),
            "plan": plan.as_ref().and_then(|plan| plan.as_ref().ok()).map(plan::plan_json),
            "plan_error": plan.as_ref().and_then(|plan| plan.as_ref().err()).map(ToString::to_string),
            "advice": advice,
        }))?,
        false => out.write(&report(&machine, kernels.isa(), plan.as_ref(), &advice))?,
    }
    // The machine is described either way; the status says whether the model would run.
    plan.transpose().map(drop).map_err(Failure::from)
}

/// What costs speed here, each with a next step.
fn advice(machine: &Machine, isa: Isa, threads: usize, debug: bool) -> Vec<String> {
    let mut all = Vec::new();
    if debug {
        all.push(
            "this forebay was built for debugging and is slow; build it with: cargo build --release"
                .to_owned(),
        );
    }
    if isa == Isa::Scalar {
        all.push(
            "this processor has none of the instruction sets with fast kernels (AVX2, AVX-512 with VNNI, NEON); \
             everything works, many times slower: use a processor that has one, or, in a virtual machine, let \
             it see the host's processor (for example -cpu host)"
                .to_owned(),
        );
    }
    if machine.large_pages.as_deref() == Some("never") {
        all.push(
            "large pages are switched off, which slows down reading weights from memory; switch them on with: \
             echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
                .to_owned(),
        );
    }
    // There is a thread for each core, unless a quota allows less.
    if let Some(cores) = machine.cores.filter(|cores| *cores > threads) {
        all.push(format!(
            "a control group limits processor time to that of {threads} of the {cores} cores; raise its CPU limit \
             (a container's --cpus) to use them all"
        ));
    }
    all
}

fn report(machine: &Machine, isa: Isa, plan: Option<&Result<Plan, PlanError>>, advice: &[String]) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<20}{}", console::one_line(value));
    };
    let count = |n: Option<usize>| n.map_or("an unknown number of".to_owned(), |n| n.to_string());
    let size = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
    row("forebay", env!("CARGO_PKG_VERSION"));
    row("system", &format!("{}, {}", std::env::consts::OS, std::env::consts::ARCH));
    row("processor", machine.processor.as_deref().unwrap_or("unknown"));
    let names: Vec<&str> = Isa::available().map(Isa::name).collect();
    row("instruction set", &format!("{isa}, the best of: {}", names.join(", ")));
    row("", "run, chat, inspect, score and bench take another with --cpu-features");
    let allowed = machine.allowed.as_ref().map(Vec::len);
    row("cores", &format!("{} cores, {} processors may be used", count(machine.cores), count(allowed)));
    row("threads", &format!("{}; --threads sets another number", Team::default_threads()));
    row("caches", &machine.caches_text());
    let memory = &machine.memory;
    row("memory", &format!("{}, {} available", size(memory.total), size(memory.available)));
    let limit = memory.limit.map_or("none".to_owned(), |limit| ByteSize(limit).to_string());
    row("memory limit", &format!("{limit} (control group)"));
    let pages = match machine.large_pages.as_deref() {
        Some("always") => "always: given to every program",
        Some("madvise") => "madvise: given where a program asks for them",
        Some("never") => "never: switched off",
        Some(other) => other,
        None => "unknown",
    };
    row("large pages", pages);
    match plan {
        None => row("plan", "give --model DIR to see how a model would run here"),
        Some(Ok(plan)) => plan::short(plan).iter().for_each(|(name, value)| row(name, value)),
        Some(Err(error)) => row("plan", &format!("none: {error}")),
    }
    if advice.is_empty() {
        row("advice", "none: nothing known costs speed here");
    }
    for (i, line) in advice.iter().enumerate() {
        row(if i == 0 { "advice" } else { "" }, line);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_machine_gets_no_advice() {
        let machine =
            Machine { large_pages: Some("madvise".to_owned()), cores: Some(4), ..Machine::default() };
        assert_eq!(advice(&machine, Isa::Avx2, 4, false), Vec::<String>::new());
        assert_eq!(advice(&Machine::default(), Isa::Neon, 4, false), Vec::<String>::new());
    }

    #[test]
    fn everything_that_costs_speed_has_a_next_step() {
        let machine = Machine { large_pages: Some("never".to_owned()), cores: Some(8), ..Machine::default() };
        let all = advice(&machine, Isa::Scalar, 4, true);
        let steps = ["cargo build --release", "-cpu host", "echo madvise", "--cpus"];
        assert_eq!(all.len(), steps.len());
        for (line, step) in all.iter().zip(steps) {
            assert!(line.contains(step), "{line}");
        }
    }
}
