// The page in a real browser, served by the real program with the bundled model.
//
//   node tests/page.mjs [--bin FOREBAY] [--chromium CHROMIUM] [--screenshots FOLDER] [--fresh]
//
// --fresh takes the page's files from the folder of assets instead of the program, to try what was just built.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { parseArgs } from "node:util";

import { build } from "esbuild";
import { chromium } from "playwright-core";

const here = new URL("./", import.meta.url).pathname;
const { values: options } = parseArgs({
  options: {
    bin: { type: "string", default: `${here}../../target/debug/forebay` },
    chromium: { type: "string", default: "/usr/bin/chromium" },
    screenshots: { type: "string" },
    fresh: { type: "boolean", default: false },
    only: { type: "string", default: "" },
  },
});
const axe = await readFile(`${here}../node_modules/axe-core/axe.min.js`, "utf8");
const folder = await mkdtemp(join(tmpdir(), "forebay-page-"));
const PHONE = { width: 360, height: 740 };
const DESK = { width: 1360, height: 860 };

/** Starts the server on a free port. */
async function serve(...more) {
  const args = ["serve", "--port", "0", "--log", "error", "--memory", "44M", "--drain-timeout", "1", ...more];
  const child = spawn(options.bin, args, {
    env: { ...process.env, FOREBAY_CACHE: join(folder, "cache"), FOREBAY_MODEL: "" },
    stdio: ["ignore", "pipe", "inherit"],
  });
  const ended = new Promise((resolve) => child.once("exit", resolve));
  for await (const line of createInterface({ input: child.stdout })) {
    const found = /^listening on (http:\S+)/.exec(line);
    if (!found) continue;
    return {
      url: found[1],
      async stop() {
        child.kill("SIGTERM");
        await ended;
      },
    };
  }
  throw new Error("the server did not start");
}

const browser = await chromium.launchPersistentContext(join(folder, "profile"), {
  executablePath: options.chromium,
  headless: true,
  args: [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
  ],
});

/** A page that complains about everything a page should not do. */
async function open(url, { size = DESK, scheme = "light", expected = [] } = {}) {
  const page = await browser.newPage();
  await page.setViewportSize(size);
  await page.emulateMedia({ colorScheme: scheme });
  const wrong = [];
  page.on("pageerror", (error) => wrong.push(`error: ${error}`));
  page.on("console", (said) => {
    // These tests read the canvas; the page does not.
    if (said.text().includes("willReadFrequently")) return;
    if (["error", "warning"].includes(said.type()) && !expected.some((known) => said.text().includes(known))) {
      wrong.push(`${said.type()}: ${said.text()}`);
    }
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(url)) wrong.push(`asks ${request.url()}`);
  });
  if (options.fresh) {
    await page.route(/\/dashboard(\/app\.js|\/app\.css|\/icon\.svg)?$/, async (route) => {
      const name = /app\.js|app\.css|icon\.svg/.exec(route.request().url())?.[0] ?? "index.html";
      const response = await route.fetch();
      const body = await readFile(`${here}../../crates/forebay-server/assets/${name}`);
      await route.fulfill({ response, body });
    });
  }
  await page.goto(`${url}/dashboard`);
  return { page, wrong };
}

async function accessible(page, what) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const bad = violations.map(
    (found) => `${what}: ${found.impact}: ${found.help}: ${found.nodes.map((node) => node.target).join(", ")}`,
  );
  assert.deepEqual(bad, [], "axe-core finds nothing, serious or not");
}

const overflow = (page) => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);

async function ask(page, text) {
  await page.getByLabel("Message", { exact: true }).fill(text);
  await page.keyboard.press("Enter");
}

const last = (page) => page.locator(".message.assistant").last();
const idle = (page) => page.locator(".status.good").waitFor({ timeout: 30_000 });

