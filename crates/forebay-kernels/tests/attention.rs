//! Blocked attention and indexer scores against docs/numerics.md written down once more, bit
//! for bit, on every instruction set.

mod common;

use common::{Weights, any_format, floats, kernels, random, same_bits};
use forebay_core::float::{bf16_to_f32, f32_to_bf16};
use forebay_core::quant::decode_row;
use forebay_kernels::*;
use proptest::prelude::*;

/// Section 2: sixteen lanes, ascending, then the tree 8-4-2-1.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lane = [0f32; 16];
    for k in 0..a.len() {
        lane[k % 16] = a[k].mul_add(b[k], lane[k % 16]);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lane[i] += lane[i + half];
        }
    }
    lane[0]
}

/// Section 4.
fn exp(x: f32) -> f32 {
    let x = if x > 90.0 { 90.0 } else { x };
    let x = if x < -110.0 { -110.0 } else { x };
    let magic = 12_582_912f32;
    let n = x.mul_add(std::f32::consts::LOG2_E, magic) - magic;
    let high = 355.0 / 512.0;
    let r = (-n).mul_add(high, x);
    let r = (-n).mul_add((std::f64::consts::LN_2 - f64::from(high)) as f32, r);
    let mut p = 1.0 / 5040.0;
    for factorial in [720.0f32, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        p = f32::mul_add(p, r, 1.0 / factorial);
    }
    if n.is_nan() {
        return f32::NAN;
    }
    let h = (n / 2.0).floor();
    p * 2f32.powi(h as i32) * 2f32.powi((n - h) as i32)
}

/// Section 7 for one query row and one head.
fn attention(q: &[f32], q_rope: &[f32], world: &World, attended: &[usize]) -> Vec<f32> {
    let latent = |t: usize| &world.latents[t * world.r..(t + 1) * world.r];
    let rope_key = |t: usize| &world.rope_keys[t * world.p..(t + 1) * world.p];
    let (mut m, mut l, mut acc) = (f32::NEG_INFINITY, 0f32, vec![0f32; world.r]);
    for tile in attended.chunk_by(|a, b| a / 64 == b / 64) {
        let scores: Vec<f32> =
            tile.iter().map(|t| (dot(q, latent(*t)) + dot(q_rope, rope_key(*t))) * SCALE).collect();
        let mut new = m;
        for s in &scores {
            if *s > new {
                new = *s;
            }
        }
        if new > m {
            let shrink = exp(m - new);
            l *= shrink;
            acc.iter_mut().for_each(|a| *a *= shrink);
            m = new;
        }
        let p: Vec<f32> = scores.iter().map(|s| exp(s - m)).collect();
        let mut sum = 0f32;
        for p in &p {
            sum += p;
        }
        l += sum;
        for (p, t) in p.iter().zip(tile) {
            for (a, v) in acc.iter_mut().zip(latent(*t)) {
                *a = p.mul_add(*v, *a);
            }
        }
    }
    acc.iter().map(|a| a / l).collect()
}

const SCALE: f32 = 0.3;

/// Rows of `dim` numbers in blocks, the first one at row `shift` of the first block.
fn in_blocks<T: Copy + Default>(rows: &[T], dim: usize, shift: usize) -> Vec<Vec<T>> {
    let count = (rows.len().checked_div(dim).unwrap_or(rows.len()) + shift).div_ceil(TILE);
    // Without columns every number of blocks will do.
    let mut all = vec![T::default(); shift * dim];
    all.extend_from_slice(rows);
    all.resize(count.max(64) * TILE * dim, T::default());
    (0..count.max(64)).map(|at| all[at * TILE * dim..(at + 1) * TILE * dim].to_vec()).collect()
}

fn refs<T>(blocks: &[Vec<T>]) -> Vec<&[T]> {
    blocks.iter().map(Vec::as_slice).collect()
}

/// A cache of bf16 numbers and some query rows.
struct World {
    rows: usize,
    heads: usize,
    r: usize,
    p: usize,
    latents: Vec<f32>,
    rope_keys: Vec<f32>,
    /// `[heads, rows, r]`: the other way round than the output.
    q: Vec<f32>,
    /// `[rows, heads, p]`
    q_rope: Vec<f32>,
}

impl World {
    fn new((rows, heads, r, p): (usize, usize, usize, usize), positions: usize, seed: u64) -> Self {
        let mut next = random(seed);
        // The size of the numbers decides how often the largest score grows; 3 brings subnormals.
        let size = [0.05, 1.0, 8.0][(seed % 3) as usize];
        let mut take = |n, spread| -> Vec<f32> {
            floats(n, spread, &mut next).iter().map(|v| bf16_to_f32(f32_to_bf16(size * v))).collect()
        };
        let spread = if seed.is_multiple_of(7) { 3 } else { 1 };
        Self {
            rows,
            heads,
            r,
            p,
            latents: take(positions * r, 1),
            rope_keys: take(positions * p, spread),
            q: take(rows * heads * r, spread),
            q_rope: take(rows * heads * p, spread),
        }
    }

