// Vercel's AI SDK by two of its providers: tools whole and streamed, and objects of a given schema.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const read_file = tool({
  description: "Read a file.",
  inputSchema: z.object({ path: z.string() }),
  execute: async ({ path }) => readFileSync(path, "utf8"),
});
const schema = z.object({ item: z.string(), count: z.number() });
const providers = {
  chat: createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, apiKey: "any", supportsStructuredOutputs: true }),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" }),
};

async function converse(chosen) {
  const asked = { model: chosen, tools: { read_file }, stopWhen: stepCountIs(3), maxRetries: 0 };
  const first = await generateText({ ...asked, prompt: "What is in notes.txt?" });
  const stream = streamText({ ...asked, prompt: "What is in notes.txt?", onError: ({ error }) => console.error(error) });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const messages = [{ role: "user", content: "What is in notes.txt?" }, ...first.response.messages];
  const again = await generateText({ ...asked, messages: [...messages, { role: "user", content: "And again?" }] });
  let structured;
  try {
    structured = (await generateObject({ model: chosen, schema, prompt: "A purchase as JSON.", maxRetries: 0 })).object;
  } catch (error) {
    structured = String(error);
  }
  return {
    answer: first.text,
    thoughts: first.steps.map((step) => step.reasoningText ?? null),
    streamed,
    streamedThoughts: (await stream.steps).map((step) => step.reasoningText ?? null),
    again: again.text,
    cached: again.usage.cachedInputTokens ?? again.usage.inputTokenDetails?.cacheReadTokens ?? null,
    structured,
  };
}

const found = {};
for (const [name, provider] of Object.entries(providers)) found[name] = await converse(provider(model));
console.log(JSON.stringify(found));
