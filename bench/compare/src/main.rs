//! Measures Forebay's CPU matrix kernels beside ggml's, in one process, round by round.
//!
//! Contenders take turns, so that a machine that changes its speed changes it for all; the
//! median of the rounds counts. See README.md for what is and is not compared.

mod contender;
mod data;
mod forebay;
mod ggml;
mod report;

use clap::Parser;
use contender::{Contender, Shape};
use forebay_kernels::{Kernels, Team};
use report::{Cell, Entry, Machine, Report};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A share of the processors' time that disturbs a measurement when others have it.
const BUSY: f64 = 0.05;

/// Compares Forebay's CPU matrix kernels with ggml's.
#[derive(Debug, Parser)]
struct Args {
    /// Weight matrices, ROWSxCOLUMNS.
    #[arg(long, value_delimiter = ',', default_value = "2048x6144,6144x2048,6144x16384")]
    shapes: Vec<Shape>,
    /// Rows of activations.
    #[arg(long, value_delimiter = ',', default_value = "1,4,8,64,512", value_parser = positive)]
    batches: Vec<usize>,
    /// Threads of each engine.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = positive)]
    threads: Vec<usize>,
    /// Only contenders whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Samples of each contender.
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Least length of a sample, in milliseconds.
    #[arg(long, default_value_t = 60)]
    sample_ms: u64,
    /// Megabytes of weights each contender rotates over: several times the last-level cache.
    #[arg(long, default_value_t = 256)]
    weights_mb: usize,
    /// Leave both engines' memory in small pages.
    #[arg(long)]
    small_pages: bool,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("{text:?} is not a whole number above 0"))
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Err(error) = data::choose_pages(!args.small_pages) {
        eprintln!("cannot start again with large pages: {error}; --small-pages does without them");
        return ExitCode::FAILURE;
    }
    ggml::be_quiet();
    let kernels = Kernels::detect();
    let mut large_pages = None;
    let mut cells = Vec::new();
    for shape in &args.shapes {
        eprintln!("{shape}: quantising");
        let values = data::normal(data::ROWS * shape.cols, 1);
        let weights = Weights::new(&args, *shape, &values);
        large_pages = data::large_pages();
        for threads in &args.threads {
            for batch in &args.batches {
                eprintln!("{shape}: threads {threads}, batch {batch}");
                match weights.measure(&args, kernels, *threads, *batch, &values) {
                    Ok(cell) => cells.push(cell),
                    Err(error) => {
                        eprintln!("cannot start threads: {error}");
                        return ExitCode::FAILURE;
                    }
                }
            }
        }
    }
    let machine = Machine {
        processor: data::processor(),
        ggml: ggml::version(),
        forebay: format!("{} ({})", env!("CARGO_PKG_VERSION"), kernels.isa()),
        large_pages,
    };
    let report = Report { machine, cells };
    println!("{}", if args.json { report.json() } else { report.tables() });
    ExitCode::SUCCESS
}

/// The matrices of one shape, in every format.
struct Weights {
    shape: Shape,
    ggml: Vec<ggml::Weights>,
    forebay: Vec<forebay::Weights>,
}

impl Weights {
    fn new(args: &Args, shape: Shape, values: &[f32]) -> Self {
        let bytes = args.weights_mb * 1_000_000;
        let ggml = ggml::KINDS
            .into_iter()
            .filter(|kind| kind.name().contains(&args.only))
            .filter_map(|kind| ggml::Weights::new(kind, shape, values, bytes))
            .collect();
        let forebay = forebay::kinds()
            .into_iter()
            .filter(|kind| kind.name().contains(&args.only))
            .map(|kind| forebay::Weights::new(kind, shape, values, bytes))
            .collect();
        Self { shape, ggml, forebay }
    }

    fn measure(
        &self,
        args: &Args,
        kernels: Kernels,
        threads: usize,
        batch: usize,
        values: &[f32],
    ) -> std::io::Result<Cell> {
        let x = data::normal(batch * self.shape.cols, 2);
        let pool = Rc::new(ggml::Pool::new(threads));
        let team = Rc::new(Team::new(threads)?);
        let mut contenders: Vec<Box<dyn Contender + '_>> = Vec::new();
        for weights in &self.ggml {
            contenders.push(Box::new(ggml::Products::new(weights, Rc::clone(&pool), &x)));
        }
        for weights in &self.forebay {
            contenders.push(Box::new(forebay::Products::new(weights, kernels, Rc::clone(&team), &x)));
        }

        let least = Duration::from_millis(args.sample_ms);
        let products: Vec<usize> = contenders.iter_mut().map(|one| warm_up(one.as_mut(), least)).collect();
        let before = data::Ticks::now();
        let mut samples = vec![Vec::new(); contenders.len()];
        for round in 0..args.rounds {
            // Everyone goes first, in the middle and last equally often.
            for turn in 0..contenders.len() {
                let index = (round + turn) % contenders.len();
                samples[index].push(sample(contenders[index].as_mut()));
            }
        }

        let others = before.zip(data::Ticks::now()).map(|(before, now)| now.others_since(before));
        if let Some(share) = others.filter(|share| *share > BUSY) {
            eprintln!("other programs had {:.0} % of the processors: measure this again", share * 100.0);
        }

        let exact = data::Exact::new(self.shape, values, &x);
        let work = (self.shape.rows * self.shape.cols * batch) as f64;
        let entries = contenders.iter().zip(products).zip(samples).map(|((one, products), samples)| {
            let seconds = median(samples) / products as f64;
            Entry {
                name: one.name(),
                bits: one.bits(),
                microseconds: seconds * 1e6,
                gmacs: work / seconds / 1e9,
                gigabytes: one.matrix_bytes() as f64 / seconds / 1e9,
                error: exact.error(&one.results()),
            }
        });
        Ok(Cell::new(self.shape.to_string(), threads, batch, others, entries.collect()))
    }
}

/// Runs the contender until it is warm; returns how many products make a sample.
fn warm_up(contender: &mut dyn Contender, least: Duration) -> usize {
    contender.prepare(1);
    let mut one = sample(contender);
    if one < least.as_secs_f64() {
        one = sample(contender).max(1e-6);
    }
    let products = ((least.as_secs_f64() / one).ceil() as usize).clamp(1, 1 << 14);
    contender.prepare(products);
    products
}

/// Seconds of one sample.
fn sample(contender: &mut dyn Contender) -> f64 {
    contender.wake();
    let start = Instant::now();
    contender.run();
    let seconds = start.elapsed().as_secs_f64();
    contender.rest();
    seconds
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
