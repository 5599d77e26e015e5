import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "../load.mjs";

const { blocks, spans } = await load("text.ts");
const { kinds } = await load("phases.ts");

test("text is cut into blocks, also while it grows", () => {
  const found = blocks("# Title\none\ntwo\n\n- a\n- `b`\n1. x\n```py\nprint(1)\n# no heading\n```\nend");
  assert.deepEqual(found.map(({ kind }) => kind), ["heading", "paragraph", "list", "list", "code", "paragraph"]);
  assert.deepEqual(found[4], { kind: "code", language: "py", text: "print(1)\n# no heading", closed: true });
  assert.equal(found[1].spans[0].text, "one\ntwo");
  assert.deepEqual(blocks("```\nhalf"), [{ kind: "code", language: "", text: "half", closed: false }]);
  assert.deepEqual(blocks(""), []);
});

test("no character of a text is lost", () => {
  for (const text of ["a **b** c `d`", "**", "`", "** a ** `b", "<b>&amp;</b>", "*single*"]) {
    const shown = spans(text).map((span) => (span.kind === "bold" ? `**${span.text}**` : span.kind === "code" ? `\`${span.text}\`` : span.text));
    assert.equal(shown.join(""), text);
  }
});

test("every part of a pass belongs to one kind, and none is lost", () => {
  const found = kinds([
    { name: "waiting for experts", ms: 4 },
    { name: "routed experts", ms: 2 },
    { name: "router", ms: 1 },
    { name: "attend", ms: 3 },
    { name: "head", ms: 5 },
    { name: "a part of tomorrow", ms: 7 },
  ]);
  assert.deepEqual(found.map(({ kind, ms }) => [kind, ms]), [["wait", 4], ["experts", 3], ["attention", 3], ["head", 5], ["other", 7]]);
});