    /// Puts NaN and infinities into some keys.
    fn poison(&mut self, seed: u64) {
        let mut next = random(seed ^ 99);
        for _ in 0..1 + next() % 4 {
            let at = (next() % self.latents.len() as u64) as usize;
            self.latents[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][(next() % 3) as usize];
        }
    }

    fn attend(
        &self,
        k: Kernels,
        bf16: bool,
        attended: Attended<'_>,
        scratch: &mut AttendScratch,
    ) -> Vec<f32> {
        let narrow = |v: &[f32]| v.iter().map(|v| (v.to_bits() >> 16) as u16).collect::<Vec<_>>();
        let (latents, rope_keys) = (narrow(&self.latents), narrow(&self.rope_keys));
        let keys = if bf16 {
            KeyCache { latents: KeyRows::Bf16(&latents), rope_keys: KeyRows::Bf16(&rope_keys) }
        } else {
            KeyCache { latents: KeyRows::F32(&self.latents), rope_keys: KeyRows::F32(&self.rope_keys) }
        };
        let mut out = vec![0.5; self.q.len()];
        attend_rows(k, &self.query(), keys, attended.clone(), scratch, &mut out);
        // The same keys in blocks, at either place, have the same bits.
        for shift in [0, 1] {
            let mut blocked = vec![0.5; self.q.len()];
            let rows = self.latents.len() / self.r;
            if bf16 {
                let (a, b) = (in_blocks(&latents, self.r, shift), in_blocks(&rope_keys, self.p, shift));
                let (a, b): (Vec<_>, Vec<_>) = (refs(&a), refs(&b));
                let keys = KeyCache {
                    latents: KeyRows::Bf16Blocks(Blocks::new(&a, self.r, shift, rows)),
                    rope_keys: KeyRows::Bf16Blocks(Blocks::new(&b, self.p, shift, rows)),
                };
                attend_rows(k, &self.query(), keys, attended.clone(), scratch, &mut blocked);
            } else {
                let (a, b) =
                    (in_blocks(&self.latents, self.r, shift), in_blocks(&self.rope_keys, self.p, shift));
                let (a, b): (Vec<_>, Vec<_>) = (refs(&a), refs(&b));
                let keys = KeyCache {
                    latents: KeyRows::F32Blocks(Blocks::new(&a, self.r, shift, rows)),
                    rope_keys: KeyRows::F32Blocks(Blocks::new(&b, self.p, shift, rows)),
                };
                attend_rows(k, &self.query(), keys, attended.clone(), scratch, &mut blocked);
            }
            assert!(same_bits(&blocked, &out), "{k:?}, bf16: {bf16}, shift {shift}");
        }
        out
    }

