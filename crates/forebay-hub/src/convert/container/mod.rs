//! The result as a Forebay container (docs/format.md).
//!
//! The files that a conversion writes otherwise are never there: they are planned as always, and while their bytes go
//! by, in memory, each goes to its place in the container. Tensors stay as they are, the matrices of an expert become
//! its record. What comes out is what packing those files would have made, byte for byte.
//!
//! - `route`: which byte goes where. `fill`: one of those files going by, and whether one went by before.
//! - `finish`: what needs all of them: the identity, and the header.

mod fill;
mod finish;
mod route;

use std::path::{Path, PathBuf};

use forebay_io::read_exact_at;
use forebay_model::{Snapshot, SnapshotOptions};
use forebay_store::catalog::{Catalog, CatalogError, Shard};
use forebay_store::config::ConfigFile;
use forebay_store::native::Header;
use forebay_store::native::header::{Source, SourceFile};
use forebay_store::shard::{ShardError, parse_header};

use super::error::ConvertError;
use super::plan::{Output, Plan};
use super::write::ASIDE;
use crate::output::file::PARTIAL;
use crate::output::folder::allocated;
use crate::pack::PackError;
use crate::pack::plan::Plan as PackPlan;

pub use fill::{Fill, is_filled, made_name};
pub use finish::finish;
use route::Route;

/// Memory that plan and header take by tensor of the result.
const MEMORY_PER_TENSOR: u64 = 1 << 10;

/// A container, planned.
#[derive(Debug)]
pub struct Container {
    /// What is where; identity, checksums and configuration files are still to come.
    plan: PackPlan,
    /// By [output](Plan::outputs): where its bytes go.
    routes: Vec<Route>,
    /// The most memory that making records takes besides the conversion.
    pub memory: u64,
}

impl Container {
    /// Plans the container that holds what `plan` makes. `generation` is the source's `generation_config.json`.
    pub fn new(plan: &Plan, config: &[u8], generation: Option<&[u8]>) -> Result<Self, ConvertError> {
        // Where messages say that the files are which are never there.
        let place = Path::new("the result");
        let parse = |name: &str, bytes: &[u8]| ConfigFile::parse(name, bytes);
        let config = parse("config.json", config)?;
        let generation = generation.map(|bytes| parse("generation_config.json", bytes)).transpose()?;
        let catalog = || catalog(place, &plan.outputs);
        let snapshot = Snapshot::of(place, &config, generation.as_ref(), catalog, SnapshotOptions::default())
            .map_err(PackError::from)?;
        let file =
            |output: &Output| SourceFile { name: output.name.clone(), size: output.bytes, sha256: None };
        let source = Source { files: plan.outputs.iter().map(file).collect(), ..Source::default() };
        let packed = PackPlan::of(&snapshot, Header { source, ..Header::default() })?;
        let routes = route::routes(&packed, &plan.outputs)?;
        let record = packed.experts.iter().flatten().map(|parts| {
            let parts = parts.map(|part| part.total_bytes());
            let all: u64 = parts.iter().sum();
            // As converted, as a record, and of one matrix the scales as numbers.
            2 * all + parts.into_iter().max().unwrap_or(0)
        });
        let memory = record.max().unwrap_or(0) + MEMORY_PER_TENSOR * snapshot.catalog.len() as u64;
        Ok(Self { plan: packed, routes, memory })
    }

    /// Bytes of the weight files.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// Of these, bytes of disk that they take in `dir` already.
    pub fn allocated(&self, dir: &Path) -> u64 {
        let files = self.files().flat_map(|(name, _)| [name.to_owned(), format!("{name}{PARTIAL}")]);
        files.map(|name| allocated(&dir.join(name))).sum()
    }

    /// The size of the [small file](made_name) of output `number`.
    pub fn made_bytes(&self, number: usize, output: &Output) -> u64 {
        fill::made_bytes(&self.routes[number], output.bytes)
    }

    /// Names and sizes of the weight files.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.plan.header.files.iter().map(|file| (file.name.as_str(), file.size))
    }
}

/// The tensors of files that are known by their headers.
fn catalog(place: &Path, outputs: &[Output]) -> Result<Catalog, CatalogError> {
    let mut headers = Vec::with_capacity(outputs.len());
    for Output { name, header, bytes, .. } in outputs {
        let path = place.join(name);
        let failed = |error| ShardError::Header { file: path.clone(), error };
        let tensors = parse_header(header.get(8..).unwrap_or_default(), *bytes).map_err(failed)?;
        headers.push((Shard { path, size: *bytes }, tensors));
    }
    Catalog::from_headers(place, headers, Default::default())
}

/// Where weight file `name` is: it has its name once every byte of all of them is in its place.
fn path(dir: &Path, name: &str) -> PathBuf {
    let whole = dir.join(name);
    if whole.exists() { whole } else { dir.join(format!("{name}{PARTIAL}")) }
}

/// Something that was checked, and is not so. It cannot happen; it is an error all the same.
fn inner(what: impl Into<String>) -> ConvertError {
    ConvertError::Source { name: "the container".to_owned(), what: what.into() }
}
