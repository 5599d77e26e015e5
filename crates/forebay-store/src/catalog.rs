//! Every tensor of a model folder, by name.
//!
//! Opening a catalogue reads all shard headers and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::folder::{self, MissingShards};
use crate::layout::Extent;
use crate::native::{Native, NativeError};
use crate::shard::{Declared, Dtype, HeaderTensor, ShardError, read_header};

/// One tensor: what it is and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Index into [`Catalog::shards`].
    pub shard: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a single element.
    pub shape: Box<[u64]>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The matrix that the writer says these bytes are, if it says so.
    pub declared: Option<Declared>,
}

/// One safetensors file of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes when the catalogue was opened.
    pub size: u64,
}

impl Shard {
    /// The file's name without the folder.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// Choices when opening a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Of several tensors with one name take the first in scan order, as the reference engine does,
    /// instead of refusing the folder.
    pub first_wins: bool,
}

/// Why a folder has no usable catalogue. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// The folder cannot be listed.
    #[error("{}: cannot list the model folder: {error}; {advice}", dir.display())]
    List {
        /// The path given.
        dir: PathBuf,
        /// The system's reason.
        error: std::io::Error,
        /// What the path seems to be, and what to do.
        advice: String,
    },
    /// There is no shard in the folder.
    #[error("{}: no .safetensors file in the model folder: {advice}", dir.display())]
    NoShards {
        /// The folder.
        dir: PathBuf,
        /// What it seems to be, and what to do.
        advice: String,
    },
    /// A shard cannot be used.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The folder holds a Forebay container that cannot be used.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// Two shards hold a tensor of the same name.
    #[error("tensor {tensor:?} is in both {first} and {second}; remove the file that does not belong")]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// File name of the earlier shard.
        first: String,
        /// File name of the later one.
        second: String,
    },
    /// More shards or tensors than can be numbered.
    #[error("{}: more than 2^32 tensors or files; this cannot be one model", dir.display())]
    TooMany {
        /// The folder.
        dir: PathBuf,
    },
}

/// The tensors of one model folder.
#[derive(Clone, Debug)]
pub struct Catalog {
    dir: PathBuf,
    shards: Vec<Shard>,
    names: Vec<Arc<str>>,
    entries: Vec<TensorEntry>,
    by_name: HashMap<Arc<str>, u32>,
    shadowed: usize,
    native: Option<Arc<Native>>,
}

impl Catalog {
    /// Opens the folder `dir`; a tensor name that occurs twice is an error.
    pub fn open(dir: &Path) -> Result<Self, CatalogError> {
        Self::open_with(dir, Options::default())
    }

    /// Opens the folder `dir`.
    ///
    /// With a file [`native::HEADER_NAME`](crate::native::HEADER_NAME) it is a Forebay container, and
    /// the files are those that its header names. Otherwise they are those directly in `dir` whose
    /// name ends in exactly `.safetensors`, links followed, in ascending byte order of their names.
    /// Their number is not limited.
    pub fn open_with(dir: &Path, options: Options) -> Result<Self, CatalogError> {
        if Native::is_at(dir) {
            return Self::of_native(Native::open(dir)?);
        }
        let files = list(dir)?;
        if files.is_empty() {
            return Err(CatalogError::NoShards { dir: dir.to_owned(), advice: no_shards(dir) });
        }
        let mut catalog = Self::empty(dir);
        for path in files {
            let (size, tensors) = read_header(&path)?;
            catalog.add(Shard { path, size }, tensors, options)?;
        }
        Ok(catalog)
    }

    /// The catalogue of headers that were read already, or that belong to files elsewhere. `dir` is what messages
    /// call the folder.
    pub fn from_headers(
        dir: &Path,
        files: impl IntoIterator<Item = (Shard, Vec<HeaderTensor>)>,
        options: Options,
    ) -> Result<Self, CatalogError> {
        let mut catalog = Self::empty(dir);
        files.into_iter().try_for_each(|(shard, tensors)| catalog.add(shard, tensors, options))?;
        Ok(catalog)
    }

