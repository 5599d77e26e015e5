//! What can be typed: every verb and option, with its help, in one place. What it means is decided in
//! [`crate::settings`].

mod bench;
mod engine;
mod get;
mod models;
mod sampling;
mod serve;
mod sessions;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use forebay_core::{ByteSize, Format};
use forebay_engine::sample::MAX_LOGPROBS;
use forebay_engine::{EngineOptions, Rates};
use forebay_hub::synth::spec::DEFAULT_SHARD_BYTES;

pub use bench::*;
pub use engine::*;
pub use get::*;
pub use models::*;
pub use sampling::*;
pub use serve::*;
pub use sessions::*;

const ABOUT: &str = "Run giant Mixture-of-Experts models on any machine, by streaming experts from disk";

const LONG_ABOUT: &str = "\
Run giant Mixture-of-Experts models on any machine, by streaming experts from disk.

A model is a folder with config.json, tokenizer.json and .safetensors files (architecture glm_moe_dsa, as \
GLM-5.2 has). Memory decides how fast it runs, never whether it runs and never which words come out. Without \
--model a small demonstration model that is part of this program is used.";

const AFTER_HELP: &str = "\
Examples:
  forebay run \"What is 2+2?\"
  forebay chat --model /models/GLM-5.2 --memory 24G
  forebay serve --model /models/GLM-5.2 --memory 24G
  forebay get OWNER/NAME --to /models/GLM-5.2
  forebay plan /models/GLM-5.2 --machine-memory 24G
  forebay inspect /models/GLM-5.2 --memory 16G
  forebay score --file book.txt
  forebay convert /models/GLM-5.2-FP8 /models/GLM-5.2
  forebay verify /models/GLM-5.2

Exit status:
  0    done (also when the reader of standard output closes it early)
  1    failed on the way, for example because an expert could not be read
  2    wrong options or input: the message says which
  3    the model folder cannot be used
  4    not enough memory
  130  interrupted by Ctrl-C

