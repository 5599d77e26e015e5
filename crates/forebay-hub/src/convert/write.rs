//! One conversion under way: the source's files one after another, each with what becomes of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_model::families::roles::Role;
use forebay_store::layout::Extent;

use super::Options;
use super::container::{self, Container, Fill};
use super::error::ConvertError;
use super::input::Inputs;
use super::loss::Loss;
use super::manifest::Manifest;
use super::plan::{Made, Output, Piece, Plan, encode};
use super::source::hub::WORK;
use super::source::{Source, SourceFile};
use crate::digest::{Algorithm, FileDigest, Hasher};
use crate::output::FileError;
use crate::output::file::NewFile;
use crate::output::folder::free_bytes;
use crate::output::ordered::{AHEAD, in_order};

/// Where pieces of files are kept that a later file completes.
pub const ASIDE: &str = "forebay-convert.parts";
/// Bytes copied at a time.
const COPY_BYTES: u64 = 1 << 20;

/// Everything that one run needs to know.
pub struct Run<'a> {
    pub dir: &'a Path,
    pub plan: &'a Plan,
    pub files: &'a [SourceFile],
    pub options: &'a Options,
    /// What is filled, if the result is a Forebay container.
    pub container: Option<&'a Container>,
    pub cancel: &'a CancelToken,
    pub progress: &'a mut dyn FnMut(u64, u64),
    pub manifest: Manifest,
    /// Bytes of the result that are there.
    pub written: u64,
    /// What this run's part of the conversion lost, by kind of weight; empty unless it is measured.
    pub losses: BTreeMap<Role, Loss>,
}

impl Run<'_> {
    /// Writes what is missing. Returns how many files that were.
    pub fn all(&mut self, source: &mut dyn Source) -> Result<usize, ConvertError> {
        let mut missing = Vec::new();
        for (number, output) in self.plan.outputs.iter().enumerate() {
            match self.is_done(number, output)? {
                true => self.written += output.bytes,
                false => missing.push(output),
            }
        }
        let left: u64 = match self.container {
            None => missing.iter().map(|output| output.bytes).sum(),
            Some(container) => container.bytes().saturating_sub(container.allocated(self.dir)),
        };
        let fetched =
            (0..self.files.len()).map(|file| source.room(file)).max().filter(|_| !missing.is_empty());
        self.check_room(u64::saturating_add(left, fetched.unwrap_or(0)))?;
        for file in 0..self.files.len() {
            let output = missing.iter().find(|output| output.source == file).copied();
            let aside = self.set_aside(source, file, &missing)?;
            if output.is_none() && aside.is_empty() {
                continue;
            }
            let parts =
                output.map_or(0, |output| output.bytes) + aside.iter().map(|part| part.len).sum::<u64>();
            self.check_room(parts.saturating_add(source.room(file)))?;
            let path = self.take(source, file)?;
            if !aside.is_empty() {
                self.copy_aside(file, &path, &aside)?;
            }
            if let Some(output) = output {
                let inputs = self.inputs(source, output, &path)?;
                self.check_room(output.bytes)?;
                self.write(output, &inputs, source.is_quantised())?;
            }
            source.release(file);
        }
        Ok(missing.len())
    }

    /// Whether an earlier run wrote this output, and it still is what it wrote.
    fn is_done(&mut self, number: usize, output: &Output) -> Result<bool, ConvertError> {
        let Some(container) = self.container else { return self.manifest.trusts(&output.name, output.bytes) };
        let bytes = container.made_bytes(number, output);
        // What is there is read, which takes a while.
        (self.progress)(self.written, self.plan.bytes());
        Ok(self.manifest.trusts(&container::made_name(number), bytes)?
            && container::is_filled(container, self.dir, number, self.cancel)?)
    }

    /// What has to be set aside of `file` before it is released; nothing if it was done before.
    fn set_aside(
        &mut self,
        source: &dyn Source,
        file: usize,
        missing: &[&Output],
    ) -> Result<Vec<Extent>, ConvertError> {
        let pieces = &self.plan.later[file];
        let wanted = missing.iter().filter(|output| output.source > file);
        let needed = wanted.flat_map(|output| &output.items).flat_map(|item| item.from.extents());
        if source.keeps_files() || !needed.into_iter().any(|extent| extent.shard as usize == file) {
            return Ok(Vec::new());
        }
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        match self.manifest.trusts(&aside_name(file), bytes)? {
            true => Ok(Vec::new()),
            false => Ok(pieces.clone()),
        }
    }

    fn copy_aside(&mut self, file: usize, path: &Path, pieces: &[Extent]) -> Result<(), ConvertError> {
        self.check_room(pieces.iter().map(|piece| piece.len).sum())?;
        let folder = self.dir.join(ASIDE);
        fs::create_dir_all(&folder).map_err(|cause| ConvertError::at("create", &folder, cause))?;
        let mut inputs = Inputs::default();
        inputs.add_whole(file as u32, path)?;
        let mut out = HashedFile::create(&folder, &aside_file(file))?;
        for piece in pieces {
            for at in (0..piece.len).step_by(COPY_BYTES as usize) {
                if self.cancel.is_cancelled() {
                    return Err(ConvertError::Cancelled);
                }
                let len = COPY_BYTES.min(piece.len - at);
                out.write(&inputs.read(&Extent { offset: piece.offset + at, len, ..*piece })?)?;
            }
        }
        let digest = out.publish()?;
        self.manifest.complete(&aside_name(file), digest)
    }

    /// Opens what `output` is made of: its own file of the source, and of earlier ones either the files or what was
    /// set aside.
    fn inputs(
        &mut self,
        source: &mut dyn Source,
        output: &Output,
        path: &Path,
    ) -> Result<Inputs, ConvertError> {
        let mut inputs = Inputs::default();
        inputs.add_whole(output.source as u32, path)?;
        let extents = output.items.iter().flat_map(|item| item.from.extents());
        let mut earlier: Vec<usize> = extents.map(|extent| extent.shard as usize).collect();
        earlier.sort_unstable();
        earlier.dedup();
        for file in earlier.into_iter().filter(|file| *file != output.source) {
            if source.keeps_files() {
                let path = self.take(source, file)?;
                inputs.add_whole(file as u32, &path)?;
            } else {
                let path = self.dir.join(aside_name(file));
                inputs.add_pieces(file as u32, &path, &self.plan.later[file])?;
            }
        }
        Ok(inputs)
    }

    /// Makes a file of the source readable, and notes what its bytes were compared with.
    fn take(&mut self, source: &mut dyn Source, file: usize) -> Result<PathBuf, ConvertError> {
        let path = source.take(file, self.cancel)?;
        let planned = &self.files[file];
        check_unchanged(source, &path, planned)?;
        if let Some(digest) = &planned.digest {
            self.manifest.verified.insert(planned.name.clone(), digest.to_string());
        }
        Ok(path)
    }

    fn check_room(&self, bytes: u64) -> Result<(), ConvertError> {
        let margin = self.options.margin;
        match free_bytes(self.dir) {
            Some(free) if bytes > 0 && free < bytes.saturating_add(margin) => {
                Err(ConvertError::NoRoom { dir: self.dir.to_owned(), bytes, margin, free })
            }
            _ => Ok(()),
        }
    }

    fn write(&mut self, output: &Output, inputs: &Inputs, measure: bool) -> Result<(), ConvertError> {
        let number = self.plan.outputs.iter().position(|other| other.name == output.name).unwrap_or(0);
        let mut sink = match self.container {
            None => Sink::File(HashedFile::create(self.dir, &output.name)?),
            Some(container) => {
                Sink::Container(Box::new(Fill::new(container, self.dir, number, output.bytes)))
            }
        };
        sink.write(&output.header)?;
        let total = self.plan.bytes();
        let (written, cancel, progress) = (&mut self.written, self.cancel, &mut *self.progress);
        let losses = &mut self.losses;
        *written += output.header.len() as u64;
        let make = |piece: &Piece| match piece {
            Piece::Rows { item, rows } => encode(&output.items[*item], rows.clone(), inputs, measure),
            Piece::Scales | Piece::Zeros(_) => Ok(Made::default()),
        };
        let mut scales: Vec<f32> = Vec::new();
        let take = |piece: &Piece, made: Result<Made, ConvertError>| {
            if cancel.is_cancelled() {
                return Err(ConvertError::Cancelled);
            }
            let made = made?;
            let bytes = match piece {
                Piece::Rows { item, .. } => {
                    if let Some(loss) = &made.loss {
                        losses.entry(output.items[*item].role).or_default().add(loss);
                    }
                    scales.extend(made.encoded.scales);
                    made.encoded.codes
                }
                Piece::Scales => scales.drain(..).flat_map(f32::to_le_bytes).collect(),
                Piece::Zeros(count) => vec![0; *count as usize],
            };
            sink.write(&bytes)?;
            *written += bytes.len() as u64;
            progress(*written, total);
            Ok(())
        };
        in_order(&output.pieces, self.options.threads, AHEAD, make, take)?;
        let (name, digest) = match sink {
            Sink::File(file) => (output.name.clone(), file.publish()?),
            Sink::Container(fill) => (container::made_name(number), fill.publish()?),
        };
        self.manifest.complete(&name, digest)
    }
}

