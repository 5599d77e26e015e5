//! Sixteen virtual lanes: the canonical order of every f32 dot product.

/// Number of virtual lanes; element `k` belongs to lane `k mod LANES`.
pub(crate) const LANES: usize = 16;

/// Something that is read as f32 without rounding.
pub(crate) trait Element: Copy {
    fn value(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}

/// The bits of a bfloat16.
#[derive(Clone, Copy, bytemuck::AnyBitPattern)]
#[repr(transparent)]
pub(crate) struct Bf16Bits(pub u16);

impl Element for Bf16Bits {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// `lanes[k mod 16] = fma(a[k], b[k], lanes[k mod 16])`, ascending k, for `N` rows `b` at once.
/// The first element belongs to lane 0.
#[inline(always)]
pub(crate) fn accumulate<const N: usize, E: Element>(
    lanes: &mut [[f32; LANES]; N],
    a: &[f32],
    rows: [&[E]; N],
) {
    let (whole, _) = a.as_chunks::<LANES>();
    let cut = whole.len() * LANES;
    let blocks = rows.map(|row| row[..a.len()].as_chunks::<LANES>().0);
    for (k, x) in whole.iter().enumerate() {
        for n in 0..N {
            let w = &blocks[n][k];
            for i in 0..LANES {
                lanes[n][i] = x[i].mul_add(w[i].value(), lanes[n][i]);
            }
        }
    }
    for n in 0..N {
        for (i, (x, w)) in a[cut..].iter().zip(&rows[n][cut..]).enumerate() {
            lanes[n][i] = x.mul_add(w.value(), lanes[n][i]);
        }
    }
}

/// The fixed tree 8-4-2-1 that turns the lanes into one number.
#[inline(always)]
pub(crate) fn tree(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// The canonical dot product.
#[inline(always)]
pub(crate) fn dot<E: Element>(a: &[f32], b: &[E]) -> f32 {
    let [sum] = dots(a, [b]);
    sum
}

/// `N` canonical dot products with one `a`; each is the same as [`dot`] alone.
#[inline(always)]
pub(crate) fn dots<const N: usize, E: Element>(a: &[f32], rows: [&[E]; N]) -> [f32; N] {
    let mut lanes = [[0f32; LANES]; N];
    accumulate(&mut lanes, a, rows);
    lanes.map(tree)
}

/// `out[i] = fma(coefficient, x[i], out[i])`.
#[inline(always)]
pub(crate) fn axpy<E: Element>(coefficient: f32, x: &[E], out: &mut [f32]) {
    for (o, v) in out.iter_mut().zip(x) {
        *o = coefficient.mul_add(v.value(), *o);
    }
}