Environment:
  FOREBAY_MODEL  the model folder to use when --model is not given
  FOREBAY_API_KEY
                 a key that clients of `serve` must send, beside those of --api-key-file
  FOREBAY_CONFIG
                 a file with options of `serve` to use when --config is not given
  FOREBAY_CACHE  where the demonstration model is unpacked (default: the user's cache
                 folder, else one in the system's folder for temporary files)
  HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_TOKEN_PATH
                 which hub, cache and token `get` uses, as for Hugging Face's own tools
  HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE
                 how `get` reaches the network, and whom it trusts
  NO_COLOR       set and not empty: no dim text";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "forebay",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = AFTER_HELP,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Answer one prompt
    ///
    /// The answer goes to standard output as it is generated, and nothing else does; reasoning, notes and
    /// measurements go to standard error.
    Run(RunArgs),
    /// Talk with a model
    ///
    /// Reads one message a line. /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the program.
    /// When standard input or output is not a terminal, the lines of standard input are the messages, and Ctrl-C
    /// ends the program.
    Chat(ChatArgs),
    /// Answer programs: OpenAI, Anthropic and Ollama interfaces over HTTP
    ///
    /// For this machine only, unless told otherwise. docs/api.md lists routes and parameters. The address goes to
    /// standard output, what happens to standard error. Ctrl-C, or the system's request to end, finishes answers that are
    /// under way.
    Serve(ServeArgs),
    /// Describe a model folder and plan its memory, reading only headers
    ///
    /// Says what the model is, which optional parts it has, and how the memory of this machine (or of
    /// --memory) would be divided. Ends with status 4 when it would not fit.
    Inspect(InspectArgs),
    /// Show how memory would be divided, how much comes from disk, and how fast that can be
    ///
    /// Reads only headers: it takes a second for a model of any size, before or after buying memory for it. Ends
    /// with status 4 when the model would not fit.
    Plan(PlanArgs),
    /// Measure how well a model predicts a text (perplexity)
    ///
    /// Every token is scored given the tokens before it. A text longer than the window is cut into windows,
    /// each scored from scratch. A text may have up to 16 MiB: it is encoded in one piece, which takes memory
    /// beside that of --memory.
    Score(ScoreArgs),
    /// Measure the speed of arithmetic and disks on this machine
    Bench(BenchArgs),
    /// Say what this machine has, what Forebay would use of it, and what costs speed
    Doctor(DoctorArgs),
    /// Measure how this machine reads a model best, and keep the result
    ///
    /// Takes less than half a minute. Reads blocks as large as an expert from the model's files, past the page cache
    /// and through it, and all compute threads read memory. The result is kept in the cache folder, with what it was
    /// measured with.
    Tune(TuneArgs),
    /// Write a model of random weights with the true shape of GLM-5.2
    ///
    /// For measuring this machine without the real model: layers, experts, formats and files are as large as the
    /// real ones, experts are chosen about as often as real text does, and the text that comes out is noise. A run
    /// that was stopped goes on when the same command is given again. docs/synth.md says more.
    Synth(SynthArgs),
    /// Download a model from a hub, and verify every byte of it
    ///
    /// Into the cache that Hugging Face's tools use, or into a folder of your own. A run that was stopped, in whatever
    /// way, goes on when the same command is given again. The folder's path goes to standard output. docs/get.md says
    /// more.
    Get(GetArgs),
    /// Check that a model folder is whole
    ///
    /// By headers alone it takes seconds: every tensor that the config asks for, exact byte counts, duplicates,
    /// overlaps, stray files, and which optional parts are there. Ends with status 3 and the exact list of what is
    /// wrong. docs/convert.md says more.
    Verify(VerifyArgs),
    /// Convert a checkpoint (BF16, F16, F32, FP8 or NVFP4) to small integers
    ///
    /// From a folder, or from a hub with one weight file of the source on the disk at a time. The whole model in one pass,
    /// MTP layer and indexer included. A run that was stopped goes on when the same
    /// command is given again; the source is never changed. docs/convert.md says what comes out.
    Convert(ConvertArgs),
    /// Pack a model into Forebay's own container, or turn a container back
    ///
    /// In the container an expert is one aligned read of bytes that can be computed on as they are, and every byte
    /// has a checksum that is compared when it is read. Nothing is lost: results are the same to the last bit, and
    /// --to-reference gives back the same tensors. A run that was stopped goes on when the same command is given
    /// again. docs/format.md describes the container.
    Pack(PackArgs),
    /// List and delete the conversations and prefixes that are kept on this machine
    ///
    /// `chat --session NAME` keeps a conversation, and what was computed of it; --prefix-store keeps the latter for a
    /// folder of your choice. docs/sessions.md says what is in them.
    Sessions(SessionsArgs),
}

/// `forebay pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// The model folder to read
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// The folder to write to: a new or empty one, or one where the same command was stopped
    #[arg(value_name = "DST")]
    pub out: PathBuf,
    /// Turn the container SRC back into safetensors files
    #[arg(long)]
    pub to_reference: bool,
    /// Which experts have their int4 codes coded, which takes about a quarter of their bytes away and loses nothing
    ///
    /// Fewer bytes come from disk, and more experts fit into memory. Each has to be decoded when it is used: quickly
    /// with AVX-512 VBMI (Intel since Ice Lake, AMD since Zen 4), at a cost in CPU time on other machines. Hence raw
    /// is the default: it is quick on every machine that the container may come to. `forebay plan` says which way a
    /// machine would take.
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = CodesArg::Raw, conflicts_with = "to_reference")]
    pub codes: CodesArg,
    /// Threads; each holds one expert [default: the cores that may be used]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Room to leave free on the disk of DST
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub margin: ByteSize,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// `--codes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CodesArg {
    /// Those that become smaller by it
    Auto,
    /// None
    Raw,
    /// As auto, in a model with int4 experts; another one is refused
    Coded,
}

/// `forebay tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The model folder [default: $FOREBAY_MODEL, else the bundled demonstration model]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Measure nothing; show what was found last
    #[arg(long)]
    pub show: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Files that a run writes beside its result.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Files")]
