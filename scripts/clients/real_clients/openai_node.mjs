// OpenAI's client for Node against a running server with the chat model of chat_model.py.
//
// node openai_node.mjs URL MODEL      from a folder whose node_modules has openai and zod

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

// Packages are the working directory's: Node would look beside this file.
const require = createRequire(path.join(process.cwd(), "package.json"));
const load = async (name) => await import(pathToFileURL(require.resolve(name)));
const { default: OpenAI, ContentFilterFinishReasonError, LengthFinishReasonError } = (await load("openai")).default;
const { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } = (await load("openai/helpers/zod")).default;
const { z } = (await load("zod")).default;

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const HELLO = "Hello, what may I do?";
const SAID = "It is 21 degrees in Rome.";
const Record = z.object({ kind: z.enum(["cat", "dog"]), age: z.number().int() });
const Report = z.object({ city: z.enum(["Rome", "Oslo"]), degrees: z.number().int() });
const City = z.object({ city: z.string() });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const asked = (content, others = {}) => ({ model, temperature: 0, messages: [{ role: "user", content }], ...others });

const cases = {
  "models, chat, usage, raw response": async () => {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    assert.deepEqual(listed, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
    const { data, response } = await client.chat.completions.create(asked("hi")).withResponse();
    assert.equal(response.status, 200);
    assert.equal(data.choices[0].message.content, HELLO);
    assert.equal(data.usage.completion_tokens, 10);
    assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + 10);
  },
  "completions, whole and as a stream": async () => {
    const prompt = "# user\nhi\n# answer: hello\n";
    const whole = await client.completions.create({ model, prompt, temperature: 0, max_tokens: 16 });
    assert.equal(whole.choices[0].text, HELLO);
    let text = "";
    for await (const chunk of await client.completions.create({ model, prompt, temperature: 0, max_tokens: 16, stream: true }))
      text += chunk.choices[0].text;
    assert.equal(text, HELLO);
  },
  "chat as a stream, with usage": async () => {
    let [text, usage] = ["", undefined];
    const stream = await client.chat.completions.create(
      asked("hi", { stream: true, stream_options: { include_usage: true } }),
    );
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, HELLO);
    assert.equal(usage.completion_tokens, 10);
  },
  "each tool_choice": async () => {
    const named = { type: "function", function: { name: "weather" } };
    const allowed = { type: "allowed_tools", allowed_tools: { mode: "required", tools: [named] } };
    for (const tool_choice of [undefined, "auto", "required", named, allowed]) {
      const { choices } = await client.chat.completions.create(asked("warm?", { tools, tool_choice }));
      const [call] = choices[0].message.tool_calls;
      assert.deepEqual(JSON.parse(call.function.arguments), { city: "Rome" });
      assert.equal(choices[0].message.tool_calls.length, 1);
      assert.equal(choices[0].finish_reason, "tool_calls");
    }
  },
  "chat.completions.parse: response_format and tools by zod": async () => {
    const typed = await client.chat.completions.parse(
      asked("a record", { response_format: zodResponseFormat(Record, "record") }),
    );
    assert.deepEqual(typed.choices[0].message.parsed, { kind: "cat", age: 3 });
    const called = await client.chat.completions.parse(
      asked("warm?", { tools: [zodFunction({ name: "weather", parameters: City })] }),
    );
    assert.deepEqual(called.choices[0].message.tool_calls[0].function.parsed_arguments, { city: "Rome" });
    await assert.rejects(
      client.chat.completions.parse(
        asked("a record", { max_tokens: 3, response_format: zodResponseFormat(Record, "record") }),
      ),
      LengthFinishReasonError,
    );
  },
  "chat.completions.stream: contents, calls, typed": async () => {
    let text = "";
    const stream = client.chat.completions.stream(asked("hi", { stream_options: { include_usage: true } }));
    stream.on("content", (delta) => (text += delta));
    assert.equal(await stream.finalContent(), HELLO);
    assert.equal(text, HELLO);
    assert.equal((await stream.totalUsage()).completion_tokens, 10);
    const done = [];
    const calls = client.chat.completions.stream(asked("Rome and Oslo?", { tools }));
    calls.on("tool_calls.function.arguments.done", (one) => done.push(JSON.parse(one.arguments).city));
    const final = await calls.finalChatCompletion();
    assert.deepEqual(done, ["Rome", "Oslo"]);
    assert.deepEqual(final.choices[0].message.tool_calls.map((one) => one.index ?? 0).length, 2);
    const typed = client.chat.completions.stream(
      asked("a record", { response_format: zodResponseFormat(Record, "record") }),
    );
    assert.deepEqual((await typed.finalChatCompletion()).choices[0].message.parsed, { kind: "cat", age: 3 });
  },
  "chat.completions.stream: thoughts": async () => {
    const final = await client.chat.completions.stream(asked("think")).finalChatCompletion();
    assert.equal(final.choices[0].message.content, "Yes, it is warm.");
  },
  "a stream that is aborted": async () => {
    const stream = client.chat.completions.stream(asked("hi", { temperature: 1.5, ignore_eos: true }));
    stream.once("content", () => stream.abort());
    await assert.rejects(stream.done());
  },
  "runTools: a call, its result, an answer": async () => {
    for (const stream of [false, true]) {
      const cities = [];
      const weather = ({ city }) => {
        cities.push(city);
        return { degrees: 21 };
      };
      const runnable = { type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: weather } };
      for (const tool of [runnable, zodFunction({ name: "weather", parameters: City, function: weather })]) {
        const runner = client.chat.completions.runTools(asked("Rome and Oslo?", { tools: [tool], stream }));
        assert.equal(await runner.finalContent(), SAID);
        assert.equal(runner.messages.length, 5);
        if (!stream) assert.ok((await runner.totalUsage()).completion_tokens > 20);
      }
      assert.deepEqual(cities, ["Rome", "Oslo", "Rome", "Oslo"]);
    }
  },
  "runTools: one tool, one call at most, and a typed answer": async () => {
    const tool = zodFunction({ name: "weather", parameters: City, function: () => "21" });
    const named = { type: "function", function: { name: "weather" } };
    const one = client.chat.completions.runTools(asked("warm?", { tools: [tool], tool_choice: named }));
    assert.equal(await one.finalFunctionToolCallResult(), "21");
    const single = client.chat.completions.runTools(asked("Rome and Oslo?", { tools: [tool], parallel_tool_calls: false }));
    assert.equal(await single.finalContent(), SAID);
    assert.equal(single.messages.filter((message) => message.role === "tool").length, 1);
    const typed = client.chat.completions.runTools(
      asked("report whether it is warm", { tools: [tool], response_format: zodResponseFormat(Report, "report") }),
    );
    assert.deepEqual(JSON.parse(await typed.finalContent()), { city: "Rome", degrees: 21 });
  },
  "responses: create, parse, stream, calls that go back": async () => {
    const others = { model, temperature: 0 };
    const whole = await client.responses.create({ ...others, input: "hi" });
    assert.equal(whole.output_text, HELLO);
    assert.equal(whole.status, "completed");
    assert.equal(whole.usage.output_tokens, 10);
    const typed = await client.responses.parse({
      ...others, input: "a record", text: { format: zodTextFormat(Record, "record") },
    });
    assert.deepEqual(typed.output_parsed, { kind: "cat", age: 3 });
    const offered = [zodResponsesFunction({ name: "weather", parameters: City })];
    const called = await client.responses.parse({ ...others, input: "Rome and Oslo?", tools: offered });
    const calls = called.output.filter((item) => item.type === "function_call");
    assert.deepEqual(calls.map((item) => item.parsed_arguments.city), ["Rome", "Oslo"]);
    const results = calls.map((item) => ({ type: "function_call_output", call_id: item.call_id, output: "21" }));
    const input = [{ role: "user", content: "Rome and Oslo?" }, ...called.output, ...results];
    assert.equal((await client.responses.create({ ...others, input, tools: offered })).output_text, SAID);
    let text = "";
    const stream = client.responses.stream({ ...others, input: "hi" });
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    assert.equal((await stream.finalResponse()).output_text, HELLO);
    assert.equal(text, HELLO);
    const events = [];
    for await (const event of await client.responses.create({ ...others, input: "warm?", tools: offered, stream: true }))
      events.push(event.type);
    assert.equal(events.at(-1), "response.completed");
    assert.ok(events.includes("response.function_call_arguments.done"));
  },
  "refusals": async () => {
    const long = "x ".repeat(9000);
    await assert.rejects(client.chat.completions.create(asked(long)), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.code, "context_length_exceeded");
      return true;
    });
    await assert.rejects(client.chat.completions.create({ ...asked("hi"), model: "other" }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create(asked("hi", { temprature: 1 })), OpenAI.BadRequestError);
    await assert.rejects(client.chat.completions.stream(asked(long)).done(), OpenAI.BadRequestError);
  },
};

let done = 0;
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    done += 1;
    console.log(`✓ ${name}`);
  } catch (error) {
    console.log(`✗ ${name}\n${error.stack}`);
  }
}
console.log(`${done} of ${Object.keys(cases).length} cases`);
process.exitCode = done === Object.keys(cases).length ? 0 : 1;
