// What the steps add up to: a column of blocks for each pass, and a bar for each depth.

import { count, element, TARGET } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const BLOCK = 9;
const COLUMN = 9;
const FLOOR = 16; // below the columns: numbers of passes
const SIDE = 20; // left of them: numbers of tokens
const MOST = 400; // passes drawn; earlier ones leave on the left

export class Passes {
  constructor(place, drafters, choose) {
    this.place = place;
    this.drafters = drafters;
    this.empty = place.firstElementChild;
    place.addEventListener("click", (event) => {
      const column = event.target.closest("[data-step]");
      if (column) choose(Number(column.dataset.step));
    });
    this.clear();
  }

  clear() {
    this.columns = [];
    this.first = 0;
    this.tallest = 1;
    this.marked = null;
    this.svg = null;
    this.place.replaceChildren(this.empty);
  }

  add(step) {
    const place = this.first + this.columns.length;
    const tokens = step.path.map((node) => this.drafters.slot(step.nodes[node - 1].drafters[0]));
    if (step.next) tokens.push(TARGET);
    const group = document.createElementNS(SVG, "g");
    group.dataset.step = place;
    tokens.forEach((slot, i) => {
      const block = document.createElementNS(SVG, "rect");
      block.setAttribute("class", `fill-${slot}`);
      block.setAttribute("y", -(i + 1) * BLOCK);
      block.setAttribute("width", COLUMN - 2);
      block.setAttribute("height", BLOCK - 2);
      group.append(block);
    });
    this.columns.push(group);
    this.tallest = Math.max(this.tallest, tokens.length);
    if (this.columns.length > MOST) {
      this.columns.shift().remove();
      this.first += 1;
    }
  }

  draw(current) {
    if (!this.columns.length) return;
    if (!this.svg) {
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("role", "img");
      this.axis = document.createElementNS(SVG, "svg"); // stays in view when the columns are scrolled
      this.axis.setAttribute("class", "axis");
      this.axis.setAttribute("width", SIDE);
      this.axis.setAttribute("aria-hidden", "true");
      this.place.replaceChildren(this.axis, this.svg);
    }
    const follows = this.place.scrollLeft + this.place.clientWidth >= this.place.scrollWidth - 2 * COLUMN;
    const height = this.tallest * BLOCK + 4;
    const width = this.columns.length * COLUMN;
    this.columns.forEach((group, i) => {
      group.setAttribute("transform", `translate(${i * COLUMN} ${height - 2})`);
      if (!group.isConnected) this.svg.append(group);
    });
    this.drawAxes(height, width);
    const passes = count(this.first + this.columns.length, "pass", "passes");
    this.svg.setAttribute("aria-label", `Tokens generated in each of ${passes}; at most ${this.tallest} in one`);
    this.marked?.classList.remove("current");
    this.marked = this.columns[current - this.first];
    this.marked?.classList.add("current");
    if (follows) this.place.scrollLeft = this.place.scrollWidth;
  }

  drawAxes(height, width) {
    for (const svg of [this.svg, this.axis]) svg.setAttribute("height", height + FLOOR);
    this.svg.setAttribute("width", Math.max(width, 3 * COLUMN));
    for (const old of this.svg.querySelectorAll(".tick")) old.remove();
    const tick = (x, y, number) => {
      const made = document.createElementNS(SVG, "text");
      for (const [name, value] of Object.entries({ class: "tick", x, y })) made.setAttribute(name, value);
      made.append(number);
      return made;
    };
    for (let pass = Math.max(1, Math.ceil((this.first + 1) / 10) * 10); pass <= this.first + this.columns.length; pass += 10) {
      this.svg.append(tick((pass - this.first - 0.5) * COLUMN - 1, height + FLOOR - 4, pass));
    }
    if (!this.first) this.svg.append(tick(COLUMN / 2 - 1, height + FLOOR - 4, 1));
    const by = Math.ceil(this.tallest / 5);
    const numbers = [];
    for (let tokens = by; tokens <= this.tallest; tokens += by) numbers.push(tick(SIDE - 8, height + 1 - (tokens - 0.5) * BLOCK, tokens));
    this.axis.replaceChildren(...numbers);
  }
}

export class Depths {
  constructor(place) {
    this.place = place;
    this.empty = place.firstElementChild;
  }

  clear() {
    this.place.replaceChildren(this.empty);
  }

  draw({ kept, reached }) {
    if (reached.length < 2) return;
    const rows = [];
    for (let depth = 1; depth < reached.length; depth++) {
      const all = reached[depth] ?? 0;
      const part = all ? (kept[depth] ?? 0) / all : 0;
      const bar = element("div", { className: "bar-fill" });
      bar.style.inlineSize = `${part * 100}%`;
      rows.push(
        element("span", { className: "bar-name", textContent: depth }),
        element("div", { className: "bar-track" }, bar),
        element("span", { className: "bar-value", textContent: `${Math.round(part * 100)}% of ${all}` }),
      );
    }
    const marks = ["0", "50", "100%"].map((mark) => element("span", { textContent: mark }));
    rows.push(element("span", { className: "bar-name", textContent: "depth" }), element("div", { className: "scale" }, ...marks));
    this.place.replaceChildren(...rows);
  }
}
