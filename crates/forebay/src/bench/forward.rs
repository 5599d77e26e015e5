//! `forebay bench forward`: whole passes of a model beside what the machine can do at most.

use std::time::{Duration, Instant};

use forebay_engine::{Engine, Session};
use forebay_kernels::{Buffer, limits};
use forebay_model::{Phase, Profile};
use serde_json::{Value, json};

use super::measure::median;
use super::stream::run_tokens;
use crate::args::BenchForwardArgs;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::load;
use crate::progress::{Progress, Unit};
use crate::settings;

/// Bytes that the read limit reads: much more than any cache.
const READ: usize = 256 << 20;
/// Parts per thread of a multiply-add limit: about ten milliseconds.
const PARTS: usize = 100;
/// Prompts that are run.
const ROUNDS: usize = 5;

/// What the machine can do, one entry per round.
#[derive(Default)]
struct Limits {
    /// Bytes per second.
    read: Vec<f64>,
    /// Multiply-adds per second with integers, and with f32.
    integer: Vec<f64>,
    float: Vec<f64>,
}

/// One kind of pass, measured several times.
struct Passes {
    /// Rows of a pass.
    rows: usize,
    /// Seconds of each pass.
    seconds: Vec<f64>,
    /// Where the time of all passes went.
    profile: Profile,
    /// Bytes that were read from disk during them.
    disk: u64,
}

/// Runs the verb.
pub fn run(args: &BenchForwardArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let (prompt, context) = (args.prompt as usize, args.filled as usize);
    let mut options = args.engine.options();
    let wanted = context.max(prompt) + args.steps as usize;
    options.context.get_or_insert(wanted);
    options.chunk.get_or_insert(prompt);
    let mut engine = load::open_engine(&dir, options, &args.engine.disk.mirror)?;
    if engine.plan().context < wanted {
        return Err(Failure::usage(format!(
            "the measurement takes {wanted} positions but the context has {}; raise --context, or lower \
             --filled, --prompt and --steps",
            engine.plan().context
        )));
    }
    let mut bytes = Buffer::zeroed(READ).ok_or_else(|| {
        Failure::runtime("there is no memory to measure the read bandwidth with".to_owned())
    })?;
    bytes.fill(1);
    let mut found = Limits::default();
    let total = (context + ROUNDS * prompt + args.steps as usize) as u64;
    let (prefill, decode) = interrupt.during(|cancel| {
        let mut session = Session::new(&engine);
        let progress = Progress::start("measuring", Unit::Tokens, total);
        let mut done = 0;
        let vocab = engine.spec().vocab as u64;
        let mut state = 1u64;
        // Any ids do; these repeat nowhere near, so that routing is spread.
        let mut ids = |n: usize| -> Vec<u32> {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 33) % vocab) as u32
            };
            (0..n).map(|_| next()).collect()
        };
        let mut pass = |engine: &mut Engine, session: &mut Session, n: usize| -> Result<f64, Failure> {
            let tokens = ids(n);
            let started = Instant::now();
            run_tokens(engine, session, &tokens, cancel)?;
            let seconds = started.elapsed().as_secs_f64();
            done += n as u64;
            progress.update(done, total);
            Ok(seconds)
        };
        // Fills the caches of experts and pages; its time counts for nothing.
        pass(&mut engine, &mut session, prompt.max(context))?;
        let mut prefill = Passes { rows: prompt, seconds: Vec::new(), profile: Profile::default(), disk: 0 };
        let before = engine.counters();
        engine.profile().reset();
        for _ in 0..ROUNDS {
            session.truncate(0);
            prefill.seconds.push(pass(&mut engine, &mut session, prompt)?);
            measure_limits(&engine, &bytes, &mut found);
        }
        prefill.profile = engine.profile().clone();
        prefill.disk = engine.counters().since(&before).bytes;

        session.truncate(0);
        pass(&mut engine, &mut session, context)?;
        let mut decode = Passes { rows: 1, seconds: Vec::new(), profile: Profile::default(), disk: 0 };
        // The first step is not counted: it fetches experts that the long pass did not leave behind.
        pass(&mut engine, &mut session, 1)?;
        let before = engine.counters();
        engine.profile().reset();
        for step in 0..args.steps.saturating_sub(1) {
            decode.seconds.push(pass(&mut engine, &mut session, 1)?);
            if step % 4 == 0 {
                measure_limits(&engine, &bytes, &mut found);
            }
        }
        decode.profile = engine.profile().clone();
        decode.disk = engine.counters().since(&before).bytes;
        Ok::<_, Failure>((prefill, decode))
    })?;
    let report = Report { engine: &engine, context, limits: &found, prefill: &prefill, decode: &decode };
    let mut out = Output::new();
    if args.json {
        return out.json(&report.json());
    }
    for (passes, what) in [(&prefill, "prefill"), (&decode, "decode")] {
        if passes.disk > 0 {
            console::note(&format!(
                "{what} read {} bytes from disk: not every expert is in memory; raise --memory to measure \
                 arithmetic alone",
                passes.disk
            ));
        }
    }
    out.write(&report.text())
}

