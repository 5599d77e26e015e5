//! `forebay bench cache`: what each policy would have hit, beside the best cache possible.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use forebay_tiers::Policy;
use forebay_tiers::routes::Routes;
use forebay_tiers::routes::file::{Record, read_routes_seen};
use forebay_tiers::routes::synthetic::CALIBRATED;
use forebay_tiers::routes::text::write_text;
use forebay_tiers::sim::{Contestant, Outcome, replay};
use serde_json::{Map, Value, json};

use crate::args::BenchCacheArgs;
use crate::console::Output;
use crate::failure::Failure;
use crate::outputs::Protected;
use crate::progress::{Progress, Unit};
use crate::prompt;

/// Slots per layer.
const BUDGETS: [usize; 14] = [1, 2, 4, 6, 8, 10, 12, 16, 25, 32, 48, 64, 96, 128];
/// Bytes of a recording that are read at a time.
const READ: usize = 1 << 20;
/// Layers that are made up.
const LAYERS: usize = 8;
/// Tokens of other texts that a made-up history has seen.
const HISTORY: usize = 2400;
/// Half-lives of aged frequency in tokens, of which the best counts.
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

/// What is replayed.
struct Played {
    routes: Routes,
    /// How often each expert was used before, by layer.
    history: Vec<Vec<u64>>,
    source: String,
    /// Of the experts chosen while recording, the share that was in memory.
    resident: Option<f64>,
}

/// Runs the verb.
pub fn run(args: &BenchCacheArgs) -> Result<(), Failure> {
    let played = match (&args.trace, &args.export_text) {
        (Some(trace), Some(out)) => return export(trace, out),
        (Some(trace), None) => recorded(trace)?,
        _ => made_up(args),
    };
    let columns = columns();
    let budgets: Vec<usize> = BUDGETS.into_iter().filter(|slots| *slots < played.routes.experts).collect();
    let progress = Progress::start("replaying", Unit::Share, 0);
    let total = (budgets.len() * columns.len()) as u64;
    let mut done = 0;
    let lines = budgets.into_iter().map(|slots| {
        let outcomes = columns.iter().map(|column| {
            let outcome = best(&played, column, slots);
            done += 1;
            progress.update(done, total);
            outcome
        });
        Line { slots, outcomes: outcomes.collect() }
    });
    let lines: Vec<Line> = lines.collect();
    drop(progress);
    let mut out = Output::new();
    match args.json {
        true => out.json(&result_json(&played, &columns, &lines)),
        false => out.write(&table(&played, &columns, &lines)),
    }
}

fn made_up(args: &BenchCacheArgs) -> Played {
    let _progress = Progress::start("making up routes", Unit::Share, 0);
    let routes = CALIBRATED.routes(LAYERS, args.tokens as usize, args.seed);
    // Another text of the same model.
    let history = CALIBRATED.routes(LAYERS, HISTORY, args.seed.wrapping_add(600)).counts();
    Played { routes, history, source: format!("made up like GLM-5.2's, seed {}", args.seed), resident: None }
}

/// A recording, and a line of progress while it is read.
fn open(path: &Path) -> Result<impl BufRead, Failure> {
    let file = prompt::open(path)?;
    let bytes = file.metadata().map_or(0, |facts| facts.len());
    let progress = Progress::start("reading the route trace", Unit::Bytes, bytes);
    Ok(BufReader::with_capacity(READ, Counted { file, progress, bytes, done: 0 }))
}

/// A file that says how much of it has been read.
struct Counted {
    file: File,
    progress: Progress,
    bytes: u64,
    done: u64,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.done += read as u64;
        self.progress.update(self.done, self.bytes);
        Ok(read)
    }
}

/// The second half of a recording; the first is its history.
fn recorded(path: &Path) -> Result<Played, Failure> {
    let shown = path.display();
    // Experts chosen by tokens for which it is known what was in memory, and how many of them were.
    let (mut chosen, mut there) = (0usize, 0usize);
    let seen = &mut |record: &Record| {
        if let Some(resident) = &record.resident {
            chosen += record.ids.len();
            there += resident.len();
        }
    };
    let (header, routes) = read_routes_seen(open(path)?, seen)
        .map_err(|error| Failure::usage(format!("{shown} cannot be replayed: {error}")))?;
    let steps = routes.layers.iter().map(Vec::len).max().unwrap_or(0);
    if steps < 2 {
        return Err(Failure::usage(format!(
            "{shown} has fewer than two passes; record a longer answer with forebay run --route-trace"
        )));
    }
    let (first, second) = routes.split(steps / 2);
    let model: String = header.model.chars().take(12).collect();
    Ok(Played {
        history: first.counts(),
        routes: second,
        source: format!("second half of {shown}, model {model}"),
        resident: (chosen > 0).then(|| there as f64 / chosen as f64),
    })
}

/// Writes a recording as text, to a file that is not there yet.
fn export(trace: &Path, out: &Path) -> Result<(), Failure> {
    let input = open(trace)?;
    let mut protected = Protected::default();
    protected.file(trace, "it is the route trace to export");
    let file = protected.claim(out, "the text")?.create_new()?;
    let mut file = Watched { file, failed: None };
    let written = write_text(input, &mut BufWriter::new(&mut file));
    let Watched { file, failed } = file;
    let lines = written.map_err(|error| {
        // Half an export is none, and its name would be taken at the next try.
        drop(file);
        let _ = std::fs::remove_file(out);
        match failed {
            Some(cause) => Failure::runtime(format!(
                "cannot write {}: {cause}; free some space or choose another path",
                out.display()
            )),
            None => Failure::usage(format!("{} is not exported: {error}", trace.display())),
        }
    })?;
    Output::new().write(&format!("{lines} lines written to {}\n", out.display()))
}

/// A file that remembers what went wrong with it, so that nothing else is blamed.
struct Watched {
    file: File,
    failed: Option<String>,
}

impl Watched {
    fn noted<T>(&mut self, done: io::Result<T>) -> io::Result<T> {
        match &done {
            // An interruption is tried again.
            Err(error) if error.kind() != io::ErrorKind::Interrupted => self.failed = Some(error.to_string()),
            _ => {}
        }
        done
    }
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes);
        self.noted(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.file.flush();
        self.noted(flushed)
    }
}

/// What the best of a column's players comes to.
fn best(played: &Played, column: &Column, slots: usize) -> Outcome {
    let history = if column.history { &played.history[..] } else { &[] };
    let outcomes = column.players.iter().map(|player| replay(&played.routes, *player, slots, history));
    outcomes.min_by_key(|outcome| outcome.misses).unwrap_or_default()
}

fn result_json(played: &Played, columns: &[Column], lines: &[Line]) -> Value {
    let Played { routes, source, resident, .. } = played;
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
        "resident_when_recorded": resident,
        "previous_token_overlap": routes.overlap(),
        "distinct_in_4": routes.distinct(4),
        "distinct_in_32": routes.distinct(32),
        "default": "blend",
        "budgets": budgets.collect::<Vec<_>>(),
    })
}

fn table(played: &Played, columns: &[Column], lines: &[Line]) -> String {
    let Played { routes, source, resident, .. } = played;
    let resident = resident.map_or(String::new(), |share| {
        format!("\nof the experts chosen, {:.1} % were in memory when this was recorded", 100.0 * share)
    });
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let mut text = format!(
        "routes: {source}\n{} layers of {} experts, {} a token, {} steps; {} % of the previous token's experts \
         used again; {} distinct in 4 steps, {} in 32{resident}\n\nshare of experts found in memory, by slots per layer:\n\n",
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
