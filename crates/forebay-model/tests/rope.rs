//! Rotary positions against tables that transformers computed (`tests/goldens/rope`).
//!
//! Both sides compute frequencies in single precision along different ways, so a frequency may differ by an ulp
//! or two, and the angle at position p by p times that: the tolerance grows with the angle. The first
//! frequency is exactly 1 on both sides, and there it does not grow.

use std::path::Path;

use forebay_kernels::Rope;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    positions: Vec<usize>,
    tables: Vec<Table>,
}

#[derive(Deserialize)]
struct Table {
    theta: f32,
    dim: usize,
    inv_freq: Vec<f32>,
    cos: Vec<Vec<f32>>,
    sin: Vec<Vec<f32>>,
    input: Vec<f32>,
    rotated: Vec<Vec<f32>>,
}

/// What one more rounding of a sine costs, in both libraries.
const SINE: f64 = 2.4e-7;
/// Two ulps of a frequency, and the rounding of its product with the position.
const ANGLE: f64 = 3.0e-7;

#[test]
fn angles_and_rotations_are_those_of_transformers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/rope/vectors.json");
    let golden: Golden = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(golden.tables.len() >= 4 && golden.positions.len() >= 10);
    for table in &golden.tables {
        let (half, what) = (table.dim / 2, format!("theta {}, width {}", table.theta, table.dim));
        let rope = Rope::new(table.dim, table.theta).unwrap();
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        rope.angles(1, &mut cos, &mut sin);
        for (j, &want) in table.inv_freq.iter().enumerate() {
            // The angle of position 1 is the frequency.
            let found = f64::from(sin[j]).atan2(f64::from(cos[j]));
            let off = (found / f64::from(want) - 1.0).abs();
            assert!(off < ANGLE, "{what}: frequency {j} is {found}, want {want}");
        }
        for (n, &position) in golden.positions.iter().enumerate() {
            rope.angles(position, &mut cos, &mut sin);
            let mut rotated = table.input.clone();
            rope.rotate(&mut rotated, &cos, &sin);
            for j in 0..half {
                let angle = position as f64 * f64::from(table.inv_freq[j]);
                let tolerance = SINE + if j == 0 { 0.0 } else { ANGLE * angle };
                let (a, b) = (f64::from(table.input[2 * j]), f64::from(table.input[2 * j + 1]));
                let wide = (a.abs() + b.abs()) * (tolerance + SINE);
                for (part, found, want, tolerance) in [
                    ("cos", cos[j], table.cos[n][j], tolerance),
                    ("sin", sin[j], table.sin[n][j], tolerance),
                    ("first half", rotated[j], table.rotated[n][j], wide),
                    ("second half", rotated[half + j], table.rotated[n][half + j], wide),
                ] {
                    let off = (f64::from(found) - f64::from(want)).abs();
                    assert!(
                        off <= tolerance,
                        "{what}, position {position}, {part} {j}: {found}, want {want}"
                    );
                }
            }
        }
    }
}
