//! `forebay bench serve`: how much more several sequences at once generate than one alone.
//!
//! Every turn is one group of answers behind the same prompts, each answer with random numbers of its own. What counts is
//! the time in which all of them generate: from the last first token to the first last one. Groups of every size take
//! turns, so that they can be compared although the machine's speed swings.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{
    Drafting, Engine, Job, JobError, JobEvent, Limits, Priority, Sampling, Scheduler, SchedulerState,
};
use forebay_tiers::Counters;
use serde_json::{Value, json};

use super::drafts::prompts;
use super::measure::median;
use crate::args::BenchServeArgs;
use crate::console::Output;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::load;
use crate::progress::{Progress, Unit};
use crate::report;
use crate::settings;

/// How long an engine may take to come back when its jobs are done.
const HOME: Duration = Duration::from_secs(60);

/// One group.
struct Turn {
    /// Tokens per second of all together.
    rate: f64,
    /// Bytes of experts read for each of them.
    bytes: f64,
    /// Share of the experts wanted that were in memory.
    hits: f64,
    /// Experts that a pass wants, over those that its rows want each for itself.
    distinct: f64,
    /// Tokens of a pass.
    tokens_per_pass: f64,
}

/// All groups of one size and depth.
struct Way {
    sequences: usize,
    drafting: Drafting,
    turns: Vec<Turn>,
}

/// Runs the verb.
pub fn run(args: &BenchServeArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let mut options = args.engine.options();
    if !args.depth.is_empty() {
        // What drafts needs its place in the plan, whatever is drafted first.
        options.drafting = Drafting::Auto;
    }
    let most = args.sequences.iter().copied().max().unwrap_or(1);
    options.sequences = usize::from(most);
    options.context.get_or_insert((args.prompt + args.tokens) as usize + 1);
    let mut engine = load::open_engine(&dir, options, &args.engine.disk.mirror)?;
    let prompts = prompts(args.text.as_deref(), args.prompt as usize, &dir, &engine)?;
    let depths: Vec<Drafting> = std::iter::once(Drafting::Off)
        .chain(args.depth.iter().map(|depth| Drafting::Depth(usize::from(*depth))))
        .collect();
    let mut ways: Vec<Way> = depths
        .iter()
        .flat_map(|drafting| args.sequences.iter().map(|n| (usize::from(*n), *drafting)))
        .map(|(sequences, drafting)| Way { sequences, drafting, turns: Vec::new() })
        .collect();
    let rounds = usize::from(args.rounds);
    let groups = ways.iter().map(|way| way.sequences).sum::<usize>() * rounds + usize::from(most);
    let total = groups as u64 * u64::from(args.tokens);
    interrupt.during(|cancel| {
        let progress = Progress::start("measuring", Unit::Tokens, total);
        let mut done = 0;
        let mut measure = |engine, way: &Way, seed| {
            let found = group(engine, &prompts, args.tokens as usize, way, seed, cancel)?;
            done += way.sequences as u64 * u64::from(args.tokens);
            progress.update(done, total);
            Ok::<_, Failure>(found)
        };
        // One that does not count: it leaves the prompts, and experts, to all others.
        let first = Way { sequences: usize::from(most), drafting: Drafting::Off, turns: Vec::new() };
        (engine, _) = measure(engine, &first, 0)?;
        for round in 0..rounds {
            let count = ways.len();
            for turn in 0..count {
                // Every way comes first as often as last.
                let way = &mut ways[(turn + round) % count];
                let found;
                (engine, found) = measure(engine, way, 1 + round as u64)?;
                way.turns.push(found);
            }
        }
        let mut out = Output::new();
        match args.json {
            true => out.json(&show_json(&engine, &ways)),
            false => out.write(&show_text(&engine, &ways)),
        }
    })
}

/// What a group of answers came to.
fn group(
    mut engine: Engine,
    prompts: &[Vec<u32>],
    tokens: usize,
    way: &Way,
    seed: u64,
    cancel: &CancelToken,
) -> Result<(Engine, Turn), Failure> {
    engine.set_drafting(way.drafting);
    let n = way.sequences;
    let scheduler = Scheduler::start(engine, Limits { queue: n, running: n, warm_up: false })
        .map_err(|error| Failure::runtime(format!("cannot start the engine's thread: {error}")))?;
    let (send, events) = channel();
    for at in 0..n {
        let sampling = Sampling { seed: 1000 * seed + at as u64, ..Sampling::default() };
        let job = job(prompts[at % prompts.len()].clone(), tokens, sampling, cancel, &scheduler, &send);
        scheduler.submit(job).map_err(|refused| Failure::runtime(refused.to_string()))?;
    }
    drop(send);
    let turn = watch(&events, n);
    let Some(engine) = scheduler.drain(HOME) else {
        return Err(Failure::runtime("the engine failed; please report this"));
    };
    if cancel.is_cancelled() {
        return Err(Failure::Interrupted);
    }
    Ok((engine, turn?))
}

/// What a job tells: when, how the engine stood, and what happened.
struct Told {
    at: Instant,
    state: Option<SchedulerState>,
    what: What,
}

