import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "../load.mjs";

const { SseParser, events } = await load("sse.ts");

// The rules are those of the HTML standard, "Interpreting an event stream".
const STREAM = [
  ": a comment\n",
  "data: one\n\n",
  "event: named\r\ndata: two\r\n\r\n",
  "data:no space\ndata:  two spaces\n\n",
  "event: without data\n\n",
  "data\n\n",
  "id: 7\nretry: 10\ndata: last: with a colon\n\n",
  "data: never ended\n",
].join("");
const EVENTS = [
  { name: "message", data: "one" },
  { name: "named", data: "two" },
  { name: "message", data: "no space\n two spaces" },
  { name: "message", data: "" },
  { name: "message", data: "last: with a colon" },
];

test("events are the same however the stream is cut", () => {
  assert.deepEqual(new SseParser().push(STREAM), EVENTS);
  for (let size = 1; size < 20; size += 1) {
    const parser = new SseParser();
    const found = [];
    for (let at = 0; at < STREAM.length; at += size) found.push(...parser.push(STREAM.slice(at, at + size)));
    assert.deepEqual(found, EVENTS, `${size} characters at a time`);
  }
});

test("letters that are cut in the middle of their bytes come out whole", async () => {
  const bytes = new TextEncoder().encode("data: für 日本 🙂\n\n");
  const response = new Response(
    new ReadableStream({
      start(controller) {
        for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
        controller.close();
      },
    }),
  );
  const found = [];
  for await (const event of events(response)) found.push(event.data);
  assert.deepEqual(found, ["für 日本 🙂"]);
});

test("who stops reading ends the request", async () => {
  let cancelled = false;
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode("data: one\n\ndata: two\n\n"));
    },
    cancel() {
      cancelled = true;
    },
  });
  for await (const event of events(new Response(body))) {
    assert.equal(event.data, "one");
    break;
  }
  assert.ok(cancelled);
});
