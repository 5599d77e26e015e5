//! The chain of one panel: sixty-four states of sixteen bits, two streams of bytes.

use super::table::{CODES, Slots, Step};
use super::{FREQUENCY_BITS, LEAST_STATE, STATE_BYTES, STATES, STREAM_STATES, STREAMS};
use crate::panel::PANEL_LINE;

/// A line of codes: two to a byte.
pub(super) type Line = [u8; PANEL_LINE];

/// A chain that was just made.
pub(super) struct Encoded<'a> {
    /// What decoding starts with.
    pub states: [u8; STATE_BYTES],
    /// What the states of the even bytes read, and those of the odd ones.
    pub streams: [&'a [u8]; STREAMS],
}

/// Codes `lines` from the last code to the first. `room` is work space.
pub(super) fn encode<'a>(
    lines: &[Line],
    steps: &[Step; CODES],
    room: &'a mut [Vec<u8>; STREAMS],
) -> Encoded<'a> {
    let mut states = [0; STATE_BYTES];
    let mut stream = 0;
    let streams = room.each_mut().map(|room| {
        // Every code puts down one byte at most; the first place is written in vain.
        room.resize(1 + lines.len() * STATES, 0);
        let start = encode_stream(lines, stream, steps, room, &mut states);
        stream += 1;
        &room[start..]
    });
    Encoded { states, streams }
}

/// Codes every second byte of the lines, from `half` on, into the end of `room`; returns where the stream starts.
fn encode_stream(
    lines: &[Line],
    half: usize,
    steps: &[Step; CODES],
    room: &mut [u8],
    states: &mut [u8; STATE_BYTES],
) -> usize {
    let mut x = [u32::from(LEAST_STATE); STREAM_STATES];
    let mut at = room.len();
    for line in lines.iter().rev() {
        for shift in [4, 0] {
            for lane in (0..STREAM_STATES).rev() {
                let step = &steps[usize::from(line[2 * lane + half] >> shift & 15)];
                let state = x[lane];
                // Written always and kept sometimes, because nobody could foresee the branch.
                room[at - 1] = state as u8;
                let spill = usize::from(state >= step.most);
                at -= spill;
                let state = state >> (8 * spill);
                let quotient = ((u64::from(state) * step.reciprocal) >> 32) as u32;
                x[lane] = (quotient << FREQUENCY_BITS) + (state - quotient * step.frequency) + step.first;
            }
        }
    }
    let first = half * STREAM_STATES;
    for (out, state) in states.as_chunks_mut::<2>().0[first..].iter_mut().zip(x) {
        *out = (state as u16).to_le_bytes();
    }
    at
}

/// A chain while it is decoded.
pub(super) struct Decoder<'a> {
    slots: &'a Slots,
    /// The whole coded matrix.
    bytes: &'a [u8],
    states: [u16; STATES],
    at: [usize; STREAMS],
    /// No stream is read further on than this: the last place with bytes for all states of a stream.
    last: usize,
}

impl<'a> Decoder<'a> {
    /// A chain with these states whose streams start at the places `at` of `bytes`, which have at least 32 bytes.
    pub(super) fn new(
        slots: &'a Slots,
        bytes: &'a [u8],
        states: &[u8; STATE_BYTES],
        at: [usize; STREAMS],
    ) -> Self {
        let mut pairs = states.as_chunks::<2>().0.iter();
        let states = [0; STATES].map(|zero: u16| pairs.next().map_or(zero, |pair| u16::from_le_bytes(*pair)));
        Self { slots, bytes, states, at, last: bytes.len().saturating_sub(STREAM_STATES) }
    }

    /// The next line: first the low nibbles of all bytes, then the high ones.
    pub(super) fn line(&mut self, out: &mut Line) {
        out.fill(0);
        for shift in [0, 4] {
            for half in 0..STREAMS {
                self.step(half, shift, out);
            }
        }
    }

    /// One code from each state of a stream.
    fn step(&mut self, half: usize, shift: u32, out: &mut Line) {
        let window: &[u8; STREAM_STATES] = match self.bytes[self.at[half]..].first_chunk() {
            Some(window) => window,
            None => &[0; STREAM_STATES],
        };
        let mut taken = 0;
        let states = &mut self.states[half * STREAM_STATES..][..STREAM_STATES];
        for (state, out) in states.iter_mut().zip(out.as_chunks_mut::<2>().0) {
            let slot = usize::from(*state) % self.slots.code.len();
            out[half] |= self.slots.code[slot] << shift;
            let rest = u16::from(self.slots.frequency[slot]) * (*state >> FREQUENCY_BITS)
                + u16::from(self.slots.rank[slot]);
            let takes = rest < LEAST_STATE;
            let more = rest << 8 | u16::from(window[taken % STREAM_STATES]);
            *state = if takes { more } else { rest };
            taken += usize::from(takes);
        }
        self.at[half] = (self.at[half] + taken).min(self.last);
    }
}