    fn query(&self) -> AttentionRows<'_> {
        AttentionRows {
            latent_queries: HeadRows { values: &self.q, row: self.r, head: self.rows * self.r },
            rope_queries: HeadRows { values: &self.q_rope, row: self.heads * self.p, head: self.p },
            rows: self.rows,
            heads: self.heads,
            latent_dim: self.r,
            rope_dim: self.p,
            scale: SCALE,
        }
    }

    /// By definition: what row `row` attends to, for every row.
    fn reference(&self, attended: impl Fn(usize) -> Vec<usize>) -> Vec<f32> {
        let pairs = (0..self.rows).flat_map(|row| (0..self.heads).map(move |head| (row, head)));
        pairs
            .flat_map(|(row, head)| {
                let q = &self.q[(head * self.rows + row) * self.r..][..self.r];
                let q_rope = &self.q_rope[(row * self.heads + head) * self.p..][..self.p];
                attention(q, q_rope, self, &attended(row))
            })
            .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn ranges_have_the_bits_of_the_definition(
        (rows, heads) in (1..4usize, 1..11usize),
        (r, p) in (1..150usize, 0..40usize),
        (start, len) in (0..200usize, 0..200usize),
        poisoned in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut world = World::new((rows, heads, r, p), start + len + rows, seed);
        if poisoned {
            world.poison(seed);
        }
        let want = world.reference(|row| (start..start + len + row).collect());
        // One work space for all: nothing of an earlier call may shine through.
        let mut scratch = AttendScratch::default();
        for k in kernels() {
            for bf16 in [false, true] {
                let found = world.attend(k, bf16, Attended::Range(start..start + len), &mut scratch);
                prop_assert!(same_bits(&found, &want), "{k:?}, bf16: {bf16}");
            }
        }
    }

    #[test]
    fn lists_have_the_bits_of_the_definition(
        heads in 1..11usize,
        (r, p) in (1..100usize, 0..40usize),
        span in 1..3000usize,
        keep in 1..200u64,
        poisoned in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut world = World::new((1, heads, r, p), span, seed);
        if poisoned {
            world.poison(seed);
        }
        let mut next = random(seed);
        let list: Vec<u32> = (0..span as u32).filter(|_| next() % span as u64 <= keep).collect();
        let want = world.reference(|_| list.iter().map(|t| *t as usize).collect());
        let mut scratch = AttendScratch::default();
        for k in kernels() {
            for bf16 in [false, true] {
                let found = world.attend(k, bf16, Attended::List(&list), &mut scratch);
                prop_assert!(same_bits(&found, &want), "{k:?}, bf16: {bf16}");
            }
        }
    }

    #[test]
    fn index_scores_have_the_bits_of_the_definition(
        (rows, heads, dim) in (1..4usize, 1..11usize, 1..140usize),
        count in 0..160usize,
        poisoned in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let (q, w) = (floats(rows * heads * dim, 1, &mut next), floats(rows * heads, 1, &mut next));
        let mut keys: Vec<f32> =
            floats(count * dim, 1, &mut next).iter().map(|v| bf16_to_f32(f32_to_bf16(*v))).collect();
        if poisoned && count > 0 {
            let at = (next() % keys.len() as u64) as usize;
            keys[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][(next() % 3) as usize];
        }
        let (per_dim, per_head) = (1.0 / (dim as f32).sqrt(), 1.0 / (heads as f32).sqrt());
        let mut want = Vec::new();
        for row in 0..rows {
            for key in keys.chunks_exact(dim) {
                let mut sum = 0f32;
                for h in 0..heads {
                    let v = dot(&q[(row * heads + h) * dim..][..dim], key) * per_dim;
                    sum = w[row * heads + h].mul_add(if v < 0.0 { 0.0 } else { v }, sum);
                }
                want.push(sum * per_head);
            }
        }
        let narrow: Vec<u16> = keys.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        let query = IndexQueries { queries: &q, weights: &w, heads, dim };
        let mut scratch = ScoreScratch::default();
        for k in kernels() {
            let (wide_blocks, narrow_blocks) = (in_blocks(&keys, dim, 0), in_blocks(&narrow, dim, 0));
            let (wide_blocks, narrow_blocks) = (refs(&wide_blocks), refs(&narrow_blocks));
            for keys in [
                KeyRows::F32(&keys),
                KeyRows::Bf16(&narrow),
                KeyRows::F32Blocks(Blocks::new(&wide_blocks, dim, 0, count)),
                KeyRows::Bf16Blocks(Blocks::new(&narrow_blocks, dim, 0, count)),
            ] {
                let mut found = vec![0.5; want.len()];
                index_scores(k, &query, keys, &mut scratch, &mut found);
                prop_assert!(same_bits(&found, &want), "{k:?} {keys:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_batch_of_combinations_is_each_by_itself(
        format in any_format(),
        (first, rows, cols) in (0..4usize, 1..40usize, 1..900usize),
        (batch, gap) in (0..10usize, 0..5usize),
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let w = Weights::random(format, first + rows, cols, 0, &mut next);
        let stride = rows + gap;
        let coefficients = floats(batch * stride, 2, &mut next);
        let start = floats(batch * cols, 1, &mut next);
        // Section 3.3.
        let mut want = start.clone();
        for i in 0..rows {
            let mut row = vec![0f32; cols];
            decode_row(&w.view(), first + i, &mut row);
            for (b, out) in want.chunks_exact_mut(cols).enumerate() {
                for (o, w) in out.iter_mut().zip(&row) {
                    *o = coefficients[b * stride + i].mul_add(*w, *o);
                }
            }
        }
        for k in kernels() {
            let mut found = start.clone();
            combine_batch(k, w.view(), first..first + rows, &coefficients, stride, &mut found);
            prop_assert!(same_bits(&found, &want), "{k:?}");
        }
    }
}

#[test]
fn maxima_that_grow_inside_a_block_rescale_there() {
    // One key in every softmax tile, each with a larger score than the last: every tile of a
    // block changes the maximum of the even heads, and none that of the odd ones.
    let mut world = World::new((1, 7, 20, 0), 64 * 40, 1);
    for t in 0..64 * 40 {
        world.latents[t * 20] = (t / 64) as f32;
    }
    for h in 0..7 {
        world.q[h * 20] = if h % 2 == 0 { 1.0 } else { -1.0 };
    }
    let list: Vec<u32> = (0..40).map(|i| i * 64 + (i * 7) % 64).collect();
    let want = world.reference(|_| list.iter().map(|t| *t as usize).collect());
    for k in kernels() {
        let found = world.attend(k, false, Attended::List(&list), &mut AttendScratch::default());
        assert!(same_bits(&found, &want), "{k:?}");
    }
}

#[test]
#[should_panic(expected = "one row")]
fn a_list_is_for_one_row() {
    let world = World::new((2, 1, 4, 0), 8, 1);
    world.attend(Kernels::detect(), false, Attended::List(&[1]), &mut AttendScratch::default());
}
