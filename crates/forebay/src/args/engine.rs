//! Options of the verbs that run a model, or say how it would run.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use forebay_core::{ByteSize, Format};
use forebay_engine::draft::MAX_DEPTH;
use forebay_engine::{Drafting, EngineOptions, IoOptions};
use forebay_io::{Access, Backend};
use forebay_kernels::Isa;
use forebay_model::{Arith, EmbeddingPlace, KvDtype, SlotCodes};
use forebay_tiers::{LookAhead, Policy};

/// How to run the model. None of these changes a word of the answer, except where it says so.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and machine")]
pub struct EngineArgs {
    /// The model folder [default: $FOREBAY_MODEL, else the bundled demonstration model]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// What decides how much memory a run takes.
    #[command(flatten)]
    pub size: SizeArgs,
    /// How numbers are computed.
    #[command(flatten)]
    pub numbers: NumberArgs,
    /// How experts are read.
    #[command(flatten)]
    pub disk: DiskArgs,
}

/// The model folder of the verbs that only look at one.
#[derive(Debug, Args)]
pub struct FolderArgs {
    /// The model folder [default: $FOREBAY_MODEL, else the bundled demonstration model]
    #[arg(value_name = "DIR", conflicts_with = "model")]
    dir: Option<PathBuf>,
    /// The same, named as by the other verbs
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
}

impl FolderArgs {
    /// The folder that was named, either way.
    pub fn named(&self) -> Option<&Path> {
        self.dir.as_deref().or(self.model.as_deref())
    }
}

/// What decides how much memory a run takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and machine")]
pub struct SizeArgs {
    /// Memory for the whole program, such as 16G or 1.5GiB [default: a share of what is available]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub memory: Option<ByteSize>,
    /// Compute threads [default: the cores that may be used]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Tokens of prompt and answer together [default: as many as fit comfortably]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Tokens per pass while reading a prompt [default: as many as fit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    /// Where token embeddings are kept; a token needs one row, so on disk they cost a small read and free memory
    /// for experts [default: disk, unless everything fits into memory]
    #[arg(long, value_enum, value_name = "PLACE")]
    pub embedding: Option<EmbeddingArg>,
    /// Precision of the KV cache; changes results slightly
    #[arg(long, value_enum, default_value_t = KvDtypeArg::Bf16)]
    pub kv_dtype: KvDtypeArg,
    /// Arithmetic of integer weights; exact is slower and changes results slightly
    #[arg(long, value_enum, default_value_t = ArithArg::Int8)]
    pub arith: ArithArg,
    /// What memory holds of coded experts (`forebay pack --codes`): the coded bytes, of which more fit, or what
    /// they decode to, which is quicker to compute with; the same words come out
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = SlotsArg::Auto)]
    pub expert_slots: SlotsArg,
    /// Re-encode float weights while loading: int8, int4-g64 (or g16 to g256), int4-row or int2-row; changes
    /// results
    #[arg(long, value_name = "FORMAT", value_parser = integer_format)]
    pub quantize: Option<Format>,
}

/// Whether tokens are drafted.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and machine")]
pub struct DraftArgs {
    /// Tokens to draft and then verify in one pass: auto, off, or 1 to 8
    ///
    /// Answers stay the same, token for token. Drafts come from the model's MTP layer or, where it has none, from what
    /// followed the same words earlier in the text; auto takes whichever promises more, and as many tokens as
    /// measurements say is fastest, none included. Every row of a pass may want other experts from the disk.
    #[arg(long, value_name = "N", default_value = "auto", value_parser = drafting)]
    pub draft: Drafting,
}

fn drafting(text: &str) -> Result<Drafting, String> {
    match (text, text.parse()) {
        ("off" | "0", _) => Ok(Drafting::Off),
        ("auto", _) => Ok(Drafting::Auto),
        (_, Ok(depth)) if (1..=MAX_DEPTH).contains(&depth) => Ok(Drafting::Depth(depth)),
        _ => Err(format!("use auto, off, or a number from 1 to {MAX_DEPTH}")),
    }
}

