//! Tables and JSON.

use serde::Serialize;
use std::fmt::Write;

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    pub machine: Machine,
    pub cells: Vec<Cell>,
}

/// What it was measured on.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub processor: String,
    pub ggml: String,
    pub forebay: String,
    /// Share of the memory in large pages, while everything was allocated.
    pub large_pages: Option<f64>,
}

/// One shape, one number of threads, one batch.
#[derive(Debug, Serialize)]
pub struct Cell {
    pub shape: String,
    pub threads: usize,
    pub batch: usize,
    /// Share of the machine's processor time that other programs had meanwhile.
    pub others: Option<f64>,
    pub entries: Vec<Entry>,
    /// Fastest Forebay layout over fastest ggml kind, by bits of a weight.
    pub ratios: Vec<Ratio>,
}

/// One contender in one cell.
#[derive(Debug, Serialize)]
pub struct Entry {
    pub name: String,
    pub bits: u8,
    /// Median time of one product.
    pub microseconds: f64,
    /// Billions of multiply-adds a second.
    pub gmacs: f64,
    /// Billions of weight bytes (scales included) a second.
    pub gigabytes: f64,
    /// Relative error against the unquantised product.
    pub error: f64,
}

/// Forebay's speed over ggml's.
#[derive(Debug, Serialize)]
pub struct Ratio {
    pub bits: u8,
    pub ratio: f64,
}

impl Cell {
    /// A cell with its ratios.
    pub fn new(
        shape: String,
        threads: usize,
        batch: usize,
        others: Option<f64>,
        entries: Vec<Entry>,
    ) -> Self {
        let best = |engine: &str, bits: u8| {
            let speeds = entries.iter().filter(|e| e.bits == bits && e.name.starts_with(engine));
            speeds.map(|e| e.gmacs).max_by(f64::total_cmp)
        };
        let ratios = [4, 8]
            .into_iter()
            .filter_map(|bits| Some(Ratio { bits, ratio: best("forebay", bits)? / best("ggml", bits)? }))
            .collect();
        Self { shape, threads, batch, others, entries, ratios }
    }
}

impl Report {
    /// The report as JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data can be written")
    }

    /// The report as Markdown: a table for every shape, number of threads and weight size.
    pub fn tables(&self) -> String {
        let mut text = String::new();
        let Machine { processor, ggml, forebay, large_pages } = &self.machine;
        let _ = writeln!(text, "{processor}; ggml {ggml}; forebay {forebay}");
        if let Some(share) = large_pages {
            let _ = writeln!(text, "{:.0} % of the memory in large pages", share * 100.0);
        }
        let _ = writeln!(text, "GMAC/s (GB/s of weights); ratio: fastest forebay over fastest ggml");
        let same = |a: &Cell, b: &Cell| a.shape == b.shape && a.threads == b.threads;
        for cells in self.cells.chunk_by(same) {
            for bits in [4, 8] {
                table(&mut text, cells, bits);
            }
        }
        text
    }
}

fn table(text: &mut String, cells: &[Cell], bits: u8) {
    let of = |cell: &Cell| -> Vec<usize> {
        (0..cell.entries.len()).filter(|i| cell.entries[*i].bits == bits).collect()
    };
    let columns = of(&cells[0]);
    if columns.is_empty() {
        return;
    }
    let (shape, threads) = (&cells[0].shape, cells[0].threads);
    let _ = writeln!(text, "\n### {shape}, threads: {threads}, {bits}-bit weights\n");
    let line = |text: &mut String, first: &str, fields: Vec<String>, last: &str| {
        let _ = write!(text, "| {first:>9} ");
        for field in fields {
            let _ = write!(text, "| {field:>22} ");
        }
        let _ = writeln!(text, "| {last:>5} |");
    };
    let names = columns.iter().map(|i| cells[0].entries[*i].name.clone()).collect();
    line(text, "batch", names, "ratio");
    line(text, "--:", vec!["--:".to_owned(); columns.len()], "--:");
    for cell in cells {
        let speeds = columns.iter().map(|i| &cell.entries[*i]);
        let speeds = speeds.map(|e| format!("{:.1} ({:.1})", e.gmacs, e.gigabytes)).collect();
        let ratio = cell.ratios.iter().find(|r| r.bits == bits);
        let ratio = ratio.map_or_else(String::new, |r| format!("{:.2}", r.ratio));
        line(text, &cell.batch.to_string(), speeds, &ratio);
    }
    let errors = columns.iter().map(|i| {
        let worst = cells.iter().map(|cell| cell.entries[*i].error).max_by(f64::total_cmp);
        format!("{:.4}", worst.unwrap_or(f64::NAN))
    });
    line(text, "rel.error", errors.collect(), "");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_takes_the_best_of_both() {
        let entry = |name: &str, bits, gmacs| Entry {
            name: name.to_owned(),
            bits,
            microseconds: 1.0,
            gmacs,
            gigabytes: 1.0,
            error: 0.0,
        };
        let entries = vec![
            entry("ggml a", 4, 2.0),
            entry("ggml b", 4, 4.0),
            entry("forebay c", 4, 1.0),
            entry("forebay d", 4, 6.0),
            entry("ggml e", 8, 1.0),
        ];
        let ratios = Cell::new("512x256".to_owned(), 1, 1, None, entries).ratios;
        assert_eq!(ratios.iter().map(|r| (r.bits, r.ratio)).collect::<Vec<_>>(), [(4, 1.5)]);
    }
}
