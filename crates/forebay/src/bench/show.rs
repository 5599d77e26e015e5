//! The results, as tables for people and as JSON for programs.

use std::fmt::Write;

use forebay_kernels::{Kernels, limits};
use serde_json::{Value, json};

use super::measure::{Limits, median, spread};
use super::{latents, matmul};
use crate::doctor::Machine;

/// Everything that was measured.
pub struct Results {
    /// The kernels.
    pub kernels: Kernels,
    /// Where.
    pub machine: Machine,
    /// Rounds.
    pub rounds: usize,
    /// Seconds of one sample, at least.
    pub sample: f64,
    /// Seconds that everything took.
    pub elapsed: f64,
    /// Weight products, a group per shape.
    pub matmul: Vec<matmul::Group>,
    /// Attention and its indexer.
    pub attention: Option<latents::Group>,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
}

/// Billions.
fn giga(value: f64) -> f64 {
    value / 1e9
}

fn percent(part: f64, whole: f64) -> f64 {
    100.0 * part / whole
}

/// One JSON object.
pub fn results_json(results: &Results) -> Value {
    let matmul = results.matmul.iter().map(|group| {
        json!({
            "rows": group.shape.rows,
            "cols": group.shape.cols,
            "limits": limits_json(&group.limits),
            "lines": group.lines.iter().map(|line| line_json(line, &group.limits)).collect::<Vec<_>>(),
        })
    });
    let attention = results.attention.as_ref().map(|group| {
        let line = |line: &latents::Line| attention_json(line, &group.limits[line.team]);
        json!({
            "limits": limits_json(&group.limits),
            "lines": group.lines.iter().map(line).collect::<Vec<_>>(),
        })
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "optimised": !cfg!(debug_assertions),
        "machine": results.machine.json(results.kernels),
        "instructions": {
            "integer": limits::integer_instructions(results.kernels),
            "float": limits::float_instructions(results.kernels),
        },
        "rounds": results.rounds,
        "sample_s": results.sample,
        "elapsed_s": results.elapsed,
        "matmul": matmul.collect::<Vec<_>>(),
        "attention": attention,
        "notes": results.notes,
    })
}

fn limits_json(limits: &[Limits]) -> Value {
    let rates = |rates: &[f64]| {
        let samples: Vec<f64> = rates.iter().copied().map(giga).collect();
        json!({"median": median(&samples), "samples": samples})
    };
    let one = |limits: &Limits| {
        json!({
            "threads": limits.threads,
            "read_gb_s": rates(&limits.read),
            "integer_gmac_s": rates(&limits.integer),
            "float_gmac_s": rates(&limits.float),
        })
    };
    limits.iter().map(one).collect()
}

fn seconds_json(seconds: &[f64]) -> Value {
    json!({"median": median(seconds), "rounds": seconds})
}

fn line_json(line: &matmul::Line, limits: &[Limits]) -> Value {
    let limits = &limits[line.case.team];
    let (read, peak) = (median(&limits.read), matmul::peak(limits, line.case.arith));
    let (memory, cache) = (&line.memory, &line.cache);
    json!({
        "format": line.case.format.to_string(),
        "layout": line.case.layout.name(),
        "arith": line.case.arith.to_string(),
        "batch": line.case.batch,
        "threads": limits.threads,
        "limits": {"read_gb_s": giga(read), "peak_gmac_s": giga(peak)},
        "memory": {
            "rows": memory.shape.rows,
            "cols": memory.shape.cols,
            "weight_bytes": memory.bytes,
            "copies": line.copies,
            "multiply_adds": memory.multiply_adds(),
            "seconds": seconds_json(&memory.seconds),
            "gb_s": giga(memory.bandwidth()),
            "gmac_s": giga(memory.speed()),
            "percent_of_read": percent(memory.bandwidth(), read),
            "percent_of_peak": percent(memory.speed(), peak),
            "percent_of_roofline": percent(memory.speed(), memory.roofline(read, peak)),
        },
        "cache": {
            "rows": cache.shape.rows,
            "cols": cache.shape.cols,
            "weight_bytes": cache.bytes,
            "multiply_adds": cache.multiply_adds(),
            "seconds": seconds_json(&cache.seconds),
            "gb_s": giga(cache.bandwidth()),
            "gmac_s": giga(cache.speed()),
            "percent_of_peak": percent(cache.speed(), peak),
        },
        "coded": line.ratio.map(|ratio| json!({
            "ratio": ratio,
            "decoding": line.decoding.as_ref().map(|timed| json!({
                "seconds": seconds_json(&timed.seconds),
                "gb_s": giga(timed.bandwidth()),
            })),
        })),
        "free_order": line.free_order.as_ref().map(|free| free_order_json(line, free)),
    })
}

