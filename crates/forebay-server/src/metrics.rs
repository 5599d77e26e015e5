//! What is counted, in the text format of Prometheus.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_engine::scheduler::{Health, SchedulerState};
use forebay_tiers::counters::Counters;

use crate::fleet::{Loads, Look, Standing};
use crate::jobs::{Counts, Status};
use crate::run::Reason;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Takes back what is no more: for gauges.
    pub fn take(&self, less: u64) {
        self.0.fetch_sub(less, Ordering::Relaxed);
    }

    /// The count.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The upper ends of the ranges of a histogram, in seconds.
const ENDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

/// How many durations fell into which range.
#[derive(Debug, Default)]
pub struct Durations {
    ranges: [Counter; ENDS.len() + 1],
    nanos: Counter,
}

impl Durations {
    /// Counts one.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let range = ENDS.iter().position(|end| seconds <= *end).unwrap_or(ENDS.len());
        self.ranges[range].add(1);
        self.nanos.add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// What the server itself counts; the rest is asked of the scheduler.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests by the hundred of their status, from 100 to 500.
    pub statuses: [Counter; 5],
    /// Connections that are open.
    pub connections: Counter,
    /// Until a request's turn came.
    pub wait: Durations,
    /// From a request to its first token.
    pub first_token: Durations,
    /// Answers that were given up because nobody read them.
    pub slow_clients: Counter,
    /// Answers that failed.
    pub failed: Counter,
    /// Answers by [`Reason`].
    reasons: [Counter; 5],
    /// How far forecasts of the first token were off, and how many there were.
    forecast_error: Durations,
    /// The time that was forecast in all, in nanoseconds, and the time that it took.
    forecast_nanos: Counter,
    taken_nanos: Counter,
}

const REASONS: [&str; 5] = ["stop", "stop_string", "tool_calls", "length", "cancelled"];

impl Metrics {
    /// Counts the end of an answer; `None` is one that was given up.
    pub fn ended(&self, reason: Option<Reason>) {
        let place = match reason {
            Some(Reason::Stop) => 0,
            Some(Reason::StopString(_)) => 1,
            Some(Reason::Calls) => 2,
            Some(Reason::Length) => 3,
            None => 4,
        };
        self.reasons[place].add(1);
    }

