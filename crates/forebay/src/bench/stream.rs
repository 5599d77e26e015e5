//! `forebay bench stream`: tokens while experts come from disk, beside what disk and arithmetic allow.
//!
//! The same tokens are run in turns without and with reading ahead, so that the two can be compared although
//! the machine's speed swings.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, Finish, Request, Sampling, Session};
use forebay_io::Gauge;
use forebay_model::Phase;
use forebay_tiers::{Counters, LookAhead};
use serde_json::{Value, json};

use super::measure::median;
use crate::args::BenchStreamArgs;
use crate::console::Output;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::load;
use crate::progress::{Progress, Unit};
use crate::report;
use crate::settings;

/// One series of passes.
struct Sample {
    tokens: usize,
    wall: f64,
    /// Seconds in which compute waited for nothing.
    compute: f64,
    experts: Counters,
    disk: Gauge,
    /// Seconds of this in the head, when no expert can be wanted.
    head: f64,
}

/// All samples of one way.
struct Way {
    name: &'static str,
    mode: LookAhead,
    samples: Vec<Sample>,
}

/// Runs the verb.
pub fn run(args: &BenchStreamArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let (prompt, steps, rounds) = (args.prompt as usize, args.steps as usize, usize::from(args.rounds));
    let mut options = args.engine.options();
    options.context.get_or_insert(prompt + steps + 1);
    let mut engine = load::open_engine(&dir, options, &args.engine.disk.mirror)?;
    let asked = match args.engine.options().look_ahead {
        LookAhead::Off => None,
        LookAhead::Auto => Some(("auto", LookAhead::Auto)),
        LookAhead::On => Some(("on", LookAhead::On)),
    };
    let ways = [("off", LookAhead::Off)].into_iter().chain(asked);
    let mut ways: Vec<Way> = ways.map(|(name, mode)| Way { name, mode, samples: Vec::new() }).collect();
    let mut prefill = Way { name: "prompt", mode: LookAhead::Auto, samples: Vec::new() };
    let total = (prompt + steps + rounds * (prompt * usize::from(args.prefill) + ways.len() * steps)) as u64;
    interrupt.during(|cancel| {
        let progress = Progress::start("measuring", Unit::Tokens, total);
        let mut done = 0;
        let mut session = Session::new(&engine);
        let ids = zipf_ids(engine.spec().vocab, prompt + steps);
        run_tokens(&mut engine, &mut session, &ids[..prompt], cancel)?;
        // One turn that does not count: every later one begins with what the last tokens left in the cache.
        for token in ids[prompt..].chunks(1) {
            run_tokens(&mut engine, &mut session, token, cancel)?;
        }
        done += (prompt + steps) as u64;
        for round in 0..rounds {
            if args.prefill {
                session.truncate(0);
                engine.store().set_look_ahead(prefill.mode);
                let sample = measure(&mut engine, &mut session, &[&ids[..prompt]], cancel)?;
                prefill.samples.push(sample);
                done += prompt as u64;
            }
            for turn in 0..ways.len() {
                // Every way comes first as often as last.
                let count = ways.len();
                let way = &mut ways[(turn + round) % count];
                engine.store().set_look_ahead(way.mode);
                session.truncate(prompt);
                let tokens: Vec<&[u32]> = ids[prompt..].chunks(1).collect();
                way.samples.push(measure(&mut engine, &mut session, &tokens, cancel)?);
                done += steps as u64;
                progress.update(done, total);
            }
        }
        Ok::<_, Failure>(())
    })?;
    if args.prefill {
        ways.insert(0, prefill);
    }
    let rate = args.engine.disk.throttle_disk.map(|rate| rate.0 as f64).or(engine.options().rates.disk);
    let report = Report { engine: &engine, ways: &ways, rate };
    let mut out = Output::new();
    match args.json {
        true => out.json(&report.json()),
        false => out.write(&report.text()),
    }
}

/// Token ids that are as unevenly frequent as words are: 1/rank.
pub(super) fn zipf_ids(vocab: usize, count: usize) -> Vec<u32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    // The inverse of the distribution function, continuous in rank.
    (0..count).map(|_| ((vocab as f64).powf(uniform()) as usize).min(vocab - 1) as u32).collect()
}

pub(super) fn run_tokens(
    engine: &mut Engine,
    session: &mut Session,
    tokens: &[u32],
    cancel: &CancelToken,
) -> Result<(), Failure> {
    let request = Request { prompt: tokens, max_tokens: 0, sampling: Sampling::default(), stops: &[] };
    let outcome = session.generate(engine, &request, cancel, None, &mut |_| ControlFlow::Continue(()))?;
    if outcome.finish == Finish::Cancelled { Err(Failure::Interrupted) } else { Ok(()) }
}

/// Runs passes and takes what they cost.
fn measure(
    engine: &mut Engine,
    session: &mut Session,
    passes: &[&[u32]],
    cancel: &CancelToken,
) -> Result<Sample, Failure> {
    let (before, gauge) = (engine.counters(), engine.store().reader().gauge());
    engine.profile().reset();
    let started = Instant::now();
    for tokens in passes {
        run_tokens(engine, session, tokens, cancel)?;
    }
    let wall = started.elapsed().as_secs_f64();
    let waited = engine.profile().spent(Phase::ExpertWait).as_secs_f64();
    let after = engine.store().reader().gauge();
    let disk = Gauge {
        outstanding: after.outstanding.saturating_sub(gauge.outstanding),
        idle: after.idle.saturating_sub(gauge.idle),
        reading: after.reading.saturating_sub(gauge.reading),
    };
    Ok(Sample {
        tokens: passes.iter().map(|tokens| tokens.len()).sum(),
        wall,
        compute: (wall - waited).max(0.0),
        experts: engine.counters().since(&before),
        disk,
        head: engine.profile().spent(Phase::Head).as_secs_f64(),
    })
}