/// One more round of the limits, on the threads of the engine.
fn measure_limits(engine: &Engine, bytes: &[u8], found: &mut Limits) {
    let (kernels, team) = (engine.kernels(), engine.team());
    let rate = |work: &dyn Fn() -> u64| {
        let started = Instant::now();
        let amount = work();
        amount as f64 / started.elapsed().as_secs_f64()
    };
    let parts = PARTS * team.threads();
    found.read.push(rate(&|| {
        std::hint::black_box(limits::read(kernels, team, bytes));
        bytes.len() as u64
    }));
    found.integer.push(rate(&|| limits::integer_multiply_adds(kernels, team, parts)));
    found.float.push(rate(&|| limits::float_multiply_adds(kernels, team, parts)));
}

/// What was found, ready to be shown.
struct Report<'a> {
    engine: &'a Engine,
    context: usize,
    limits: &'a Limits,
    prefill: &'a Passes,
    decode: &'a Passes,
}

impl Report<'_> {
    /// Weight bytes of one token and multiply-adds with weights, the head apart or not.
    fn work(&self, with_head: bool) -> (f64, f64) {
        let work = self.engine.work();
        let counted = Phase::ALL.iter().filter(|phase| with_head || **phase != Phase::Head);
        counted.fold((0.0, 0.0), |(bytes, macs), phase| {
            let work = work[*phase as usize];
            (bytes + work.bytes as f64, macs + work.multiply_adds as f64)
        })
    }

    /// Multiply-adds with weights per second of the prompt; the head runs for its last row only.
    fn prefill_rate(&self) -> f64 {
        let layers = self.work(false).1;
        let head = self.work(true).1 - layers;
        (layers * self.prefill.rows as f64 + head) / median(&self.prefill.seconds)
    }

    /// Weight bytes per second of a decode step.
    fn decode_rate(&self) -> f64 {
        self.work(true).0 / median(&self.decode.seconds)
    }

    fn text(&self) -> String {
        let threads = self.engine.team().threads();
        let (read, integer, float) =
            (median(&self.limits.read), median(&self.limits.integer), median(&self.limits.float));
        let (prefill, decode) = (median(&self.prefill.seconds), median(&self.decode.seconds));
        let mut text = format!(
            "limits on {threads} thread{}: read {:.1} GB/s, integer {:.0} GMAC/s, f32 {:.0} GMAC/s\n\
             prefill of {} tokens: {:.3} s, {:.1} tokens/s; weights at {:.0} GMAC/s, {:.0} % of the integer peak\n\
             decode at {} cached tokens: {:.2} ms, {:.1} tokens/s; {:.2} GB of weights at {:.1} GB/s, {:.0} % of \
             the read bandwidth\n\n",
            if threads == 1 { "" } else { "s" },
            read / 1e9,
            integer / 1e9,
            float / 1e9,
            self.prefill.rows,
            prefill,
            self.prefill.rows as f64 / prefill,
            self.prefill_rate() / 1e9,
            100.0 * self.prefill_rate() / integer,
            self.context,
            1e3 * decode,
            1.0 / decode,
            self.work(true).0 / 1e9,
            self.decode_rate() / 1e9,
            100.0 * self.decode_rate() / read,
        );
        text.push_str(&format!(
            "{:24}{:>12}{:>7}{:>10}{:>14}{:>7}{:>10}\n",
            "phase", "prefill ms", "%", "GMAC/s", "decode ms", "%", "GB/s"
        ));
        for row in self.rows() {
            text.push_str(&format!(
                "{:24}{:>12.2}{:>7.1}{:>10}{:>14.3}{:>7.1}{:>10}\n",
                row.phase.name(),
                1e3 * row.prefill,
                100.0 * row.prefill_share,
                number(row.prefill_rate / 1e9, 0),
                1e3 * row.decode,
                100.0 * row.decode_share,
                number(row.decode_rate / 1e9, 1),
            ));
        }
        let rest = |passes: &Passes| mean(passes) - phases_sum(passes);
        text.push_str(&format!(
            "{:24}{:>12.2}{:>7.1}{:>10}{:>14.3}{:>7.1}\n",
            "outside the phases",
            1e3 * rest(self.prefill),
            100.0 * rest(self.prefill) / mean(self.prefill),
            "",
            1e3 * rest(self.decode),
            100.0 * rest(self.decode) / mean(self.decode),
        ));
        text
    }

    /// One row per phase that took time.
    fn rows(&self) -> Vec<Row> {
        let work = self.engine.work();
        let of = |phase: Phase| {
            let work = work[phase as usize];
            let (prefill, decode) = (per_pass(self.prefill, phase), per_pass(self.decode, phase));
            let rows = if phase == Phase::Head { 1 } else { self.prefill.rows };
            Row {
                phase,
                prefill,
                prefill_share: prefill / mean(self.prefill),
                prefill_rate: work.multiply_adds as f64 * rows as f64 / prefill,
                decode,
                decode_share: decode / mean(self.decode),
                decode_rate: work.bytes as f64 / decode,
            }
        };
        Phase::ALL.map(of).into_iter().filter(|row| row.prefill > 0.0 || row.decode > 0.0).collect()
    }

    fn json(&self) -> Value {
        let rows = self.rows().into_iter().map(|row| {
            json!({
                "phase": row.phase.name(),
                "prefill_seconds": row.prefill,
                "prefill_multiply_adds_per_second": finite(row.prefill_rate),
                "decode_seconds": row.decode,
                "decode_bytes_per_second": finite(row.decode_rate),
            })
        });
        let passes = |passes: &Passes| {
            json!({
                "rows": passes.rows,
                "seconds": passes.seconds,
                "outside_phases_seconds": mean(passes) - phases_sum(passes),
                "disk_bytes": passes.disk,
            })
        };
        json!({
            "threads": self.engine.team().threads(),
            "cpu_features": self.engine.kernels().isa().name(),
            "context": self.context,
            "weight_bytes_per_token": self.work(true).0,
            "weight_multiply_adds_per_token": self.work(true).1,
            "limits": {
                "read_bytes_per_second": self.limits.read,
                "integer_multiply_adds_per_second": self.limits.integer,
                "float_multiply_adds_per_second": self.limits.float,
            },
            "prefill": passes(self.prefill),
            "decode": passes(self.decode),
            "prefill_multiply_adds_per_second": self.prefill_rate(),
            "decode_bytes_per_second": self.decode_rate(),
            "phases": rows.collect::<Vec<_>>(),
        })
    }
}

/// One phase, per pass.
struct Row {
    phase: Phase,
    prefill: f64,
    prefill_share: f64,
    prefill_rate: f64,
    decode: f64,
    decode_share: f64,
    decode_rate: f64,
}

/// Mean seconds of a pass.
fn mean(passes: &Passes) -> f64 {
    passes.seconds.iter().sum::<f64>() / passes.seconds.len().max(1) as f64
}

/// Mean seconds of a phase.
fn per_pass(passes: &Passes, phase: Phase) -> f64 {
    passes.profile.spent(phase).as_secs_f64() / passes.seconds.len().max(1) as f64
}

/// Mean seconds of all phases.
fn phases_sum(passes: &Passes) -> f64 {
    let sum: Duration = Phase::ALL.iter().map(|phase| passes.profile.spent(*phase)).sum();
    sum.as_secs_f64() / passes.seconds.len().max(1) as f64
}

/// A rate, or nothing where there is none.
fn number(rate: f64, digits: usize) -> String {
    if rate.is_finite() && rate > 0.0 { format!("{rate:.digits$}") } else { String::new() }
}

fn finite(rate: f64) -> Option<f64> {
    Some(rate).filter(|rate| rate.is_finite() && *rate > 0.0)
}
