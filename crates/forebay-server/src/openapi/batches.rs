//! Files and batches: the work of the night.

use serde_json::{Map, Value};

/// Their routes.
pub fn paths(_add: &mut impl FnMut(&str, &str, Value)) {}

/// Their schemas.
pub fn schemas() -> Map<String, Value> {
    Map::new()
}
