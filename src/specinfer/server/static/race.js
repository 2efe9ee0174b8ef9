// The same request with and without speculation: two clocks, and whether the texts are equal.
// Neither is traced, since noting trees takes time; so the texts are not marked here.

import { events } from "./api.js";
import { count } from "./text.js";

const LEAST = 8; // tokens: clocks of shorter texts tell nothing
const WARM = 4;

class Lane {
  constructor(place) {
    this.clock = place.querySelector("[data-clock]");
    this.words = place.querySelector("[data-words]");
    this.output = place.querySelector("[data-text]");
    this.track = place.querySelector(".track > div");
    this.clear();
  }

  clear() {
    this.text = "";
    this.tokens = 0;
    this.seconds = 0;
    this.first = null;
    this.passes = null;
    this.reason = null;
    this.output.replaceChildren();
    this.words.textContent = "waits for a request";
    this.track.style.inlineSize = "0";
    this.clock.textContent = "0.00 s";
  }

  draw() {
    this.clock.textContent = `${this.seconds.toFixed(2)} s`;
    if (this.most) this.track.style.inlineSize = `${Math.min(100, (this.tokens / this.most) * 100)}%`;
    if (!this.tokens) return;
    const parts = [count(this.tokens, "token"), `${(this.tokens / this.seconds).toFixed(1)} a second`];
    if (this.passes) parts.push(`${this.passes.toFixed(2)} a pass`);
    if (this.first !== null) parts.push(`first after ${Math.round(this.first * 1000)} ms`);
    this.words.textContent = parts.join(" · ");
  }

  async run(path, body, key, signal) {
    this.most = body.max_tokens;
    this.words.textContent = "runs";
    const start = performance.now();
    const passed = () => (performance.now() - start) / 1000;
    const tick = () => {
      this.seconds = passed();
      this.draw();
      frame = requestAnimationFrame(tick);
    };
    let frame = requestAnimationFrame(tick);
    try {
      for await (const event of events(path, body, key, signal)) {
        const choice = event.choices?.[0];
        const text = choice?.text ?? choice?.delta?.content ?? "";
        if (text) {
          this.first ??= passed();
          this.text += text;
          this.output.append(text);
          this.output.scrollTop = this.output.scrollHeight;
        }
        this.reason = choice?.finish_reason ?? this.reason;
        this.tokens = event.usage?.completion_tokens ?? this.tokens;
        this.passes = event.metrics?.speculative_decoding?.tokens_per_pass ?? this.passes;
      }
    } finally {
      cancelAnimationFrame(frame);
      this.seconds = passed();
      this.draw();
    }
  }
}

// What a server measures or compiles when it is first asked so is no part of the race.
async function warmUp(path, body, key, signal) {
  for await (const _ of events(path, { ...body, max_tokens: WARM }, key, signal));
}

export class Race {
  constructor(place) {
    this.lanes = { tree: new Lane(place.querySelector("[data-lane=tree]")), plain: new Lane(place.querySelector("[data-lane=plain]")) };
    this.verdict = place.querySelector("#verdict");
    this.order = place.querySelector("#race-order");
    this.hint = place.querySelector("#race-hint");
    this.order.addEventListener("change", () => this.explain());
    this.explain();
  }

  explain() {
    this.hint.textContent =
      this.order.value === "turns"
        ? "First with a tree, then without, so that neither waits for the other. Each is warmed up with a few tokens. Same seed; neither reuses what the server has cached of an earlier prompt."
        : "Both at once: they share the machine, so both clocks run slower than alone. Same seed.";
  }

  clear() {
    this.verdict.hidden = true;
    for (const lane of Object.values(this.lanes)) lane.clear();
  }

  // Returns the text; `body` has a seed.
  async run(path, body, key, signal) {
    this.clear();
    const { tree, plain } = this.lanes;
    const own = body.speculative?.tree;
    const salt = () => crypto.getRandomValues(new Uint32Array(4)).join("-");
    const with_ = { ...body, cache_salt: salt(), speculative: { tree: own && own !== "off" ? own : "auto" } };
    const without = { ...body, cache_salt: salt(), speculative: { tree: "off" } };
    for (const [lane, asked] of [[tree, with_], [plain, without]]) {
      lane.words.textContent = "warms up";
      await warmUp(path, { ...asked, cache_salt: salt() }, key, signal);
      lane.words.textContent = "waits for its turn";
    }
    const inTurns = this.order.value === "turns";
    const first = tree.run(path, with_, key, signal);
    if (inTurns) await first;
    const second = plain.run(path, without, key, signal);
    await Promise.all([first, second]);
    this.judge(with_.speculative.tree);
    return tree.text;
  }

  judge(shape) {
    const { tree, plain } = this.lanes;
    const speed = this.compare(shape);
    let at = 0;
    const length = Math.min(tree.text.length, plain.text.length);
    while (at < length && tree.text[at] === plain.text[at]) at++;
    const equal = tree.text === plain.text;
    const texts = equal
      ? `The texts are equal, all ${count(tree.text.length, "character")}.`
      : `The texts part after ${count(at, "character")}: the server’s verification keeps the distribution of the text, not every word, or sums were rounded differently.`;
    this.verdict.replaceChildren(Object.assign(document.createElement("strong"), { textContent: speed }), ` ${texts}`);
    this.verdict.classList.toggle("differs", !equal);
    this.verdict.hidden = false;
  }

  compare(shape) {
    const { tree, plain } = this.lanes;
    const ratio = plain.seconds / tree.seconds;
    if (Math.min(tree.tokens, plain.tokens) < LEAST) return "Too short to compare the speeds.";
    if (ratio >= 1.005) return `${ratio.toFixed(2)} times as fast with a tree (${shape}).`;
    if (ratio <= 0.995) return `${(1 / ratio).toFixed(2)} times as fast without a tree (${shape}).`;
    return `Equally fast with a tree (${shape}) and without.`;
  }
}
