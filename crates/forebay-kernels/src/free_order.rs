//! What the fixed order of sums costs: a product that sums in another order, for measurement only.
//!
//! docs/numerics.md fixes the order in which the segments of a row are added. A kernel that need
//! not keep it could add every second segment to a sum of its own, so that no multiply-add waits
//! for the one before. [`matmul`] here is that kernel: the code of [`crate::matmul()`], the
//! order apart. Its results are right to rounding, but they are not the bits that Forebay
//! promises, and nothing that computes a model may call it. `forebay bench kernels` compares the
//! two.

use crate::{Input, Kernels, Team, Weights};

/// As [`crate::matmul()`], but products of weights in panels with quantised activations are
/// summed in free order. Others are not, and have the same bits as there.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul<'a>(
    kernels: Kernels,
    team: &Team,
    weights: impl Into<Weights<'a>>,
    input: Input<'a>,
    y: &'a mut [f32],
) {
    crate::matmul(kernels.in_free_order(), team, weights, input, y);
}

#[cfg(test)]
mod tests {
    use crate::{Activations, Input, Isa, Kernels, Team};
    use forebay_core::format::{Format, GroupSize};
    use forebay_core::panel::{PanelShape, PanelView};
    use forebay_core::view::MatrixView;

    /// Numbers that repeat nowhere near, from -1 to 1.
    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * i + 7 * i) % 1009) as f32 / 504.5 - 1.0).collect()
    }

    #[test]
    fn another_order_gives_nearly_the_same() {
        let team = Team::new(2).unwrap();
        let group = GroupSize::ALL.into_iter().find(|size| size.get() == 64).unwrap();
        for format in [Format::Int4Group(group), Format::Int4Row, Format::Int8Row] {
            let (rows, cols) = (70, 1000);
            let codes: Vec<u8> = (0..format.payload_bytes(rows, cols).unwrap())
                .map(|i| (i * 89 + i / 251 * 7) as u8)
                .collect();
            let scales: Vec<f32> =
                numbers(format.scale_count(rows, cols).unwrap()).iter().map(|x| 0.01 + x * 0.005).collect();
            let view = MatrixView::new(format, rows, cols, &codes, &scales).unwrap();
            let shape = PanelShape::new(format, rows, cols).unwrap();
            let mut bytes = vec![0; shape.bytes()];
            shape.pack(&view, &mut bytes);
            let panels = PanelView::new(shape, &bytes).unwrap();
            for batch in [1, 2, 8, 13] {
                let x = numbers(batch * cols);
                for kernels in Isa::available().map(|isa| Kernels::with_isa(isa).unwrap()) {
                    let mut quantised = Activations::new(cols);
                    quantised.quantise(kernels, &team, &x);
                    let input = Input::int8(&x, &quantised);
                    let (mut canonical, mut free) = (vec![0f32; batch * rows], vec![0f32; batch * rows]);
                    crate::matmul(kernels, &team, panels, input, &mut canonical);
                    super::matmul(kernels, &team, panels, input, &mut free);
                    let pairs = canonical.iter().zip(&free);
                    let off = pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
                    let norm = canonical.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>().sqrt();
                    assert!(
                        norm > 1.0 && off < 1e-5 * norm,
                        "{kernels:?}, {format}, {batch}: {off} of {norm}"
                    );
                    assert_ne!(canonical, free, "the order is another one");
                    // What is not in panels keeps its order.
                    super::matmul(kernels, &team, view, input, &mut free);
                    assert_eq!(canonical, free, "{kernels:?}, {format}, {batch}");
                }
            }
        }
    }
}
