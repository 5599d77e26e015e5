//! Which bytes of the files that would be packed go where in the container.

use std::collections::BTreeMap;

use forebay_store::layout::Extent;

use super::super::error::ConvertError;
use super::super::plan::Output;
use super::{PackPlan, inner};

/// Where the bytes of one file go.
#[derive(Clone, Debug, Default)]
pub struct Route {
    /// From front to back, without a gap behind the file's header.
    pub parts: Vec<Part>,
    /// What they become, in the order in which it is complete.
    pub places: Vec<Place>,
}

/// A run of bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte in the file.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// What they are.
    pub what: What,
    /// The index of what they become part of in [`Route::places`], if these are its last bytes.
    pub ends: Option<usize>,
}

/// What some bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A tensor of the resident file, by its number: it is one place of its own.
    Tensor(usize),
    /// Codes or scales of a matrix of an expert.
    Matrix {
        /// By its number in the header.
        layer: usize,
        /// Which.
        expert: usize,
        /// 0 is gate, 1 is up, 2 is down.
        part: usize,
        /// Or codes.
        scales: bool,
    },
}

/// A tensor or a record in the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which; of a record, any of its parts.
    pub what: What,
    /// The number of its file.
    pub file: usize,
    /// First byte there.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The routes of all outputs.
pub fn routes(plan: &PackPlan, outputs: &[Output]) -> Result<Vec<Route>, ConvertError> {
    let mut all: Vec<Vec<Part>> = vec![Vec::new(); outputs.len()];
    let mut add = |from: Extent, what| match all.get_mut(from.shard as usize) {
        _ if from.len == 0 => Ok(()),
        Some(parts) => {
            parts.push(Part { at: from.offset, len: from.len, what, ends: None });
            Ok(())
        }
        None => Err(inner("a tensor is in no file")),
    };
    for (number, from) in plan.tensors.iter().enumerate() {
        add(*from, What::Tensor(number))?;
    }
    for (layer, experts) in plan.experts.iter().enumerate() {
        for (expert, matrices) in experts.iter().enumerate() {
            let shard = matrices[0].codes.shard;
            for (part, found) in matrices.iter().enumerate() {
                for (from, scales) in [(Some(found.codes), false), (found.scales, true)] {
                    let Some(from) = from else { continue };
                    if from.shard != shard {
                        return Err(inner(format!("expert {expert} of layer {layer} is in two files")));
                    }
                    add(from, What::Matrix { layer, expert, part, scales })?;
                }
            }
        }
    }
    all.into_iter().zip(outputs).map(|(parts, output)| route(plan, parts, output)).collect()
}

fn route(plan: &PackPlan, mut parts: Vec<Part>, output: &Output) -> Result<Route, ConvertError> {
    parts.sort_unstable_by_key(|part| part.at);
    let mut at = output.header.len() as u64;
    for part in &parts {
        if part.at != at {
            return Err(inner(format!("byte {at} of {} belongs to nothing", output.name)));
        }
        at += part.len;
    }
    if at != output.bytes {
        return Err(inner(format!("{} does not end with its last tensor", output.name)));
    }
    // An expert is complete with the last of its parts.
    let mut last = BTreeMap::new();
    for (number, part) in parts.iter().enumerate() {
        if let What::Matrix { layer, expert, .. } = part.what {
            last.insert((layer, expert), number);
        }
    }
    let mut places = Vec::new();
    for (number, part) in parts.iter_mut().enumerate() {
        let place = match part.what {
            What::Tensor(tensor) => {
                let found = &plan.header.tensors[tensor];
                Place { what: part.what, file: 0, offset: found.offset, len: found.len }
            }
            What::Matrix { layer, expert, .. } if last.get(&(layer, expert)) == Some(&number) => {
                let layer = &plan.header.layers[layer];
                let record = &layer.records[expert];
                Place { what: part.what, file: layer.file as usize, offset: record.offset, len: record.len }
            }
            What::Matrix { .. } => continue,
        };
        part.ends = Some(places.len());
        places.push(place);
    }
    Ok(Route { parts, places })
}
