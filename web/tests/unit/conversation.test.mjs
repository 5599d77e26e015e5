import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "../load.mjs";

const { grow, growing, message, openCalls, toSend, tokensPerSecond } = await load("conversation.ts");

const chunk = (delta, finish = null) => JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] });
const call = (id, name) => ({ id, type: "function", function: { name, arguments: "{}" } });
const answered = (...events) => events.reduce((answer, [name, data, now]) => grow(answer, name, data, now ?? 0), growing(0));

test("an answer grows from its deltas to its end", () => {
  const answer = answered(
    ["forebay.started", JSON.stringify({ cached_tokens: 3, forecast: { first_token_ms: 80 } })],
    ["forebay.progress", JSON.stringify({ done: 5, total: 20, bytes_read: 1000, left_ms: 60 })],
    ["message", chunk({ role: "assistant" })],
    ["message", chunk({ reasoning_content: "so " }), 100],
    ["message", chunk({ reasoning_content: "what" }), 150],
    ["message", chunk({ content: "4" }), 200],
    ["message", chunk({ content: "2" }), 300],
    ["message", chunk({}, "stop"), 310],
    ["message", JSON.stringify({ choices: [], usage: { prompt_tokens: 23, completion_tokens: 5, prompt_tokens_details: { cached_tokens: 2 } } })],
    ["message", "[DONE]"],
  );
  assert.deepEqual([answer.state, answer.content, answer.reasoning], ["done", "42", "so what"]);
  const { facts } = answer;
  assert.deepEqual(facts.progress, { done: 5, total: 20, read: 1000, leftMs: 60 });
  assert.deepEqual([facts.started, facts.forecastMs, facts.cached, facts.promptTokens, facts.tokens], [true, 80, 2, 23, 5]);
  assert.deepEqual([facts.firstAt, facts.lastAt], [100, 300]);
  // Four tokens behind the first one, in 200 ms.
  assert.equal(tokensPerSecond(facts), 20);
});

test("rates that would be chance are not shown", () => {
  const facts = { ...growing(0).facts, tokens: 7, firstAt: 0, lastAt: 12 };
  assert.equal(tokensPerSecond(facts), null);
  assert.equal(tokensPerSecond({ ...facts, lastAt: 1000, tokens: 1 }), null);
  assert.equal(tokensPerSecond({ ...facts, firstAt: null }), null);
});

test("an answer that was cut or failed says so, and what came stays", () => {
  assert.equal(answered(["message", chunk({ content: "a" }, "length")]).state, "cut");
  const failed = answered(["message", chunk({ content: "a" })], ["message", '{"error":{"message":"an expert could not be read"}}']);
  assert.deepEqual([failed.state, failed.content, failed.error], ["failed", "a", "an expert could not be read"]);
  assert.equal(answered(["message", "<html>"]).state, "failed");
});

test("calls are answered in their order, and only those of the last answer", () => {
  const first = { ...message("assistant", ""), calls: [call("a", "one")] };
  const second = { ...message("assistant", ""), calls: [call("b", "two"), call("c", "three")] };
  const result = (callId) => ({ ...message("tool", "x"), callId });
  assert.deepEqual(openCalls([]), []);
  assert.deepEqual(openCalls([message("user", "?"), second]).map(({ id }) => id), ["b", "c"]);
  assert.deepEqual(openCalls([second, result("b")]).map(({ id }) => id), ["c"]);
  assert.deepEqual(openCalls([first, second, result("c"), result("b")]), []);
});

test("what is sent is what the interface takes", () => {
  const asked = message("user", "Weather?");
  const calls = { ...message("assistant", ""), reasoning: "hm", calls: [call("a", "weather")] };
  const result = { ...message("tool", "wet"), callId: "a" };
  const failed = { ...message("assistant", "half"), state: "failed" };
  const empty = { ...message("assistant", ""), state: "stopped" };
  assert.deepEqual(toSend([asked, calls, result, failed, empty], "  "), [
    { role: "user", content: "Weather?" },
    { role: "assistant", content: null, reasoning_content: "hm", tool_calls: [call("a", "weather")] },
    { role: "tool", content: "wet", tool_call_id: "a" },
  ]);
  assert.deepEqual(toSend([asked], "Be brief.")[0], { role: "system", content: "Be brief." });
});
