//! The options of the verbs that check and make model folders.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use forebay_core::{ByteSize, Format};
use forebay_hub::convert::{DEFAULT_MARGIN, ResultKind, Targets};

use super::HubArgs;

/// `forebay verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The model folder
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Also read every byte and compare it with the digests that are known: from `forebay get`, from
    /// forebay-digests.json, from the names of the blobs in a Hugging Face cache
    ///
    /// This fills the page cache with the model: never do it right before measuring a cold start. A run that was
    /// stopped goes on when the same command is given again.
    #[arg(long)]
    pub hash: bool,
    /// Read every byte and record the digests in the folder, if there are none yet
    #[arg(long)]
    pub record: bool,
    /// Threads that hash [default: the cores that may be used, up to 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// `forebay convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The checkpoint: BF16, F16, F32, FP8 with blocks of 128 x 128, or NVFP4 (ModelOpt); a folder, a GGUF file (the first,
    /// if there are several) with weights in F32, F16, BF16, Q8_0, Q6_K, Q4_K or Q4_0, or where there is none of that name
    /// a repository, as OWNER/NAME or OWNER/NAME@REVISION
    ///
    /// Of a repository one weight file after another is fetched, verified, converted and deleted.
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// The folder to write to: a new or empty one, or one where the same command was stopped
    #[arg(value_name = "DST")]
    pub out: PathBuf,
    /// For a GGUF file: the folder with the original model's tokenizer.json (and chat template, if it has one); not
    /// needed if the file's metadata say that text is cut as by GLM (glm4, chatglm-bpe)
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Format of routed experts, shared experts and dense layers: int4-g64 (or g16 to g256), int4-row, int8, int2-row,
    /// bf16, f16 or f32
    #[arg(long, value_name = "FORMAT", default_value = "int4-g64", value_parser = weights)]
    pub to: Format,
    /// What is written
    #[arg(long, value_enum, default_value_t = Container::Reference)]
    pub container: Container,
    /// Format of routed experts [default: that of --to]
    #[arg(long, value_name = "FORMAT")]
    pub experts: Option<Format>,
    /// Format of dense layers and shared experts [default: that of --to]
    #[arg(long, value_name = "FORMAT")]
    pub dense: Option<Format>,
    /// Format of attention's projections [default: int8]
    #[arg(long, value_name = "FORMAT")]
    pub attention: Option<Format>,
    /// Format of token embeddings [default: int8]
    #[arg(long, value_name = "FORMAT")]
    pub embed: Option<Format>,
    /// Format of the output head [default: int8]
    #[arg(long, value_name = "FORMAT")]
    pub head: Option<Format>,
    /// Format of the indexer of sparse attention [default: int8]
    #[arg(long, value_name = "FORMAT", conflicts_with = "skip_indexer")]
    pub indexer: Option<Format>,
    /// Format of the layer that drafts tokens, its experts included [default: int8]
    #[arg(long, value_name = "FORMAT", conflicts_with = "skip_mtp")]
    pub mtp: Option<Format>,
    /// Leave the layer that drafts tokens (MTP) out
    #[arg(long)]
    pub skip_mtp: bool,
    /// Leave the indexer of sparse attention out
    #[arg(long)]
    pub skip_indexer: bool,
    /// Leave this much of the disk free
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(DEFAULT_MARGIN))]
    pub margin: ByteSize,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Threads that convert; they do not change a byte [default: the cores that may be used]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Only say what would be read and written, and how much disk and memory that takes
    #[arg(long, conflicts_with = "check_text")]
    pub plan: bool,
    /// Afterwards measure source and result on this text (UTF-8): perplexity, and how often both predict the same token
    #[arg(long, value_name = "PATH")]
    pub check_text: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// What a conversion writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Container {
    /// Safetensors files, which the reference engine reads too
    Reference,
    /// Forebay's own container: what `forebay pack` would make of the other one, without the other one ever being there
    Forebay,
}

impl From<Container> for ResultKind {
    fn from(container: Container) -> Self {
        match container {
            Container::Reference => Self::Reference,
            Container::Forebay => Self::Forebay,
        }
    }
}

/// A format of weights; that of files is another matter.
fn weights(text: &str) -> Result<Format, String> {
    match text {
        "forebay" => Err("that is a container, not a format of weights: give --container forebay".to_owned()),
        _ => text.parse().map_err(|error: forebay_core::format::ParseFormatError| error.to_string()),
    }
}

impl ConvertArgs {
    /// The format of every part.
    pub fn targets(&self) -> Targets {
        let of = Targets::of(self.to);
        Targets {
            experts: self.experts.unwrap_or(of.experts),
            dense: self.dense.unwrap_or(of.dense),
            attention: self.attention.unwrap_or(of.attention),
            embedding: self.embed.unwrap_or(of.embedding),
            head: self.head.unwrap_or(of.head),
            indexer: self.indexer.unwrap_or(of.indexer),
            mtp: self.mtp.unwrap_or(of.mtp),
        }
    }
}
