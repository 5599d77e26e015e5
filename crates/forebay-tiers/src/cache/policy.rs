//! Which resident is worth least: the policies, as data.

/// How a layer chooses whom to keep. Decisions follow from the sequence of unions alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// The expert that was routed to most recently is worth most; every miss that finds
    /// a place is kept.
    Lru,
    /// Session counts with a touch of recency, as in the reference, with its
    /// clock in tokens of the layer: counts are halved every `halve_every` tokens, and a
    /// miss must beat a resident by the reference's margin.
    Lfru {
        /// Tokens between two halvings; 0 never halves.
        halve_every: u32,
    },
    /// Aged frequency with admission: how often an expert was used lately, with an
    /// exponential memory. A miss that is worth no more than any resident passes through.
    Aged {
        /// Tokens after which a use counts half; at least 1.
        half_life: u32,
    },
    /// Aged frequency over three memories at once: the last tokens, the topic, and the
    /// text as a whole ([`BLEND`]). The default: docs/cache.md has the table in which it
    /// is the best at every budget.
    #[default]
    Blend,
}

/// One memory of a frequency policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// Tokens after which a use counts half.
    pub half_life: u32,
    /// Its share of an expert's worth.
    pub weight: f64,
}

/// The memories of [`Policy::Blend`].
///
/// A use is predicted from three things that differ in speed: the last token (a quarter of
/// its experts come back at once), the topic (tens of tokens) and what the layer likes
/// (hundreds). The values won a search of 126 settings on made-up routes of other seeds than
/// the tests have. Doubling the first half-life costs up to 1.6 points (6 to 16 slots);
/// halving or doubling the others moves no budget by more than 0.7.
pub const BLEND: [Memory; 3] = [
    Memory { half_life: 1, weight: 0.2 },
    Memory { half_life: 16, weight: 0.4 },
    Memory { half_life: 400, weight: 0.4 },
];

/// The factor that halves in `half_life` steps, by Newton's method on `x^h = 1/2`:
/// products and quotients only, so that every machine gets the same bits.
pub(crate) fn decay(half_life: u32) -> f64 {
    let h = f64::from(half_life.max(1));
    // Start above the root: the iteration then falls monotonically.
    let mut x = 1.0 - 0.5 / h;
    for _ in 0..60 {
        x -= x * (1.0 - 0.5 / power(x, u64::from(half_life.max(1)))) / h;
    }
    x
}

/// `base` to the power of `exponent` by repeated squaring, for the same reason.
pub(crate) fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_life_halves() {
        // 2^(-1/h), from a table.
        for (half_life, want) in [
            (1, 0.5),
            (2, 0.707_106_781_186_547_5),
            (16, 0.957_603_280_698_573_6),
            (400, 0.998_268_632_597_392_5),
        ] {
            assert!((decay(half_life) - want).abs() < 1e-12, "{half_life}: {}", decay(half_life));
        }
        for half_life in [1, 3, 1000, 1_000_000, u32::MAX] {
            assert!((power(decay(half_life), u64::from(half_life)) - 0.5).abs() < 1e-6, "{half_life}");
        }
        assert_eq!(decay(0), decay(1));
    }

    #[test]
    fn the_shares_of_the_blend_are_shares() {
        assert!((BLEND.iter().map(|memory| memory.weight).sum::<f64>() - 1.0).abs() < 1e-12);
    }
}
