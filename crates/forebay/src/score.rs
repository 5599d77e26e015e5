//! `forebay score`: how well a model predicts a text.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Event, Session, TokenScore};
use serde_json::{Value, json};

use crate::args::ScoreArgs;
use crate::closing;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::hindsight::{Hindsight, Stretch};
use crate::interrupt::Interrupt;
use crate::load;
use crate::progress::{Progress, Unit};
use crate::prompt::{self, Limit};
use crate::recordings::Recordings;
use crate::report;
use crate::settings;
use crate::usage::Usage;

/// What GLM models saw in front of every text.
const GLM_PREFIX: &str = "[gMASK]<sop>";

/// What is to be scored, before it is cut into windows.
#[derive(Debug)]
struct Input {
    /// Ids that stand in front of every window and are never scored.
    prefix: Vec<u32>,
    /// Independent sequences.
    sequences: Vec<Vec<u32>>,
}

/// Tokens that are scored in one go, from nothing.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    tokens: Vec<u32>,
    /// Index of the first token that counts; at least 1, the first token has nothing before it.
    first: usize,
}

/// A window's scores: of the tokens from `first` on.
struct Scored {
    window: Window,
    scores: Vec<TokenScore>,
}

/// Runs the verb.
pub fn run(args: &ScoreArgs) -> Result<(), Failure> {
    let given = match &args.ids {
        Some(path) => Given::Ids(parse_ids(&prompt::read_file(path)?, path)?),
        None => Given::Text(
            prompt::read(args.text.as_deref(), args.file.as_deref(), "text", || Ok(Limit::FILE))?.0,
        ),
    };
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let input = input(given, &dir, !args.no_prefix)?;
    let interrupt = Interrupt::install()?;
    let roots = load::roots(&dir, &args.engine.disk.mirror);
    let inputs = [args.file.as_deref(), args.ids.as_deref()];
    let mut recordings = Recordings::create(&args.files, &roots, &inputs)?;
    let opening = Instant::now();
    let mut engine = load::open_engine(&dir, args.engine.options(), &args.engine.disk.mirror)?;
    let usage = Usage::begin(&dir, &mut engine);
    let load_time = opening.elapsed();
    check_ids(&input, engine.spec().vocab)?;
    let windows = cut(&input, window_length(args, &engine)?, args.skip)?;
    if windows.len() > input.sequences.len() {
        let length = windows.iter().map(|window| window.tokens.len()).max().unwrap_or(0);
        console::note(&format!(
            "the text is scored in {} windows of up to {length} tokens, each from scratch",
            windows.len()
        ));
    }
    recordings.begin(&dir, &engine, &[])?;
    let (before, disk_before) = (engine.counters(), engine.store().disk_time());
    let started = Instant::now();
    let mut session = Session::new(&engine);
    let scored = interrupt
        .during(|cancel| score(&mut engine, &mut session, windows, "scoring", &mut recordings, cancel))?;
    let time = started.elapsed();
    let experts = engine.counters().since(&before);
    let disk_time = engine.store().disk_time().saturating_sub(disk_before);
    if let Some(usage) = usage {
        usage.end(&mut engine);
    }

    let summary = Summary::of(&scored);
    let stretch = Stretch { tokens: summary.tokens, time, disk_time, ..Stretch::default() };
    let stretch = stretch.with(&experts);
    let hindsight = Hindsight::of(&mut engine, &stretch);
    let mut result = result(&dir, &engine, &input.prefix, &scored, &summary, &hindsight, time);
    closing::add_cost(&mut result, &mut engine, &roots, load_time, time);
    let mut out = Output::new();
    if args.json {
        out.json(&result)?;
    } else {
        out.write(&summary.text(scored.len()))?;
        let what = format!("{} tokens in {:.2} s", summary.tokens, time.as_secs_f64());
        closing::show(&mut engine, &roots, &hindsight, &what, experts.step_bytes());
    }
    recordings.finish(&result)
}

/// Scores every window from nothing.
fn score(
    engine: &mut Engine,
    session: &mut Session,
    windows: Vec<Window>,
    label: &'static str,
    recordings: &mut Recordings,
    cancel: &CancelToken,
) -> Result<Vec<Scored>, Failure> {
    let total: usize = windows.iter().map(|window| window.tokens.len()).sum();
    let progress = Progress::start(label, Unit::Tokens, total as u64);
    let mut before = 0;
    let score = |window: Window| {
        let (trace, mut on_pass) = recordings.watch();
        let on_event = &mut |event| match event {
            Event::Prefill { done, .. } => progress.update((before + done) as u64, total as u64),
            Event::Pass(stats) => on_pass(&stats),
            Event::Token(_) => {}
        };
        let mut scores = session.score(engine, &window.tokens, cancel, trace, on_event)?;
        before += window.tokens.len();
        scores.drain(..window.first - 1);
        Ok(Scored { window, scores })
    };
    windows.into_iter().map(score).collect()
}

