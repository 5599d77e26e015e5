//! Options of `forebay bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use forebay_core::{ByteSize, Format};
use forebay_engine::draft::MAX_DEPTH;
use forebay_kernels::Isa;

use super::{ArithArg, EngineArgs};
use crate::bench::{Layout, Shape};

/// `forebay bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: BenchWhat,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchWhat {
    /// Measure the kernels beside what this machine can do at most
    ///
    /// Weight products with the sizes of GLM-5.2 and random weights, from memory and from the cache, then
    /// attention and its indexer. The limits (reading memory, multiply-adds in registers) are measured in the
    /// same rounds. Takes about a minute; no model is needed. docs/benchmarks.md says how to read the result.
    Kernels(BenchKernelsArgs),
    /// Measure whole passes of a model, phase by phase, beside what this machine can do at most
    ///
    /// A prompt, then single tokens behind a filled context. The parts of the time add up. Give enough --memory
    /// for all experts to measure arithmetic alone.
    Forward(BenchForwardArgs),
    /// Measure tokens while experts come from disk, beside what disk and arithmetic allow
    ///
    /// The same tokens in turns, without and with reading ahead. Give less --memory than the experts take, and
    /// --throttle-disk to see what another disk would do.
    Stream(BenchStreamArgs),
    /// Measure what drafting is worth, with fixed depths and with --draft auto
    ///
    /// The same greedy answer is generated in turns with every depth, from the model's own drafts or from drafts that are
    /// right as often as --acceptance says. --draft auto begins every turn knowing nothing. docs/drafting.md says how
    /// to read the result.
    Drafts(BenchDraftsArgs),
    /// Measure how much more several sequences at once generate than one alone
    ///
    /// Answers behind the same prompt, each with its own random numbers, in turns of every number of sequences. Give less
    /// --memory than the experts take, and --throttle-disk, to see what a disk makes of it. docs/serving.md says how
    /// to read the result.
    Serve(BenchServeArgs),
    /// Replay which experts a model used against every cache policy and the best cache possible
    ///
    /// Without --trace the routes are made up so that they are used again as often as GLM-5.2's are. Takes a
    /// few seconds; no model is needed. docs/cache.md says how to read the result.
    Cache(BenchCacheArgs),
    /// Measure how fast experts can be read from disk
    ///
    /// Reads blocks as large as an expert from random places, by worker threads and by io_uring, past the page cache
    /// and through it, with several depths, in turns. Nothing is written.
    Io(BenchIoArgs),
}

/// `forebay bench stream`.
#[derive(Debug, Args)]
pub struct BenchStreamArgs {
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt: u32,
    /// Single tokens of each turn
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub steps: u32,
    /// Turns of each way; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Measure the prompt too, once a turn
    #[arg(long)]
    pub prefill: bool,
    /// Print one JSON object with every turn instead of a table
    #[arg(long)]
    pub json: bool,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forebay bench drafts`.
#[derive(Debug, Args)]
pub struct BenchDraftsArgs {
    /// Shares of drafts that are right, from 0 to 1; a list separated by commas [default: the model's own drafts]
    #[arg(long, value_name = "SHARE", value_delimiter = ',', value_parser = share)]
    pub acceptance: Vec<f64>,
    /// Depths beside none and auto; a list separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 3, 5, 8], value_parser = clap::value_parser!(u8).range(1..=MAX_DEPTH as i64))]
    pub depth: Vec<u8>,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub tokens: u32,
    /// Tokens of a prompt, at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt: u32,
    /// Take prompts from the lines of this file [default: made up]
    #[arg(long, value_name = "PATH")]
    pub text: Option<PathBuf>,
    /// Turns of each way; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Print one JSON object with every turn instead of a table
    #[arg(long)]
    pub json: bool,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forebay bench serve`.
#[derive(Debug, Args)]
pub struct BenchServeArgs {
    /// Sequences at once; a list separated by commas, which begins with what the others are compared with
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 4, 8], value_parser = clap::value_parser!(u8).range(1..=64))]
    pub sequences: Vec<u8>,
    /// Depths of drafts beside none; a list separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=MAX_DEPTH as i64))]
    pub depth: Vec<u8>,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = clap::value_parser!(u32).range(4..=100_000))]
    pub tokens: u32,
    /// Tokens of a prompt, at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt: u32,
    /// Take prompts from the lines of this file, in turns: one line is one topic [default: made up]
    #[arg(long, value_name = "PATH")]
    pub text: Option<PathBuf>,
    /// Turns of each way; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Print one JSON object with every turn instead of a table
    #[arg(long)]
    pub json: bool,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "use a number from 0 to 1".to_owned())
}

