// The page: one request at a time, its text, its steps and its numbers.

import { events, Failure, read, storedKey, storeKey } from "./api.js";
import { body, key, mode, system } from "./ask.js";
import { Depths, Passes } from "./charts.js";
import { chooseEnter, chooseTheme, openHelp, watchKeys } from "./keys.js";
import { Race } from "./race.js";
import { isTrace, readTrace, traceLink } from "./share.js";
import { Steps } from "./steps.js";
import { count, Drafters, element, noGuesses, Painter, shortName } from "./text.js";
import { Thought } from "./thought.js";
import { TreeView } from "./tree.js";

const $ = (id) => document.getElementById(id);
const drafters = new Drafters();
const tree = new TreeView($("tree-view"), $("details"), drafters);
const passes = new Passes($("passes"), drafters, (place) => steps.go(place));
const depths = new Depths($("depths"));
const controls = { slider: $("slider"), play: $("play"), newest: $("newest"), back: $("back"), forth: $("forth") };
const steps = new Steps({ ...controls, words: $("step-words") }, showStep);
const race = new Race($("race-view"));
const hello = $("transcript").firstElementChild;
const PLACEHOLDERS = { completion: "Text to continue", chat: "Ask something" };
const EXAMPLES = {
  completion: ["def fibonacci(n):", "class Stack:\n    def push(self, item):", "import json\n\ndef load(path):"],
  chat: ["Explain recursion in two sentences.", "Write a Python function that reverses a string.", "Name five uses of a paper clip."],
};
const SPEAK_EVERY = 4000; // milliseconds between announcements to a screen reader

let model = "";
let about = {};
let messages = []; // of the conversation, without the system message
let running = null; // the controller of the request under way
let marked = [];
let shown = null; // what a link to the trace contains, without its steps

// ------------------------------------------------------------------------------------------ start

let hasFailed = false; // to meet the model

async function meet() {
  const isFirst = !model;
  try {
    const models = await read("v1/models", key());
    model = models.data[0].id;
    about = await read("page.json", key());
    if (hasFailed) say("");
  } catch (failure) {
    hasFailed = true;
    say(failure.message);
    $("settings").open ||= failure.status === 401;
    if (failure.status === 503 || failure.status === 0) setTimeout(meet, 3000); // it may still be loading
    return;
  }
  $("model").textContent = shortName(model);
  const chosen = about.drafters ? ` · drafters chosen: ${about.drafters}` : "";
  $("model").title = `${model} · context of ${about.max_model_len} tokens${chosen} · SpecInfer ${about.version}`;
  document.title = `${shortName(model)} · SpecInfer`;
  $("send").disabled = !about.has_text;
  if (!about.has_text) say("This model has no tokenizer: it takes token ids, and this page has text only.");
  const chat = document.querySelector("#mode input[value=chat]");
  chat.disabled = !about.has_chat;
  $("chat-reason").hidden = about.has_chat || !about.has_text;
  if (!about.has_chat) $("chat-reason").textContent = "Chat is off: this model has no chat template.";
  if (isFirst && about.has_chat && !running && !$("prompt").value) {
    chat.checked = true;
    changeMode();
  }
}

