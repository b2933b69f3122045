// The server's public API, and nothing else: the page can do what every client can.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let key = "";

/** Send this API key from now on. It is kept here, and nowhere else. */
export function useKey(value) {
  key = value;
}

/** How the server stands: the object of GET /status. */
export async function status() {
  return (await send("status", { cache: "no-store" })).json();
}

/**
 * Stream a completion or a chat; yields the parsed events up to [DONE].
 * An error in the stream, or in place of it, is thrown as an ApiError.
 */
export async function* stream(path, body, signal) {
  const answer = await send(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const line of lines(answer.body)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice("data: ".length);
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 0);
    yield event;
  }
  throw new ApiError("the connection ended before the text did", 0);
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let message = `the server answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // No error in JSON: the status says it.
  }
  throw new ApiError(message, answer.status);
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}