    fn empty(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            shards: Vec::new(),
            names: Vec::new(),
            entries: Vec::new(),
            by_name: HashMap::new(),
            shadowed: 0,
            native: None,
        }
    }

    /// The tensors of a container's resident file. Those of experts in records are not among them:
    /// see [`native`](Self::native).
    fn of_native(native: Native) -> Result<Self, CatalogError> {
        let mut catalog = Self::empty(native.dir());
        let header = native.header();
        let shard = |file: &crate::native::header::DataFile| Shard {
            path: native.dir().join(&file.name),
            size: file.size,
        };
        catalog.shards = header.files.iter().map(shard).collect();
        let too_many = || CatalogError::TooMany { dir: native.dir().to_owned() };
        for tensor in &header.tensors {
            let number = u32::try_from(catalog.entries.len()).map_err(|_| too_many())?;
            let name: Arc<str> = tensor.name.as_str().into();
            catalog.by_name.insert(name.clone(), number);
            catalog.names.push(name);
            let (dtype, shape) = (tensor.dtype.clone(), tensor.shape.as_slice().into());
            let (offset, len) = (tensor.offset, tensor.len);
            catalog.entries.push(TensorEntry { shard: 0, dtype, shape, offset, len, declared: None });
        }
        catalog.native = Some(Arc::new(native));
        Ok(catalog)
    }

    /// The Forebay container that this is, with the experts in its records; `None` if it is another.
    pub fn native(&self) -> Option<&Native> {
        self.native.as_deref()
    }

    /// The CRC32C that the bytes of a whole tensor must have, where the container says so.
    pub fn checksum(&self, extent: Extent) -> Option<u32> {
        Some(self.native.as_ref()?.tensor_at(extent)?.crc)
    }

    /// What the container says that the tensor `name` is stored as.
    pub(crate) fn named_weight(&self, name: &str) -> Option<crate::native::header::Weight> {
        let native = self.native.as_ref()?;
        // Tensors have the same order here and there.
        native.header().tensors[*self.by_name.get(name)? as usize].weight
    }

    /// The folder that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files, in scan order; [`TensorEntry::shard`] counts them.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The file name of shard `index`, for messages; `?` if there is no such shard.
    pub fn shard_name(&self, index: u32) -> String {
        self.shards.get(index as usize).map_or_else(|| "?".to_owned(), Shard::name)
    }

    /// The tensor `name`.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.get(*self.by_name.get(name)? as usize)
    }

    /// All tensors, in scan order: by shard, then as the header lists them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &TensorEntry)> {
        self.names.iter().map(|name| &**name).zip(&self.entries)
    }

    /// Number of tensors of the model's files, those in expert records included.
    pub fn stored_tensors(&self) -> usize {
        self.len() + self.native().map_or(0, Native::record_tensors)
    }

    /// Number of tensors with a name here.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the shards hold no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Tensors passed over because an earlier shard has one of the same name ([`Options::first_wins`]).
    pub fn shadowed(&self) -> usize {
        self.shadowed
    }

    /// Types that Forebay does not read, with the number of tensors that have them: worth a note,
    /// and an error only when one of these tensors is needed.
    pub fn unknown_dtypes(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for entry in &self.entries {
            if let Dtype::Other(name) = &entry.dtype {
                *counts.entry(&**name).or_default() += 1;
            }
        }
        counts
    }

    /// Shards that `model.safetensors.index.json`, or the numbering in the file names, promises and
    /// the folder lacks. Reads the index; for reports on an incomplete model.
    pub fn missing_shards(&self) -> Option<MissingShards> {
        if self.native.is_some() {
            return None;
        }
        let present: Vec<_> = self.shards.iter().map(Shard::name).collect();
        folder::missing_shards(&self.dir, &present)
    }

    fn add(&mut self, file: Shard, tensors: Vec<HeaderTensor>, options: Options) -> Result<(), CatalogError> {
        let too_many = || CatalogError::TooMany { dir: self.dir.clone() };
        let shard = u32::try_from(self.shards.len()).map_err(|_| too_many())?;
        u32::try_from(self.entries.len() + tensors.len()).map_err(|_| too_many())?;
        self.shards.push(file);
        for tensor in tensors {
            if let Some(earlier) = self.get(&tensor.name) {
                if !options.first_wins {
                    let (first, second) = (self.shard_name(earlier.shard), self.shard_name(shard));
                    return Err(CatalogError::Duplicate { tensor: tensor.name.to_string(), first, second });
                }
                self.shadowed += 1;
                continue;
            }
            self.by_name.insert(tensor.name.clone(), self.entries.len() as u32);
            self.names.push(tensor.name);
            let HeaderTensor { dtype, shape, offset, len, declared, .. } = tensor;
            self.entries.push(TensorEntry { shard, dtype, shape, offset, len, declared });
        }
        Ok(())
    }
}

/// The paths of the shards of `dir`, in ascending byte order.
pub fn list(dir: &Path) -> Result<Vec<PathBuf>, CatalogError> {
    let failed = |error| CatalogError::List { dir: dir.to_owned(), error, advice: folder::advice(dir) };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if name.as_encoded_bytes().ends_with(b".safetensors") {
            files.push(name);
        }
    }
    files.sort_unstable_by(|a, b| a.as_encoded_bytes().cmp(b.as_encoded_bytes()));
    Ok(files.into_iter().map(|name| dir.join(name)).collect())
}

fn no_shards(dir: &Path) -> String {
    match folder::missing_shards(dir, &[]) {
        Some(missing) => format!("it looks like an incomplete download ({missing}); resume the download"),
        None => folder::advice(dir),
    }
}
