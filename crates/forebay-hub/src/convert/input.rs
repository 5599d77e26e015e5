//! Open files of the source, and pieces of files that are gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use forebay_io::read_exact_at;
use forebay_store::layout::Extent;

use super::error::ConvertError;

/// What can be read at the moment.
#[derive(Debug, Default)]
pub struct Inputs {
    files: BTreeMap<u32, Input>,
}

#[derive(Debug)]
struct Input {
    file: File,
    path: PathBuf,
    /// For pieces that were set aside: where each is now, by its first byte in the source's file.
    moved: Option<BTreeMap<u64, (u64, u64)>>,
}

impl Inputs {
    /// Opens `path` as file `shard` of the source.
    pub fn add_whole(&mut self, shard: u32, path: &Path) -> Result<(), ConvertError> {
        self.add(shard, path, None)
    }

    /// Opens `path`, to which `extents` of file `shard` of the source were copied one behind another.
    pub fn add_pieces(&mut self, shard: u32, path: &Path, extents: &[Extent]) -> Result<(), ConvertError> {
        let mut at = 0;
        let mut moved = BTreeMap::new();
        for extent in extents {
            moved.insert(extent.offset, (extent.len, at));
            at += extent.len;
        }
        self.add(shard, path, Some(moved))
    }

    fn add(
        &mut self,
        shard: u32,
        path: &Path,
        moved: Option<BTreeMap<u64, (u64, u64)>>,
    ) -> Result<(), ConvertError> {
        let file = File::open(path).map_err(|cause| ConvertError::at("open", path, cause))?;
        self.files.insert(shard, Input { file, path: path.to_owned(), moved });
        Ok(())
    }

    /// Reads these bytes of the source. What was never made readable reads as the end of a file.
    pub fn read(&self, extent: &Extent) -> Result<Vec<u8>, ConvertError> {
        let missing = || ConvertError::Source {
            name: format!("file {} of the source", extent.shard),
            what: "it is not there any more; convert again".to_owned(),
        };
        let input = self.files.get(&extent.shard).ok_or_else(missing)?;
        let offset = match &input.moved {
            None => extent.offset,
            Some(moved) => {
                let (&from, &(len, to)) = moved.range(..=extent.offset).next_back().ok_or_else(missing)?;
                let skipped = extent.offset - from;
                if skipped.saturating_add(extent.len) > len {
                    return Err(missing());
                }
                to + skipped
            }
        };
        let len = usize::try_from(extent.len).map_err(|_| missing())?;
        let mut bytes = vec![0; len];
        read_exact_at(&input.file, &input.path, &mut bytes, offset)?;
        Ok(bytes)
    }
}
