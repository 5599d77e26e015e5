// The page in a real browser, served by the real program with the bundled model.
//
//   node tests/page.mjs [--bin FOREBAY] [--chromium CHROMIUM] [--screenshots FOLDER] [--fresh]
//
// --fresh takes the page's files from the folder of assets instead of the program, to try what was just built.
import assert from "node:assert/strict";

import { accessible, answers, ask, close, DESK, idle, last, mapPixels, open, options, overflow, PHONE, run, shoot, view, withHeat } from "./harness.mjs";
import { overnight, overnightStub } from "./overnight.mjs";

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
    // Five layers with 64 experts each, and the MTP layer.
    assert.deepEqual([before.width, before.height], [64, 6]);
    await page.getByRole("button", { name: "What is 2+2?" }).click();
    await last(page).getByText("2+2=4.").waitFor();
    await last(page).getByText(/^\d+ tokens · .*first after/).waitFor();
    await idle(page);
    for (const unit of ["tokens/s", "%", "B", "B/s"]) {
      await page.locator(".figure").getByText(new RegExp(`${unit}\\s*$`)).first().waitFor();
    }
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
    // The kinds of work make up the whole token, and the parts do.
    const shares = await page.locator(".time > table tbody td:last-child").allTextContents();
    assert.equal(shares.length, 5);
    assert.ok(Math.abs(shares.reduce((sum, text) => sum + Number.parseFloat(text), 0) - 100) < 1, `${shares}`);
    await page.getByText("Every part").click();
    await page.locator(".time details").getByText("attend", { exact: true }).waitFor();
    await view(page, "Requests");
    await page.getByText(`${feed.recent[0].id} complete`).waitFor();
    await page.getByText(/^\d+ of \d+ blocks of the KV cache/).waitFor();
    await view(page, "Engine");
    // The second turn goes on from the first.
    await ask(page, "What is the capital of France?");
    await answers(page, 2);
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
    assert.equal(await page.locator(".heat tbody tr").count(), 6);
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

  async "a meaning shows for a pointer and for the keyboard"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    for (const name of ["Speed", "Hits", "RAM", "hits by use"]) {
      const term = page.getByRole("button", { name, exact: true });
      const tip = page.locator(`#${await term.getAttribute("aria-describedby")}`);
      assert.equal(await tip.evaluate((found) => getComputedStyle(found).visibility), "hidden", name);
      await term.hover();
      await tip.and(page.locator(":visible")).waitFor();
      const box = await tip.boundingBox();
      assert.ok(box.x >= 0 && box.x + box.width <= DESK.width, name);
      await page.mouse.move(0, 0);
      await term.focus();
      await page.waitForFunction((id) => getComputedStyle(document.getElementById(id)).visibility === "visible", await tip.getAttribute("id"));
      await term.blur();
    }
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "everything is reached with the keyboard alone"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    // The first stop leads past everything to the message box.
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.textContent.trim()), "Skip to the message box");
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.id), "message");
    await page.keyboard.type("What is 2+2?");
    await page.keyboard.press("Enter");
    await last(page).getByText("2+2=4.").waitFor();
    await idle(page);
    // Every stop on a round through the page has a name and can be seen to be it.
    const stops = new Set();
    for (let at = 0; at < 60; at += 1) {
      await page.keyboard.press("Tab");
      const stop = await page.evaluate(() => {
        const found = document.activeElement;
        if (!found || found === document.body) return null;
        const name = found.getAttribute("aria-label") ?? (found.labels?.[0]?.textContent || found.textContent);
        return { name: name.trim(), outline: getComputedStyle(found).outlineStyle !== "none", skip: found.matches(".skip") };
      });
      if (stop === null) continue;
      assert.ok(stop.name, "a stop without a name");
      assert.ok(stop.outline || stop.skip, `${stop.name} does not show that it has the focus`);
      stops.add(stop.name);
    }
    for (const name of ["Requests", "Overnight", "Message", "Settings", "New conversation", "Again", "Last prompt", "Speed", "Memory and machine"]) {
      assert.ok(stops.has(name), `${name} is not reached: ${[...stops].join(", ")}`);
    }
    const tab = page.getByRole("button", { name: "Requests", exact: true });
    await tab.focus();
    await page.keyboard.press("Enter");
    await page.getByText("Forecast against reality").waitFor();
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "a server that goes away is missed, and found again"({ url }) {
    const { page, wrong } = await open(url, { expected: ["ERR_"] });
    await idle(page);
    await page.route("**/dashboard/events", (route) => route.abort());
    // Hidden pages ask nothing; shown again, they ask anew.
    const hide = (hidden) =>
      page.evaluate((hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
      }, hidden);
    await hide(true);
    await hide(false);
    await page.getByText(/^No connection \(.*\)\. What is shown is what was known last/).waitFor();
    await accessible(page, "no connection");
    await page.unroute("**/dashboard/events");
    await idle(page);
    assert.equal(await page.locator(".problem").count(), 0);
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "a tool is called, and its result answered"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    await page.getByText("Settings", { exact: true }).click();
    const schema = { type: "object", properties: { city: { type: "string", description: "The name of the city" } }, required: ["city"] };
    const described = { name: "get_weather", description: "Get the current weather for a city.", parameters: schema };
    await page.getByLabel("Tools, as JSON").fill(JSON.stringify([{ type: "function", function: described }]));
    await page.getByLabel("Temperature").fill("0");
    await page.getByText("Settings", { exact: true }).click();
    await ask(page, "What is the weather in Paris?");
    await page.locator(".call").getByText('"city": "Paris"').waitFor();
    await page.getByText("Result of get_weather").waitFor();
    await page.locator("#message").fill('{"temperature": 21}');
    await page.keyboard.press("Enter");
    await answers(page, 2);
    assert.match(await last(page).locator(".rich").textContent(), /21/);
    assert.deepEqual(wrong, []);
    await page.close();
  },

  // The bundled model thinks nothing: here a stand-in for the server says what a larger one would.
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
      await view(page, name);
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
      await view(page, "Requests");
      await accessible(page, `${scheme}, requests`);
      assert.deepEqual(wrong, []);
      await page.close();
    }
  },

  async "the map of a whole GLM-5.2 moves, is read with the keyboard and fits a phone"({ url }) {
    const state = await (await fetch(`${url}/dashboard/state`)).json();
    const layers = Array.from({ length: 76 }, (_, at) => ({ layer: 3 + at, experts: 256, slots: 20, mtp: at === 75 }));
    // Every other expert in memory; every fourth one just used.
    const cells = (used) => Array.from({ length: 19_456 }, (_, at) => (((at % 2) << 7) | ((at % 4 === used ? 1 : 0) << 6) | at % 12).toString(16).padStart(2, "0")).join("");
    const events = [
      ["state", { ...state, memory: { ...state.memory, experts: 19_456, slots: 9_728, planned_slots: 9_728, resident: 9_728 } }],
      ["map", { layers, cells: cells(1), passes: 1 }],
    ];
    const { page, wrong } = await open(url, {
      before: async (page) => {
        await page.addInitScript(() => {
          globalThis.draws = [];
          const put = CanvasRenderingContext2D.prototype.putImageData;
          CanvasRenderingContext2D.prototype.putImageData = function (...rest) {
            globalThis.draws.push(performance.now());
            return put.apply(this, rest);
          };
        });
        const body = events.map(([name, value]) => `event: ${name}\ndata: ${JSON.stringify(value)}\n\n`).join("");
        await page.route("**/dashboard/events", (route) => route.fulfill({ contentType: "text/event-stream", body }));
      },
    });
    await page.locator("canvas").waitFor();
    await page.waitForFunction(() => globalThis.draws.length > 0 && performance.now() - globalThis.draws.at(-1) > 500);
    const draws = await page.evaluate(() => globalThis.draws);
    const frames = draws.length - 1;
    const ms = draws.at(-1) - draws[0];
    // The glow fades in 0.7 s, a draw a frame; how many frames a busy machine gives is not the page's doing.
    assert.ok(frames >= 2, `${frames} frames`);
    const { width, height, pixels } = await mapPixels(page);
    assert.deepEqual([width, height], [256, 76]);
    assert.ok(pixels.every((pixel) => pixel !== 0), "every expert has its place");
    await page.locator("canvas").focus();
    for (const key of ["ArrowRight", "ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
    await page.locator(".readout").getByText("Layer 4, expert 1: in memory").waitFor();
    await shoot(page, "stub-map");
    await page.setViewportSize(PHONE);
    await view(page, "Engine");
    assert.equal(await overflow(page), 0);
    await shoot(page, "stub-map-phone");
    assert.deepEqual(wrong, []);
    await page.close();
    return `${frames} frames in ${(ms / 1000).toFixed(2)} s, ${Math.round((1000 * frames) / ms)} a second`;
  },

  async "19,456 experts are drawn sixty times a second with time to spare"({ url }) {
    const { page, wrong } = await open(url);
    await withHeat(page);
    const ms = await page.evaluate(() => {
      const { grid, paint, palette, fade, LEVELS } = globalThis.heat;
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
        for (let at = frame; at < cells.length; at += 97) [cells[at], glow[at]] = [0xc0 | frame % 32, LEVELS - 1];
        fade(glow, 1);
        paint(pixels, cells, glow, shape, colours);
        context.putImageData(image, 0, 0);
      }
      // What was put is drawn before it is read.
      context.getImageData(0, 0, 1, 1);
      canvas.remove();
      return (performance.now() - began) / frames;
    });
    assert.ok(ms < 1000 / 60, `${ms} ms`);
    assert.deepEqual(wrong, []);
    await page.close();
    return `${ms.toFixed(2)} ms a frame`;
  },
};