/** Every pixel of the map as one number. */
const mapPixels = (page) =>
  page.evaluate(() => {
    const canvas = document.querySelector("canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return { width: canvas.width, height: canvas.height, pixels: [...new Uint32Array(data.buffer)] };
  });

/** Puts the page's own drawing into reach of a test. */
async function withHeat(page) {
  const { outputFiles } = await build({
    entryPoints: [`${here}../src/heat.ts`],
    bundle: true,
    write: false,
    format: "iife",
    globalName: "heat",
  });
  await page.evaluate(`${outputFiles[0].text}; globalThis.heat = heat`);
}

async function shoot(page, name) {
  if (options.screenshots) await page.screenshot({ path: join(options.screenshots, `${name}.png`) });
}

const tests = {
  async "a browser gets the page at / and a program gets JSON, both under a strict policy"({ url }) {
    const html = await fetch(url, { headers: { accept: "text/html,*/*;q=0.8" } });
    assert.match(html.headers.get("content-type"), /^text\/html/);
    assert.match(html.headers.get("vary"), /accept/);
    const json = await fetch(url);
    assert.equal((await json.json()).name, "forebay");
    for (const path of ["/dashboard", "/dashboard/app.js", "/dashboard/app.css", "/dashboard/icon.svg"]) {
      const response = await fetch(url + path);
      assert.equal(response.status, 200, path);
      const policy = response.headers.get("content-security-policy");
      assert.match(policy, /default-src 'none'/);
      assert.doesNotMatch(policy, /unsafe|\*/);
    }
  },

  async "a chat answers, and the map, the times and the requests follow"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    await page.locator("canvas").waitFor();
    const before = await mapPixels(page);
    assert.deepEqual([before.width, before.height], [64, 5]);
    await page.getByRole("button", { name: "What is 2+2?" }).click();
    await last(page).getByText("2+2=4.").waitFor();
    await last(page).getByText(/\d+ tokens · .* tokens\/s · first after/).waitFor();
    await idle(page);
    await page.locator(".facts").getByText(/[\d.]+% of the experts/).waitFor();
    const during = await mapPixels(page);
    const changed = during.pixels.filter((pixel, at) => pixel !== before.pixels[at]).length;
    assert.ok(changed > 20, `${changed} cells changed`);
    // The glow fades, and then nothing moves.
    await page.waitForTimeout(1500);
    const [calm, later] = [await mapPixels(page), (await page.waitForTimeout(600), await mapPixels(page))];
    assert.deepEqual(calm, later);
    await withHeat(page);
    const plain = await page.evaluate(() => [...globalThis.heat.palette(false).slice(0, 256)]);
    assert.deepEqual(calm.pixels.filter((pixel) => !plain.includes(pixel)), [], "nothing glows any more");
    const feed = await (await fetch(`${url}/dashboard/state`)).json();
    const resident = feed.map.cells.match(/../g).filter((cell) => Number.parseInt(cell, 16) & 0x80).length;
    assert.ok(resident > 0 && resident <= feed.memory.slots);
    await page.locator(".tiers").getByText(`${resident} of ${feed.memory.slots} slots hold an expert`).waitFor();
    await page.locator(".time").getByText("waiting for experts").waitFor();
    await page.getByText(`${feed.recent[0].id} complete`).waitFor();
    // The second turn goes on from the first.
    await ask(page, "What is the capital of France?");
    await page.waitForFunction(() => document.querySelectorAll(".message.assistant footer").length === 2);
    await last(page).getByText(/prompt tokens were known/).waitFor();
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "the map is read with the keyboard, and as a table"({ url }) {
    const { page, wrong } = await open(url);
    await page.locator("canvas").focus();
    await page.keyboard.press("ArrowRight");
    await page.locator(".readout").getByText("Layer 3, expert 0").waitFor();
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowRight");
    await page.locator(".readout").getByText("Layer 4, expert 1").waitFor();
    await page.getByText("As a table").click();
    assert.equal(await page.locator(".heat tbody tr").count(), 5);
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "settings reach the server, and wrong ones do not"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    await page.getByText("Settings", { exact: true }).click();
    await page.getByLabel("Temperature").fill("3");
    await page.getByText("The temperature is a number from 0 to 2.").waitFor();
    await page.getByLabel("Message", { exact: true }).fill("What is 2+2?");
    assert.ok(await page.getByRole("button", { name: "Send" }).isDisabled());
    await page.getByLabel("Temperature").fill("0.5");
    await page.getByLabel("Most tokens").fill("3");
    await page.getByLabel("Think first").check();
    await page.getByLabel("System message").fill("Be brief.");
    await page.getByLabel("Tools, as JSON").fill('[{"type":"function","function":{"name":"look_up","parameters":{"type":"object"}}}]');
    const [request] = await Promise.all([
      page.waitForRequest("**/v1/chat/completions"),
      page.getByRole("button", { name: "Send" }).click(),
    ]);
    const body = request.postDataJSON();
    assert.deepEqual([body.temperature, body.max_tokens, body.enable_thinking], [0.5, 3, true]);
    assert.deepEqual(body.messages[0], { role: "system", content: "Be brief." });
    assert.equal(body.tools[0].function.name, "look_up");
    await last(page).getByText(/cut at the limit of tokens/).waitFor();
    await page.getByRole("button", { name: "New conversation" }).click();
    assert.equal(await page.locator(".message").count(), 0);
    assert.deepEqual(wrong, []);
    await page.close();
  },

  // The bundled model thinks nothing and calls nothing: here a stand-in for the server says what a larger one would.
  async "reasoning is folded, calls are shown and answered, and nothing of an answer becomes markup"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    const asked = [];
    await page.route("**/v1/chat/completions", async (route) => {
      asked.push(route.request().postDataJSON());
      const call = { index: 0, id: "call_1", type: "function", function: { name: "weather", arguments: '{"city":"Oslo"}' } };
      const deltas =
        asked.length === 1
          ? [{ reasoning_content: "Hidden " }, { reasoning_content: "thoughts" }, { tool_calls: [call] }]
          : [{ content: "# Rain\n<img src=x onerror=alert(1)> **bold**\n```py\nprint(1)\n```\n" }];
      const chunks = deltas.map((delta) => ({ choices: [{ index: 0, delta, finish_reason: null }] }));
      chunks.push({ choices: [{ index: 0, delta: {}, finish_reason: asked.length === 1 ? "tool_calls" : "stop" }] });
      const body = `${chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("")}data: [DONE]\n\n`;
      await route.fulfill({ contentType: "text/event-stream", body });
    });
    await ask(page, "Weather?");
    const thoughts = page.getByText("Hidden thoughts");
    await page.getByText("Thought first").waitFor();
    assert.ok(!(await thoughts.isVisible()));
    await page.getByText("Thought first").click();
    await thoughts.waitFor();
    await page.locator(".call").getByText('"city": "Oslo"').waitFor();
    await page.getByText("Result of weather").waitFor();
    await page.locator("#message").fill("wet");
    await page.keyboard.press("Enter");
    await page.locator(".rich strong").getByText("bold").waitFor();
    assert.equal(await page.locator(".rich img").count(), 0);
    await page.getByText("<img src=x onerror=alert(1)>").waitFor();
    const sent = asked[1].messages;
    assert.deepEqual(sent[1].tool_calls[0].function, { name: "weather", arguments: '{"city":"Oslo"}' });
    assert.equal(sent[1].reasoning_content, "Hidden thoughts");
    assert.deepEqual(sent[2], { role: "tool", content: "wet", tool_call_id: "call_1" });
    await accessible(page, "tools");
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "a phone has all of it, one view at a time, and scrolls down only"({ url }) {
    const { page, wrong } = await open(url, { size: PHONE });
    await idle(page);
    await ask(page, "What is 2+2?");
    await last(page).getByText("2+2=4.").waitFor();
    assert.equal(await overflow(page), 0);
    assert.ok(!(await page.locator("canvas").isVisible()));
    await page.getByText("Settings", { exact: true }).click();
    assert.equal(await overflow(page), 0);
    await accessible(page, "phone, settings");
    await page.getByText("Settings", { exact: true }).click();
    for (const name of ["Engine", "Requests"]) {
      await page.getByRole("button", { name, exact: true }).click();
      await page.locator(`.${name.toLowerCase()}`).waitFor();
      assert.equal(await overflow(page), 0, name);
      const side = await page.locator(".side").evaluate((found) => found.scrollWidth - found.clientWidth);
      assert.equal(side, 0, name);
      await accessible(page, `phone, ${name}`);
    }
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "axe-core finds nothing in light and dark"({ url }) {
    for (const scheme of ["light", "dark"]) {
      const { page, wrong } = await open(url, { scheme });
      await accessible(page, `${scheme}, empty`);
      await idle(page);
      await ask(page, "Name three colours.");
      await page.locator(".message.assistant footer").waitFor();
      for (const summary of await page.locator("summary:visible").all()) await summary.click();
      await accessible(page, scheme);
      assert.deepEqual(wrong, []);
      await page.close();
    }
  },

  async "19,456 experts are drawn sixty times a second with time to spare"({ url }) {
    const { page, wrong } = await open(url);
    await withHeat(page);
    const ms = await page.evaluate(() => {
      const { grid, paint, palette, fade } = globalThis.heat;
      const shape = grid(Array.from({ length: 76 }, (_, layer) => ({ layer, experts: 256, slots: 20, mtp: layer === 75 })));
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [shape.columns, shape.rows];
      document.body.append(canvas);
      const context = canvas.getContext("2d");
      const image = context.createImageData(256, 76);
      const [pixels, colours] = [new Uint32Array(image.data.buffer), palette(false)];
      const [cells, glow] = [new Uint8Array(19_456), new Uint8Array(19_456)];
      const frames = 300;
      const began = performance.now();
      for (let frame = 0; frame < frames; frame += 1) {
        for (let at = frame; at < cells.length; at += 97) [cells[at], glow[at]] = [0xc0 | frame % 32, 15];
        fade(glow, 1);
        paint(pixels, cells, glow, shape, colours);
        context.putImageData(image, 0, 0);
      }
      // What was put is drawn before it is read.
      context.getImageData(0, 0, 1, 1);
      canvas.remove();
      return (performance.now() - began) / frames;
    });
    console.log(`      ${ms.toFixed(2)} ms a frame`);
    assert.ok(ms < 1000 / 60, `${ms} ms`);
    assert.deepEqual(wrong, []);
    await page.close();
  },
};

const slow = {
  async "an answer can be stopped, and its request ends"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    await ask(page, `Tell me about ${"this and that and ".repeat(20)}.`);
    await page.locator(".waiting progress").waitFor();
    await page.getByText(/Reading the prompt: \d+ of \d+ tokens, about/).waitFor();
    await page.locator(".jobs").getByText(/prompt: \d+ of \d+ tokens computed/).waitFor();
    await shoot(page, "dashboard-prefill");
    await page.getByRole("button", { name: "Stop" }).click();
    await last(page).getByText("stopped by you").waitFor();
    const began = performance.now();
    await idle(page);
    assert.ok(performance.now() - began < 5000, "the engine stopped too");
    await page.locator(".requests").getByText("cancelled", { exact: true }).waitFor();
    // The next one is answered.
    await page.getByRole("button", { name: "New conversation" }).click();
    await ask(page, "What is 2+2?");
    await last(page).getByText(/^2\+2=4\.$/).waitFor({ timeout: 60_000 });
    await page.locator(".message.assistant footer").waitFor({ timeout: 60_000 });
    // And can be stopped with a key while it grows.
    await ask(page, "Name three colours.");
    await page.waitForFunction(() => document.querySelectorAll(".message.assistant")[1]?.querySelector(".rich").textContent);
    await page.keyboard.press("Escape");
    await last(page).getByText("stopped by you").waitFor();
    assert.deepEqual(wrong, []);
    await page.close();
  },
};

const locked = {
  async "a key is asked for, checked, kept in the tab and sent"({ url }) {
    assert.equal((await fetch(`${url}/dashboard/state`)).status, 401);
    assert.equal((await fetch(`${url}/dashboard/events`)).status, 401);
    const { page, wrong } = await open(url, { expected: ["401"] });
    await page.getByText("This server asks for a key").waitFor();
    await accessible(page, "door");
    await page.getByLabel("API key").fill("wrong");
    await page.keyboard.press("Enter");
    await page.getByText("the API key is wrong").waitFor();
    await page.getByLabel("API key").fill("sesame");
    await page.keyboard.press("Enter");
    await idle(page);
    await ask(page, "What is 2+2?");
    await last(page).getByText("2+2=4.").waitFor();
    assert.deepEqual(await page.evaluate(() => [{ ...sessionStorage }, { ...localStorage }, document.cookie]), [
      { "forebay-key": "sesame" },
      {},
      "",
    ]);
    assert.deepEqual(wrong, []);
    await page.close();
  },
};

const pictures = {
  async "pictures for the documentation"({ url }) {
    for (const [name, size, scheme] of [
      ["dashboard-light", DESK, "light"],
      ["dashboard-dark", DESK, "dark"],
      ["dashboard-phone", PHONE, "light"],
      ["dashboard-phone-engine", PHONE, "dark"],
    ]) {
      const { page, wrong } = await open(url, { size, scheme });
      await idle(page);
      await ask(page, "What is 2+2?");
      await page.locator(".message.assistant footer").waitFor();
      await ask(page, "What is the capital of France?");
      await page.waitForFunction(() => document.querySelectorAll(".message.assistant footer").length === 2);
      await idle(page);
      if (name.endsWith("engine")) await page.getByRole("button", { name: "Engine", exact: true }).click();
      await page.waitForTimeout(400);
      await shoot(page, name);
      assert.deepEqual(wrong, []);
      await page.close();
    }
  },
};

let [passed, failed] = [0, 0];
try {
  const rounds = [
    [tests, []],
    [slow, ["--throttle-disk", "3M"]],
    [locked, ["--api-key", "sesame"]],
    ...(options.screenshots ? [[pictures, []]] : []),
  ];
  for (const [group, more] of rounds) {
    const chosen = Object.entries(group).filter(([name]) => name.includes(options.only));
    if (chosen.length === 0) continue;
    const server = await serve(...more);
    for (const [name, test] of chosen) {
      try {
        await test(server);
        passed += 1;
        console.log(`ok    ${name}`);
      } catch (error) {
        failed += 1;
        console.log(`FAIL  ${name}\n${error.stack}`);
      }
    }
    await server.stop();
  }
} finally {
  await browser.close();
  await rm(folder, { recursive: true, force: true });
}
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed > 0 || passed === 0 ? 1 : 0;