pub struct RecordArgs {
    /// Record which experts every token used, for `forebay bench cache --trace`
    ///
    /// One JSON object a line; docs/cache.md describes it. An existing file is replaced.
    #[arg(long, value_name = "PATH")]
    pub route_trace: Option<PathBuf>,
    /// Write what every pass cost to this file, as JSON lines, and the whole run in the last one
    #[arg(long, value_name = "PATH")]
    pub record: Option<PathBuf>,
}

/// `forebay run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The prompt; - reads standard input, which is also read when no prompt is given and it is not a terminal
    #[arg(value_name = "PROMPT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from this file (UTF-8)
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Give the model exactly the prompt's text, without the chat template
    ///
    /// Control tokens written in the text are active then. Otherwise one newline at the end of a file or of
    /// standard input is not part of the prompt, and control tokens are ordinary text.
    #[arg(long, conflicts_with_all = ["system", "think"])]
    pub no_template: bool,
    /// Print one JSON object with answer, measurements and settings instead of text
    #[arg(long)]
    pub json: bool,
    /// List the log-probability of every token and of this many alternatives, up to 20; with --json
    #[arg(long, value_name = "N", requires = "json", value_parser = clap::value_parser!(u8).range(0..=MAX_LOGPROBS as i64))]
    pub logprobs: Option<u8>,
    /// How to answer.
    #[command(flatten)]
    pub answer: AnswerArgs,
    /// What the answer may be.
    #[command(flatten)]
    pub structure: StructureArgs,
    /// Files to write beside the result.
    #[command(flatten)]
    pub files: RecordArgs,
    /// What is kept for later runs.
    #[command(flatten)]
    pub prefixes: PrefixArgs,
    /// Whether tokens are drafted.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl RunArgs {
    /// The options of the run.
    pub fn options(&self) -> EngineOptions {
        EngineOptions { drafting: self.draft.draft, ..self.engine.options() }
    }
}

/// `forebay chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Keep the conversation under this name and go on with it next time, with what was computed of it; without,
    /// nothing is kept
    ///
    /// Files that only you can read, in the folder for program state. `forebay sessions` lists and deletes them;
    /// docs/sessions.md says what is in them.
    #[arg(long, value_name = "NAME", value_parser = crate::sessions::name)]
    pub session: Option<String>,
    /// Where the context is full, forget the oldest turns and run the rest again, instead of refusing the message; it is
    /// said every time
    #[arg(long)]
    pub context_shift: bool,
    /// Keep the words of the conversation only; what was computed of them is computed again next time
    #[arg(long, requires = "session", conflicts_with_all = ["prefix_store", "prefix_store_size"])]
    pub no_prefix_store: bool,
    /// What is kept for later runs.
    #[command(flatten)]
    pub prefixes: PrefixArgs,
    /// How to answer.
    #[command(flatten)]
    pub answer: AnswerArgs,
    /// What every answer may be.
    #[command(flatten)]
    pub structure: StructureArgs,
    /// Files to write beside the result.
    #[command(flatten)]
    pub files: RecordArgs,
    /// Whether tokens are drafted.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Read what earlier runs used most into free memory while the chat waits for you; hits then depend on how
    /// long that took
    #[arg(long, value_enum, default_value_t = SwitchArg::On, help_heading = "Disk")]
    pub warm_up: SwitchArg,
}

impl ChatArgs {
    /// Whether free memory is filled from the usage history.
    pub fn warms_up(&self) -> bool {
        self.warm_up == SwitchArg::On
    }
}

impl ChatArgs {
    /// The options of the run.
    pub fn options(&self) -> EngineOptions {
        EngineOptions { drafting: self.draft.draft, ..self.engine.options() }
    }
}

/// `forebay inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// What to look at.
    #[command(flatten)]
    pub folder: FolderArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// What decides how much memory a run takes.
    #[command(flatten)]
    pub size: SizeArgs,
    /// How numbers are computed.
    #[command(flatten)]
    pub numbers: NumberArgs,
    /// Whether tokens are drafted.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// The way to read experts.
    #[command(flatten)]
    pub way: WayArgs,
}

impl InspectArgs {
    /// The options of the run to look at.
    pub fn options(&self) -> EngineOptions {
        let drafting = self.draft.draft;
        EngineOptions { io: self.way.io(), drafting, ..self.numbers.over(self.size.options()) }
    }
}

