//! `forebay bench cache`: what each policy would have hit, beside the best cache possible.

use std::fmt::Write;
use std::fs::File;
use std::io::BufReader;

use forebay_tiers::Policy;
use forebay_tiers::routes::Routes;
use forebay_tiers::routes::file::read_routes;
use forebay_tiers::routes::synthetic::CALIBRATED;
use forebay_tiers::sim::{Contestant, Outcome, replay};
use serde_json::{Map, Value, json};

use crate::args::BenchCacheArgs;
use crate::console::Output;
use crate::failure::Failure;

/// Slots per layer, as in the performance notes.
const BUDGETS: [usize; 14] = [1, 2, 4, 6, 8, 10, 12, 16, 25, 32, 48, 64, 96, 128];
/// Layers that are made up.
const LAYERS: usize = 8;
/// Tokens of other texts that a made-up history has seen.
const HISTORY: usize = 2400;
/// Half-lives of aged frequency, of which the best counts, as in the notes.
const HALF_LIVES: [u32; 4] = [7, 23, 69, 138];
/// How often LFRU halves: the reference's usual interval between passes.
const HALVE_EVERY: u32 = 64;

/// A column: its heading, its name for programs, who plays (the best of several counts), and
/// whether it knows the history.
struct Column {
    head: &'static str,
    name: &'static str,
    players: Vec<Contestant>,
    history: bool,
}

/// Every column, the default's last but one and the optimum last.
fn columns() -> Vec<Column> {
    let one = |head, name, player, history| Column { head, name, players: vec![player], history };
    let policy = Contestant::Policy;
    let aged = HALF_LIVES.map(|half_life| policy(Policy::Aged { half_life })).to_vec();
    vec![
        one("global LRU", "global_lru", Contestant::GlobalLru, false),
        one("naive LRU", "one_at_a_time_lru", Contestant::OneAtATime, false),
        one("LRU", "trimmed_lru", Contestant::TrimmedLru, false),
        one("LRU, hits stay", "lru", policy(Policy::Lru), false),
        one("pins", "pins", Contestant::Pins, true),
        one("half pins", "half_pins", Contestant::HalfPins, true),
        one("LFRU", "lfru", policy(Policy::Lfru { halve_every: HALVE_EVERY }), false),
        Column { head: "aged LFU", name: "aged", players: aged, history: true },
        one("blend, cold", "blend_without_history", policy(Policy::Blend), false),
        one("blend *", "blend", policy(Policy::Blend), true),
        one("Belady", "belady", Contestant::Belady, false),
    ]
}

/// One budget's outcomes, in the order of the columns.
struct Line {
    slots: usize,
    outcomes: Vec<Outcome>,
}

/// Runs the verb.
pub fn run(args: &BenchCacheArgs) -> Result<(), Failure> {
    let (routes, history, source) = match &args.trace {
        Some(path) => recorded(path)?,
        None => made_up(args),
    };
    let columns = columns();
    let budgets = BUDGETS.iter().filter(|slots| **slots < routes.experts);
    let lines: Vec<Line> = budgets.map(|&slots| line(&routes, &history, &columns, slots)).collect();
    let mut out = Output::new();
    if args.json {
        return out.json(&result_json(&routes, &source, &columns, &lines));
    }
    out.write(&table(&routes, &source, &columns, &lines))
}

fn made_up(args: &BenchCacheArgs) -> (Routes, Vec<Vec<u64>>, String) {
    let routes = CALIBRATED.routes(LAYERS, args.tokens as usize, args.seed);
    // Another text of the same model.
    let history = CALIBRATED.routes(LAYERS, HISTORY, args.seed.wrapping_add(600)).counts();
    (routes, history, format!("made up like GLM-5.2's, seed {}", args.seed))
}

