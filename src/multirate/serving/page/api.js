// Asks the server. The API key is kept for this tab only.

const KEY = "multirate-key";

/** A request that the server refused, or could not finish. Its message is a sentence for the reader. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

function headers() {
  const found = { "content-type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  // A header holds bytes, so other characters go as their UTF-8.
  if (key !== null) found.authorization = "Bearer " + String.fromCharCode(...new TextEncoder().encode(key));
  return found;
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer. It may have stopped, or the connection is down.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) return new Failure("The API key is missing or wrong.", 401);
  const said = sentence(body.error?.message ?? `status ${response.status}`);
  const wait = Number(response.headers.get("retry-after"));
  const again = wait ? ` Try again in ${wait} second${wait === 1 ? "" : "s"}.` : "";
  const busy = response.status === 429 ? "The server is busy. " : "";
  return new Failure(`${busy}${said}${again}`, response.status);
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** What does not change while the server runs: model, method, context, max_tokens, needs_key. */
export async function aboutServer() {
  return (await ask("page/server.json")).json();
}

/** Raises a Failure with status 401 if the key is missing or wrong. */
export async function checkKey() {
  await ask("v1/models");
}

export async function metrics(signal) {
  return (await ask("metrics", { signal })).text();
}

/** The chunks of a streamed chat. */
export async function* chat(body, signal) {
  const asked = { ...body, stream: true, return_origins: true };
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  while (true) {
    const { done, value } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      return { done: true };
    });
    if (done) throw new Failure("The connection broke before the answer was complete.");
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(sentence(chunk.error.message));
      yield chunk;
    }
  }
}
