//! `forebay bench drafts`: what drafting is worth, by how often drafts are right and how deep they are.
//!
//! The same greedy answer is generated in turns without drafts, with fixed depths and under the controller, which
//! begins every turn knowing nothing, or with `--learnt` what it found out in the turns before. With `--acceptance` drafts come from the answer itself and err as often as wanted.

use std::path::Path;

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::draft::{Controller, Foretold};
use forebay_engine::{DraftStats, Drafting, Engine, Finish, Outcome, Request, Sampling, Session};
use serde_json::{Value, json};

use super::measure::median;
use super::stream::zipf_ids;
use crate::args::BenchDraftsArgs;
use crate::console::Output;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::load;
use crate::progress::{Progress, Unit};
use crate::report;
use crate::settings;

/// One answer.
struct Turn {
    /// Tokens per second behind the first one.
    rate: f64,
    /// Bytes of experts read for each of them.
    bytes: f64,
    drafts: DraftStats,
}

/// All answers of one way.
struct Way {
    drafting: Drafting,
    turns: Vec<Turn>,
}

/// All ways with drafts that are right equally often; `None` takes the model's own.
struct World {
    acceptance: Option<f64>,
    ways: Vec<Way>,
    /// What the controller found out so far.
    learnt: Controller,
}

/// Runs the verb.
pub fn run(args: &BenchDraftsArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let interrupt = Interrupt::install()?;
    let mut options = args.engine.options();
    let tokens = args.tokens as usize;
    // What drafts needs its place in the plan, whatever is drafted first.
    options.drafting = Drafting::Auto;
    options.context.get_or_insert(args.prompt as usize + tokens + 1);
    let mut engine = load::open_engine(&dir, options, &args.engine.disk.mirror)?;
    let prompts = prompts(args.text.as_deref(), args.prompt as usize, &dir, &engine)?;
    let mut worlds = worlds(args);
    let turns = prompts.len() * usize::from(args.rounds) * worlds.iter().map(|w| w.ways.len()).sum::<usize>();
    interrupt.during(|cancel| {
        let total = ((turns + prompts.len()) * tokens) as u64;
        let progress = Progress::start("measuring", Unit::Tokens, total);
        let mut done = 0;
        let mut step = || {
            done += tokens as u64;
            progress.update(done, total);
        };
        for prompt in &prompts {
            measure(&mut engine, prompt, args, &mut worlds, cancel, &mut step)?;
        }
        Ok::<_, Failure>(())
    })?;
    let mut out = Output::new();
    match args.json {
        true => out.json(&show_json(&engine, &worlds)),
        false => out.write(&show_text(&engine, &worlds)),
    }
}

/// What the answers follow: the first tokens of each line of a file, or made-up ones.
pub(super) fn prompts(
    text: Option<&Path>,
    len: usize,
    dir: &Path,
    engine: &Engine,
) -> Result<Vec<Vec<u32>>, Failure> {
    let Some(path) = text else { return Ok(vec![zipf_ids(engine.spec().vocab, len)]) };
    let tokenizer = load::tokenizer(dir)?;
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
    let ids = text.lines().map(|line| tokenizer.encode_raw(line));
    let prompts: Vec<Vec<u32>> = ids.map(|ids| ids.into_iter().take(len).collect()).collect();
    let prompts: Vec<Vec<u32>> = prompts.into_iter().filter(|ids: &Vec<u32>| !ids.is_empty()).collect();
    match prompts.is_empty() {
        true => Err(Failure::usage(format!("{} has no line to go on from", path.display()))),
        false => Ok(prompts),
    }
}

fn worlds(args: &BenchDraftsArgs) -> Vec<World> {
    let acceptances: Vec<Option<f64>> = match args.acceptance.is_empty() {
        true => vec![None],
        false => args.acceptance.iter().copied().map(Some).collect(),
    };
    let depths = args.depth.iter().map(|depth| Drafting::Depth(usize::from(*depth)));
    let ways: Vec<Drafting> = [Drafting::Off, Drafting::Auto].into_iter().chain(depths).collect();
    let world = |acceptance| World {
        acceptance,
        ways: ways.iter().map(|&drafting| Way { drafting, turns: Vec::new() }).collect(),
        learnt: Controller::default(),
    };
    acceptances.into_iter().map(world).collect()
}

/// Generates behind `prompt` in all ways, in turns.
fn measure(
    engine: &mut Engine,
    prompt: &[u32],
    args: &BenchDraftsArgs,
    worlds: &mut [World],
    cancel: &CancelToken,
    step: &mut dyn FnMut(),
) -> Result<(), Failure> {
    let mut session = Session::new(engine);
    engine.set_drafting(Drafting::Off);
    // Says what is right, and leaves in the cache what every later turn finds there.
    let (answer, _) = generate(engine, &mut session, prompt, args.tokens, cancel)?;
    step();
    for round in 0..usize::from(args.rounds) {
        for world in &mut *worlds {
            let count = world.ways.len();
            if args.learnt && round == 0 {
                // A turn to learn from.
                let seed = u64::from(args.rounds) + 1;
                world.turn(engine, &mut session, prompt, &answer, Drafting::Auto, (seed, true), cancel)?;
            }
            for turn in 0..count {
                // Every way comes first as often as last.
                let at = (turn + round) % count;
                let (drafting, how) = (world.ways[at].drafting, (round as u64 + 1, args.learnt));
                let turn = world.turn(engine, &mut session, prompt, &answer, drafting, how, cancel)?;
                world.ways[at].turns.push(turn);
                step();
            }
        }
    }
    Ok(())
}

