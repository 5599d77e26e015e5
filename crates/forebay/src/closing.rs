//! What a run says at its end: one line for people, and for programs where its bytes and its time went.

use std::path::PathBuf;
use std::time::Duration;

use forebay_core::ByteSize;
use forebay_engine::{Engine, PassStats};
use forebay_io::{MemoryInfo, RootStats};
use forebay_model::Phase;
use forebay_tiers::Counters;
use serde_json::{Map, Value, json};

use crate::console;
use crate::hindsight::Hindsight;
use crate::report;

/// Ends what is shown of a run: what went wrong with its folders, then one line. `read` are the bytes of experts
/// that were read for `what` was done.
pub fn show(engine: &mut Engine, roots: &[PathBuf], hindsight: &Hindsight, what: &str, read: u64) {
    let notes = root_notes(roots, &engine.store().reader().roots());
    notes.iter().chain(&repeated(&engine.counters())).for_each(|note| console::note(note));
    console::diagnose(&format!("{}{}\n", line(hindsight, what, read), report::deviations(engine.options())));
}

/// The line that ends every run: speed and what limits it, then `what` was done, and what was read for it. Which
/// options changed the result follows.
fn line(hindsight: &Hindsight, what: &str, read: u64) -> String {
    let read = (read > 0).then(|| format!("{} of experts read", ByteSize(read)));
    let parts = [hindsight.line(), Some(what.to_owned()), read];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join("; ")
}

/// One line for each folder of the model's files that let the run down.
fn root_notes(roots: &[PathBuf], stats: &[RootStats]) -> Vec<String> {
    let bad = roots.iter().zip(stats).filter(|(_, stats)| stats.errors > 0);
    bad.map(|(root, stats)| {
        let RootStats { errors, suspects, .. } = stats;
        let were = if *errors == 1 { "read failed" } else { "reads failed" };
        let others = if roots.len() > 1 { "; another copy was read instead where there is one" } else { "" };
        format!(
            "{errors} {were} in {}{others}; files of it that are avoided now: {suspects}; check this disk",
            root.display()
        )
    })
    .collect()
}

/// What was not read at the first try, or not past the page cache, although it was to be.
fn repeated(counters: &Counters) -> Option<String> {
    let Counters { reads, retries, fallbacks, .. } = counters;
    (retries + fallbacks > 0).then(|| {
        format!(
            "of {reads} reads {retries} were tried again and {fallbacks} were ended through the page cache; nothing is \
             missing, but a disk that goes on so is slow: forebay bench io measures it"
        )
    })
}

/// Adds to `result` what the process cost since the model was opened: streaming, bytes by class, time by part, and what each folder
/// and memory came to. `work` is the time of what was asked for, loading apart.
pub fn add_cost(result: &mut Value, engine: &mut Engine, roots: &[PathBuf], load: Duration, work: Duration) {
    let counters = engine.counters();
    let stats = engine.store().reader().roots();
    let root = |(folder, stats): (&PathBuf, &RootStats)| {
        json!({
            "folder": folder.display().to_string(),
            "bytes_read": stats.bytes,
            "errors": stats.errors,
            "suspect_files": stats.suspects,
            "bytes_per_s": stats.rate,
        })
    };
    let memory = MemoryInfo::read();
    let time = [("loading", load)].into_iter().chain(named(engine.profile().all()));
    let entries = [
        ("experts", report::experts_json(&counters)),
        (
            "bytes_by_class",
            json!({
                "experts": counters.bytes,
                "embeddings": engine.embedding_bytes_read(),
                "resident": engine.loaded_bytes(),
            }),
        ),
        ("roots", roots.iter().zip(&stats).map(root).collect()),
        ("time", time_json(&parts(time, load + work, "sampling and text"))),
        (
            "memory",
            json!({
                "planned": engine.plan().total(),
                "footprint_now": memory.footprint(),
                "footprint_peak": memory.process_peak_rss,
            }),
        ),
    ];
    for (name, value) in entries {
        result[name] = value;
    }
}

/// Where the time of one pass went.
pub fn pass_time_json(stats: &PassStats) -> Value {
    time_json(&parts(named(stats.phases), stats.time, "other"))
}

fn named(phases: [Duration; Phase::ALL.len()]) -> impl Iterator<Item = (&'static str, Duration)> {
    Phase::ALL.iter().map(|phase| phase.name()).zip(phases)
}

/// Parts of `wall`, and what none of them accounts for.
fn parts<'a>(
    known: impl Iterator<Item = (&'a str, Duration)>,
    wall: Duration,
    rest: &'a str,
) -> Vec<(&'a str, Duration)> {
    let mut parts: Vec<_> = known.collect();
    let spent: Duration = parts.iter().map(|(_, time)| time).sum();
    parts.push((rest, wall.saturating_sub(spent)));
    parts
}

/// Seconds of each part and its share of all; the shares add up to 1.
fn time_json(parts: &[(&str, Duration)]) -> Value {
    let wall: f64 = parts.iter().map(|(_, time)| time.as_secs_f64()).sum();
    let of = |value: &dyn Fn(f64) -> Value| -> Map<String, Value> {
        parts.iter().map(|(name, time)| ((*name).to_owned(), value(time.as_secs_f64()))).collect()
    };
    json!({
        "wall_s": wall,
        "seconds": of(&|seconds| json!(seconds)),
        "shares": of(&|seconds| json!(if wall > 0.0 { seconds / wall } else { 0.0 })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_says_what_was_read_for_what_was_done() {
        let nothing = Hindsight::default();
        assert_eq!(line(&nothing, "2 tokens", 0), "2 tokens");
        assert_eq!(line(&nothing, "2 tokens", 3_210_000_000), "2 tokens; 3.21 GB of experts read");
    }

    #[test]
    fn a_folder_that_let_the_run_down_is_named() {
        let roots = ["/a", "/b"].map(PathBuf::from);
        let bad = RootStats { errors: 3, suspects: 1, ..RootStats::default() };
        let stats = [bad, RootStats::default()];
        let notes = root_notes(&roots, &stats);
        assert_eq!(
            notes,
            ["3 reads failed in /a; another copy was read instead where there is one; files of it that are \
              avoided now: 1; check this disk"]
        );
        assert!(root_notes(&roots[1..], &stats[1..]).is_empty());
    }

    #[test]
    fn reads_that_took_two_tries_are_told() {
        let all_well = Counters { reads: 9, direct_reads: 9, ..Counters::default() };
        assert_eq!(repeated(&all_well), None);
        for (retries, fallbacks) in [(2, 0), (0, 1)] {
            let told = repeated(&Counters { retries, fallbacks, ..all_well }).unwrap();
            let words = format!("of 9 reads {retries} were tried again and {fallbacks} were ended");
            assert!(told.starts_with(&words), "{told}");
        }
    }

    #[test]
    fn time_goes_somewhere() {
        let second = Duration::from_secs;
        let known = [("loading", second(2)), ("head", second(1)), ("router", second(3))];
        let found = parts(known.into_iter(), second(8), "text");
        assert_eq!(found[3], ("text", second(2)));
        let json = time_json(&found);
        assert_eq!((&json["wall_s"], &json["shares"]["router"]), (&json!(8.0), &json!(3.0 / 8.0)));
        // Passes that were run and then failed are in the profile and in no answer.
        let found = parts(known.into_iter(), second(2), "text");
        let json = time_json(&found);
        let shares = json["shares"].as_object().unwrap().values();
        assert_eq!(shares.map(|share| share.as_f64().unwrap()).sum::<f64>(), 1.0);
        assert_eq!(time_json(&[])["wall_s"], json!(0.0));
    }
}