/// `forebay plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// What to plan for.
    #[command(flatten)]
    pub folder: FolderArgs,
    /// Plan for a machine with this much memory on which nothing else runs, such as 24G, instead of this one
    #[arg(long, value_name = "SIZE")]
    pub machine_memory: Option<ByteSize>,
    /// Bytes per second that the disk gives, such as 7G, instead of what was measured
    #[arg(long, value_name = "RATE", value_parser = engine::rate, allow_hyphen_values = true)]
    pub disk_rate: Option<ByteSize>,
    /// Bytes per second that memory gives, such as 90G, instead of what was measured
    #[arg(long, value_name = "RATE", value_parser = engine::rate, allow_hyphen_values = true)]
    pub memory_rate: Option<ByteSize>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// What decides how much memory a run takes.
    #[command(flatten)]
    pub size: SizeArgs,
    /// Whether tokens are drafted.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// The way to read experts.
    #[command(flatten)]
    pub way: WayArgs,
}

impl PlanArgs {
    /// The options of the run to plan.
    pub fn options(&self) -> EngineOptions {
        let rate = |given: Option<ByteSize>| given.map(|ByteSize(bytes)| bytes as f64);
        let rates = Rates { disk: rate(self.disk_rate), memory: rate(self.memory_rate), decode: None };
        let drafting = self.draft.draft;
        EngineOptions { rates, io: self.way.io(), drafting, ..self.size.options() }
    }
}

