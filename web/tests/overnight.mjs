// The overnight jobs: against a stand-in with OpenAI's shapes, for what takes long or goes wrong, and against the server.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";

import { accessible, idle, open, overflow, PHONE, shoot, view } from "./harness.mjs";

const line = (id, text) =>
  JSON.stringify({
    custom_id: id,
    method: "POST",
    url: "/v1/chat/completions",
    body: { model: "forebay-demo", messages: [{ role: "user", content: text }], temperature: 0, max_tokens: 20 },
  });
const upload = (text, name = "requests.jsonl") => ({ name, mimeType: "application/jsonl", buffer: Buffer.from(text) });

/** What a file holds that the page saved. */
async function saved(page, click) {
  const [download] = await Promise.all([page.waitForEvent("download"), click()]);
  return { name: download.suggestedFilename(), text: await readFile(await download.path(), "utf8") };
}

export const overnightStub = {
  async "jobs show how far they are, and what was wrong with them"({ url }) {
    const hour = 3600;
    const now = Math.floor(Date.now() / 1000);
    const job = (id, status, more = {}) => ({ id, object: "batch", endpoint: "/v1/chat/completions", status, input_file_id: "file-in", created_at: now, ...more });
    const jobs = [
      job("batch_1", "in_progress", { request_counts: { total: 40, completed: 12, failed: 1 }, forebay: { eta_seconds: 2 * hour + 300 } }),
      job("batch_2", "completed", { request_counts: { total: 2, completed: 2, failed: 0 }, output_file_id: "file-out", completed_at: now }),
      job("batch_3", "failed", { errors: { data: [{ line: 7, message: "no custom_id" }] }, failed_at: now }),
    ];
    const cancelled = [];
    const { page, wrong } = await open(url, {
      before: async (page) => {
        await page.route("**/v1/batches?*", (route) => route.fulfill({ json: { object: "list", data: jobs, has_more: false } }));
        await page.route("**/v1/batches/*/cancel", (route) => {
          cancelled.push(route.request().url().split("/").at(-2));
          jobs[0].status = "cancelling";
          return route.fulfill({ json: jobs[0] });
        });
        await page.route("**/v1/files/*/content", (route) => route.fulfill({ contentType: "application/jsonl", body: '{"custom_id":"a"}\n' }));
      },
    });
    await view(page, "Overnight");
    await page.getByText("12 of 40 requests answered, 1 failed; about 2 h 5 min left; given at").waitFor();
    assert.equal(await page.getByLabel("batch_1: requests").evaluate((found) => found.value / found.max), 13 / 40);
    await page.getByText("line 7: no custom_id").waitFor();
    await accessible(page, "jobs");
    await shoot(page, "stub-overnight");
    const answers = await saved(page, () => page.getByRole("button", { name: "Answers of batch_2" }).click());
    assert.deepEqual(answers, { name: "batch_2-answers.jsonl", text: '{"custom_id":"a"}\n' });
    await page.getByRole("button", { name: "Cancel batch_1" }).click();
    await page.getByText("being cancelled").waitFor();
    assert.deepEqual(cancelled, ["batch_1"]);
    assert.equal(await page.getByRole("button", { name: "Cancel batch_1" }).count(), 0);
    await page.setViewportSize(PHONE);
    assert.equal(await overflow(page), 0);
    assert.equal(await page.locator(".side").evaluate((found) => found.scrollWidth - found.clientWidth), 0);
    await accessible(page, "jobs on a phone");
    assert.deepEqual(wrong, []);
    await page.close();
  },

  async "a bad file is not sent, and a refused one says why"({ url }) {
    const sent = [];
    const { page, wrong } = await open(url, {
      expected: ["400"],
      before: async (page) => {
        await page.route("**/v1/batches?*", (route) => route.fulfill({ json: { object: "list", data: [], has_more: false } }));
        await page.route("**/v1/files", (route) => {
          sent.push(route.request().headers()["content-type"]);
          return route.fulfill({ status: 400, json: { error: { message: "the file is too large" } } });
        });
      },
    });
    await view(page, "Overnight");
    await page.getByText("No job has been given to this server.").waitFor();
    await page.getByLabel(/^Requests, one JSON object a line/).setInputFiles(upload(`${line("a", "Hi")}\n{"custom_id": "b"`));
    await page.getByRole("button", { name: "Start" }).click();
    await page.getByText(/^Line 2 is no JSON/).waitFor();
    assert.deepEqual(sent, []);
    await page.getByLabel(/^Requests, one JSON object a line/).setInputFiles(upload(line("a", "Hi")));
    await page.getByRole("button", { name: "Start" }).click();
    await page.getByText("the file is too large").waitFor();
    assert.match(sent[0], /^multipart\/form-data/);
    assert.deepEqual(wrong, []);
    await page.close();
  },
};

export const overnight = {
  async "an overnight job runs, and its answers are fetched"({ url }) {
    const there = (await fetch(`${url}/v1/batches`)).status !== 404;
    const { page, wrong } = await open(url, { expected: there ? [] : ["404"] });
    await idle(page);
    await view(page, "Overnight");
    if (!there) {
      await page.getByText("This server has no queue for such jobs").waitFor();
      await accessible(page, "no jobs");
      assert.deepEqual(wrong, []);
      await page.close();
      return "pending: the server has no /v1/batches yet (404), which the page says";
    }
    await page.getByText("No job has been given to this server.").waitFor();
    await page.getByLabel(/^Requests, one JSON object a line/).setInputFiles(upload(`${line("sum", "What is 2+2?")}\n${line("capital", "What is the capital of France?")}\n`));
    await page.getByRole("button", { name: "Start" }).click();
    await page.getByText("2 requests of requests.jsonl taken.").waitFor();
    await page.locator(".batches").getByText("complete", { exact: true }).waitFor({ timeout: 60_000 });
    await page.getByText("2 of 2 requests answered").waitFor();
    await shoot(page, "dashboard-overnight");
    const { text } = await saved(page, () => page.getByRole("button", { name: /^Answers of / }).click());
    const found = Object.fromEntries(
      text
        .trim()
        .split("\n")
        .map((line) => JSON.parse(line))
        .map(({ custom_id, response }) => [custom_id, response.body.choices[0].message.content]),
    );
    assert.deepEqual(found, { sum: "2+2=4.", capital: "The capital of France is Paris." });
    await accessible(page, "a job");
    // A second one, cancelled.
    const long = Array.from({ length: 200 }, (_, at) => line(`story-${at}`, `Tell me story ${at}.`)).join("\n");
    await page.getByLabel(/^Requests, one JSON object a line/).setInputFiles(upload(long, "stories.jsonl"));
    await page.getByRole("button", { name: "Start" }).click();
    await page.getByRole("button", { name: /^Cancel / }).first().click();
    await page.locator(".batches li").first().getByText("cancelled", { exact: true }).waitFor({ timeout: 60_000 });
    await idle(page);
    assert.deepEqual(wrong, []);
    await page.close();
  },
};
