//! Which keys are attended together, and their copy in lines.

use crate::attention::{Attended, KeyCache, KeyRows, TILE, bf16};
use crate::portable::Room;
use crate::portable::lanes::{Element, LANES};
use crate::portable::registers::Line;

/// Keys that are attended together at most: whole softmax tiles as far as they fit. A sparse
/// selection has few keys per tile, so many tiles share a block.
pub(crate) const BLOCK: usize = 64;
const _: () = assert!(BLOCK >= TILE, "a block holds at least one softmax tile");

/// Rows of a block in memory: scores are computed for up to three keys past its end.
pub(crate) const BLOCK_ROWS: usize = BLOCK.next_multiple_of(4);

/// The positions of one block.
pub(super) struct Block {
    positions: [usize; BLOCK],
    len: usize,
    /// Ends of the softmax tiles.
    ends: [usize; BLOCK],
    tiles: usize,
}

impl Block {
    pub(super) fn new() -> Self {
        Self { positions: [0; BLOCK], len: 0, ends: [0; BLOCK], tiles: 0 }
    }

    /// The attended positions, ascending.
    pub(super) fn positions(&self) -> &[usize] {
        &self.positions[..self.len]
    }

    /// Where each softmax tile of the block ends, ascending.
    pub(super) fn tile_ends(&self) -> &[usize] {
        &self.ends[..self.tiles]
    }

    /// Moves as many softmax tiles as fit out of `rest`; false when nothing is left.
    #[inline(always)]
    pub(super) fn take(&mut self, rest: &mut Attended<'_>) -> bool {
        (self.len, self.tiles) = (0, 0);
        loop {
            let count = first_tile(rest);
            if count == 0 || self.len + count > BLOCK {
                return self.len > 0;
            }
            let places = &mut self.positions[self.len..self.len + count];
            match rest {
                Attended::Range(range) => {
                    for (place, position) in places.iter_mut().zip(range) {
                        *place = position;
                    }
                }
                Attended::List(list) => {
                    let (tile, after) = list.split_at(count);
                    for (place, position) in places.iter_mut().zip(tile) {
                        *place = *position as usize;
                    }
                    *list = after;
                }
            }
            self.len += count;
            self.ends[self.tiles] = self.len;
            self.tiles += 1;
        }
    }
}

/// How many positions the first softmax tile of `rest` has; 0 when nothing is left.
#[inline(always)]
fn first_tile(rest: &Attended<'_>) -> usize {
    match rest {
        Attended::Range(range) => {
            let end = (range.start / TILE + 1).saturating_mul(TILE).min(range.end);
            end.saturating_sub(range.start)
        }
        Attended::List(list) => {
            let tile = list.first().map(|t| *t as usize / TILE);
            // Ascending and distinct: at most TILE of them.
            list.iter().take_while(|t| Some(**t as usize / TILE) == tile).count()
        }
    }
}

/// How queries and keys lie in lines: the latent part, the rope part, and room to the next row.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    pub latent_lines: usize,
    pub rope_lines: usize,
    /// Lines from one row to the next.
    pub stride: usize,
}

impl Layout {
    pub(crate) fn new(latent_dim: usize, rope_dim: usize) -> Self {
        let (latent_lines, rope_lines) = (latent_dim.div_ceil(LANES), rope_dim.div_ceil(LANES));
        let lines = latent_lines + rope_lines;
        // Four lines beyond a multiple of eight, so that a column of rows spreads over the sets
        // of the first cache.
        Self { latent_lines, rope_lines, stride: lines + (12 - lines % 8) % 8 }
    }
}

/// Copies the keys at `positions` into `tile`, widened; columns past a part's end are 0.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(super) unsafe fn pack<R: Room>(
    keys: KeyCache<'_>,
    dims: (usize, usize),
    positions: &[usize],
    layout: Layout,
    tile: &mut [Line],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        pack_part::<R>(keys.latents, dims.0, positions, layout, tile);
        pack_part::<R>(keys.rope_keys, dims.1, positions, layout, &mut tile[layout.latent_lines..]);
    }
}

#[inline(always)]
unsafe fn pack_part<R: Room>(
    rows: KeyRows<'_>,
    dim: usize,
    positions: &[usize],
    layout: Layout,
    tile: &mut [Line],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match rows {
            KeyRows::F32(rows) => {
                gather::<R, f32>(|t| contiguous(rows, t, dim), dim, positions, layout, tile)
            }
            KeyRows::Bf16(rows) => {
                gather::<R, _>(|t| contiguous(bf16(rows), t, dim), dim, positions, layout, tile)
            }
            KeyRows::F32Blocks(rows) => gather::<R, f32>(|t| rows.row(t, dim), dim, positions, layout, tile),
            KeyRows::Bf16Blocks(rows) => {
                gather::<R, _>(|t| bf16(rows.row(t, dim)), dim, positions, layout, tile)
            }
        }
    }
}

#[inline(always)]
fn contiguous<E>(rows: &[E], position: usize, dim: usize) -> &[E] {
    &rows[position * dim..(position + 1) * dim]
}

#[inline(always)]
unsafe fn gather<'a, R: Room, E: Element + 'a>(
    row: impl Fn(usize) -> &'a [E],
    dim: usize,
    positions: &[usize],
    layout: Layout,
    tile: &mut [Line],
) {
    if dim == 0 {
        return;
    }
    for (position, lines) in positions.iter().zip(tile.chunks_mut(layout.stride)) {
        // SAFETY: passed on to the caller.
        unsafe { to_lines::<R, E>(row(*position), 0.0, lines) };
    }
}

/// Widens `row` into the start of `lines`, the last line filled up with `padding`.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn to_lines<R: Room, E: Element>(row: &[E], padding: f32, lines: &mut [Line]) {
    let (whole, tail) = row.as_chunks::<LANES>();
    for (line, values) in lines.iter_mut().zip(whole) {
        // SAFETY: passed on to the caller.
        unsafe { R::store(E::load::<R>(values), &mut line.0) };
    }
    if !tail.is_empty() {
        let line = &mut lines[whole.len()].0;
        *line = [padding; LANES];
        for (place, value) in line.iter_mut().zip(tail) {
            *place = value.value();
        }
    }
}
