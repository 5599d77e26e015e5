//! Rotary position embedding: interleaved pairs in, half-split out.

/// The widest rotation, so that rotating needs no heap.
const WIDEST: usize = 512;

/// The frequencies of one rotation. Sines and cosines come from a software library in
/// f64, so they are the same on every machine, at any position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    frequencies: Vec<f32>,
}

/// A rotation that cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RopeError {
    /// The width is odd, zero or too large.
    #[error("a rotary embedding of width {dim} is not possible; the width must be even and 2 to {WIDEST}")]
    Dim {
        /// What was asked for.
        dim: usize,
    },
    /// The base is not a positive finite number.
    #[error("rope theta is {theta}; it must be a positive finite number")]
    Theta {
        /// What was asked for.
        theta: f32,
    },
}

impl Rope {
    /// A rotation of `dim` columns with base `theta`: `frequency[j] = theta^(-2j / dim)`.
    ///
    /// # Errors
    /// [`RopeError`] if `dim` is odd or out of range, or `theta` not positive and finite.
    pub fn new(dim: usize, theta: f32) -> Result<Self, RopeError> {
        if dim == 0 || !dim.is_multiple_of(2) || dim > WIDEST {
            return Err(RopeError::Dim { dim });
        }
        if !(theta > 0.0 && theta.is_finite()) {
            return Err(RopeError::Theta { theta });
        }
        let exponent = |j: usize| -2.0 * j as f64 / dim as f64;
        let frequencies = (0..dim / 2).map(|j| libm::pow(f64::from(theta), exponent(j)) as f32).collect();
        Ok(Self { frequencies })
    }

    /// Columns that are rotated.
    pub fn dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Cosines and sines of `position`, `dim / 2` each.
    ///
    /// # Panics
    /// If the outputs are not `dim / 2` long.
    pub fn angles(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        let half = self.frequencies.len();
        assert!(cos.len() == half && sin.len() == half, "one cosine and one sine per pair");
        for ((f, c), s) in self.frequencies.iter().zip(cos).zip(sin) {
            let angle = position as f32 * f;
            (*s, *c) = {
                let (sin, cos) = libm::sincos(f64::from(angle));
                (sin as f32, cos as f32)
            };
        }
    }

    /// Rotates one vector of `dim` columns: pairs `(2j, 2j + 1)` in, `j` and `dim / 2 + j` out.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn rotate(&self, v: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = self.frequencies.len();
        assert!(
            v.len() == 2 * half && cos.len() == half && sin.len() == half,
            "lengths must fit the rotation"
        );
        let mut pairs = [0f32; WIDEST];
        pairs[..v.len()].copy_from_slice(v);
        let (first, second) = v.split_at_mut(half);
        for (j, pair) in pairs.as_chunks::<2>().0[..half].iter().enumerate() {
            let [a, b] = *pair;
            first[j] = a * cos[j] - b * sin[j];
            second[j] = b * cos[j] + a * sin[j];
        }
    }
}