/// The same product with sums in free order, and how much longer the canonical order takes.
fn free_order_json(line: &matmul::Line, free: &matmul::FreeOrder) -> Value {
    let one = |canonical: &matmul::Timed, free: &matmul::Timed| {
        json!({
            "seconds": seconds_json(&free.seconds),
            "gmac_s": giga(free.speed()),
            "canonical_costs_percent": matmul::cost_of_order(canonical, free),
        })
    };
    json!({"memory": one(&line.memory, &free.memory), "cache": one(&line.cache, &free.cache)})
}

fn attention_json(line: &latents::Line, limits: &Limits) -> Value {
    let (read, peak) = (median(&limits.read), median(&limits.float));
    json!({
        "name": line.name,
        "threads": limits.threads,
        "limits": {"read_gb_s": giga(read), "peak_gmac_s": giga(peak)},
        "multiply_adds": line.multiply_adds,
        "bytes": line.bytes,
        "seconds": seconds_json(&line.seconds),
        "gb_s": giga(line.bandwidth()),
        "gmac_s": line.speed().map(giga),
        "percent_of_peak": line.speed().map(|speed| percent(speed, peak)),
    })
}

/// Tables.
pub fn results_text(results: &Results) -> String {
    let mut text = String::new();
    let machine = &results.machine;
    let processor = machine.processor.as_deref().unwrap_or("unknown processor");
    let pages = machine.large_pages.as_deref().unwrap_or("unknown");
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{processor}, {}; caches: {}; large pages: {pages}\n\
         medians of {} rounds, {:.0} s in all; GB/s are 10^9 bytes of weights, scales included; GMAC/s are 10^9 \
         multiply-adds",
        results.kernels.isa(),
        machine.caches_text(),
        results.rounds,
        results.elapsed,
    );
    for group in &results.matmul {
        let _ = writeln!(text, "\nproducts with {} weights", group.shape);
        limits_text(&mut text, results.kernels, &group.limits);
        let seconds = group.lines.iter().flat_map(|line| [&line.memory.seconds, &line.cache.seconds]);
        spread_text(&mut text, seconds);
        text.push_str(&products(group));
        for line in &group.lines {
            order_text(&mut text, group, line);
            decoding_text(&mut text, group, line);
        }
    }
    if let Some(group) = &results.attention {
        let _ = writeln!(
            text,
            "\nattention, one row, bf16 cache: 64 heads, latent 512, rope 64; indexer: 32 heads of 128"
        );
        limits_text(&mut text, results.kernels, &group.limits);
        spread_text(&mut text, group.lines.iter().map(|line| &line.seconds));
        text.push_str(&attention(group));
    }
    text
}

fn limits_text(text: &mut String, kernels: Kernels, all: &[Limits]) {
    for one in all {
        let threads = if one.threads == 1 { "thread reads" } else { "threads read" };
        let _ = writeln!(
            text,
            "  {} {threads} {:.1} GB/s; peak {:.0} GMAC/s int8 ({}), {:.0} GMAC/s exact ({})",
            one.threads,
            giga(median(&one.read)),
            giga(median(&one.integer)),
            limits::integer_instructions(kernels),
            giga(median(&one.float)),
            limits::float_instructions(kernels),
        );
    }
}

/// How much to trust the rest.
fn spread_text<'a>(text: &mut String, seconds: impl Iterator<Item = &'a Vec<f64>>) {
    let spreads: Vec<f64> = seconds.map(|seconds| 100.0 * spread(seconds)).collect();
    let most = spreads.iter().copied().fold(0.0, f64::max);
    let _ = writeln!(
        text,
        "  times differ between rounds by {:.0} % (median; at most {most:.0} %)",
        median(&spreads)
    );
}

fn products(group: &matmul::Group) -> String {
    let head = [
        "threads", "format", "layout", "arith", "rows", "GB/s", "GMAC/s", "% read", "% peak", "% roof",
        "GMAC/s", "% peak",
    ];
    let mut table = Table::new(&head);
    table.text_columns = 1..4;
    for line in &group.lines {
        let limits = &group.limits[line.case.team];
        let (read, peak) = (median(&limits.read), matmul::peak(limits, line.case.arith));
        let (memory, cache) = (&line.memory, &line.cache);
        table.row([
            limits.threads.to_string(),
            line.case.format.to_string(),
            line.case.layout.name().to_owned(),
            line.case.arith.to_string(),
            line.case.batch.to_string(),
            one_digit(giga(memory.bandwidth())),
            one_digit(giga(memory.speed())),
            one_digit(percent(memory.bandwidth(), read)),
            one_digit(percent(memory.speed(), peak)),
            one_digit(percent(memory.speed(), memory.roofline(read, peak))),
            one_digit(giga(cache.speed())),
            one_digit(percent(cache.speed(), peak)),
        ]);
    }
    table.over = vec![(5..10, "weights from memory"), (10..12, "from the cache")];
    table.text()
}

