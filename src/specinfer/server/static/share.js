// A trace as a link: the whole of it is compressed into the part of the address after "#", which no server is sent.
// What comes out of a link was written by anyone: each value is checked, and shown as text only.

import { Failure } from "./api.js";

const PREFIX = "#trace=1.";
const MOST_LINK = 64 * 1024; // characters; chats and mail programs cut longer addresses
const MOST_BYTES = 4 * 1024 * 1024; // after decompression
const MOST_STEPS = 4096;
const MOST_NODES = 1024; // of one step
const MOST_NAMES = 32;

export function isTrace(hash) {
  return hash.startsWith("#trace=");
}

export async function traceLink({ model, isChat, prompt, text, thought, steps }) {
  const names = [...new Set(steps.flatMap((step) => step.nodes.flatMap((node) => node.drafters)))];
  const rows = steps.map(({ root, nodes, path, next }) => [
    [root.token, root.text],
    nodes.map(({ token, text, parent, drafters, q, p }) => [token, text, parent, drafters.map((name) => names.indexOf(name)), q, p]),
    path,
    next && [next.token, next.text, next.p],
  ]);
  const stream = new Blob([JSON.stringify([model, isChat, prompt, text, names, rows, thought])]).stream();
  const packed = await new Response(stream.pipeThrough(new CompressionStream("deflate-raw"))).bytes();
  const letters = Array.from(packed, (byte) => String.fromCharCode(byte)).join("");
  const link = PREFIX + btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (link.length <= MOST_LINK) return link;
  const size = `${Math.ceil(link.length / 1024)} of at most ${MOST_LINK / 1024} KiB`;
  throw new Failure(`This trace is too long for a link (${size}): use a smaller max_tokens or tree.`);
}

export async function readTrace(hash) {
  if (!hash.startsWith(PREFIX)) throw new Failure("This link has a trace of another version of the page.");
  if (hash.length > MOST_LINK) throw new Failure("The trace in this link is too long.");
  try {
    return checked(JSON.parse(await unpack(hash.slice(PREFIX.length))));
  } catch {
    throw new Failure("The trace in this link is damaged. Was the link cut?");
  }
}

async function unpack(letters) {
  const packed = atob(letters.replaceAll("-", "+").replaceAll("_", "/"));
  const stream = new Blob([Uint8Array.from(packed, (char) => char.charCodeAt(0))]).stream();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let size = 0;
  let text = "";
  for await (const part of stream.pipeThrough(new DecompressionStream("deflate-raw"))) {
    size += part.length;
    check(size <= MOST_BYTES); // leaving the loop ends the decompression
    text += decoder.decode(part, { stream: true });
  }
  return text + decoder.decode();
}

// ------------------------------------------------------------------------------------------ checks

function check(condition) {
  if (!condition) throw new Error("not a trace");
}

function list(value, most) {
  check(Array.isArray(value) && value.length <= most);
  return value;
}

function string(value) {
  check(typeof value === "string");
  return value;
}

function whole(value, least, most) {
  check(Number.isInteger(value) && value >= least && value <= most);
  return value;
}

function chance(value) {
  check(value === null || (typeof value === "number" && value >= 0 && value <= 1));
  return value;
}

function token([id, text]) {
  return { token: whole(id, 0, 2 ** 31), text: string(text) };
}

function checked(value) {
  const [model, isChat, prompt, text, names, rows, thought = ""] = list(value, 7);
  check(typeof isChat === "boolean");
  list(names, MOST_NAMES).forEach(string);
  const steps = list(rows, MOST_STEPS).map((row) => step(list(row, 4), names));
  return { model: string(model), isChat, prompt: string(prompt), text: string(text), thought: string(thought), steps };
}

function step([root, rows, path, next], names) {
  const nodes = list(rows, MOST_NODES).map((row, i) => ({
    ...token(list(row, 6)),
    parent: whole(row[2], 0, i), // parents stand before their children
    drafters: list(row[3], MOST_NAMES).map((at) => names[whole(at, 0, names.length - 1)]),
    q: chance(row[4]),
    p: chance(row[5]),
  }));
  let at = 0;
  for (const node of list(path, nodes.length)) {
    whole(node, 1, nodes.length);
    check(nodes[node - 1].parent === at);
    at = node;
  }
  return { root: token(list(root, 2)), nodes, path, next: next === null ? null : { ...token(list(next, 3)), p: chance(next[2]) } };
}
