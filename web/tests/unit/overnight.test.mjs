import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "../load.mjs";

const { check, endedAt, isOpen, problems } = await load("overnight.ts");

const line = (change = {}) =>
  JSON.stringify({ custom_id: "a", method: "POST", url: "/v1/chat/completions", body: { messages: [] }, ...change });

test("a good file says what it holds", () => {
  const text = `${line()}\r\n\n${line({ custom_id: "b" })}\n`;
  assert.deepEqual(check(text), { endpoint: "/v1/chat/completions", requests: 2 });
});

test("a bad file says which line is wrong, and why", () => {
  const cases = [
    ["", /holds no request/],
    ["\n \n", /holds no request/],
    [`${line()}\n{`, /^Line 2 is no JSON/],
    ["[]", /^Line 1 is no JSON object/],
    ["null", /^Line 1 is no JSON object/],
    [line({ custom_id: undefined }), /^Line 1 has no custom_id/],
    [line({ custom_id: 7 }), /^Line 1 has no custom_id/],
    [`${line()}\n\n${line()}`, /^Line 3 has the custom_id "a" of an earlier line/],
    [line({ method: "GET" }), /^Line 1: the method/],
    [line({ url: "/v1/models" }), /^Line 1: the url/],
    [`${line()}\n${line({ custom_id: "b", url: "/v1/completions" })}`, /^Line 2 asks \/v1\/completions/],
    [line({ body: "text" }), /^Line 1 has no body/],
  ];
  for (const [text, expected] of cases) assert.match(check(text), expected, text);
});

test("a job is open until it ended, whichever way", () => {
  const open = ["validating", "in_progress", "finalizing", "cancelling"];
  const over = ["completed", "failed", "expired", "cancelled"];
  for (const status of [...open, ...over]) assert.equal(isOpen({ status }), open.includes(status), status);
  assert.equal(endedAt({ completed_at: null, cancelled_at: 5 }), 5);
  assert.equal(endedAt({}), null);
  assert.deepEqual(problems({ errors: { data: [{ line: 3, message: "no body" }, { code: "empty_file" }] } }), ["line 3: no body", "empty_file"]);
  assert.deepEqual(problems({ errors: null }), []);
});