const slow = {
  async "an answer can be stopped, and its request ends"({ url }) {
    const { page, wrong } = await open(url);
    await idle(page);
    await ask(page, `Tell me about ${"this and that and ".repeat(20)}.`);
    await page.locator(".waiting progress").waitFor();
    await page.getByText(/Reading the prompt: \d+ of \d+ tokens, about/).waitFor();
    await view(page, "Requests");
    await page.locator(".jobs").getByText(/prompt: \d+ of \d+ tokens done/).waitFor();
    const [job] = (await (await fetch(`${url}/dashboard/state`)).json()).jobs;
    assert.equal(job.running.prompt, job.prompt_tokens, "the whole prompt is what there is to do");
    assert.ok(job.running.done >= job.running.reused && job.running.done <= job.running.prompt);
    await shoot(page, "dashboard-prefill");
    await page.getByRole("button", { name: "Stop" }).click();
    await last(page).getByText("stopped by you").waitFor();
    await idle(page);
    await page.locator(".requests").getByText("cancelled", { exact: true }).waitFor();
    const [ended] = (await (await fetch(`${url}/dashboard/state`)).json()).recent;
    assert.equal(ended.how, "cancelled");
    assert.ok(ended.stats.computed < ended.prompt_tokens && ended.stats.new_tokens === 0, "the engine stopped too");
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
    for (const [name, size, scheme, shown] of [
      ["dashboard-light", DESK, "light", "Engine"],
      ["dashboard-dark", DESK, "dark", "Engine"],
      ["dashboard-time", DESK, "light", "Engine"],
      ["dashboard-requests", DESK, "light", "Requests"],
      ["dashboard-phone", PHONE, "light", "Chat"],
      ["dashboard-phone-engine", PHONE, "dark", "Engine"],
    ]) {
      const { page, wrong } = await open(url, { size, scheme });
      await idle(page);
      await ask(page, "What is 2+2?");
      await answers(page, 1);
      await ask(page, "Tell me a story.");
      if (name === "dashboard-light" || name === "dashboard-phone") {
        // While it grows.
        await page.waitForFunction(() => document.querySelectorAll(".rich")[1]?.textContent.length > 400);
      } else {
        await page.waitForFunction(() => document.querySelectorAll(".message.assistant footer").length === 2, null, { timeout: 120_000 });
        await idle(page);
      }
      if (shown !== "Chat") await view(page, shown);
      await page.waitForTimeout(300);
      if (name === "dashboard-time") await page.locator(".time").evaluate((found) => found.scrollIntoView());
      await shoot(page, name);
      assert.deepEqual(wrong, []);
      await page.close();
    }
  },
};

try {
  const { passed, failed } = await run([
    { tests: { ...tests, ...overnightStub, ...overnight } },
    { tests: slow, more: ["--throttle-disk", "3M"] },
    { tests: locked, more: ["--api-key", "sesame"] },
    ...(options.screenshots ? [{ tests: pictures, tuned: true }] : []),
  ]);
  console.log(`${passed} passed, ${failed} failed`);
  process.exitCode = failed > 0 || passed === 0 ? 1 : 0;
} finally {
  await close();
}
