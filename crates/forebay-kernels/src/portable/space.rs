//! Working memory on the stack.

use bytemuck::Zeroable;
use std::mem::MaybeUninit;

/// Room for up to `N` values, which are cleared when they are asked for: a product of few rows
/// does not pay for what many would need.
pub(crate) struct Space<T, const N: usize>([MaybeUninit<T>; N]);

impl<T: Zeroable, const N: usize> Space<T, N> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; N])
    }

    /// The first `count` values, all zero.
    #[inline(always)]
    pub(crate) fn zeros(&mut self, count: usize) -> &mut [T] {
        let values = &mut self.0[..count];
        let start = values.as_mut_ptr().cast::<T>();
        // SAFETY: the memory of `count` values is ours, and zero bytes make a `T`.
        unsafe {
            start.write_bytes(0, count);
            std::slice::from_raw_parts_mut(start, count)
        }
    }
}