/// `forebay bench cache`.
#[derive(Debug, Args)]
pub struct BenchCacheArgs {
    /// Replay this recording (`forebay run --route-trace`); its first half serves as history
    #[arg(long, value_name = "PATH", conflicts_with_all = ["tokens", "seed"])]
    pub trace: Option<PathBuf>,
    /// Only write the recording to this new file as text, a line for each token and layer; docs/cache.md
    /// describes it
    #[arg(long, value_name = "PATH", requires = "trace", conflicts_with = "json")]
    pub export_text: Option<PathBuf>,
    /// Tokens to make up
    #[arg(long, value_name = "N", default_value_t = 700, value_parser = clap::value_parser!(u32).range(2..=20_000))]
    pub tokens: u32,
    /// Same seed, same routes
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `forebay bench io`.
#[derive(Debug, Args)]
pub struct BenchIoArgs {
    /// Read the files of this model folder [default: $FOREBAY_MODEL, else the bundled demonstration model]
    #[arg(long, value_name = "DIR", conflicts_with = "file")]
    pub model: Option<PathBuf>,
    /// Read this file
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Bytes of one read, up to 256 MiB [default: the model's largest expert; with --file one of GLM-5.2's]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub block: Option<ByteSize>,
    /// Reads at a time; a list separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16], value_parser = clap::value_parser!(u8).range(1..=64))]
    pub depth: Vec<u8>,
    /// How often everything is measured, in turns; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Milliseconds of one sample
    #[arg(long, value_name = "MS", default_value_t = 250, value_parser = clap::value_parser!(u16).range(1..))]
    pub sample: u16,
    /// Print one JSON object with every round instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `forebay bench forward`.
#[derive(Debug, Args)]
pub struct BenchForwardArgs {
    /// Print one JSON object with every pass instead of a table
    #[arg(long)]
    pub json: bool,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt: u32,
    /// Cached tokens behind which single tokens are run
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub filled: u32,
    /// Single tokens to run
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(2..))]
    pub steps: u32,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forebay bench kernels`. Lists are separated by commas.
#[derive(Debug, Args)]
pub struct BenchKernelsArgs {
    /// Print one JSON object with every round instead of a table
    #[arg(long)]
    pub json: bool,
    /// Measure every shape, batch and number of threads; takes much longer
    #[arg(long)]
    pub full: bool,
    /// What to measure [default: matmul,attention]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    pub what: Vec<KernelArg>,
    /// Weight formats [default: int4-g64,int4-row,int8]
    #[arg(long, value_delimiter = ',', value_name = "FORMAT")]
    pub format: Vec<Format>,
    /// Shapes of weight matrices, as ROWSxCOLUMNS [default: 2048x6144]
    #[arg(long, value_delimiter = ',', value_name = "SHAPE")]
    pub shape: Vec<Shape>,
    /// How weights lie in memory [default: panels,rows]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LAYOUT")]
    pub layout: Vec<Layout>,
    /// Arithmetics [default: int8,exact]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ARITH")]
    pub arith: Vec<ArithArg>,
    /// Rows of activations [default: 1,2,4,8,64]
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub batch: Vec<u16>,
    /// Compute threads [default: one, and the cores that may be used]
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Vec<u16>,
    /// How often everything is measured, in turns; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Memory for weights [default: a quarter of what is available]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory: Option<ByteSize>,
    /// Instruction set: scalar, avx2, avx512, neon, neon-dotprod or neon-i8mm [default: the best there is]
    #[arg(long, value_name = "ISA")]
    pub cpu_features: Option<Isa>,
}

/// `--what` of `forebay bench kernels`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KernelArg {
    /// Products of weights and activations
    Matmul,
    /// Attention over cached keys, and its indexer
    Attention,
}
