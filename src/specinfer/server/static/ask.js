// The form: what is asked for, as the body of a request.

import { Failure } from "./api.js";

const field = (id) => document.getElementById(id);

export function mode() {
  return document.querySelector("#mode input:checked").value;
}

export function key() {
  return field("key").value.trim();
}

// Raises a Failure that names the field if a value cannot be sent.
export function body(model, messages) {
  const asked = { model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (messages) asked.messages = messages;
  else asked.prompt = field("prompt").value;
  put(asked, "temperature", number("temperature"));
  put(asked, "top_p", number("top_p"));
  put(asked, "max_tokens", number("max_tokens"));
  put(asked, "seed", number("seed"));
  const stops = field("stop-strings").value.split("\n").filter(Boolean);
  if (stops.length) asked.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
  const tree = treeChoice();
  if (tree) asked.speculative = { tree };
  return asked;
}

export function treeChoice() {
  const chosen = field("tree").value;
  if (chosen !== "own") return chosen;
  const expansion = field("expansion").value.trim();
  if (!expansion) throw new Failure("tree: give the children per level such as 3,2,1,1, or choose another tree.");
  return expansion;
}

export function system() {
  return field("system").value.trim();
}

function number(name) {
  const input = field(name);
  if (input.validity.badInput) throw new Failure(`${name}: this is not a number.`);
  if (!input.validity.valid) throw new Failure(`${name}: ${input.validationMessage}`);
  return input.value === "" ? undefined : input.valueAsNumber;
}

function put(asked, name, value) {
  if (value !== undefined) asked[name] = value;
}
