//! `forebay bench kernels`: the arithmetic beside what the machine can do at most.
//!
//! `forebay bench forward` is in [`forward`], `forebay bench io` in [`disk`].
//!
//! [`cases`] says what is measured, [`weights`] makes the random data, [`measure`] holds the clock, [`matmul`]
//! and [`latents`] know what there is to time, [`show`] prints it. `docs/benchmarks.md` explains the method.

mod cache;
mod cases;
pub mod disk;
mod drafts;
mod forward;
mod latents;
mod matmul;
mod measure;
mod serve;
mod show;
mod stream;
mod weights;

use std::time::Instant;

use forebay_kernels::Team;

pub use cases::{Layout, Shape};
pub use measure::median;

use crate::args::{BenchArgs, BenchKernelsArgs, BenchWhat};
use crate::console::{self, Output};
use crate::doctor::Machine;
use crate::failure::Failure;
use crate::progress::{Progress, Unit};
use crate::settings;
use cases::Selection;
use matmul::Bench;
use measure::{Pace, limit_turns};
use show::Results;

/// Seconds that the samples of the quick selection share.
const QUICK: f64 = 40.0;
/// Seconds that the samples of everything share.
const FULL: f64 = 900.0;
/// Seconds of one sample, at least and at most.
const SAMPLE: (f64, f64) = (0.002, 0.04);
/// A quarter of the memory that is available is used for weights.
const MEMORY_SHARE: u64 = 4;
/// Memory for weights where the system does not say how much is available.
const USUAL_MEMORY: u64 = 2 << 30;

/// Runs the verb.
pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.what {
        BenchWhat::Kernels(args) => kernels(args),
        BenchWhat::Forward(args) => forward::run(args),
        BenchWhat::Cache(args) => cache::run(args),
        BenchWhat::Stream(args) => stream::run(args),
        BenchWhat::Drafts(args) => drafts::run(args),
        BenchWhat::Serve(args) => serve::run(args),
        BenchWhat::Io(args) => disk::run(args),
    }
}

fn kernels(args: &BenchKernelsArgs) -> Result<(), Failure> {
    let started = Instant::now();
    let kernels = settings::kernels(args.cpu_features)?;
    let machine = Machine::read();
    let selection = Selection::new(args);
    let available = machine.memory.available.map_or(USUAL_MEMORY, |bytes| bytes / MEMORY_SHARE);
    let teams: Result<Vec<Team>, _> = selection.threads.iter().map(|threads| Team::new(*threads)).collect();
    let teams = teams.map_err(|error| {
        Failure::runtime(format!("cannot start the threads: {error}; choose fewer with --threads"))
    })?;
    if cfg!(debug_assertions) {
        console::note("this forebay was built for debugging; its speeds mean nothing");
    }
    let bench = Bench {
        kernels,
        teams: &teams,
        selection: &selection,
        machine: &machine,
        memory: args.memory.map_or(available, |bytes| bytes.0),
        sample: sample(&selection, if args.full { FULL } else { QUICK }),
    };

    let progress = Progress::start("measuring", Unit::Share, 0);
    let weights: Vec<f64> = selection.shapes.iter().map(|shape| shape_weight(&bench, *shape)).collect();
    let products = if selection.matmul { &selection.shapes[..] } else { &[] };
    let attention_weight = f64::from(u8::from(selection.attention)) * attention_weight(&bench);
    let total = weights.iter().take(products.len()).sum::<f64>() + attention_weight;
    let mut pace = Pace::new(&progress, total);
    let mut matmul = Vec::new();
    for (shape, weight) in products.iter().zip(weights) {
        matmul.push(matmul::run(&bench, *shape, &mut pace, weight));
    }
    let attention = selection.attention.then(|| latents::run(&bench, &mut pace, attention_weight));
    drop(progress);

    let mut notes: Vec<String> =
        matmul.iter_mut().flat_map(|group| std::mem::take(&mut group.notes)).collect();
    if matches!(attention, Some(None)) {
        notes.push("attention is left out: there is too little memory for its cache".to_owned());
    }
    let results = Results {
        kernels,
        rounds: selection.rounds,
        sample: bench.sample,
        elapsed: started.elapsed().as_secs_f64(),
        matmul,
        attention: attention.flatten(),
        notes,
        machine,
    };
    let mut out = Output::new();
    if args.json {
        return out.json(&show::results_json(&results));
    }
    for note in &results.notes {
        console::note(note);
    }
    out.write(&show::results_text(&results))
}

/// Seconds of one sample, so that all of them take about `budget` seconds: products from memory and from the
/// cache, attention, and the three limits of each number of threads.
fn sample(selection: &Selection, budget: f64) -> f64 {
    let with_limits = |others: usize| others + 3 * selection.threads.len() * limit_turns(others);
    let cases = selection.cases();
    let count = |applies: fn(&cases::Case) -> bool| cases.iter().filter(|case| applies(case)).count();
    let products = 2 * (cases.len() + count(cases::Case::compares_order)) + count(cases::Case::decodes);
    let products = if selection.matmul { products } else { 0 };
    let attention = if selection.attention { latents::METERS * selection.threads.len() } else { 0 };
    let round = selection.shapes.len() * with_limits(products) + with_limits(attention);
    (budget / (round * (selection.rounds + 1)) as f64).clamp(SAMPLE.0, SAMPLE.1)
}

/// About how many seconds the products of a shape take, for the estimate of the time that is left.
fn shape_weight(bench: &Bench<'_>, shape: Shape) -> f64 {
    let seconds = |case: &cases::Case| {
        // A cautious guess; only the ratio between shapes counts.
        let speed = 3e10 * bench.selection.threads[case.team] as f64;
        let product = shape.multiply_adds() as f64 * case.batch as f64 / speed;
        let orders = if case.compares_order() { 2.0 } else { 1.0 } + if case.decodes() { 0.5 } else { 0.0 };
        orders * (bench.sample + bench.sample.max(product))
    };
    let cases = bench.selection.cases();
    (bench.selection.rounds + 1) as f64 * cases.iter().map(seconds).sum::<f64>()
}

/// The same for attention and its indexer.
fn attention_weight(bench: &Bench<'_>) -> f64 {
    (bench.selection.rounds + 1) as f64 * bench.sample * ((3 + latents::METERS) * bench.teams.len()) as f64
}