function say(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

// ------------------------------------------------------------------------------------------- steps

function showStep(step) {
  if (!step) return;
  tree.show(step);
  passes.draw(steps.at);
  for (const span of marked) span.classList.remove("current");
  marked = running && steps.follows ? [] : [...answerPlace.querySelectorAll(`[data-step="${steps.at}"]`)];
  for (const span of marked) span.classList.add("current");
  if (marked.length) reveal(marked[0]);
}

// Scrolls the text alone, not the page.
function reveal(span) {
  if (!span.checkVisibility()) return; // in a folded thought
  const scroller = $("transcript");
  const view = scroller.getBoundingClientRect();
  const box = span.getBoundingClientRect();
  if (box.top < view.top || box.bottom > view.bottom) scroller.scrollTop += box.top - view.top - view.height / 2;
}

let answerPlace = $("transcript");
let stepsDue = false;

// However many steps come between two frames, only the newest is drawn.
function drawSoon() {
  if (stepsDue) return;
  stepsDue = true;
  requestAnimationFrame(() => {
    stepsDue = false;
    steps.update();
    depths.draw(steps);
    drawLegend();
  });
}

function drawLegend() {
  const entries = drafters.names.map((name) =>
    element(
      "span",
      { title: name },
      element("span", { className: `ink-${drafters.slot(name)}`, textContent: `${drafters.mark(name)} ` }),
      element("span", { className: `token by-${drafters.slot(name)}`, textContent: shortName(name) }),
    ),
  );
  const own = element("span", {}, element("span", { className: "ink-target", textContent: "◎ " }));
  own.append(element("span", { className: "token by-target", textContent: "the target itself" }));
  $("legend").replaceChildren(...entries, own);
}

// Announces a streamed text in pieces that end with a line or sentence, a few seconds apart.
class Speaker {
  constructor(place) {
    this.place = place;
    place.replaceChildren();
    this.waiting = "";
    this.time = performance.now();
  }

  add(text) {
    this.waiting += text;
    if (performance.now() - this.time < SPEAK_EVERY) return;
    const end = Math.max(...["\n", ". ", "? ", "! "].map((mark) => this.waiting.lastIndexOf(mark)));
    if (end >= 0) this.flush(end + 1);
  }

  flush(end = this.waiting.length) {
    if (this.waiting.slice(0, end).trim()) this.place.append(element("p", { textContent: this.waiting.slice(0, end) }));
    this.waiting = this.waiting.slice(end);
    this.time = performance.now();
  }
}

function number(name, text) {
  document.querySelector(`[data-number=${name}]`).textContent = text;
}

// ------------------------------------------------------------------------------------------ answers

function clearSteps() {
  for (const part of [steps, tree, passes, depths]) part.clear();
  for (const name of ["speed", "first", "pass", "kept", "tokens"]) number(name, "–");
  $("share").hidden = true;
}

function addStep(step, painter) {
  for (const node of step.path) {
    const { text, drafters: makers } = step.nodes[node - 1];
    painter.expect(text, makers[0] ?? null, steps.list.length);
  }
  if (step.next) painter.expect(step.next.text, null, steps.list.length);
  passes.add(step);
  steps.add(step);
}

function drawTotals() {
  const { generated, guessed, accepted } = steps.totals;
  if (steps.list.length) number("pass", (generated / steps.list.length).toFixed(2));
  if (guessed) number("kept", `${Math.round((accepted / guessed) * 100)}%`);
}

async function answer(path, asked, place) {
  answerPlace = place.closest(".message") ?? place;
  clearSteps();
  const painter = new Painter(place, drafters);
  const thought = new Thought(place);
  const speaker = new Speaker($("spoken"));
  const start = performance.now();
  const result = { text: "", thought: "", reason: null, tokens: 0, first: null };
  const scroller = $("transcript");
  for await (const event of events(path, { ...asked, trace: true }, key(), running.signal)) {
    const now = (performance.now() - start) / 1000;
    const choice = event.choices?.[0];
    for (const step of event.specinfer?.steps ?? choice?.specinfer?.steps ?? []) {
      addStep(step, painter);
    }
    const text = choice?.text ?? choice?.delta?.content ?? "";
    const thinks = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    const follows = scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 40;
    if (thinks) {
      if (!thought.text) $("status").textContent = "The model thinks.";
      painter.show(thinks, thought.add(thinks));
      result.thought = thought.text;
    }
    if (text) {
      if (!result.text) $("status").textContent = "The model answers.";
      thought.end();
      painter.show(text);
      speaker.add(text);
      result.text += text;
    }
    if (follows && (thinks || text)) scroller.scrollTop = scroller.scrollHeight;
    result.reason = choice?.finish_reason ?? result.reason;
    result.plain = event.metrics?.speculative_decoding?.reason ?? result.plain;
    result.tokens = event.usage?.completion_tokens ?? Math.max(steps.totals.generated, result.tokens);
    if (result.tokens && result.first === null) {
      result.first = now;
      number("first", now < 1 ? `${Math.round(now * 1000)} ms` : `${now.toFixed(2)} s`);
    }
    if (choice) {
      number("speed", now > 0 && result.tokens ? (result.tokens / now).toFixed(1) : "–");
      number("tokens", String(result.tokens));
      drawTotals();
      drawSoon();
    }
  }
  thought.end();
  speaker.flush();
  return result;
}

function ending({ text, thought, reason, tokens, plain }, seconds) {
  if (!text && thought) return `Done: all ${count(tokens, "token")} are a thought. Raise max_tokens for an answer.`;
  if (!text) return "The model ended its answer at once: there is no text.";
  const why = reason === "length" ? ", the most allowed" : "";
  return `Done: ${count(tokens, "token")} in ${seconds.toFixed(1)} seconds${why}.${noGuesses(plain)}`;
}

function bubble(role, text) {
  const place = element("div", { className: "words", textContent: text });
  const name = element("h3", { textContent: role === "user" ? "You" : "Model" });
  $("transcript").append(element("div", { className: `message ${role}` }, name, place));
  $("transcript").scrollTop = $("transcript").scrollHeight;
  return place;
}

// The trace stays in the address and in nothing else: a server is never sent what follows "#".
async function share() {
  try {
    const link = await traceLink({ ...shown, steps: steps.list });
    history.replaceState(null, "", link);
    const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    $("status").textContent = `${copied ? "Link copied" : "The link is in the address bar"}: it contains the prompt, the text and the trees.`;
  } catch (failure) {
    if (!(failure instanceof Failure)) throw failure;
    say(failure.message);
  }
}

async function openShared() {
  if (!isTrace(location.hash) || running) return;
  clear(false);
  try {
    const { steps: list, ...trace } = await readTrace(location.hash);
    shown = { ...trace, isShared: true };
    hello.remove();
    if (trace.isChat) bubble("user", trace.prompt);
    else $("transcript").append(element("span", { className: "given", textContent: trace.prompt }));
    const place = trace.isChat ? bubble("assistant", "") : $("transcript");
    answerPlace = place.closest(".message") ?? place;
    const painter = new Painter(place, drafters);
    for (const step of list) addStep(step, painter);
    if (trace.thought) painter.show(trace.thought, new Thought(place, "Thought").add(trace.thought));
    painter.show(trace.text);
    drawTotals();
    number("tokens", String(steps.totals.generated));
    steps.go(0);
    drawSoon();
    $("status").textContent = `A shared trace of ${shortName(trace.model)}, ${count(list.length, "step")}: shown from the link, not generated here.`;
  } catch (failure) {
    if (!(failure instanceof Failure)) throw failure;
    say(failure.message);
  }
}

async function send() {
  if (running || about.has_text === false) return;
  if (shown?.isShared) clear();
  say("");
  const isChat = mode() === "chat";
  const isRace = $("race").checked;
  const prompt = $("prompt").value;
  if (!prompt) {
    say(isChat ? "Write a message first." : "Write a prompt first.");
    $("prompt").focus();
    return;
  }
  const talk = isChat ? [...messages, { role: "user", content: prompt }] : null;
  const start = performance.now();
  running = new AbortController();
  let place = null;
  try {
    const first = system() ? [{ role: "system", content: system() }] : [];
    const asked = body(model, talk && [...first, ...talk]);
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    wait(true);
    $(isRace ? "race-view" : "single").scrollIntoView({ block: matchMedia("(min-width: 62rem)").matches ? "nearest" : "start" });
    let result;
    if (isRace) {
      asked.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
      result = { text: await race.run(path, asked, key(), running.signal) };
      if (isChat) {
        hello.remove();
        bubble("user", prompt);
        bubble("assistant", result.text);
      }
    } else {
      hello.remove();
      if (isChat) {
        bubble("user", prompt);
        $("prompt").value = "";
        place = bubble("assistant", "");
      } else {
        $("transcript").replaceChildren(element("span", { className: "given", textContent: prompt }));
        place = $("transcript");
      }
      shown = { model, isChat, prompt, text: "", thought: "" };
      result = await answer(path, asked, place);
    }
    if (isChat) messages = [...talk, { role: "assistant", content: result.text, reasoning_content: result.thought || undefined }];
    $("status").textContent = isRace ? "" : ending(result, (performance.now() - start) / 1000);
  } catch (failure) {
    if (failure.name === "AbortError") $("status").textContent = "Stopped.";
    else if (failure instanceof Failure) {
      $("status").textContent = "";
      say(failure.message);
      $("settings").open ||= failure.status === 401;
    } else throw failure;
    // What was shown of an answer stays part of the conversation; what got none is taken back.
    if (place?.textContent && isChat) messages = [...talk, { role: "assistant", content: place.textContent }];
    else if (isChat && place?.isConnected) {
      place.parentElement.previousElementSibling.remove();
      place.parentElement.remove();
      $("prompt").value = prompt;
    }
  } finally {
    running = null;
    wait(false);
    if (steps.list.length) drawSoon();
    if (shown && place && steps.list.length) {
      shown.text = place.textContent.slice(isChat ? 0 : prompt.length);
      shown.thought = place.parentElement.querySelector(".thought .words")?.textContent ?? "";
      $("share").hidden = false;
    }
  }
}

function wait(isWaiting) {
  $("send").disabled = isWaiting || about.has_text === false;
  $("stop").hidden = !isWaiting;
  document.body.classList.toggle("running", isWaiting);
  if (isWaiting) $("status").textContent = "The model answers.";
  if (isWaiting && isTrace(location.hash)) history.replaceState(null, "", location.pathname + location.search);
}

function clear(forgetsLink = true) {
  running?.abort();
  messages = [];
  shown = null;
  $("transcript").replaceChildren(hello);
  $("spoken").replaceChildren();
  clearSteps();
  race.clear();
  $("status").textContent = "";
  say("");
  if (forgetsLink && isTrace(location.hash)) history.replaceState(null, "", location.pathname + location.search);
}

// ------------------------------------------------------------------------------------------ controls

function changeMode() {
  const isChat = mode() === "chat";
  const isRace = $("race").checked;
  $("prompt-label").textContent = isChat ? "Message" : "Prompt";
  $("prompt").placeholder = PLACEHOLDERS[mode()];
  $("system-label").hidden = !isChat;
  $("send").textContent = isRace ? "Race" : isChat ? "Send" : "Complete";
  $("clear").textContent = isChat ? "New conversation" : "Clear";
  $("examples").replaceChildren(
    ...EXAMPLES[mode()].map((text) => element("button", { type: "button", value: text, textContent: text.split("\n")[0], title: text })),
  );
  $("look").hidden = isRace;
  $("single").hidden = isRace;
  $("race-view").hidden = !isRace;
  $("main").classList.toggle("racing", isRace);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => clear());
$("share").addEventListener("click", share);
addEventListener("hashchange", openShared);
$("mode").addEventListener("change", () => {
  clear();
  changeMode();
});
$("race").addEventListener("change", changeMode);
$("examples").addEventListener("click", ({ target }) => {
  if (running || !target.value) return;
  $("prompt").value = target.value;
  send();
});
$("tree").addEventListener("change", () => ($("expansion-label").hidden = $("tree").value !== "own"));
$("key").addEventListener("change", () => {
  storeKey(key());
  meet();
});
$("transcript").addEventListener("click", (event) => {
  const token = event.target.closest("[data-step]");
  if (token && answerPlace.contains(token)) steps.go(Number(token.dataset.step));
});
$("zoom-in").addEventListener("click", () => tree.zoom(1.25));
$("zoom-out").addEventListener("click", () => tree.zoom(1 / 1.25));
$("zoom-fit").addEventListener("click", () => tree.zoom(null));
$("help-open").addEventListener("click", openHelp);
chooseTheme($("theme"));
watchKeys({ send, sends: chooseEnter($("enter-sends")), stop: () => running?.abort(), steps, tree, prompt: $("prompt") });
$("key").value = storedKey();
changeMode();
openShared();
meet();