/// `forebay score`.
#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// The text; - reads standard input, which is also read when no text is given and it is not a terminal
    #[arg(value_name = "TEXT", conflicts_with_all = ["file", "ids"])]
    pub text: Option<String>,
    /// Score the text of this file (UTF-8)
    #[arg(long, value_name = "PATH", conflicts_with = "ids")]
    pub file: Option<PathBuf>,
    /// Score token ids from this file: a JSON list of ids, a JSON list of such lists (windows), or ids
    /// separated by white space
    ///
    /// They are scored exactly as given; no tokenizer is needed.
    #[arg(long, value_name = "PATH")]
    pub ids: Option<PathBuf>,
    /// Leave the first N tokens of every window out of the score; they are context only
    ///
    /// The prefix that is put before a text is never scored and does not count.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub skip: usize,
    /// Longest window in tokens [default: the context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub window: Option<u32>,
    /// Do not put the model's start tokens (`[gMASK]<sop>`) before each window of a text
    ///
    /// GLM models were trained with that prefix, so texts get it unless they start with it.
    #[arg(long, conflicts_with = "ids")]
    pub no_prefix: bool,
    /// Print one JSON object with the log-probability of every token instead of text
    #[arg(long)]
    pub json: bool,
    /// Files to write beside the result.
    #[command(flatten)]
    pub files: RecordArgs,
    /// How to run the model.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forebay doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Also say how the model in this folder would run here [default: $FOREBAY_MODEL, if set]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// `forebay synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// The folder to write to: a new or empty one, or one where the same command was stopped
    #[arg(value_name = "DIR")]
    pub out: PathBuf,
    /// Layers, the first three of them dense; GLM-5.2 has 78
    #[arg(long, value_name = "N", conflicts_with_all = ["dense", "moe"], value_parser = clap::value_parser!(u16).range(1..=128))]
    pub layers: Option<u16>,
    /// Dense layers [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..=128))]
    pub dense: Option<u16>,
    /// Layers of experts [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..=128))]
    pub moe: Option<u16>,
    /// Format of the weights: int4-row, int4-g64 (or g16 to g256), int8, int2-row, bf16, f16, f32, or
    /// fp8-e4m3 (blocks of 128 x 128, as checkpoints are published)
    #[arg(long, value_name = "FORMAT", default_value = "int4-row")]
    pub format: Format,
    /// Add the layer that drafts tokens (multi-token prediction)
    #[arg(long)]
    pub mtp: bool,
    /// Add the indexer of sparse attention
    #[arg(long)]
    pub dsa: bool,
    /// Sizes that are not given one by one
    #[arg(long, value_enum, value_name = "SHAPE", default_value_t = ShapeArg::Glm52)]
    pub shape: ShapeArg,
    /// Experts per layer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub experts: Option<u32>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub hidden: Option<u32>,
    /// Width of one expert
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub expert_width: Option<u32>,
    /// Token ids; at least the 8192 of the tokenizer that comes with the model
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab: Option<u32>,
    /// Same seed and options, same bytes, on any machine
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Largest weight file
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(DEFAULT_SHARD_BYTES))]
    pub file_size: ByteSize,
    /// Threads that make weights [default: the cores that may be used]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Only say which files would be written
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// `--shape`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ShapeArg {
    /// GLM-5.2: 256 experts of 19 MB a layer
    #[value(name = "glm-5.2")]
    Glm52,
    /// The same structure at about a thousandth of the size
    Tiny,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use forebay_kernels::Isa;
    use forebay_model::{Arith, EmbeddingPlace, KvDtype};

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_reach_the_engine() {
        let line = "forebay score x --memory 2G --threads 3 --context 77 --chunk 9 --kv-dtype f32 \
                    --arith exact --quantize int4-g32 --low-rank-norm-eps 1e-6 --cpu-features scalar \
                    --embedding disk";
        let Verb::Score(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().verb else { panic!() };
        let options = args.engine.options();
        assert_eq!(options.memory, Some(ByteSize(2_000_000_000)));
        assert_eq!((options.threads, options.context, options.chunk), (Some(3), Some(77), Some(9)));
        assert_eq!((options.kv_dtype, options.arith), (KvDtype::F32, Arith::Exact));
        assert_eq!(options.quantise.map(|format| format.to_string()).as_deref(), Some("int4-g32"));
        assert_eq!((options.isa, options.low_rank_norm_eps), (Some(Isa::Scalar), Some(1e-6)));
        assert_eq!(options.embedding, Some(EmbeddingPlace::Disk));
        for bad in ["0", "-1e-6", "nan", "inf", "1e-60", "x"] {
            let line = ["forebay", "score", "x", "--low-rank-norm-eps", bad];
            assert!(Cli::try_parse_from(line).is_err(), "{bad}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for line in [
            "run x --temperature 2.5",
            "run x --temperature -1",
            "run x --temperature nan",
            "run x --top-p 0",
            "run x --top-k -1",
            "run x --min-p 1.5",
            "run x --repetition-penalty 0",
            "run x --presence-penalty 3",
            "run x --frequency-penalty nan",
            "run x --logit-bias 3",
            "run x --logit-bias 3=101",
            "run x --logit-bias -3=1",
            "run x --logprobs 5",
            "run x --json --logprobs 21",
            "run x --json-schema {} --regex a",
            "run x --grammar a --regex a",
            "run x --max-tokens 0",
            "run x --seed -1",
            "run x --threads 0",
            "run x --context 0",
            "run x --quantize bf16",
            "run x --quantize q4_0",
            "run x --cpu-features sse9",
            "run x --memory lots",
            "run x --file y",
            "run x --no-template --think",
            "inspect a --model b",
            "plan a --model b",
            "plan a --machine-memory much",
            "plan a --embedding ram",
            "plan a --disk-rate 0",
            "plan a --disk-rate nan",
            "plan a --disk-rate -7G",
            "plan a --disk-rate inf",
            "plan a --memory-rate 99999T",
            // These mean nothing to a plan.
            "plan a --mirror b",
            "plan a --throttle-disk 1G",
            "plan a --look-ahead on",
            "plan a --cache-policy lru",
            "plan a --cpu-features scalar",
            "inspect a --mirror b",
            "score --file a --ids b",
            "score x --window 1",
            "bench",
            "bench kernels --shape 2048",
            "bench kernels --format q4_0",
            "bench kernels --batch 0",
            "bench kernels --rounds 0",
            "bench kernels --what speed",
            "bench cache --tokens 1",
            "bench cache --trace x --seed 1",
        ] {
            let words = ["forebay"].into_iter().chain(line.split_whitespace());
            let error = Cli::try_parse_from(words).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
