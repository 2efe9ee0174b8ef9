// The thought of a model, folded above its answer.

import { element } from "./text.js";

export class Thought {
  constructor(answer, title = "Thinks …") {
    this.answer = answer;
    this.title = title;
    this.text = "";
  }

  // Returns the place of its text.
  add(text) {
    if (!this.text) {
      this.start = performance.now();
      this.summary = element("summary", { textContent: this.title });
      this.words = element("div", { className: "words" });
      this.answer.before(element("details", { className: "thought" }, this.summary, this.words));
    }
    this.text += text;
    return this.words;
  }

  // The answer begins, or there is none.
  end() {
    if (this.summary?.textContent !== this.title) return;
    this.summary.textContent = `Thought for ${((performance.now() - this.start) / 1000).toFixed(1)} seconds`;
  }
}
