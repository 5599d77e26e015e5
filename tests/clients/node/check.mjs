// The npm package `openai` against a real server: content, usage and reasons for the end.
//
//     node check.mjs http://127.0.0.1:8000
//
// The server has to serve the bundled model. `.ci/clients` starts one and installs the client.

import assert from "node:assert/strict";
import OpenAI, { BadRequestError, toFile } from "openai";

const model = "forebay-demo";
const messages = [{ role: "user", content: "What is 2+2?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the current weather for a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string", description: "The name of the city" } },
        required: ["city"],
      },
    },
  },
];
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "unused", maxRetries: 0 });

const checks = {
  async chat() {
    const whole = await client.chat.completions.create({ model, messages });
    assert.equal(whole.choices[0].message.content, "2+2=4.");
    assert.equal(whole.choices[0].finish_reason, "stop");
    assert.deepEqual([whole.usage.prompt_tokens, whole.usage.completion_tokens], [13, 6]);
    const stream = await client.chat.completions.create({
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let last;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      last = chunk;
    }
    assert.deepEqual([text, last.usage.total_tokens], ["2+2=4.", 19]);
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), (error) => {
      return error instanceof BadRequestError && error.param === "temperature";
    });
  },

  async tools() {
    const asked = await client.chat.completions.create({ model, messages: weather, tools });
    assert.equal(asked.choices[0].finish_reason, "tool_calls");
    const call = asked.choices[0].message.tool_calls[0].function;
    assert.deepEqual([call.name, JSON.parse(call.arguments)], ["get_weather", { city: "Paris" }]);
    const final = await client.chat.completions.stream({ model, messages: weather, tools }).finalChatCompletion();
    assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { city: "Paris" });
  },

  async responses() {
    const whole = await client.responses.create({ model, input: "What is 2+2?" });
    assert.deepEqual([whole.output_text, whole.status, whole.usage.output_tokens], ["2+2=4.", "completed", 6]);
    const kinds = [];
    for await (const event of await client.responses.create({ model, input: "What is 2+2?", stream: true })) {
      kinds.push(event.type);
    }
    assert.deepEqual([kinds[0], kinds.at(-1)], ["response.created", "response.completed"]);
  },

  async batches() {
    const url = "/v1/chat/completions";
    const line = { custom_id: "one", method: "POST", url, body: { model, messages } };
    const input = await client.files.create({
      file: await toFile(Buffer.from(JSON.stringify(line) + "\n"), "in.jsonl"),
      purpose: "batch",
    });
    let batch = await client.batches.create({ input_file_id: input.id, endpoint: url, completion_window: "24h" });
    for (let tries = 0; tries < 600 && batch.status !== "completed"; tries++) {
      await new Promise((done) => setTimeout(done, 50));
      batch = await client.batches.retrieve(batch.id);
    }
    assert.deepEqual(batch.request_counts, { total: 1, completed: 1, failed: 0 });
    const output = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    assert.equal(output.response.body.choices[0].message.content, "2+2=4.");
    assert.equal((await client.files.delete(input.id)).deleted, true);
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok      npm_${name}`);
  } catch (error) {
    process.exitCode = 1;
    console.log(`FAILED  npm_${name}: ${error.stack}`);
  }
}
