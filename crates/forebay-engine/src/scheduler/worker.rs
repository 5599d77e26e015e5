//! The engine's thread: passes over the rows of all jobs that run.

use std::cell::RefCell;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use forebay_model::workspace::LOGIT_ROWS;
use forebay_model::{ForwardError, Part, Phase, Trace, Watch, forward, logits};
use forebay_tiers::ExpertStore;

use super::Shared;
use super::compose::{Pace, Ran, Shares, Wish, compose};
use super::job::JobError;
use super::sequence::{Sequence, Teller, Work, reason};
use super::watch::{SeenPass, Uses};
use crate::draft::Drafting;
use crate::engine::Engine;
use crate::session::{Finish, GenerateError, PassStats, pass_starts, pass_stats};

/// Serves jobs until the scheduler is drained, or the engine fails.
pub(super) fn run(mut engine: Engine, shared: &Shared) {
    let mut running = Vec::new();
    let left = catch_unwind(AssertUnwindSafe(|| serve(&mut engine, &mut running, shared)));
    let engine = match left {
        Ok(()) => Some(engine),
        Err(panic) => {
            let reason = reason(panic.as_ref());
            let waiting = shared.lock().fail(&reason);
            let error = || JobError::EngineFailed { reason: reason.clone() };
            running.into_iter().for_each(|mut sequence: Sequence| sequence.events.failed(error()));
            waiting.into_iter().for_each(|mut waiting| waiting.events.failed(error()));
            // What state it is in nobody knows: its threads may wait for something that never comes.
            std::mem::forget(engine);
            None
        }
    };
    shared.lock().leave(engine);
    shared.changed.notify_all();
}

fn serve(engine: &mut Engine, running: &mut Vec<Sequence>, shared: &Shared) {
    let mut pace = Pace::default();
    let mut keeping = Keeping::default();
    while !running.is_empty() || wait(engine, shared) {
        shared.sweep();
        let was_idle = running.is_empty();
        admit(engine, running, shared);
        if running.is_empty() {
            continue;
        }
        if was_idle {
            // What was read while nobody asked for anything is not this work's cost.
            engine.store.work_begins();
        }
        pass(engine, running, &mut pace, shared);
        keeping.between_passes(engine, shared);
        if running.is_empty() {
            engine.store.work_ends();
        }
    }
    let ends = shared.lock().ends.unwrap_or_else(Instant::now).max(Instant::now() + LAST_SAVE);
    save(engine, shared, &mut || Instant::now() < ends);
}

/// How long keeping prefixes may take at the end where there is no time left.
const LAST_SAVE: Duration = Duration::from_secs(5);
/// Blocks that are written at once between two passes, and how much longer it takes until there are more.
const SOME_BLOCKS: usize = 4;
const SAVE_SHARE: u32 = 20;

/// Keeps prefixes while there is always somebody to answer: a few blocks now and then, which delay the next token.
#[derive(Default)]
struct Keeping {
    /// Not before.
    due: Option<Instant>,
}

impl Keeping {
    fn between_passes(&mut self, engine: &mut Engine, shared: &Shared) {
        let began = Instant::now();
        if self.due.is_some_and(|due| began < due) {
            return;
        }
        let mut left = SOME_BLOCKS;
        save(engine, shared, &mut || {
            let goes_on = left > 0;
            left = left.saturating_sub(1);
            goes_on
        });
        self.due = Some(Instant::now() + SAVE_SHARE * began.elapsed());
    }
}

/// Writes what is to be kept of what was computed, as long as `goes_on` says so.
fn save(engine: &mut Engine, shared: &Shared, goes_on: &mut dyn FnMut() -> bool) {
    let trouble = engine.save_prefixes_while(goes_on).err().map(|error| error.to_string());
    shared.lock().keeping = trouble;
}

