// The same request with and without speculation: two clocks, and whether the texts are equal.
// Neither is traced, since noting trees takes time; so the texts are not marked here.

import { events } from "./api.js";
import { count, noGuesses } from "./text.js";

const LEAST = 8; // tokens: clocks of shorter texts tell nothing
const WARM = 4;
const WAITING = ["waits for a request", "warms up", "waits for its turn", "runs"];

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
    this.thought = "";
    this.tokens = 0;
    this.seconds = 0;
    this.first = null;
    this.passes = null;
    this.plain = null;
    this.output.replaceChildren();
    this.state = "waits for a request";
    this.draw();
    this.track.style.inlineSize = "0";
  }

  draw() {
    this.clock.textContent = `${this.seconds.toFixed(2)} s`;
    if (this.most) this.track.style.inlineSize = `${Math.min(100, (this.tokens / this.most) * 100)}%`;
    const parts = this.state ? [this.state] : [];
    if (this.tokens) parts.push(count(this.tokens, "token"), `${(this.tokens / this.seconds).toFixed(1)} a second`);
    if (this.passes) parts.push(`${this.passes.toFixed(2)} a pass`);
    if (this.first !== null) parts.push(`first after ${Math.round(this.first * 1000)} ms`);
    const words = parts.join(" · ");
    if (words !== this.words.textContent) this.words.textContent = words;
  }

  enter(state) {
    this.state = state;
    this.draw();
  }

  // What a server measures or compiles when it is first asked so is no part of the race.
  async warmUp(path, body, key, signal) {
    this.enter("warms up");
    await this.ended(async () => {
      for await (const _ of events(path, { ...body, max_tokens: WARM }, key, signal));
    });
    this.enter("waits for its turn");
  }

  // However it ends, the lane shows how.
  async ended(action) {
    try {
      await action();
    } catch (failure) {
      this.enter(failure.name === "AbortError" ? "stopped" : failure.status ? "refused" : "failed");
      throw failure;
    }
  }

  async run(path, body, key, signal) {
    this.most = body.max_tokens;
    this.enter("runs");
    const start = performance.now();
    const passed = () => (performance.now() - start) / 1000;
    const tick = () => {
      this.seconds = passed();
      this.draw();
      frame = requestAnimationFrame(tick);
    };
    let frame = requestAnimationFrame(tick);
    try {
      await this.ended(() => this.receive(events(path, body, key, signal), passed));
      this.state = this.tokens ? "" : "ended at once";
    } finally {
      cancelAnimationFrame(frame);
      this.seconds = passed();
      this.draw();
    }
  }

  async receive(stream, passed) {
    for await (const event of stream) {
      const choice = event.choices?.[0];
      const text = choice?.text ?? choice?.delta?.content ?? "";
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      if (text || thought) {
        this.first ??= passed();
        this.text += text;
        this.thought += thought;
        this.output.append(thought + text);
        this.output.scrollTop = this.output.scrollHeight;
      }
      this.plain = event.metrics?.speculative_decoding?.reason ?? this.plain;
      this.tokens = event.usage?.completion_tokens ?? this.tokens;
      this.passes = event.metrics?.speculative_decoding?.tokens_per_pass ?? this.passes;
    }
  }
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
    const ownStop = new AbortController();
    const either = AbortSignal.any([signal, ownStop.signal]);
    try {
      await tree.warmUp(path, { ...with_, cache_salt: salt() }, key, either);
      await plain.warmUp(path, { ...without, cache_salt: salt() }, key, either);
      const first = tree.run(path, with_, key, either);
      if (this.order.value === "turns") await first;
      await Promise.all([first, plain.run(path, without, key, either)]);
    } catch (failure) {
      ownStop.abort(); // one side alone is no race
      for (const lane of [tree, plain]) if (WAITING.includes(lane.state)) lane.enter("stopped");
      throw failure;
    }
    this.judge(with_.speculative.tree);
    return tree.text;
  }

  judge(shape) {
    const { tree, plain } = this.lanes;
    const { words: speed, isWon } = this.compare(shape);
    let at = 0;
    const [one, other] = [tree, plain].map((lane) => lane.thought + lane.text);
    while (at < Math.min(one.length, other.length) && one[at] === other[at]) at++;
    const texts = one === other
      ? `The texts are equal, all ${count(one.length, "character")}.`
      : `The texts part after ${count(at, "character")}: the server’s verification keeps the distribution of the text, not every word, or sums were rounded differently.`;
    this.verdict.replaceChildren(Object.assign(document.createElement("strong"), { textContent: speed }), `${noGuesses(tree.plain)} ${texts}`);
    this.verdict.classList.toggle("won", isWon);
    this.verdict.hidden = false;
  }

  compare(shape) {
    const { tree, plain } = this.lanes;
    const ratio = plain.seconds / tree.seconds;
    if (Math.min(tree.tokens, plain.tokens) < LEAST) return { words: "Too short to compare the speeds.", isWon: false };
    if (ratio >= 1.005) return { words: `${ratio.toFixed(2)} times as fast with a tree (${shape}).`, isWon: true };
    const words = ratio <= 0.995 ? `${(1 / ratio).toFixed(2)} times as fast without a tree` : "Equally fast without a tree";
    return { words: `${words} (${shape}) for this request.`, isWon: false };
  }
}
