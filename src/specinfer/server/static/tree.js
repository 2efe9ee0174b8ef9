// The tree of one step in SVG: scrolled, dragged and sized, gone through by keys, with a node's particulars below.

import { HEIGHT, joint, layOut, percent } from "./layout.js";
import { clipped, element, shortName, TARGET, visible } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const KINDS = {
  root: "the last known token",
  kept: "accepted",
  left: "rejected",
  target: "said by the target itself",
};

function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export class TreeView {
  constructor(place, details, drafters) {
    this.place = place;
    this.details = details;
    this.drafters = drafters;
    this.scale = null; // null: fits the width
    this.drawn = null;
    this.selected = null;
    this.empty = place.firstElementChild;
    place.addEventListener("click", (event) => {
      if (!this.isDragged) this.pick(event.target.closest("[data-place]"));
    });
    place.addEventListener("keydown", (event) => this.onKey(event));
    this.drag();
    new ResizeObserver(() => this.scale === null && this.size()).observe(place);
  }

  clear() {
    this.step = this.drawn = this.selected = null;
    this.place.replaceChildren(this.empty);
    this.details.replaceChildren();
  }

  show(step) {
    if (step === this.step) return;
    this.step = step;
    this.selected = null;
    this.drawn = layOut(step);
    const { nodes, width, height } = this.drawn;
    const lines = nodes.slice(1).map((node) =>
      shape("path", { class: `edge ${node.kind}`, d: joint(nodes[node.parent], node) }),
    );
    lines.sort((a, b) => rankOf(a) - rankOf(b)); // what was accepted lies on top
    this.groups = nodes.map((node) => this.node(node));
    this.svg = shape(
      "svg",
      { class: "tree", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": this.words() },
      ...lines,
      ...this.groups,
    );
    this.place.replaceChildren(this.svg);
    this.groups[0].setAttribute("tabindex", "0");
    this.size();
    this.place.scrollTo(0, 0);
    this.describe(null);
  }

  node(node) {
    const slot = node.kind === "target" ? TARGET : node.kind === "root" ? "root" : this.drafters.slot(node.drafters[0]);
    const marks = shape("text", { class: "marks", x: 7, y: 17 });
    if (node.kind === "target") marks.append(shape("tspan", { class: `ink-${TARGET}` }, "◎"));
    node.drafters.slice(0, 3).forEach((name, i) => {
      marks.append(shape("tspan", { x: 7 + i * 12, class: `ink-${this.drafters.slot(name)}` }, this.drafters.mark(name)));
    });
    const group = shape(
      "g",
      {
        class: `node ${node.kind} is-${slot}`,
        transform: `translate(${node.x} ${node.y})`,
        "data-place": node.place,
        role: "button",
        tabindex: "-1",
        "aria-label": this.name(node),
      },
      shape("title", {}, this.name(node)),
      shape("rect", { width: node.width, height: HEIGHT, rx: 5 }),
      marks,
      // Isolated, so that text from right to left stays in its node.
      shape("text", { class: "label", x: node.marks + 3, y: 17 }, `\u2068${node.label}\u2069`),
    );
    if (node.chance) group.append(shape("text", { class: "chance", x: node.width - 8, y: 17 }, node.chance));
    return group;
  }

  name(node) {
    const who = node.drafters.length ? `, guessed by ${node.drafters.map(shortName).join(" and ")}` : "";
    const chance = node.chance ? `, ${node.chance}% for the target` : "";
    return `${clipped(visible(node.text, node.token), 60)}: ${KINDS[node.kind]}${who}${chance}`;
  }

  words() {
    const { nodes, path, next } = this.step;
    return `${nodes.length} guesses, ${path.length} accepted${next ? ", and one token of the target" : ""}`;
  }

  // ------------------------------------------------------------------------------------------ size

  size() {
    if (!this.drawn) return;
    const { width, height } = this.drawn;
    const room = this.place.clientWidth - 2;
    const scale = this.scale ?? Math.min(1.2, Math.max(0.8, room / width));
    this.svg.setAttribute("width", width * scale);
    this.svg.setAttribute("height", height * scale);
    this.shownScale = scale;
  }

  zoom(factor) {
    if (!this.drawn) return;
    this.scale = factor === null ? null : Math.min(3, Math.max(0.2, this.shownScale * factor));
    this.size();
  }

  // Dragging with a mouse; fingers scroll anyway.
  drag() {
    let start = null;
    this.place.addEventListener("pointerdown", (event) => {
      this.isDragged = false;
      if (event.pointerType === "mouse" && event.button === 0) {
        start = { x: event.clientX + this.place.scrollLeft, y: event.clientY + this.place.scrollTop, event };
      }
    });
    addEventListener("pointermove", (event) => {
      if (!start) return;
      const { clientX, clientY } = start.event;
      this.isDragged ||= Math.hypot(event.clientX - clientX, event.clientY - clientY) > 4;
      this.place.scrollTo(start.x - event.clientX, start.y - event.clientY);
    });
    addEventListener("pointerup", () => (start = null));
    this.place.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15);
      },
      { passive: false },
    );
  }

  // ------------------------------------------------------------------------------------------ nodes

  onKey(event) {
    const group = event.target.closest("[data-place]");
    if (!group || event.ctrlKey || event.metaKey || event.altKey) return;
    const { nodes, children } = this.drawn;
    const node = nodes[Number(group.dataset.place)];
    const siblings = node.parent < 0 ? [node] : children[node.parent];
    const place = siblings.indexOf(node);
    const next = {
      ArrowLeft: nodes[node.parent],
      ArrowRight: children[node.place][0],
      ArrowUp: siblings[place - 1],
      ArrowDown: siblings[place + 1],
    };
    if (event.key in next) {
      const to = next[event.key];
      if (to) {
        for (const each of this.groups) each.setAttribute("tabindex", "-1");
        this.groups[to.place].setAttribute("tabindex", "0");
        this.groups[to.place].focus();
      }
    } else if (event.key === "Enter" || event.key === " ") this.pick(group);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  pick(group) {
    this.selected?.classList.remove("selected");
    this.selected = group === this.selected ? null : group;
    this.selected?.classList.add("selected");
    if (this.drawn) this.describe(this.selected ? this.drawn.nodes[Number(this.selected.dataset.place)] : null);
  }

  numGuesses(parent) {
    return this.drawn.children[parent].filter((child) => child.rank).length;
  }

  describe(node) {
    if (!node) {
      const hint = "Choose a node for its particulars. Numbers are the target’s probability in percent.";
      this.details.replaceChildren(element("p", { className: "hint", textContent: hint }));
      return;
    }
    const { nodes } = this.drawn;
    const path = [];
    for (let at = node; at; at = nodes[at.parent]) path.unshift(visible(at.text, at.token));
    const rows = [
      ["token", visible(node.text, node.token), "code"],
      ["token id", node.token],
      ["verdict", KINDS[node.kind]],
      ["depth", node.depth],
    ];
    if (node.rank) rows.push(["rank", `${node.rank} of ${this.numGuesses(node.parent)} after its parent`]);
    if (node.drafters.length) rows.push([node.drafters.length > 1 ? "drafters" : "drafter", node.drafters.join(", ")]);
    if (node.q !== undefined) rows.push(["q, the drafter’s confidence", exact(node.q)]);
    if (node.kind !== "root") rows.push(["p, the target’s probability", exact(node.p)]);
    rows.push(["path", path.join(" "), "code"]);
    const list = element("dl");
    for (const [name, value, tag] of rows) {
      const said = element("dd");
      said.append(tag ? element(tag, { textContent: value }) : String(value));
      list.append(element("div", {}, element("dt", { textContent: name }), said));
    }
    this.details.replaceChildren(list);
  }
}

function rankOf(line) {
  return line.classList.contains("left") ? 0 : 1;
}

function exact(chance) {
  if (chance === null) return "not a number";
  return `${chance >= 0.001 ? chance.toFixed(4) : chance.toExponential(2)} (${percent(chance)}%)`;
}