enum What {
    Token,
    Done,
    Failed(JobError),
}

fn job(
    prompt: Vec<u32>,
    tokens: usize,
    sampling: Sampling,
    cancel: &CancelToken,
    scheduler: &Scheduler,
    to: &Sender<Told>,
) -> Job {
    let (to, scheduler, mut seen) = (to.clone(), scheduler.clone(), 0);
    let events = Box::new(move |event| {
        let what = match event {
            JobEvent::Token(_) => What::Token,
            JobEvent::Done(_) => What::Done,
            JobEvent::Failed(error) => What::Failed(error),
            _ => return ControlFlow::Continue(()),
        };
        seen += usize::from(matches!(what, What::Token));
        // Looked at where the time that counts may begin or end.
        let state = (seen == 1 || seen == tokens).then(|| scheduler.state());
        _ = to.send(Told { at: Instant::now(), state, what });
        ControlFlow::Continue(())
    });
    Job {
        prompt,
        max_tokens: Some(tokens),
        sampling,
        stops: Vec::new(),
        constraint: None,
        priority: Priority::Interactive,
        cancel: cancel.clone(),
        events,
    }
}

/// Follows a group to its end.
fn watch(events: &Receiver<Told>, sequences: usize) -> Result<Turn, Failure> {
    let (mut begun, mut ended, mut counted) = (0, 0, 0u64);
    let mut from: Option<(Instant, SchedulerState)> = None;
    let mut to: Option<(Instant, SchedulerState, u64)> = None;
    for told in events {
        match told.what {
            What::Failed(error) => return Err(Failure::runtime(error.to_string())),
            What::Done => ended += 1,
            What::Token => {
                counted += u64::from(from.is_some() && to.is_none());
                let Some(state) = told.state else { continue };
                if begun < sequences {
                    begun += 1;
                    if begun == sequences {
                        from = Some((told.at, state));
                    }
                } else if to.is_none() {
                    to = Some((told.at, state, counted));
                }
            }
        }
    }
    let (Some((from, before)), Some((to, after, tokens)), true) = (from, to, ended == sequences) else {
        return Err(Failure::runtime("the answers were too short to be measured; give more --tokens"));
    };
    let seconds = (to - from).as_secs_f64();
    let experts: Counters = after.experts.since(&before.experts);
    let passes = after.totals.passes - before.totals.passes;
    Ok(Turn {
        rate: tokens as f64 / seconds,
        bytes: experts.step_bytes() as f64 / tokens.max(1) as f64,
        hits: experts.hits as f64 / (experts.hits + experts.misses).max(1) as f64,
        distinct: (experts.hits + experts.misses) as f64 / experts.requests.max(1) as f64,
        tokens_per_pass: tokens as f64 / passes.max(1) as f64,
    })
}

/// Median over turns of the speed against the first way in the same turn.
fn gain(way: &Way, first: &Way) -> f64 {
    let ratios = way.turns.iter().zip(&first.turns).map(|(turn, first)| turn.rate / first.rate);
    median(&ratios.collect::<Vec<_>>())
}

fn show_text(engine: &Engine, ways: &[Way]) -> String {
    let plan = engine.plan();
    let mut text = format!(
        "{} slots in {} layers; tokens of all sequences together, medians\n\n",
        plan.resident_slots(),
        plan.demand.layers.len()
    );
    let Some(first) = ways.first() else { return text };
    text += "sequences  draft  tokens/s  of each  against the first  tokens/pass  distinct %  read/token  hits %\n";
    for way in ways {
        let of = |value: &dyn Fn(&Turn) -> f64| median(&way.turns.iter().map(value).collect::<Vec<_>>());
        let rate = of(&|turn| turn.rate);
        text += &format!(
            "{:<9}  {:>5}  {:>8.2}  {:>7.2}  {:>17.3}  {:>11.2}  {:>10.1}  {:>10}  {:>6.1}\n",
            way.sequences,
            way.drafting.to_string(),
            rate,
            rate / way.sequences as f64,
            gain(way, first),
            of(&|turn| turn.tokens_per_pass),
            100.0 * of(&|turn| turn.distinct),
            ByteSize(of(&|turn| turn.bytes) as u64).to_string(),
            100.0 * of(&|turn| turn.hits),
        );
    }
    text
}

fn show_json(engine: &Engine, ways: &[Way]) -> Value {
    let turn = |turn: &Turn| {
        json!({
            "tokens_per_s": turn.rate,
            "read_bytes_per_token": turn.bytes,
            "hit_rate": turn.hits,
            "distinct": turn.distinct,
            "tokens_per_pass": turn.tokens_per_pass,
        })
    };
    let way = |way: &Way| {
        json!({
            "sequences": way.sequences,
            "draft": way.drafting.to_string(),
            "gain": gain(way, &ways[0]),
            "turns": way.turns.iter().map(turn).collect::<Vec<_>>(),
        })
    };
    json!({ "ways": ways.iter().map(way).collect::<Vec<_>>(), "settings": report::engine_json(engine) })
}
