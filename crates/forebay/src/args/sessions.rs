//! Options of what is kept between runs.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use forebay_core::ByteSize;

/// What of a run is kept for later ones.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prefixes")]
pub struct PrefixArgs {
    /// Keep what was computed of prompts and answers in this folder, and go on from it where a prompt begins with the
    /// same tokens; the words stay the same
    ///
    /// Off unless asked for: the files hold your prompts and answers as token ids. Only you can read them.
    #[arg(long, value_name = "DIR")]
    pub prefix_store: Option<PathBuf>,
    /// Bytes that kept prefixes may take, of all models together; the least recently used make room [default: 4G]
    #[arg(long, value_name = "SIZE")]
    pub prefix_store_size: Option<ByteSize>,
}

impl PrefixArgs {
    /// Bytes that kept prefixes may take.
    pub fn limit(&self) -> ByteSize {
        self.prefix_store_size.unwrap_or(ByteSize(4_000_000_000))
    }
}

/// `forebay sessions`.
#[derive(Debug, Args)]
pub struct SessionsArgs {
    /// What to do.
    #[command(subcommand)]
    pub verb: SessionsVerb,
}

/// What to do with what is kept.
#[derive(Debug, Subcommand)]
pub enum SessionsVerb {
    /// Show what is kept, and how much it takes
    List {
        /// Show the prefixes in this folder instead of the usual one
        #[arg(long, value_name = "DIR")]
        prefix_store: Option<PathBuf>,
        /// Print one JSON object instead of text
        #[arg(long)]
        json: bool,
    },
    /// Delete conversations, or kept prefixes
    Rm {
        /// The conversations to delete
        #[arg(value_name = "NAME", value_parser = crate::sessions::name, required_unless_present_any = ["all", "prefixes"])]
        names: Vec<String>,
        /// Delete all conversations and all prefixes
        #[arg(long, conflicts_with = "names")]
        all: bool,
        /// Delete the prefixes of all models: what was computed of prompts and answers, and their token ids
        #[arg(long)]
        prefixes: bool,
        /// Delete the prefixes in this folder instead of the usual one
        #[arg(long, value_name = "DIR", requires = "prefixes")]
        prefix_store: Option<PathBuf>,
    },
}