/// The scores of a text with the model in `dir`, as the verb would score it; `label` says what is going on.
pub fn text(
    dir: &Path,
    text: &str,
    options: &EngineOptions,
    label: &'static str,
    cancel: &CancelToken,
) -> Result<Vec<TokenScore>, Failure> {
    let input = input(Given::Text(text.to_owned()), dir, true)?;
    let mut engine = load::open_engine(dir, *options, &[])?;
    check_ids(&input, engine.spec().vocab)?;
    let windows = cut(&input, engine.plan().context, 0)?;
    let mut session = Session::new(&engine);
    let scored = score(&mut engine, &mut session, windows, label, &mut Recordings::default(), cancel)?;
    Ok(scored.into_iter().flat_map(|window| window.scores).collect())
}

/// What the user gave.
enum Given {
    Text(String),
    Ids(Vec<Vec<u32>>),
}

/// A text is encoded; ids are taken as they are.
fn input(given: Given, dir: &Path, prefixed: bool) -> Result<Input, Failure> {
    let text = match given {
        Given::Ids(sequences) => return Ok(Input { prefix: Vec::new(), sequences }),
        Given::Text(text) => text,
    };
    let tokenizer = load::tokenizer(dir)?;
    let family = forebay_store::config::ConfigFile::read(dir)?;
    let family = family.root().opt_str("model_type")?.unwrap_or_default();
    let prefix = match prefixed && family.contains("glm") {
        true => tokenizer.encode_raw(GLM_PREFIX),
        false => Vec::new(),
    };
    // A text that brings the prefix along has it once, like any other.
    let mut ids = tokenizer.encode_raw(&text);
    if ids.starts_with(&prefix) {
        ids.drain(..prefix.len());
    }
    Ok(Input { prefix, sequences: vec![ids] })
}

/// A JSON list of ids, a JSON list of such lists, or ids separated by white space.
fn parse_ids(text: &str, path: &Path) -> Result<Vec<Vec<u32>>, Failure> {
    let bad = |what: &str, found: &dyn std::fmt::Display| {
        Failure::usage(format!(
            "{}: {what} {found}; give a JSON list of token ids, a list of such lists, or ids separated by spaces",
            path.display()
        ))
    };
    let id = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| bad("no token id:", value))
    };
    if !text.trim_start().starts_with('[') {
        let ids = text.split_whitespace().map(|word| word.parse().map_err(|_| bad("no token id:", &word)));
        return Ok(vec![ids.collect::<Result<_, _>>()?]);
    }
    let list: Vec<Value> = serde_json::from_str(text).map_err(|error| bad("not a JSON list:", &error))?;
    if list.iter().any(Value::is_array) {
        let sequence = |value: &Value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            other => Err(bad("a list of windows holds", other)),
        };
        return list.iter().map(sequence).collect();
    }
    Ok(vec![list.iter().map(id).collect::<Result<_, _>>()?])
}

fn check_ids(input: &Input, vocab: usize) -> Result<(), Failure> {
    let mut ids = input.sequences.iter().flatten();
    match ids.find(|&&id| id as usize >= vocab) {
        Some(id) => Err(Failure::usage(format!(
            "token id {id} is outside the vocabulary of {vocab} ids; use ids of this model's tokenizer"
        ))),
        None => Ok(()),
    }
}

fn window_length(args: &ScoreArgs, engine: &Engine) -> Result<usize, Failure> {
    let context = engine.plan().context;
    match args.window.map(|window| window as usize) {
        Some(window) if window > context => Err(Failure::usage(format!(
            "a window of {window} tokens does not fit into a context of {context}; lower --window or raise --context"
        ))),
        window => Ok(window.unwrap_or(context)),
    }
}

/// Cuts sequences into windows of at most `length` tokens, the prefix included.
fn cut(input: &Input, length: usize, skip: usize) -> Result<Vec<Window>, Failure> {
    let prefix = &input.prefix;
    let room = length.saturating_sub(prefix.len());
    if room == 0 {
        return Err(Failure::usage(format!(
            "windows of {length} tokens have no room beside the prefix of {}; raise --window or --context, or add --no-prefix",
            prefix.len()
        )));
    }
    let first = prefix.len().saturating_add(skip).max(1);
    let windows: Vec<Window> = input
        .sequences
        .iter()
        .flat_map(|sequence| sequence.chunks(room))
        .map(|tokens| [prefix, tokens].concat())
        .map(|tokens| Window { first: first.min(tokens.len()), tokens })
        .collect();
    if windows.iter().all(|window| window.first == window.tokens.len()) {
        let tokens: usize = windows.iter().map(|window| window.tokens.len()).sum();
        return Err(Failure::usage(format!(
            "none of the {tokens} tokens can be scored; give a longer text or lower --skip"
        )));
    }
    Ok(windows)
}

/// All windows together.
#[derive(Default)]
struct Summary {
    tokens: usize,
    scored: usize,
    /// Tokens that the model would have chosen.
    exact: usize,
    /// Sum of log-probabilities.
    sum: f64,
}

