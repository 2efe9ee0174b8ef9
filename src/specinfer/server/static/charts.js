// What the steps add up to: a column of blocks for each pass, and a bar for each depth.

import { element, TARGET } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const BLOCK = 9;
const COLUMN = 9;
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
      this.place.replaceChildren(this.svg);
    }
    const follows = this.place.scrollLeft + this.place.clientWidth >= this.place.scrollWidth - 2 * COLUMN;
    const height = this.tallest * BLOCK + 4;
    this.columns.forEach((group, i) => {
      group.setAttribute("transform", `translate(${i * COLUMN} ${height - 2})`);
      if (!group.isConnected) this.svg.append(group);
    });
    this.svg.setAttribute("width", this.columns.length * COLUMN);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", `Tokens generated in each of ${this.first + this.columns.length} passes`);
    this.marked?.classList.remove("current");
    this.marked = this.columns[current - this.first];
    this.marked?.classList.add("current");
    if (follows) this.place.scrollLeft = this.place.scrollWidth;
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
    this.place.replaceChildren(...rows);
  }
}
