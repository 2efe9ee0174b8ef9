// The steps of one answer: which one is shown, going through them, and what they add up to.

import { count } from "./text.js";

export class Steps {
  constructor({ slider, play, newest, back, forth, words }, show) {
    Object.assign(this, { slider, play, newest, back, forth, words, show });
    slider.addEventListener("input", () => this.go(Number(slider.value) - 1));
    back.addEventListener("click", () => this.move(-1));
    forth.addEventListener("click", () => this.move(1));
    newest.addEventListener("click", () => this.follow());
    play.addEventListener("click", () => this.toggle());
    this.clear();
  }

  clear() {
    this.halt();
    this.list = [];
    this.at = -1;
    this.follows = true;
    this.kept = [];
    this.reached = [];
    this.totals = { guessed: 0, accepted: 0, generated: 0 };
    this.update();
  }

  add(step) {
    this.list.push(step);
    const depths = [0];
    const here = new Set();
    for (const node of step.nodes) {
      depths.push(depths[node.parent] + 1);
      here.add(depths.at(-1));
    }
    for (const depth of here) this.reached[depth] = (this.reached[depth] ?? 0) + 1;
    for (let depth = 1; depth <= step.path.length; depth++) this.kept[depth] = (this.kept[depth] ?? 0) + 1;
    this.totals.guessed += step.nodes.length;
    this.totals.accepted += step.path.length;
    this.totals.generated += step.path.length + (step.next ? 1 : 0);
    if (this.follows) this.at = this.list.length - 1;
  }

  get current() {
    return this.list[this.at] ?? null;
  }

  go(place) {
    if (!this.list.length) return;
    this.at = Math.min(Math.max(place, 0), this.list.length - 1);
    this.follows = this.at === this.list.length - 1;
    this.update();
  }

  move(by) {
    this.halt();
    this.go(this.at + by);
  }

  follow() {
    this.halt();
    this.go(this.list.length - 1);
  }

  toggle() {
    if (this.timer) {
      this.halt();
      return;
    }
    if (!this.list.length) return;
    if (this.at === this.list.length - 1) this.go(0);
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "Pause");
    this.timer = setInterval(() => {
      this.go(this.at + 1);
      if (this.at >= this.list.length - 1) this.halt();
    }, 600);
  }

  halt() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "Play");
  }

  update() {
    const count = this.list.length;
    this.slider.max = Math.max(count, 1);
    this.slider.value = this.at + 1;
    this.slider.disabled = count < 2;
    this.back.disabled = this.at <= 0;
    this.forth.disabled = this.at >= count - 1;
    this.play.disabled = count < 2;
    this.newest.disabled = !count;
    this.newest.setAttribute("aria-pressed", String(this.follows));
    const step = this.current;
    this.words.textContent = step ? sentence(step, this.at + 1, count) : "no step yet";
    this.slider.setAttribute("aria-valuetext", this.words.textContent);
    this.show(step);
  }
}

function sentence(step, number, all) {
  const generated = step.path.length + (step.next ? 1 : 0);
  const guesses = step.nodes.length ? `${step.path.length} of ${count(step.nodes.length, "draft token")} accepted` : "no draft tokens";
  return `step ${number} of ${all} · ${guesses} · ${count(generated, "token")}`;
}