/// The second half of a recording; the first is its history.
fn recorded(path: &std::path::Path) -> Result<(Routes, Vec<Vec<u64>>, String), Failure> {
    let shown = path.display();
    let file = File::open(path).map_err(|error| {
        Failure::usage(format!("cannot open the route trace {shown}: {error}; check the path"))
    })?;
    let (header, routes) = read_routes(BufReader::new(file))
        .map_err(|error| Failure::usage(format!("{shown} cannot be replayed: {error}")))?;
    let steps = routes.layers.iter().map(Vec::len).max().unwrap_or(0);
    if steps < 2 {
        return Err(Failure::usage(format!(
            "{shown} has fewer than two passes; record a longer answer with forebay run --route-trace"
        )));
    }
    let (first, second) = routes.split(steps / 2);
    let model: String = header.model.chars().take(12).collect();
    Ok((second, first.counts(), format!("second half of {shown}, model {model}")))
}

fn line(routes: &Routes, history: &[Vec<u64>], columns: &[Column], slots: usize) -> Line {
    let best = |column: &Column| {
        let history = if column.history { history } else { &[] };
        let outcomes = column.players.iter().map(|player| replay(routes, *player, slots, history));
        outcomes.min_by_key(|outcome| outcome.misses).unwrap_or_default()
    };
    Line { slots, outcomes: columns.iter().map(best).collect() }
}

fn result_json(routes: &Routes, source: &str, columns: &[Column], lines: &[Line]) -> Value {
    let by_name = |line: &Line, value: &dyn Fn(&Outcome) -> Value| -> Map<String, Value> {
        columns.iter().zip(&line.outcomes).map(|(c, outcome)| (c.name.to_owned(), value(outcome))).collect()
    };
    let budgets = lines.iter().map(|line| {
        json!({
            "slots_per_layer": line.slots,
            "hit_rate": by_name(line, &|outcome| json!(outcome.hit_rate())),
            "misses": by_name(line, &|outcome| json!(outcome.misses)),
        })
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "routes": source,
        "layers": routes.layers.len(),
        "experts": routes.experts,
        "experts_per_token": routes.top_k,
        "steps": routes.layers.iter().map(Vec::len).max(),
        "previous_token_overlap": routes.overlap(),
        "distinct_in_4": routes.distinct(4),
        "distinct_in_32": routes.distinct(32),
        "default": "blend",
        "budgets": budgets.collect::<Vec<_>>(),
    })
}

fn table(routes: &Routes, source: &str, columns: &[Column], lines: &[Line]) -> String {
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let mut text = format!(
        "routes: {source}\n{} layers of {} experts, {} a token, {} steps; {} % of the previous token's experts \
         used again; {} distinct in 4 steps, {} in 32\n\nshare of experts found in memory, by slots per layer:\n\n",
        routes.layers.len(),
        routes.experts,
        routes.top_k,
        routes.layers.iter().map(Vec::len).max().unwrap_or(0),
        figure(routes.overlap().map(|share| 100.0 * share)),
        figure(routes.distinct(4)),
        figure(routes.distinct(32)),
    );
    let width = |column: &Column| column.head.len().max(5);
    let mut row = |first: &str, cells: &mut dyn Iterator<Item = String>, last: &str| {
        let cells: Vec<String> =
            columns.iter().zip(cells).map(|(column, cell)| format!("{cell:>0$}", width(column))).collect();
        let _ = writeln!(text, "{first:>5}  {}  {last:>14}", cells.join("  "));
    };
    row("slots", &mut columns.iter().map(|column| column.head.to_owned()), "reads / Belady");
    for line in lines {
        let mut cells = line.outcomes.iter().map(|outcome| format!("{:.3}", outcome.hit_rate()));
        let [.., ours, best] = &line.outcomes[..] else { continue };
        let ratio = ours.misses as f64 / best.misses.max(1) as f64;
        row(&line.slots.to_string(), &mut cells, &format!("{ratio:.2}"));
    }
    text += "\n* the default. Pins, half pins, aged LFU and it know the history of other texts. docs/cache.md \
             explains the columns.\n";
    text
}
