//! What a container gets once all of its weights are in their places.

use std::path::Path;

use forebay_io::{Access, open_files};
use forebay_store::layout::Extent;
use forebay_store::native::{HEADER_NAME, Native, preamble};
use sha2::Digest;

use super::super::error::ConvertError;
use super::super::plan::Output;
use super::fill::{Files, Made, made};
use super::route::What;
use super::{Container, PackPlan, path};
use crate::output::file::{PARTIAL, publish, write_whole};
use crate::pack::{PackError, identity, row_table};

/// Completes the container in `dir`, into which all of `outputs` went. `small` are the configuration files, `on_hub`
/// repository and commit that it was made of, if it was. The header comes last: until then the folder is no model.
pub fn finish(
    container: &Container,
    outputs: &[Output],
    dir: &Path,
    small: &[(&str, Vec<u8>)],
    on_hub: Option<(String, String)>,
) -> Result<(), ConvertError> {
    let mut header = container.plan.header.clone();
    (header.source.repository, header.source.revision) = on_hub.unwrap_or_default();
    let find = |name: &&str| small.iter().find(|(found, _)| found == name);
    let side_files = identity::SIDE_FILES.iter().filter_map(find);
    header.side_files = side_files.map(|(name, bytes)| identity::side_file(name, bytes)).collect();
    let mut sha = identity::begin(&header.side_files);
    for (number, (output, route)) in outputs.iter().zip(&container.routes).enumerate() {
        let Made { crcs, pages } = made(dir, number, route)?;
        identity::add_name(&mut sha, &output.name, output.bytes);
        sha.update(&output.header);
        sha.update(pages);
        for (place, crc) in route.places.iter().zip(crcs) {
            match place.what {
                What::Tensor(tensor) => header.tensors[tensor].crc = crc,
                What::Matrix { layer, expert, .. } => header.layers[layer].records[expert].crc = crc,
            }
        }
    }
    header.identity = sha.finalize().into();

    let mut files = Files { dir, container, open: Default::default() };
    // The tables of row checksums are made of the tensors where they are now.
    let resident =
        open_files(&[path(dir, &header.files[0].name)], Access::Buffered).map_err(PackError::from)?;
    let places =
        header.tensors.iter().map(|tensor| Extent { shard: 0, offset: tensor.offset, len: tensor.len });
    let mut placed = PackPlan { tensors: places.collect(), experts: Vec::new(), header };
    for tensor in 0..placed.header.tensors.len() {
        let table = row_table(&placed, tensor, &resident.shards);
        let table = table.map_err(|cause| PackError::source(&placed.header.tensors[tensor].name, cause))?;
        if let (Some(table), Some(checks)) = (table, &mut placed.header.tensors[tensor].row_checks) {
            checks.crc = crc32c::crc32c(&table);
            files.write(0, checks.offset, &table)?;
        }
    }
    let header = placed.header;
    for number in 0..header.files.len() {
        files.write(number, 0, &preamble(&header, number))?;
    }
    files.sync()?;
    drop(files);
    for file in &header.files {
        if dir.join(format!("{}{PARTIAL}", file.name)).exists() {
            publish(dir, &file.name)?;
        }
    }
    for (name, bytes) in small {
        super::super::put(dir, name, bytes)?;
    }
    write_whole(dir, HEADER_NAME, &header.to_bytes())?;
    // Everything is read back and checked but the weights.
    Native::open(dir).map_err(PackError::from)?;
    Ok(())
}