impl Summary {
    fn of(windows: &[Scored]) -> Self {
        let mut all = Self::default();
        for Scored { window, scores } in windows {
            all.tokens += window.tokens.len();
            all.scored += scores.len();
            all.exact += scores.iter().filter(|score| score.best == score.token).count();
            all.sum += scores.iter().map(|score| score.log_probability).sum::<f64>();
        }
        all
    }

    fn mean(&self) -> f64 {
        self.sum / self.scored as f64
    }

    fn perplexity(&self) -> f64 {
        (-self.mean()).exp()
    }

    fn text(&self, windows: usize) -> String {
        format!(
            "perplexity       {:.4}\n\
             log-probability  {:.4} in all, {:.5} per token\n\
             tokens           {} scored of {} in {windows} window{}; {:.1} % predicted exactly\n",
            self.perplexity(),
            self.sum,
            self.mean(),
            self.scored,
            self.tokens,
            if windows == 1 { "" } else { "s" },
            100.0 * self.exact as f64 / self.scored as f64,
        )
    }
}

fn result(
    dir: &Path,
    engine: &Engine,
    prefix: &[u32],
    scored: &[Scored],
    summary: &Summary,
    hindsight: &Hindsight,
    time: Duration,
) -> Value {
    let seconds = time.as_secs_f64();
    let windows: Vec<Value> = scored
        .iter()
        .map(|Scored { window, scores }| {
            json!({
                "token_ids": window.tokens,
                "first_scored": window.first,
                "log_probabilities": scores.iter().map(|score| score.log_probability).collect::<Vec<_>>(),
                "likeliest_ids": scores.iter().map(|score| score.best).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "perplexity": summary.perplexity(),
        "mean_log_probability": summary.mean(),
        "log_probability": summary.sum,
        "tokens": summary.tokens,
        "scored_tokens": summary.scored,
        "predicted_exactly": summary.exact,
        "prefix_ids": prefix,
        "seconds": seconds,
        "tokens_per_s": summary.tokens as f64 / seconds,
        "hindsight": hindsight.json(),
        "model": report::model_json(dir, engine),
        "settings": report::engine_json(engine),
        "windows": windows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Option<Vec<Vec<u32>>> {
        parse_ids(text, Path::new("ids")).ok()
    }

    #[test]
    fn ids_in_three_forms() {
        assert_eq!(ids(" [1, 2,3]"), Some(vec![vec![1, 2, 3]]));
        assert_eq!(ids("[[1, 2], [3]]"), Some(vec![vec![1, 2], vec![3]]));
        assert_eq!(ids("1 2\n3\t4\n"), Some(vec![vec![1, 2, 3, 4]]));
        for wrong in ["[1, -2]", "[1, [2]]", "[[1], 2]", "[1.5]", "[4294967296]", "1,2", "[1", "{}", "x"] {
            assert!(ids(wrong).is_none(), "{wrong}");
        }
    }

    fn windows(prefix: &[u32], tokens: u32, length: usize, skip: usize) -> Vec<(usize, usize)> {
        let input = Input { prefix: prefix.to_vec(), sequences: vec![(0..tokens).collect()] };
        let windows = cut(&input, length, skip).unwrap();
        let text: Vec<u32> = windows.iter().flat_map(|w| w.tokens[prefix.len()..].to_vec()).collect();
        assert_eq!(text, (0..tokens).collect::<Vec<_>>(), "every token is in one window");
        assert!(windows.iter().all(|w| w.tokens.starts_with(prefix)));
        windows.iter().map(|w| (w.tokens.len(), w.first)).collect()
    }

    #[test]
    fn windows_hold_the_prefix_and_skip_their_own_start() {
        assert_eq!(windows(&[], 10, 4, 0), [(4, 1), (4, 1), (2, 1)]);
        assert_eq!(windows(&[], 10, 4, 3), [(4, 3), (4, 3), (2, 2)]);
        assert_eq!(windows(&[8, 9], 5, 4, 0), [(4, 2), (4, 2), (3, 2)]);
        assert_eq!(windows(&[8, 9], 5, 10, 1), [(7, 3)]);
    }

    #[test]
    fn nothing_to_score_is_an_error() {
        let cut_one = |prefix: &[u32], tokens: &[u32], length, skip| {
            cut(&Input { prefix: prefix.to_vec(), sequences: vec![tokens.to_vec()] }, length, skip)
        };
        assert!(cut_one(&[], &[], 4, 0).is_err());
        assert!(cut_one(&[], &[1], 4, 0).is_err());
        assert!(cut_one(&[], &[1, 2], 4, 2).is_err());
        assert!(cut_one(&[8, 9], &[1], 2, 0).is_err());
        assert!(cut_one(&[8, 9], &[1], 4, usize::MAX).is_err());
        assert!(cut_one(&[8, 9], &[1], 4, 0).is_ok());
    }
}
