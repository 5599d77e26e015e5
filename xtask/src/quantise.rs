//! Writes a quantised container of a float checkpoint, the way the reference converter lays it out.

use std::path::Path;

use forebay_core::{Format, MatrixView, quant};
use forebay_io::{Access, Shard, open_files, read_exact_at};
use forebay_model::families::glm;
use forebay_model::families::roles::{Role, Shape, TensorNeed};
use forebay_model::{Snapshot, SnapshotOptions};
use forebay_store::layout::{self, Extent, WeightLayout};
use forebay_testkit::container::{self, Tensor};

use crate::Outcome;

pub(crate) fn quantise(source: &Path, target: &Path, experts: &str, rest: &str) -> Outcome {
    let (experts, rest): (Format, Format) = (experts.parse()?, rest.parse()?);
    let snapshot = Snapshot::open(source, SnapshotOptions::default())?;
    let paths: Vec<_> = snapshot.catalog.shards().iter().map(|shard| &shard.path).collect();
    let shards = open_files(&paths, Access::Buffered)?.shards;
    let mut tensors = Vec::new();
    for need in needs(&snapshot) {
        let wanted = match need.role {
            Role::RoutedExpert => need.role.quantised(Format::F32, experts),
            role => role.quantised(Format::F32, rest),
        };
        tensors.extend(convert(&snapshot, &shards, &need, wanted)?);
    }
    std::fs::create_dir_all(target)?;
    let file = target.join("model.safetensors");
    container::write(&file, &tensors)?;
    println!("{}: {} tensors, {} bytes", file.display(), tensors.len(), std::fs::metadata(&file)?.len());
    Ok(())
}

/// Every tensor of the model: decoder, indexer, MTP.
fn needs(snapshot: &Snapshot) -> Vec<TensorNeed> {
    let spec = &snapshot.spec;
    let mut needs = glm::global_needs(spec);
    for layer in 0..spec.layers.len() {
        needs.extend(glm::layer_needs(spec, layer));
    }
    for layer in spec.sparse_layers() {
        needs.extend((0..spec.moe.experts).flat_map(|expert| glm::expert_needs(spec, layer, expert)));
    }
    if let Some(indexer) = spec.indexer.filter(|_| snapshot.sparse_attention.is_active()) {
        let layers = spec.full_indexer_layers();
        needs.extend(layers.flat_map(|layer| glm::indexer_needs(spec, &indexer, layer)));
    }
    if snapshot.mtp.is_active() {
        needs.extend(glm::mtp_needs(spec));
    }
    needs
}

fn convert(snapshot: &Snapshot, shards: &[Shard], need: &TensorNeed, wanted: Format) -> Outcome<Vec<Tensor>> {
    let catalog = &snapshot.catalog;
    let (layout, shape) = match need.shape {
        Shape::Matrix { rows, cols } => (layout::weight(catalog, &need.name, rows, cols)?, vec![rows, cols]),
        Shape::FloatMatrix { rows, cols } => {
            (layout::float_matrix(catalog, &need.name, rows, cols)?, vec![rows, cols])
        }
        Shape::Vector { len } => (layout::vector(catalog, &need.name, len)?, vec![len]),
    };
    let values = decode(shards, &layout)?;
    if wanted.is_integer() && matches!(need.shape, Shape::Matrix { .. }) {
        return Ok(Tensor::quantised(&need.name, wanted, layout.rows, layout.cols, &values).into());
    }
    Ok(vec![Tensor::f32(&need.name, &shape, &values)])
}

fn decode(shards: &[Shard], layout: &WeightLayout) -> Outcome<Vec<f32>> {
    let read = |extent: Extent| -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(extent.len)?];
        let shard = &shards[extent.shard as usize];
        read_exact_at(&*shard.file, &shard.path, &mut bytes, extent.offset)?;
        Ok(bytes)
    };
    let codes = read(layout.codes)?;
    let scales = match layout.scales {
        Some(extent) => read(extent)?,
        None => Vec::new(),
    };
    let (scales, _) = scales.as_chunks::<4>();
    let scales: Vec<f32> = scales.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let view = MatrixView::new(layout.format, layout.rows, layout.cols, &codes, &scales)?;
    let mut values = vec![0.0; layout.rows * layout.cols];
    for (row, out) in values.chunks_exact_mut(layout.cols).enumerate() {
        quant::decode_row(&view, row, out);
    }
    Ok(values)
}