impl World {
    /// Generates `answer` again. `how` is the seed of the drafts and whether the controller keeps what it knows.
    #[allow(clippy::too_many_arguments)] // The bench's state, and what differs from turn to turn.
    fn turn(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        prompt: &[u32],
        answer: &[u32],
        drafting: Drafting,
        (seed, learnt): (u64, bool),
        cancel: &CancelToken,
    ) -> Result<Turn, Failure> {
        engine.set_drafting(drafting);
        if learnt && drafting == Drafting::Auto {
            engine.set_controller(self.learnt.clone());
        }
        let foretold = |right| Foretold::new(prompt.len(), answer.to_vec(), right, seed);
        session.foretell(self.acceptance.map(foretold));
        session.reuse(prompt);
        let before = session.tokens().len();
        let (again, outcome) = generate(engine, session, &prompt[before..], answer.len() as u32, cancel)?;
        if again != answer {
            return Err(Failure::runtime(format!(
                "with --draft {drafting} another answer came out; please report this"
            )));
        }
        if drafting == Drafting::Auto {
            self.learnt = engine.drafting().clone();
        }
        let stats = outcome.stats;
        Ok(Turn {
            rate: report::decode_rate(&stats).unwrap_or(f64::NAN),
            bytes: stats.decode_experts.step_bytes() as f64 / stats.decoded().max(1) as f64,
            drafts: stats.drafts,
        })
    }
}

fn generate(
    engine: &mut Engine,
    session: &mut Session,
    prompt: &[u32],
    tokens: u32,
    cancel: &CancelToken,
) -> Result<(Vec<u32>, Outcome), Failure> {
    let request = Request { prompt, max_tokens: tokens as usize, sampling: Sampling::greedy(), stops: &[] };
    let mut answer = Vec::new();
    let outcome = session.generate(engine, &request, cancel, None, &mut |event| {
        if let forebay_engine::Event::Token(token) = event {
            answer.push(token.id);
        }
        std::ops::ControlFlow::Continue(())
    })?;
    if outcome.finish == Finish::Cancelled { Err(Failure::Interrupted) } else { Ok((answer, outcome)) }
}

impl World {
    /// Median over turns of the speed against no drafts in the same turn.
    fn gain(&self, way: &Way) -> f64 {
        let plain = &self.ways[0];
        let ratios = way.turns.iter().zip(&plain.turns).map(|(turn, plain)| turn.rate / plain.rate);
        median(&ratios.collect::<Vec<_>>())
    }

    /// The best fixed depth in hindsight, none included, and its gain.
    fn best(&self) -> (Drafting, f64) {
        let fixed = self.ways.iter().filter(|way| way.drafting != Drafting::Auto);
        let gains = fixed.map(|way| (way.drafting, self.gain(way)));
        gains.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((Drafting::Off, 1.0))
    }
}

fn show_text(engine: &Engine, worlds: &[World]) -> String {
    let plan = engine.plan();
    let mut text = format!(
        "{} slots in {} layers; speed against no drafts, medians\n\n",
        plan.resident_slots(),
        plan.demand.layers.len(),
    );
    let Some(first) = worlds.first() else { return text };
    text += "right   tokens/s";
    for way in &first.ways[1..] {
        text += &format!("{:>8}", way.drafting.to_string());
    }
    text += "    best  auto/best  accepted  drafted  read/token plain, auto\n";
    for world in worlds {
        let of = |way: &Way, value: &dyn Fn(&Turn) -> f64| {
            median(&way.turns.iter().map(value).collect::<Vec<_>>())
        };
        let (plain, auto) = (&world.ways[0], &world.ways[1]);
        text += &match world.acceptance {
            Some(right) => format!("{right:<7.2}"),
            None => "own    ".to_owned(),
        };
        text += &format!("{:>9.2}", of(plain, &|turn| turn.rate));
        for way in &world.ways[1..] {
            text += &format!("{:>8.3}", world.gain(way));
        }
        let (best, gain) = world.best();
        let mut drafts = DraftStats::default();
        auto.turns.iter().for_each(|turn| drafts.join(&turn.drafts));
        text += &format!(
            "{:>8}{:>11.3}{:>10}{:>9}  {}, {}\n",
            best.to_string(),
            world.gain(auto) / gain,
            drafts.accepted,
            drafts.verified,
            ByteSize(of(plain, &|turn| turn.bytes) as u64),
            ByteSize(of(auto, &|turn| turn.bytes) as u64),
        );
    }
    text
}

fn show_json(engine: &Engine, worlds: &[World]) -> Value {
    let turn = |turn: &Turn| {
        json!({
            "tokens_per_s": turn.rate,
            "read_bytes_per_token": turn.bytes,
            "verified": turn.drafts.verified,
            "accepted": turn.drafts.accepted,
            "passes_by_accepted": turn.drafts.passes,
        })
    };
    let world = |world: &World| {
        let way = |way: &Way| {
            json!({
                "draft": way.drafting.to_string(),
                "gain": world.gain(way),
                "turns": way.turns.iter().map(turn).collect::<Vec<_>>(),
            })
        };
        let (best, gain) = world.best();
        json!({
            "acceptance": world.acceptance,
            "expert_wait_share": world.learnt.known().map(|known| known.waiting()),
            "ways": world.ways.iter().map(way).collect::<Vec<_>>(),
            "best_fixed": best.to_string(),
            "auto_against_best": world.gain(&world.ways[1]) / gain,
        })
    };
    json!({
        "worlds": worlds.iter().map(world).collect::<Vec<_>>(),
        "settings": report::engine_json(engine),
    })
}
