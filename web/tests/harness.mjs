// What the browser tests share: the server, the browser, and pages that complain about everything a page should not do.
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { parseArgs } from "node:util";

import { build } from "esbuild";
import { chromium } from "playwright-core";

const here = new URL("./", import.meta.url).pathname;
export const { values: options } = parseArgs({
  options: {
    bin: { type: "string", default: `${here}../../target/debug/forebay` },
    chromium: { type: "string", default: "/usr/bin/chromium" },
    screenshots: { type: "string" },
    fresh: { type: "boolean", default: false },
    only: { type: "string", default: "" },
  },
});
export const PHONE = { width: 360, height: 740 };
export const DESK = { width: 1360, height: 860 };

const axe = await readFile(`${here}../node_modules/axe-core/axe.min.js`, "utf8");
const folder = await mkdtemp(join(tmpdir(), "forebay-page-"));
let servers = 0;

/** The world of server number `at`: whatever it keeps lies in the folder of this run. */
const world = (at) => ({
  ...process.env,
  FOREBAY_CACHE: join(folder, "cache"),
  FOREBAY_MODEL: "",
  // An empty one would be refused.
  FOREBAY_API_KEY: undefined,
  HOME: join(folder, `home-${at}`),
  XDG_CACHE_HOME: join(folder, `cache-${at}`),
  XDG_DATA_HOME: join(folder, `data-${at}`),
  XDG_STATE_HOME: join(folder, `state-${at}`),
});

/** Measures the machine for the server that is started next. */
function tune() {
  const { status, stderr } = spawnSync(options.bin, ["tune"], { env: world(servers + 1), encoding: "utf8" });
  if (status !== 0) throw new Error(`forebay tune failed: ${stderr}`);
}

/** Starts the server on a free port, with the bundled model and an empty place for what it keeps. */
async function serve(...more) {
  servers += 1;
  const args = ["serve", "--port", "0", "--log", "error", "--memory", "44M", "--drain-timeout", "1", ...more];
  const child = spawn(options.bin, args, {
    env: world(servers),
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

/** Ends the browser, and leaves nothing behind. */
export async function close() {
  await browser.close();
  await rm(folder, { recursive: true, force: true });
}

/** A page that complains about everything a page should not do: errors, warnings, requests to anybody else. */
export async function open(url, { size = DESK, scheme = "light", expected = [], before = async () => {} } = {}) {
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
    if (!request.url().startsWith(url) && !request.url().startsWith(`blob:${url}`)) wrong.push(`asks ${request.url()}`);
  });
  if (options.fresh) {
    await page.route(/\/dashboard(\/app\.js|\/app\.css|\/icon\.svg)?$/, async (route) => {
      const name = /app\.js|app\.css|icon\.svg/.exec(route.request().url())?.[0] ?? "index.html";
      const response = await route.fetch();
      const body = await readFile(`${here}../../crates/forebay-server/assets/${name}`);
      await route.fulfill({ response, body });
    });
  }
  await before(page);
  await page.goto(`${url}/dashboard`);
  return { page, wrong };
}

/** Fails if axe-core finds anything, serious or not. */
export async function accessible(page, what) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const bad = violations.map(
    (found) => `${what}: ${found.impact}: ${found.help}: ${found.nodes.map((node) => node.target).join(", ")}`,
  );
  assert.deepEqual(bad, [], "axe-core finds nothing, serious or not");
}

/** Pixels by which a page is wider than its window. */
export const overflow = (page) =>
  page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);

/** Types a message and sends it. */
export async function ask(page, text) {
  await page.getByLabel("Message", { exact: true }).fill(text);
  await page.keyboard.press("Enter");
}

/** Shows one of the views. */
export const view = (page, name) => page.getByRole("navigation").getByRole("button", { name, exact: true }).click();

/** The last answer. */
export const last = (page) => page.locator(".message.assistant").last();

/** Waits until so many answers are complete. */
export const answers = (page, count) =>
  page.waitForFunction((count) => document.querySelectorAll(".message.assistant footer").length === count, count);

/** Waits until the engine has nothing to do. */
export const idle = (page) => page.locator(".status.good").waitFor({ timeout: 30_000 });

/** Every pixel of the map as one number. */
export const mapPixels = (page) =>
  page.evaluate(() => {
    const canvas = document.querySelector("canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return { width: canvas.width, height: canvas.height, pixels: [...new Uint32Array(data.buffer)] };
  });

/** Puts the page's own drawing into reach of a test. */
export async function withHeat(page) {
  const { outputFiles } = await build({
    entryPoints: [`${here}../src/heat.ts`],
    bundle: true,
    write: false,
    format: "iife",
    globalName: "heat",
  });
  await page.evaluate(`${outputFiles[0].text}; globalThis.heat = heat`);
}

/** A picture, if pictures are wanted. */
export async function shoot(page, name) {
  if (options.screenshots) await page.screenshot({ path: join(options.screenshots, `${name}.png`) });
}

/** Runs groups of tests, each against a server of its own, on a measured machine if need be: how many passed and failed. */
export async function run(rounds) {
  let [passed, failed] = [0, 0];
  for (const { tests: group, more = [], tuned = false } of rounds) {
    const chosen = Object.entries(group).filter(([name]) => name.includes(options.only));
    if (chosen.length === 0) continue;
    if (tuned) tune();
    const server = await serve(...more);
    for (const [name, test] of chosen) {
      try {
        const said = await test(server);
        passed += 1;
        console.log(`ok    ${name}${said ? `: ${said}` : ""}`);
      } catch (error) {
        failed += 1;
        console.log(`FAIL  ${name}\n${error.stack}`);
      }
    }
    await server.stop();
  }
  return { passed, failed };
}