/// Waits for a job, and uses the time; `false` when the end has come.
fn wait(engine: &mut Engine, shared: &Shared) -> bool {
    {
        let queue = shared.lock();
        if queue.wants_attention() {
            return !queue.is_finished();
        }
    }
    // When everybody has an answer, so that nobody waits for it; what is left as somebody comes is for the next time.
    save(engine, shared, &mut || !shared.lock().wants_attention());
    let look = |store: &ExpertStore| {
        if shared.watch.is_watched() {
            shared.lock().look_at_store(store);
            shared.watch.look_at(store);
        }
    };
    engine.idle_watched(shared.facts.limits.warm_up, look, || {
        let mut queue = shared.lock();
        while !queue.wants_attention() {
            queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        !queue.is_finished()
    })
}

/// Begins jobs whose turn has come, as long as there are places, and KV blocks for all that they are expected to need.
/// Batch work gives its blocks up for others: what it has is there for them.
///
/// Those that run are kept in the order in which they have a right to KV blocks: batch work last, and of the same kind
/// who came first.
fn admit(engine: &mut Engine, running: &mut Vec<Sequence>, shared: &Shared) {
    shared.lock().hold(running.iter().map(|sequence| (sequence.id, sequence.blocks())));
    loop {
        let Some((job, blocks)) = shared.lock().next() else { return };
        let id = job.id;
        match Sequence::new(engine, job, blocks) {
            Ok(sequence) => {
                let at = running.partition_point(|other| sequence.is_batch() || !other.is_batch());
                running.insert(at, sequence);
            }
            Err((mut events, error)) => {
                shared.lock().ended(id, 0, None);
                events.failed(error.into());
                shared.changed.notify_all();
            }
        }
    }
}

/// How a sequence fared in a pass.
type Fared = Result<Range<usize>, ForwardError>;

/// One pass, and what comes of it for every sequence that had rows in it.
fn pass(engine: &mut Engine, running: &mut Vec<Sequence>, pace: &mut Pace, shared: &Shared) {
    let number = shared.lock().next_pass();
    let answers = prepare(engine, running, pace, number, shared);
    let taking_part = running.iter().filter(|sequence| sequence.takes_part()).count();
    if taking_part == 0 {
        return;
    }
    let alone = taking_part == 1;
    let prompt: usize = running.iter().map(Sequence::prompt_rows).sum();
    shared.lock().run_on(running.iter().map(|sequence| (sequence.id, sequence.state())));
    let start = pass_starts(engine);
    // Whoever looks in while a pass runs sees the experts of the next one.
    let mut uses = shared.watch.is_watched().then(|| shared.watch.begin(prompt == 0));
    let (fared, rows) = run_rows(engine, running, &mut uses, shared);
    judge(engine, running, &fared);
    let stats = pass_stats(engine, rows, &start);
    let waited = stats.phases[Phase::ExpertWait as usize];
    pace.observe(&Ran { prompt, answers, time: stats.time, waited });
    shared.lock().passed(&stats, taking_part, engine);
    if uses.is_some() {
        shared.watch.look_at(&engine.store);
    }
    let (mut at, mut tokens) = (0, 0);
    for fared in fared {
        let ended = match fared {
            None => None,
            Some(Ok(rows)) => {
                let before = running[at].new_tokens();
                let ended = after(engine, &mut running[at], rows, &stats, alone);
                tokens += running[at].new_tokens() - before;
                ended
            }
            Some(Err(ForwardError::Cancelled)) => Some(Ok(Finish::Cancelled)),
            Some(Err(error)) => Some(Err(error.into())),
        };
        match ended {
            None => at += 1,
            Some(how) => end(engine, running.remove(at), how, shared),
        }
    }
    // What only found that an answer is over made no token.
    if prompt > 0 || tokens > 0 {
        let seen = SeenPass { number, stats, prompt, sequences: taking_part, tokens };
        shared.lock().last_passes[usize::from(prompt == 0)] = Some(seen);
    }
}

/// What becomes of a sequence behind a pass: `None` if it goes on.
fn after(
    engine: &mut Engine,
    sequence: &mut Sequence,
    rows: Range<usize>,
    stats: &PassStats,
    alone: bool,
) -> Option<Result<Finish, GenerateError>> {
    match sequence.after(engine, rows, stats, alone) {
        Ok(ControlFlow::Continue(())) => None,
        Ok(ControlFlow::Break(finish)) => Some(Ok(finish)),
        Err(error) => Some(Err(error)),
    }
}

/// Tells how a job ended, and counts it.
fn end(engine: &mut Engine, mut sequence: Sequence, how: Result<Finish, GenerateError>, shared: &Shared) {
    sequence.leave(engine);
    let outcome = how.map(|finish| sequence.outcome(engine, finish));
    shared.seen().add(sequence.tokens());
    {
        let mut queue = shared.lock();
        queue.ended(sequence.id, sequence.reused, outcome.as_ref().ok());
        queue.look_at(engine);
    }
    match outcome {
        Ok(outcome) => sequence.events.done(outcome),
        Err(error) => sequence.events.failed(error.into()),
    }
    shared.changed.notify_all();
}

/// Decides what every sequence runs in the next pass; those end that cannot go on. How many of them generate and have a
/// turn.
fn prepare(
    engine: &mut Engine,
    running: &mut Vec<Sequence>,
    pace: &Pace,
    number: u64,
    shared: &Shared,
) -> usize {
    let mut at = 0;
    while at < running.len() {
        match running[at].cancel.is_cancelled() {
            true => end(engine, running.remove(at), Ok(Finish::Cancelled), shared),
            false => at += 1,
        }
    }
    resume(engine, running);
    // What others compute anyway is waited for.
    let waits = |at: usize| running[..at].iter().any(|other| running[at].waits_for(other));
    let runs: Vec<usize> = (0..running.len()).filter(|at| !running[*at].is_paused() && !waits(*at)).collect();
    let wishes: Vec<Wish> = runs.iter().map(|at| running[*at].wish()).collect();
    let mut shares = vec![0; running.len()];
    let Shares { rows, answers } = compose(&wishes, engine.plan().chunk, pace);
    for (at, rows) in runs.into_iter().zip(rows) {
        shares[at] = rows;
    }
    let rates = shared.lock().rates;
    let taking_part = shares.iter().filter(|rows| **rows > 0).count();
    // A row more of one sequence costs what a row of another one does, and is right less often.
    let drafting = match engine.options().drafting {
        Drafting::Off => false,
        Drafting::Auto => taking_part == 1,
        Drafting::Depth(_) => true,
    };
    let mut at = 0;
    for rows in shares {
        loop {
            let rows = if running[at].is_paused() { 0 } else { rows };
            match running[at].prepare(engine, rows, drafting, number, &rates) {
                Ok(()) => at += 1,
                Err(GenerateError::Forward(ForwardError::NoBlock(_))) if give_way(engine, running, at) => {
                    continue;
                }
                Err(error) => end(engine, running.remove(at), Err(error), shared),
            }
            break;
        }
    }
    answers
}

/// Lets those go on that gave their KV blocks up, the first one first, as far as there are blocks again; what batch work
/// has is there for others.
fn resume(engine: &Engine, running: &mut [Sequence]) {
    for at in 0..running.len() {
        let sequence = &running[at];
        if !sequence.is_paused() {
            continue;
        }
        let before = running.iter().filter(|other| !other.is_paused());
        let before = before.filter(|other| sequence.is_batch() || !other.is_batch());
        let taken: usize = before.map(Sequence::blocks).sum();
        if taken > 0 && taken + sequence.blocks() > engine.kv_blocks() {
            return;
        }
        running[at].resume();
    }
}

/// Finds KV blocks for the sequence `at`: the last in order gives its own up, which may be this one. `false` if there are
/// none to be had.
fn give_way(engine: &mut Engine, running: &mut [Sequence], at: usize) -> bool {
    let last = running.iter().rposition(Sequence::has_blocks).filter(|last| *last >= at).unwrap_or(at);
    if last == at && !running[..at].iter().any(Sequence::has_blocks) {
        return false;
    }
    running[last].pause(engine);
    true
}

/// Runs the rows of all sequences that have any: how each fared, and how many rows there were.
fn run_rows(
    engine: &mut Engine,
    running: &mut [Sequence],
    uses: &mut Option<Uses<'_>>,
    shared: &Shared,
) -> (Vec<Option<Fared>>, usize) {
    let layers = engine.spec().layers.len();
    let took_part: Vec<bool> = running.iter().map(Sequence::takes_part).collect();
    let (mut parts, mut tellers, mut bystanders) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, took_part) in running.iter_mut().zip(&took_part) {
        let Work { part, teller } = sequence.work();
        match took_part {
            true => {
                parts.push(part);
                tellers.push(teller);
            }
            false => bystanders.push(teller),
        }
    }
    let tellers = RefCell::new(tellers);
    let (ctx, store, ws) = engine.split();
    let mut watch = Watch {
        trace: uses.as_mut().map(|uses| uses as &mut dyn Trace),
        layers_done: &mut |done, bytes| {
            shared.watch.layers_done(done, layers);
            // Those that wait may have given up meanwhile.
            shared.sweep();
            bystanders.iter_mut().for_each(Teller::look_for_cancellation);
            tellers.borrow_mut().iter_mut().for_each(|teller| teller.layers_done(done, layers, bytes));
        },
        left: &mut |part, error| tellers.borrow_mut()[part].left(error),
    };
    forward(ctx, store, &mut parts, ws, &mut watch);
    let mut results = parts.into_iter().map(Part::result);
    let fared: Vec<Option<Fared>> =
        took_part.into_iter().map(|took_part| if took_part { results.next() } else { None }).collect();
    let rows = fared.iter().flatten().flatten().map(ExactSizeIterator::len).sum();
    (fared, rows)
}

/// Shows every sequence the logits that it wants, those of several at a time.
fn judge(engine: &mut Engine, running: &mut [Sequence], fared: &[Option<Fared>]) {
    let mut wanted = Vec::new();
    for (at, fared) in fared.iter().enumerate() {
        if let Some(Ok(rows)) = fared {
            wanted.extend(running[at].logit_rows().map(|row| (at, row, rows.start + row)));
        }
    }
    let mut wanted = wanted.into_iter().peekable();
    let mut block = Vec::with_capacity(LOGIT_ROWS);
    let (ctx, _, ws) = engine.split();
    let vocab = ctx.model.spec.vocab;
    while wanted.peek().is_some() {
        block.clear();
        block.extend(wanted.by_ref().filter(|(at, ..)| running[*at].wants_logits()).take(LOGIT_ROWS));
        let rows = logits(ctx, ws, block.iter().map(|(_, _, row)| *row));
        for ((at, row, _), logits) in block.iter().zip(rows.chunks_exact(vocab)) {
            if running[*at].wants_logits() {
                running[*at].judge(*row, logits);
            }
        }
    }
}
