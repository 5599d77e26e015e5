// The experts as pixels, one each: a row is a layer, a column is an expert. Drawing all 19,456 of GLM-5.2 is one loop over
// a table of 256 colours and one putImageData; the browser scales it.

import type { ExpertMap } from "./types";

export const IN_MEMORY = 0x80;
export const USED = 0x40;
/** How many bits the count of uses has. */
export const USES = 0x3f;

/** Bits of the count at which colours are strongest: 2,048 uses. */
const HOT = 12;

/** How a map lies on the canvas. */
export interface Grid {
  columns: number;
  rows: number;
  /** The first cell of each row, and how many there are. */
  spans: { start: number; length: number }[];
}

export function grid(layers: ExpertMap["layers"]): Grid {
  let start = 0;
  const spans = layers.map((layer) => {
    const span = { start, length: layer.experts };
    start += layer.experts;
    return span;
  });
  return { columns: Math.max(0, ...layers.map((layer) => layer.experts)), rows: layers.length, spans };
}

/** The bytes of a feed; null if it is none of this length. */
export function decode(hex: string, cells: number): Uint8Array | null {
  if (hex.length !== 2 * cells) return null;
  const found = new Uint8Array(cells);
  for (let at = 0; at < cells; at += 1) {
    const value = Number.parseInt(hex.slice(2 * at, 2 * at + 2), 16);
    if (Number.isNaN(value)) return null;
    found[at] = value;
  }
  return found;
}

type Colour = [number, number, number];

const mix = (a: Colour, b: Colour, t: number): Colour => [
  a[0] + (b[0] - a[0]) * t,
  a[1] + (b[1] - a[1]) * t,
  a[2] + (b[2] - a[2]) * t,
];

// As ImageData wants it on every machine that a browser runs on: red in the lowest byte.
const pixel = ([red, green, blue]: Colour): number =>
  ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;

/** Colours of every byte without its bit USED, and then the same with the glow of a use at full strength. */
export function palette(dark: boolean): Uint32Array {
  const disk: [Colour, Colour] = dark ? [[30, 39, 43], [84, 96, 101]] : [[230, 225, 213], [176, 166, 148]];
  const memory: [Colour, Colour] = dark ? [[28, 92, 92], [128, 232, 220]] : [[152, 208, 202], [6, 78, 80]];
  const glow: Colour = dark ? [255, 176, 92] : [226, 104, 20];
  const table = new Uint32Array(256 * LEVELS);
  for (let level = 0; level < LEVELS; level += 1) {
    for (let byte = 0; byte < 256; byte += 1) {
      const [cold, hot] = byte & IN_MEMORY ? memory : disk;
      const heat = Math.min((byte & USES) / HOT, 1);
      table[256 * level + byte] = pixel(mix(mix(cold, hot, heat), glow, level / (LEVELS - 1)));
    }
  }
  return table;
}

/** Steps from no glow to full glow: one a frame, as long as it takes to fade. */
export const LEVELS = 42;

/** Writes a map into pixels; `glow` has the level of each cell. Cells that a layer does not have stay clear. */
export function paint(pixels: Uint32Array, cells: Uint8Array, glow: Uint8Array, shape: Grid, colours: Uint32Array) {
  pixels.fill(0);
  shape.spans.forEach(({ start, length }, row) => {
    const from = row * shape.columns;
    for (let at = 0; at < length; at += 1) {
      const cell = start + at;
      pixels[from + at] = colours[256 * (glow[cell] ?? 0) + (cells[cell] ?? 0)] ?? 0;
    }
  });
}

/** Lets the glow fade by so many levels; whether any is left. */
export function fade(glow: Uint8Array, levels: number): boolean {
  let left = false;
  for (let at = 0; at < glow.length; at += 1) {
    const now = glow[at] ?? 0;
    if (now > 0) {
      glow[at] = now > levels ? now - levels : 0;
      left ||= now > levels;
    }
  }
  return left;
}

/** In words: what a byte says. */
export function describe(byte: number): string {
  const bits = byte & USES;
  const uses =
    bits === 0
      ? "not used since you look"
      : bits === 1
        ? "used once since you look"
        : `used ${(2 ** (bits - 1)).toLocaleString("en")} to ${(2 ** bits - 1).toLocaleString("en")} times since you look`;
  const last = byte & USED ? ", also in the last pass" : "";
  return `${byte & IN_MEMORY ? "in memory" : "on disk only"}, ${uses}${last}`;
}
