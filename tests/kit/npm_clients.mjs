// Clients from npm, unchanged: `CLIENT URL MODEL EMBEDDER` prints what CLIENT made of the answers.
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, streamText, tool } from "ai";
import OpenAI from "openai";

const [, , CLIENT, URL, MODEL, EMBEDDER] = process.argv;
const baseURL = `${URL}/v1`;
const QUESTION = "Count from 3 to 9.";
const messages = [{ role: "user", content: QUESTION }];
const parameters = {
  type: "object",
  properties: { n: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["n"],
  additionalProperties: false,
};
const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };

async function openai() {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const exact = { model: MODEL, messages, temperature: 0, max_tokens: 80 };
  const whole = await client.chat.completions.create(exact);
  const streamed = await client.chat.completions.stream(exact).finalContent();
  const called = await client.chat.completions.create({
    ...exact,
    tools: [{ type: "function", function: { name: "lookup", description: "looks a number up", parameters, strict: true } }],
    tool_choice: { type: "function", function: { name: "lookup" } },
  });
  const asked = { model: MODEL, temperature: 0, max_output_tokens: 80 };
  const response = await client.responses.create({ ...asked, input: QUESTION });
  const next = await client.responses.create({ ...asked, input: "Say hello.", previous_response_id: response.id });
  const events = [];
  for await (const event of await client.responses.create({ ...asked, input: QUESTION, stream: true })) {
    if (event.type === "response.completed") events.push(event.response.usage);
  }
  const packed = await client.embeddings.create({ model: EMBEDDER, input: ["red", "green"] });
  const plain = await client.embeddings.create({ model: EMBEDDER, input: "red", encoding_format: "float" });
  const text = await client.completions.create({ model: MODEL, prompt: QUESTION, max_tokens: 9, temperature: 0 });
  return [
    whole.choices[0].message.content,
    streamed,
    called.choices[0].message.tool_calls[0].function,
    [response.output_text, next.output_text, events],
    [packed, plain].map((embedded) => embedded.data.map((item) => item.embedding)),
    text.choices[0].text,
  ];
}

async function batch() {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const line = (number) => ({
    custom_id: `line-${number}`,
    method: "POST",
    url: "/v1/chat/completions",
    body: { model: MODEL, messages, temperature: 0, max_tokens: 80 },
  });
  const lines = [1, 2, 3].map((number) => JSON.stringify(line(number))).join("\n");
  const name = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "batch-")), "in.jsonl");
  fs.writeFileSync(name, lines);
  const file = await client.files.create({ file: fs.createReadStream(name), purpose: "batch" });
  fs.rmSync(path.dirname(name), { recursive: true });
  const made = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
  let job = await client.batches.create(made);
  while (!["completed", "failed"].includes(job.status)) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    job = await client.batches.retrieve(job.id);
  }
  const listed = [];
  for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
  const output = await (await client.files.content(job.output_file_id)).text();
  const rows = output.trim().split("\n").map((row) => JSON.parse(row));
  const deleted = await client.files.delete(file.id);
  return [rows.map((row) => row.response.body.choices[0].message.content), listed.length, deleted.deleted];
}

// The AI SDK: everything that both of its providers do.
async function withModel(model) {
  const exact = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 80, maxRetries: 0 };
  const whole = await generateText(exact);
  const streamed = streamText(exact);
  const pieces = [];
  for await (const piece of streamed.textStream) pieces.push(piece);
  const lookup = tool({ description: "looks a number up", inputSchema: jsonSchema(parameters), strict: true });
  const called = await generateText({ ...exact, tools: { lookup }, toolChoice: { type: "tool", toolName: "lookup" } });
  return [whole.text, pieces.join(""), await streamed.usage, called.toolCalls.map((call) => [call.toolName, call.input])];
}

async function ai() {
  const provider = createOpenAI({ baseURL, apiKey: "none" });
  const values = await withModel(provider.chat(MODEL));
  const exact = { model: provider.responses(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: 80 };
  const response = await generateText({ ...exact, maxRetries: 0 });
  const streamed = streamText({ ...exact, maxRetries: 0 });
  const embedded = await embedMany({ model: provider.embedding(EMBEDDER), values: ["red", "green"], maxRetries: 0 });
  return [...values, response.text, await streamed.text, embedded.embeddings];
}

async function compatible() {
  const provider = createOpenAICompatible({ name: "llmserve", baseURL, apiKey: "none", supportsStructuredOutputs: true });
  const values = await withModel(provider(MODEL));
  const output = Output.object({ schema: jsonSchema(schema) });
  const parsed = await generateText({ model: provider(MODEL), prompt: QUESTION, temperature: 0, output, maxRetries: 0 });
  return [...values, typeof parsed.output.ok];
}

// Streams alone, their pieces as they come.
async function streams() {
  const values = [];
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const chunks = [];
  for await (const chunk of await client.chat.completions.create({ model: MODEL, messages, stream: true, max_tokens: 5 }))
    chunks.push(chunk.choices[0].delta.content ?? "");
  values.push(chunks);
  const provider = createOpenAI({ baseURL, apiKey: "none" });
  const compatible = createOpenAICompatible({ name: "llmserve", baseURL });
  for (const model of [provider.chat(MODEL), provider.responses(MODEL), compatible(MODEL)]) {
    const pieces = [];
    const streamed = streamText({ model, prompt: QUESTION, maxOutputTokens: 5, maxRetries: 0 });
    for await (const piece of streamed.textStream) pieces.push(piece);
    values.push(pieces);
  }
  return values;
}

console.log(JSON.stringify(await { openai, batch, ai, compatible, streams }[CLIENT]()));
