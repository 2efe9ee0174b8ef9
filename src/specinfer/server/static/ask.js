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
  put(asked, "temperature", number("temperature", "Temperature"));
  put(asked, "top_p", number("top-p", "Top p"));
  put(asked, "max_tokens", number("max-tokens", "Most tokens"));
  put(asked, "seed", number("seed", "Seed"));
  const stops = field("stops").value.split("\n").filter(Boolean);
  if (stops.length) asked.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
  const tree = treeChoice();
  if (tree) asked.speculative = { tree };
  return asked;
}

export function treeChoice() {
  const chosen = field("tree").value;
  if (chosen !== "own") return chosen;
  const expansion = field("expansion").value.trim();
  if (!expansion) throw new Failure("Tree: give an expansion such as 3,2,1,1, or choose another tree.");
  return expansion;
}

export function system() {
  return field("system").value.trim();
}

function number(id, name) {
  const input = field(id);
  if (input.validity.badInput) throw new Failure(`${name}: this is no number.`);
  if (!input.validity.valid) throw new Failure(`${name}: ${input.validationMessage}`);
  return input.value === "" ? undefined : input.valueAsNumber;
}

function put(asked, name, value) {
  if (value !== undefined) asked[name] = value;
}
