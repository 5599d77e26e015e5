import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "../load.mjs";

const { bytes, count, moment, percent, plural, rate, share, speed, time } = await load("format.ts");

test("numbers have three digits and a unit", () => {
  const cases = [
    [bytes(0), "0 B"],
    [bytes(999), "999 B"],
    [bytes(1000), "1.00 kB"],
    [bytes(1234567), "1.23 MB"],
    [bytes(12_345_678), "12.3 MB"],
    [bytes(999_600), "1.00 MB"],
    [bytes(383_760_000_000), "384 GB"],
    [bytes(5e15), "5,000 TB"],
    [rate(2_900_000_000), "2.90 GB/s"],
    [time(0.26), "0.26 ms"],
    [time(6.64), "6.6 ms"],
    [time(163), "163 ms"],
    [time(999.9), "1.0 s"],
    [time(42_000), "42.0 s"],
    [time(120_000), "2 min"],
    [time(3_120_000), "52 min"],
    [time(7_320_000), "2 h 2 min"],
    [speed(0.9), "0.90 tokens/s"],
    [speed(52.6), "52.6 tokens/s"],
    [speed(1364.2), "1,364 tokens/s"],
    [count(19456), "19,456"],
    [plural(1, "row"), "1 row"],
    [plural(2000, "row"), "2,000 rows"],
    [percent(0.566), "56.6%"],
    [percent(1), "100%"],
  ];
  for (const [found, expected] of cases) assert.equal(found, expected);
});

test("what nobody knows is said to be unknown, and what is nearly all is not all", () => {
  for (const of of [bytes, rate, time, speed, percent]) {
    assert.equal(of(null), "unknown");
    assert.equal(of(undefined), "unknown");
  }
  assert.equal(percent(Number.NaN), "unknown");
  assert.equal(percent(0.99999), "99.9%");
  assert.equal(share(0, 0), null);
  assert.equal(share(3, 1), 0.75);
});

test("a moment has its day where that is not today", () => {
  const then = new Date(2026, 2, 7, 4, 5).getTime() / 1000;
  assert.equal(moment(then, new Date(2026, 2, 7, 23, 0)), "at 04:05");
  assert.equal(moment(then, new Date(2026, 2, 8, 1, 0)), "on 7 Mar at 04:05");
});
