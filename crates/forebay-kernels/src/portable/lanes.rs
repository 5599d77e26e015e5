//! Sixteen virtual lanes: the canonical order of every f32 dot product.

use super::Room;

/// Number of virtual lanes; element `k` belongs to lane `k mod LANES`.
pub(crate) const LANES: usize = 16;

/// Something that is read as f32 without rounding.
pub(crate) trait Element: Copy {
    fn value(self) -> f32;

    /// # Safety
    /// The processor has the room's instruction set.
    unsafe fn load<R: Room>(values: &[Self; LANES]) -> R::Lanes;
}

impl Element for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<R: Room>(values: &[Self; LANES]) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::load(values) }
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

    #[inline(always)]
    unsafe fn load<R: Room>(values: &[Self; LANES]) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::load_bf16(values) }
    }
}

/// `lanes[k mod 16] = fma(a[k], b[k], lanes[k mod 16])`, ascending k, for `N` rows `b` at once.
/// The first element belongs to lane 0.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn accumulate<R: Room, E: Element, const N: usize>(
    lanes: &mut [[f32; LANES]; N],
    a: &[f32],
    rows: [&[E]; N],
) {
    let (whole, tail) = a.as_chunks::<LANES>();
    let rows = rows.map(|row| row[..a.len()].as_chunks::<LANES>());
    // SAFETY: passed on to the caller.
    unsafe {
        let mut sums = lanes.each_ref().map(|lanes| R::load(lanes));
        for (k, x) in whole.iter().enumerate() {
            let x = R::load(x);
            for n in 0..N {
                sums[n] = R::fma(x, E::load::<R>(&rows[n].0[k]), sums[n]);
            }
        }
        for n in 0..N {
            R::store(sums[n], &mut lanes[n]);
        }
    }
    for (lanes, (_, row_tail)) in lanes.iter_mut().zip(rows) {
        for ((lane, x), w) in lanes.iter_mut().zip(tail).zip(row_tail) {
            *lane = x.mul_add(w.value(), *lane);
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
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn dot<R: Room, E: Element>(a: &[f32], b: &[E]) -> f32 {
    // SAFETY: passed on to the caller.
    let [sum] = unsafe { dots::<R, E, 1>(a, [b]) };
    sum
}

/// `N` canonical dot products with one `a`; each is the same as [`dot`] alone.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn dots<R: Room, E: Element, const N: usize>(a: &[f32], rows: [&[E]; N]) -> [f32; N] {
    let mut lanes = [[0f32; LANES]; N];
    // SAFETY: passed on to the caller.
    unsafe { accumulate::<R, E, N>(&mut lanes, a, rows) };
    lanes.map(tree)
}

/// `out[i] = fma(coefficient, x[i], out[i])`.
#[inline(always)]
pub(crate) fn axpy<E: Element>(coefficient: f32, x: &[E], out: &mut [f32]) {
    for (o, v) in out.iter_mut().zip(x) {
        *o = coefficient.mul_add(v.value(), *o);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scalar::Scalar;

    /// Lanes whose sum depends on the order of additions.
    fn sums() -> [[f32; LANES]; 4] {
        std::array::from_fn(|n| {
            std::array::from_fn(|i| 1.7f32.powi((7 * i as i32 + 5 * n as i32) % 23) / 3.0)
        })
    }

    unsafe fn trees<R: Room>() -> [f32; 4] {
        // SAFETY: passed on to the caller.
        unsafe { R::trees(sums().each_ref().map(|lanes| R::load(lanes))) }
    }

    #[test]
    fn every_room_adds_lanes_as_the_tree_does() {
        let wanted = sums().map(tree);
        // SAFETY: the scalar room needs nothing of the processor.
        assert_eq!(unsafe { trees::<Scalar>() }, wanted);
        #[cfg(target_arch = "x86_64")]
        {
            use crate::isa::Isa;
            if Isa::Avx2.is_available() {
                // SAFETY: just checked.
                assert_eq!(unsafe { trees::<crate::x86::avx2::Avx2>() }, wanted);
            }
            if Isa::Avx512.is_available() {
                // SAFETY: just checked.
                assert_eq!(unsafe { trees::<crate::x86::avx512::Avx512>() }, wanted);
            }
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: every processor of this architecture has NEON.
        assert_eq!(unsafe { trees::<crate::arm::neon::Neon>() }, wanted);
    }
}