/// How numbers are computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and machine")]
pub struct NumberArgs {
    /// Epsilon of the two low-rank norms of attention; transformers uses 1e-6 whatever the config says; changes
    /// results slightly [default: the config's rms_norm_eps]
    #[arg(long, value_name = "EPSILON", value_parser = epsilon)]
    pub low_rank_norm_eps: Option<f32>,
    /// Instruction set: scalar, avx2, avx512, neon, neon-dotprod or neon-i8mm [default: the best there is]
    #[arg(long, value_name = "ISA")]
    pub cpu_features: Option<Isa>,
}

/// How experts are read. Changes nothing but speed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Disk")]
pub struct DiskArgs {
    /// Another folder with copies of the model's files, or of some of them, best on another disk: each expert
    /// is read from where it is expected first; may be given several times
    #[arg(long, value_name = "DIR")]
    pub mirror: Vec<PathBuf>,
    /// The way to read.
    #[command(flatten)]
    pub way: WayArgs,
    /// Read experts before it is certain that they are wanted, while the disk has nothing else to do
    #[arg(long, value_enum, default_value_t = LookAheadArg::Auto)]
    pub look_ahead: LookAheadArg,
    /// Which experts stay in memory: those used most lately at three speeds, or the last ones
    #[arg(long, value_enum, default_value_t = PolicyArg::Blend)]
    pub cache_policy: PolicyArg,
    /// Pretend that the disk reads at most this much a second, such as 1G (1MiB at least), for experiments; reads go through
    /// the page cache then, unless --io-access says otherwise
    #[arg(long, value_name = "RATE", value_parser = throttle)]
    pub throttle_disk: Option<ByteSize>,
}

/// The way to read experts.
#[derive(Debug, Args)]
#[command(next_help_heading = "Disk")]
pub struct WayArgs {
    /// Who reads: threads or the kernel's ring (Linux) [default: what forebay tune found, else threads]
    #[arg(long, value_enum, value_name = "BACKEND")]
    pub io_backend: Option<BackendArg>,
    /// Read through the page cache or past it [default: what forebay tune found, else past it, unless
    /// every expert fits into memory]
    #[arg(long, value_enum, value_name = "ACCESS")]
    pub io_access: Option<AccessArg>,
    /// Experts that are read at a time [default: what forebay tune found, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub io_depth: Option<u16>,
}

impl WayArgs {
    /// The same, as the engine takes it.
    pub fn io(&self) -> IoOptions {
        IoOptions {
            backend: self.io_backend.map(|backend| match backend {
                BackendArg::Pool => Backend::Pool,
                BackendArg::Uring => Backend::Uring,
            }),
            access: self.io_access.map(|access| match access {
                AccessArg::Buffered => Access::Buffered,
                AccessArg::Uncached => Access::Uncached,
                AccessArg::Direct => Access::Direct,
            }),
            depth: self.io_depth.map(usize::from),
            throttle: None,
        }
    }
}

impl DiskArgs {
    /// `options` with these.
    pub fn over(&self, options: EngineOptions) -> EngineOptions {
        EngineOptions {
            io: IoOptions { throttle: self.throttle_disk.map(|rate| rate.0), ..self.way.io() },
            look_ahead: self.look_ahead(),
            policy: self.policy(),
            ..options
        }
    }

    fn look_ahead(&self) -> LookAhead {
        match self.look_ahead {
            LookAheadArg::Auto => LookAhead::Auto,
            LookAheadArg::On => LookAhead::On,
            LookAheadArg::Off => LookAhead::Off,
        }
    }

    fn policy(&self) -> Policy {
        match self.cache_policy {
            PolicyArg::Blend => Policy::Blend,
            PolicyArg::Lru => Policy::Lru,
        }
    }
}

/// Less is slower than any disk, and a read would take minutes.
const SLOWEST: u64 = 1 << 20;
/// More than any memory delivers.
const FASTEST: u64 = 1_000_000_000_000_000;