/// What was found, ready to be shown.
struct Report<'a> {
    engine: &'a Engine,
    ways: &'a [Way],
    /// Bytes per second that the disk delivers at best, if known.
    rate: Option<f64>,
}

/// Medians over the samples of one way.
struct Summary {
    seconds_per_token: f64,
    bytes_per_token: f64,
    compute_per_token: f64,
    hit_rate: f64,
    /// Bytes per second, all the time.
    bandwidth: f64,
    /// Share of the time with a read outstanding.
    busy: f64,
    /// Share of that in which none was being read.
    starved: f64,
    /// Of the experts asked for ahead, those that were wanted; of all bytes, those that were
    /// there in time, and those that were not wanted.
    right: f64,
    useful: f64,
    wasted: f64,
}

impl Way {
    fn summary(&self) -> Summary {
        let of = |value: &dyn Fn(&Sample) -> f64| median(&self.samples.iter().map(value).collect::<Vec<_>>());
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let seconds = |time: Duration| time.as_secs_f64();
        Summary {
            seconds_per_token: of(&|s| s.wall / s.tokens as f64),
            bytes_per_token: of(&|s| s.experts.bytes as f64 / s.tokens as f64),
            compute_per_token: of(&|s| s.compute / s.tokens as f64),
            hit_rate: of(&|s| share(s.experts.hits as f64, (s.experts.hits + s.experts.misses) as f64)),
            bandwidth: of(&|s| s.experts.bytes as f64 / s.wall),
            busy: of(&|s| seconds(s.disk.outstanding) / s.wall),
            starved: of(&|s| share(seconds(s.disk.idle), seconds(s.disk.outstanding))),
            right: of(&|s| {
                let wanted = s.experts.ahead_ready + s.experts.ahead_late;
                share(wanted as f64, s.experts.ahead_asked as f64)
            }),
            useful: of(&|s| share(s.experts.ahead_useful_bytes as f64, s.experts.bytes as f64)),
            wasted: of(&|s| share(s.experts.ahead_wasted_bytes as f64, s.experts.bytes as f64)),
        }
    }
}

impl Report<'_> {
    fn text(&self) -> String {
        let plan = self.engine.plan();
        let layers = plan.demand.layers.len().max(1);
        let mut text = format!(
            "{} slots in {layers} layers, each of {}{}; disk at best {}\n\n",
            plan.resident_slots(),
            ByteSize(plan.slot_row() / layers as u64),
            plan.codes.map_or(String::new(), |choice| format!(", for {} experts", choice.slots)),
            self.rate.map_or("unknown (run forebay tune)".to_owned(), |rate| format!(
                "{}/s",
                ByteSize(rate as u64)
            )),
        );
        text += "ahead     ms/token  read/token   hits %  read GB/s  of disk %  busy %  starved %  compute ms  \
                 disk ms  wall/max  right %  useful %  wasted %\n";
        for way in self.ways {
            let s = way.summary();
            let disk = self.rate.map(|rate| s.bytes_per_token / rate);
            let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "?".to_owned());
            text += &format!(
                "{:<8} {:>9.2} {:>11} {:>8.1} {:>10.3} {:>10} {:>7.1} {:>10.2} {:>11.2} {:>8} {:>9} {:>8.1} {:>9.1} {:>9.1}\n",
                way.name,
                1e3 * s.seconds_per_token,
                ByteSize(s.bytes_per_token as u64).to_string(),
                100.0 * s.hit_rate,
                s.bandwidth / 1e9,
                or_unknown(self.rate.map(|rate| format!("{:.1}", 100.0 * s.bandwidth / rate))),
                100.0 * s.busy,
                100.0 * s.starved,
                1e3 * s.compute_per_token,
                or_unknown(disk.map(|disk| format!("{:.2}", 1e3 * disk))),
                or_unknown(disk.map(|d| format!("{:.3}", s.seconds_per_token / d.max(s.compute_per_token)))),
                100.0 * s.right,
                100.0 * s.useful,
                100.0 * s.wasted,
            );
        }
        text
    }

    fn json(&self) -> Value {
        let way = |way: &Way| {
            let sample = |sample: &Sample| {
                json!({
                    "tokens": sample.tokens,
                    "wall_s": sample.wall,
                    "compute_s": sample.compute,
                    "experts": report::experts_json(&sample.experts),
                    "disk_outstanding_s": sample.disk.outstanding.as_secs_f64(),
                    "disk_starved_s": sample.disk.idle.as_secs_f64(),
                    "disk_mean_depth": sample.disk.mean_depth(),
                    "head_s": sample.head,
                })
            };
            json!({ "look_ahead": way.name, "samples": way.samples.iter().map(sample).collect::<Vec<_>>() })
        };
        json!({
            "disk_bytes_per_s": self.rate,
            "ways": self.ways.iter().map(way).collect::<Vec<_>>(),
            "settings": report::engine_json(self.engine),
        })
    }
}