/// What the fixed order of sums costs, where it was measured.
fn order_text(text: &mut String, group: &matmul::Group, line: &matmul::Line) {
    let Some(free) = &line.free_order else { return };
    let threads = group.limits[line.case.team].threads;
    let part = |canonical: &matmul::Timed, free: &matmul::Timed| {
        format!(
            "{:.1} against {:.1} GMAC/s, costs {:.1} %",
            giga(canonical.speed()),
            giga(free.speed()),
            matmul::cost_of_order(canonical, free)
        )
    };
    let _ = writeln!(
        text,
        "  canonical order against free order, {}, {threads} thread{}, {} row{}: from memory {}; from the cache {}",
        line.case.format,
        if threads == 1 { "" } else { "s" },
        line.case.batch,
        if line.case.batch == 1 { "" } else { "s" },
        part(&line.memory, &free.memory),
        part(&line.cache, &free.cache),
    );
}

/// How fast coded weights are decoded, where it was measured.
fn decoding_text(text: &mut String, group: &matmul::Group, line: &matmul::Line) {
    let (Some(timed), Some(ratio)) = (&line.decoding, line.ratio) else { return };
    let threads = group.limits[line.case.team].threads;
    let _ = writeln!(
        text,
        "  decoding to memory, {}, {threads} thread{}: {:.1} GB/s of what is decoded; coded weights take {:.1} % of it",
        line.case.format,
        if threads == 1 { "" } else { "s" },
        giga(timed.bandwidth()),
        100.0 * ratio,
    );
}

fn attention(group: &latents::Group) -> String {
    let mut table = Table::new(&["threads", "what", "us", "GMAC/s", "% peak", "GB/s read"]);
    table.text_columns = 1..2;
    for line in &group.lines {
        let limits = &group.limits[line.team];
        let peak = median(&limits.float);
        let optional = |value: Option<f64>| value.map_or("-".to_owned(), one_digit);
        table.row([
            limits.threads.to_string(),
            line.name.to_owned(),
            one_digit(1e6 * median(&line.seconds)),
            optional(line.speed().map(giga)),
            optional(line.speed().map(|speed| percent(speed, peak))),
            one_digit(giga(line.bandwidth())),
        ]);
    }
    table.text()
}

fn one_digit(value: f64) -> String {
    format!("{value:.1}")
}

/// Columns as wide as their widest entry; numbers to the right, text to the left.
pub struct Table {
    rows: Vec<Vec<String>>,
    /// The columns that hold text.
    pub text_columns: std::ops::Range<usize>,
    /// Titles over several columns.
    over: Vec<(std::ops::Range<usize>, &'static str)>,
}

impl Table {
    /// A table with these columns.
    pub fn new(head: &[&str]) -> Self {
        let head = head.iter().map(|name| (*name).to_owned()).collect();
        Self { rows: vec![head], text_columns: 0..0, over: Vec::new() }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, row: [String; N]) {
        self.rows.push(row.into());
    }

    /// The table as it is shown.
    pub fn text(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        // Where a column starts: two spaces before each.
        let start = |column: usize| widths[..column].iter().map(|width| width + 2).sum::<usize>() + 2;
        let mut text = String::new();
        if !self.over.is_empty() {
            let mut line = String::new();
            for (range, title) in &self.over {
                let (from, to) = (start(range.start), start(range.end) - 2);
                let dashes = (to - from).saturating_sub(title.len() + 2);
                let (left, right) = (dashes / 2, dashes - dashes / 2);
                let _ = write!(line, "{:<1$}", "", from.saturating_sub(line.len()));
                let _ = write!(line, "{} {title} {}", "-".repeat(left), "-".repeat(right));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let _ = if self.text_columns.contains(&column) {
                    write!(line, "  {cell:<width$}")
                } else {
                    write!(line, "  {cell:>width$}")
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let mut table = Table::new(&["n", "name", "value", "%"]);
        table.text_columns = 1..2;
        table.over = vec![(2..4, "both")];
        table.row(["10".to_owned(), "a".to_owned(), "1.5".to_owned(), "100.0".to_owned()]);
        let want = "            --- both ---\n   n  name  value      %\n  10  a       1.5  100.0\n";
        assert_eq!(table.text(), want);
    }
}