fn throttle(text: &str) -> Result<ByteSize, String> {
    let rate: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    match rate.0 >= SLOWEST {
        true => Ok(rate),
        false => Err("at least 1MiB a second".to_owned()),
    }
}

/// Bytes per second that a machine may have.
pub fn rate(text: &str) -> Result<ByteSize, String> {
    let rate: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    match (SLOWEST..=FASTEST).contains(&rate.0) {
        true => Ok(rate),
        false => Err("use a rate from 1MiB to 1P a second, such as 7G".to_owned()),
    }
}

/// `--warm-up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SwitchArg {
    /// Do
    On,
    /// Do not
    Off,
}

/// `--io-backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// Threads that read
    Pool,
    /// A ring of the Linux kernel; threads where it refuses
    Uring,
}

/// `--io-access`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccessArg {
    /// Through the page cache, which keeps what it can
    Buffered,
    /// Through the page cache, which is told to forget
    Uncached,
    /// Past the page cache
    Direct,
}

/// `--look-ahead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LookAheadArg {
    /// Where measurements say that it gains
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

/// `--cache-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyArg {
    /// Aged frequency at three speeds
    Blend,
    /// Least recently used
    Lru,
}

impl EngineArgs {
    /// The same, as the engine takes it.
    pub fn options(&self) -> EngineOptions {
        self.disk.over(self.numbers.over(self.size.options()))
    }
}

impl SizeArgs {
    /// The same, as the engine takes it; everything else is as usual.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            memory: self.memory,
            threads: self.threads.map(usize::from),
            context: self.context.map(|n| n as usize),
            chunk: self.chunk.map(|n| n as usize),
            kv_dtype: match self.kv_dtype {
                KvDtypeArg::Bf16 => KvDtype::Bf16,
                KvDtypeArg::F32 => KvDtype::F32,
            },
            arith: match self.arith {
                ArithArg::Exact => Arith::Exact,
                ArithArg::Int8 => Arith::Int8,
            },
            quantise: self.quantize,
            expert_slots: match self.expert_slots {
                SlotsArg::Auto => None,
                SlotsArg::Coded => Some(SlotCodes::Coded),
                SlotsArg::Decoded => Some(SlotCodes::Decoded),
            },
            embedding: self.embedding.map(|place| match place {
                EmbeddingArg::Memory => EmbeddingPlace::Memory,
                EmbeddingArg::Disk => EmbeddingPlace::Disk,
            }),
            ..EngineOptions::default()
        }
    }
}

impl NumberArgs {
    /// `options` with these.
    pub fn over(&self, options: EngineOptions) -> EngineOptions {
        EngineOptions { isa: self.cpu_features, low_rank_norm_eps: self.low_rank_norm_eps, ..options }
    }
}

/// `--embedding`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum EmbeddingArg {
    /// With the other weights
    Memory,
    /// In its file
    Disk,
}

/// `--expert-slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SlotsArg {
    /// What is expected to be faster here, as `forebay plan` says
    Auto,
    /// Coded bytes, decoded whenever they are multiplied
    Coded,
    /// Decoded on arrival
    Decoded,
}

/// `--kv-dtype`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum KvDtypeArg {
    /// 2 bytes a value, as the published model was trained
    Bf16,
    /// 4 bytes a value
    F32,
}

/// `--arith`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArithArg {
    /// Weights and activations in single precision
    Exact,
    /// Activations in 8 bits with a scale per 64
    Int8,
}

/// A positive number that single precision holds.
fn epsilon(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("an epsilon is a small positive number, such as 1e-6".to_owned()),
    }
}

fn integer_format(text: &str) -> Result<Format, String> {
    let format: Format = text.parse().map_err(|error| format!("{error}"))?;
    if format.is_integer() {
        Ok(format)
    } else {
        Err("only integer formats can be made while loading: int8, int4-g64, int4-row, int2-row".to_owned())
    }
}