/// Where the bytes of an output go.
enum Sink<'a> {
    /// Into a file of its own.
    File(HashedFile),
    /// Into their places in a container.
    Container(Box<Fill<'a>>),
}

impl Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        match self {
            Self::File(file) => Ok(file.write(bytes)?),
            Self::Container(fill) => fill.write(bytes),
        }
    }
}

/// The header says where everything is: it must be the one that was planned with.
fn check_unchanged(source: &dyn Source, path: &Path, planned: &SourceFile) -> Result<(), ConvertError> {
    match source.is_unchanged(path, planned)? {
        true => Ok(()),
        false => Err(ConvertError::SourceChanged { path: path.to_owned() }),
    }
}

fn aside_file(file: usize) -> String {
    format!("{file:05}.bin")
}

fn aside_name(file: usize) -> String {
    format!("{ASIDE}/{}", aside_file(file))
}

/// A new file and the hash of what was written to it.
pub struct HashedFile {
    file: NewFile,
    hash: Hasher,
    size: u64,
}

impl HashedFile {
    pub fn create(dir: &Path, name: &str) -> Result<Self, FileError> {
        Ok(Self { file: NewFile::create(dir, name)?, hash: Hasher::new(Algorithm::Sha256, 0), size: 0 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        self.file.write(bytes)
    }

    pub fn publish(self) -> Result<FileDigest, FileError> {
        self.file.publish()?;
        Ok(FileDigest { size: self.size, digest: self.hash.finish() })
    }
}

/// Removes what only an unfinished conversion needs. Should it stay, it does no harm.
pub fn tidy(dir: &Path) {
    for folder in [ASIDE, WORK] {
        let _ = fs::remove_dir_all(dir.join(folder));
    }
}
