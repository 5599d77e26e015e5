import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "../load.mjs";

const { LEVELS, decode, describe, fade, grid, paint, palette } = await load("heat.ts");

const layers = [3, 2, 4].map((experts, layer) => ({ layer, experts, slots: 1, mtp: layer === 2 }));

test("cells lie in the rows of their layers", () => {
  const shape = grid(layers);
  assert.deepEqual([shape.columns, shape.rows], [4, 3]);
  const cells = new Uint8Array([0x80, 0, 0xc1, 0x41, 0, 0, 0x85, 0, 0xff]);
  const [pixels, colours] = [new Uint32Array(12).fill(7), palette(false)];
  const glow = new Uint8Array(9);
  glow[3] = LEVELS - 1;
  paint(pixels, cells, glow, shape, colours);
  const plain = (byte) => colours[byte];
  assert.deepEqual(
    [...pixels],
    [plain(0x80), plain(0), plain(0xc1), 0, colours[256 * (LEVELS - 1) + 0x41], plain(0), 0, 0, plain(0), plain(0x85), plain(0), plain(0xff)],
  );
  assert.deepEqual(grid([]), { columns: 0, rows: 0, spans: [] });
});

test("a feed of another length or with other letters is none", () => {
  assert.deepEqual([...decode("00ff80", 3)], [0, 255, 128]);
  assert.equal(decode("00ff8", 3), null);
  assert.equal(decode("00ff80", 2), null);
  assert.equal(decode("00zz80", 3), null);
});

test("memory, disk and glow look different in both schemes, and opaque", () => {
  for (const dark of [false, true]) {
    const colours = palette(dark);
    const some = [0, 0x80, 0x0c, 0x8c, 256 * (LEVELS - 1)].map((at) => colours[at]);
    assert.equal(new Set(some).size, some.length);
    assert.ok(colours.every((colour) => colour >>> 24 === 255));
  }
});

test("a glow fades to nothing", () => {
  const glow = new Uint8Array([15, 3, 0]);
  assert.equal(fade(glow, 2), true);
  assert.deepEqual([...glow], [13, 1, 0]);
  assert.equal(fade(glow, 13), false);
  assert.deepEqual([...glow], [0, 0, 0]);
});

test("a cell is described as the feed counts: bits of its uses", () => {
  assert.equal(describe(0), "on disk only, not used since you look");
  assert.equal(describe(0x81), "in memory, used once since you look");
  assert.equal(describe(0xc3), "in memory, used 4 to 7 times since you look, also in the last pass");
});
