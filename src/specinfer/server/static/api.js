// Requests to this server: events of a stream as they come, and failures in words.

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const KEY = "specinfer-key";

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage may be forbidden; then the key lives in its field alone
  }
}

export function storeKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // as above
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw new Failure(await refusal(response), response.status);
  return response;
}

export async function read(path, key) {
  return (await reach(path, { headers: headers(key) })).json();
}

async function refusal(response) {
  let message = "";
  try {
    message = messageOf((await response.json()).error);
  } catch {
    // not from the API: the status must do
  }
  switch (response.status) {
    case 401:
      return "The server wants an API key. Enter it under Settings.";
    case 404:
      return sentence(message) || "This server does not offer that.";
    case 429:
      return `The server is busy: ${message || "try again in a moment"}.`;
    case 503:
      return `The server cannot answer now: ${message || "try again in a moment"}.`;
    default:
      return sentence(message) || `The server answered with status ${response.status}.`;
  }
}

function messageOf(error) {
  return typeof error?.message === "string" ? error.message.trim() : "";
}

// A field's name, which a refusal begins with, stays as it is written in requests.
function sentence(message) {
  return /^[\w.[\]]+:/.test(message) ? message : message.charAt(0).toUpperCase() + message.slice(1);
}

// Yields each event of the stream; returns after its last.
export async function* events(path, body, key, signal) {
  const response = await reach(path, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Failure("The answer broke off: the connection ended early.");
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Failure(sentence(messageOf(event.error)) || "The answer failed.");
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure("The answer broke off: the connection was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