    /// Compares a forecast with what came.
    pub fn forecast(&self, expected: Duration, taken: Duration) {
        self.forecast_error.observe(expected.abs_diff(taken));
        self.forecast_nanos.add(u64::try_from(expected.as_nanos()).unwrap_or(u64::MAX));
        self.taken_nanos.add(u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Everything, as text.
    pub fn text(&self, state: &SchedulerState, model: &str) -> String {
        let mut page = Page(String::new());
        let model = model.replace(['\\', '"', '\n'], "_");
        page.gauge(
            "forebay_info",
            "What runs.",
            &[(format!("version=\"{}\",model=\"{model}\"", env!("CARGO_PKG_VERSION")), 1.0)],
        );
        let ready = f64::from(u8::from(state.health == Health::Ready));
        page.gauge("forebay_ready", "1 while requests are taken on.", &[(String::new(), ready)]);
        page.gauge(
            "forebay_requests_running",
            "Requests that are being answered.",
            &[(String::new(), state.running as f64)],
        );
        let waiting = [
            ("priority=\"interactive\"".to_owned(), state.waiting as f64),
            ("priority=\"batch\"".to_owned(), state.waiting_batch as f64),
        ];
        page.gauge("forebay_requests_waiting", "Requests whose turn has not come.", &waiting);
        page.gauge(
            "forebay_connections",
            "Open connections.",
            &[(String::new(), self.connections.value() as f64)],
        );
        let statuses: Vec<_> = self
            .statuses
            .iter()
            .enumerate()
            .map(|(at, count)| (format!("status=\"{}xx\"", at + 1), count.value() as f64))
            .collect();
        page.counter("forebay_http_responses_total", "Responses by status.", &statuses);
        let totals = &state.totals;
        let reasons: Vec<_> = REASONS
            .iter()
            .zip(&self.reasons)
            .map(|(name, count)| (format!("reason=\"{name}\""), count.value() as f64))
            .collect();
        page.counter("forebay_answers_total", "Answers by the reason for their end.", &reasons);
        for (name, help, value) in [
            ("forebay_answers_failed_total", "Answers that failed.", self.failed.value() as f64),
            ("forebay_requests_submitted_total", "Requests taken on.", totals.submitted as f64),
            (
                "forebay_requests_refused_total",
                "Requests refused because too many waited.",
                totals.refused as f64,
            ),
            (
                "forebay_slow_clients_total",
                "Answers given up because nobody read them.",
                self.slow_clients.value() as f64,
            ),
            ("forebay_prompt_tokens_total", "Prompt tokens computed.", totals.prompt_tokens as f64),
            (
                "forebay_prompt_tokens_cached_total",
                "Prompt tokens that were known.",
                totals.reused_tokens as f64,
            ),
            ("forebay_generation_tokens_total", "Tokens generated.", totals.new_tokens as f64),
            ("forebay_prefill_seconds_total", "Time for prompts.", totals.prefill.as_secs_f64()),
            ("forebay_decode_seconds_total", "Time for answers.", totals.decode.as_secs_f64()),
            (
                "forebay_draft_tokens_total",
                "Drafted tokens that were verified.",
                totals.drafts.verified as f64,
            ),
            (
                "forebay_draft_tokens_accepted_total",
                "Drafted tokens that were right.",
                totals.drafts.accepted as f64,
            ),
        ] {
            page.counter(name, help, &[(String::new(), value)]);
        }
        page.experts(&state.experts);
        let (used, all) = state.kv_blocks;
        let blocks = [("state=\"used\"".to_owned(), used as f64), ("state=\"all\"".to_owned(), all as f64)];
        page.gauge("forebay_kv_blocks", "Blocks of the KV cache.", &blocks);
        page.gauge(
            "forebay_expert_slots",
            "Experts that memory has room for.",
            &[(String::new(), state.slots as f64)],
        );
        page.durations(
            "forebay_time_to_first_token_seconds",
            "From a request to its first token.",
            &self.first_token,
        );
        page.durations("forebay_queue_wait_seconds", "Until a request's turn came.", &self.wait);
        page.durations(
            "forebay_forecast_error_seconds",
            "How far the forecast of the first token was off, either way.",
            &self.forecast_error,
        );
        for (name, help, counter) in [
            (
                "forebay_forecast_seconds_total",
                "Time that was forecast until first tokens.",
                &self.forecast_nanos,
            ),
            ("forebay_forecast_taken_seconds_total", "Time that they took.", &self.taken_nanos),
        ] {
            page.counter(name, help, &[(String::new(), counter.value() as f64 / 1e9)]);
        }
        page.0
    }
}

/// What is counted of models and their loads.
pub fn of_models<S>(names: &[String], look: &Look<S>) -> String {
    let mut page = Page(String::new());
    let label = |place: usize| format!("model=\"{}\"", names[place].replace(['\\', '"', '\n'], "_"));
    let all = |value: &dyn Fn(usize) -> f64| -> Vec<(String, f64)> {
        (0..names.len()).map(|place| (label(place), value(place))).collect()
    };
    let resident = all(&|place| f64::from(u8::from(look.standing == Standing::Resident(place))));
    page.gauge("forebay_model_resident", "1 while the model is in memory.", &resident);
    let loads = |place: usize| &look.loads[place];
    let done = all(&|place| loads(place).done as f64);
    page.counter("forebay_model_loads_total", "Times that the model was loaded.", &done);
    let failed = all(&|place| loads(place).failed as f64);
    page.counter("forebay_model_load_failures_total", "Times that it could not be.", &failed);
    let time = all(&|place| loads(place).time.as_secs_f64());
    page.counter("forebay_model_load_seconds_total", "Time that all of that took.", &time);
    let last = |(place, loads): (usize, &Loads)| Some((label(place), loads.last?.as_secs_f64()));
    let last: Vec<_> = look.loads.iter().enumerate().filter_map(last).collect();
    page.gauge("forebay_model_last_load_seconds", "What loading it took the last time.", &last);
    page.0
}

/// What is counted of files and batches.
pub fn of_batches(counts: &Counts) -> String {
    let mut page = Page(String::new());
    let statuses: Vec<_> = Status::ALL
        .iter()
        .zip(counts.batches)
        .map(|(status, count)| (format!("status=\"{}\"", status.name()), count as f64))
        .collect();
    page.gauge("forebay_batches", "Batches by status.", &statuses);
    let requests = [
        ("completed", counts.completed),
        ("failed", counts.failed),
        ("running", counts.running),
        ("waiting", counts.waiting),
    ];
    let requests = requests.map(|(state, count)| (format!("state=\"{state}\""), count as f64));
    page.gauge("forebay_batch_requests", "Requests of the batches that are kept, by state.", &requests);
    let none = String::new;
    page.gauge(
        "forebay_batch_paused",
        "1 while results cannot be written.",
        &[(none(), f64::from(u8::from(counts.stuck)))],
    );
    page.gauge("forebay_files_bytes", "Bytes of files.", &[(none(), counts.file_bytes as f64)]);
    page.0
}

/// A page of metrics.
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.0, "{name} {value}"),
            _ => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }

    fn all(&mut self, name: &str, values: &[(String, f64)]) {
        values.iter().for_each(|(labels, value)| self.line(name, labels, value));
    }

    fn counter(&mut self, name: &str, help: &str, values: &[(String, f64)]) {
        self.head(name, help, "counter");
        self.all(name, values);
    }

    fn gauge(&mut self, name: &str, help: &str, values: &[(String, f64)]) {
        self.head(name, help, "gauge");
        self.all(name, values);
    }

    fn durations(&mut self, name: &str, help: &str, durations: &Durations) {
        self.head(name, help, "histogram");
        let mut count = 0;
        for (range, counter) in durations.ranges.iter().enumerate() {
            count += counter.value();
            let end = ENDS.get(range).map_or("+Inf".to_owned(), f64::to_string);
            self.line(&format!("{name}_bucket"), &format!("le=\"{end}\""), count);
        }
        self.line(&format!("{name}_sum"), "", durations.nanos.value() as f64 / 1e9);
        self.line(&format!("{name}_count"), "", count);
    }

    /// Expert streaming.
    fn experts(&mut self, counters: &Counters) {
        for (name, help, value) in [
            (
                "forebay_expert_hits_total",
                "Experts that were in memory when they were wanted.",
                counters.hits as f64,
            ),
            ("forebay_expert_misses_total", "Experts that were not.", counters.misses as f64),
            ("forebay_expert_bytes_total", "Bytes of experts read.", counters.bytes as f64),
            (
                "forebay_expert_wait_seconds_total",
                "Time that arithmetic waited for experts.",
                counters.wait_ns as f64 / 1e9,
            ),
            (
                "forebay_expert_service_seconds_total",
                "Time that reads took, summed over readers.",
                counters.service_ns as f64 / 1e9,
            ),
            ("forebay_expert_failures_total", "Experts that could not be read.", counters.failures as f64),
            (
                "forebay_expert_read_retries_total",
                "Reads of experts that were tried again: short, interrupted, or failed once.",
                counters.retries as f64,
            ),
        ] {
            self.counter(name, help, &[(String::new(), value)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cumulative_and_end_with_everything() {
        let durations = Durations::default();
        for millis in [1, 5, 6, 700, 4_000_000] {
            durations.observe(Duration::from_millis(millis));
        }
        let mut page = Page(String::new());
        page.durations("x_seconds", "Times.", &durations);
        for line in [
            "# TYPE x_seconds histogram",
            "x_seconds_bucket{le=\"0.005\"} 2",
            "x_seconds_bucket{le=\"0.01\"} 3",
            "x_seconds_bucket{le=\"1\"} 4",
            "x_seconds_bucket{le=\"600\"} 4",
            "x_seconds_bucket{le=\"+Inf\"} 5",
            "x_seconds_count 5",
            "x_seconds_sum 4000.712",
        ] {
            assert!(page.0.lines().any(|found| found == line), "{line} is missing:\n{}", page.0);
        }
    }
}
