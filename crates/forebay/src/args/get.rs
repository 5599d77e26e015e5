//! What can be typed behind `forebay get`.

use std::path::PathBuf;

use clap::Args;
use forebay_core::ByteSize;

/// Which hub, and how to talk with it.
#[derive(Debug, Args)]
pub struct HubArgs {
    /// The hub [default: $HF_ENDPOINT, else that of Hugging Face]
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Trust the authorities in this PEM file instead of the usual ones [default: $SSL_CERT_FILE, if set]
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Connections at the same time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub connections: u8,
}

/// `forebay get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// The repository, as OWNER/NAME or OWNER/NAME@REVISION: a branch, a tag or a commit [default: main]
    #[arg(value_name = "REPO[@REV]")]
    pub repo: String,
    /// Put plain files into this folder [default: the cache, $HF_HUB_CACHE or $HF_HOME/hub]
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,
    /// Only files whose names match, such as '*.json'; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// Leave at least this much of the disk free
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(20_000_000_000))]
    pub margin: ByteSize,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Only say what would be fetched and what the model needs
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object instead of the folder's path
    #[arg(long)]
    pub json: bool,
}
