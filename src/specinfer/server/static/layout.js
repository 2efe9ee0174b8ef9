// Where the nodes of a tree stand: a column for each depth, a row for each leaf, the accepted path straight on top.

import { clipped, columns, visible } from "./text.js";

const CHAR = 7.4; // width of a column of text
const LONGEST = 16;
export const HEIGHT = 26;
const ROW = 34;
const GAP = 38;
const MARGIN = 10;

// The nodes of a step: the root at place 0, draft tokens from 1 on, and last the token of the target itself, if there is one.
export function nodesOf(step) {
  const nodes = [{ ...step.root, place: 0, kind: "root", parent: -1, depth: 0, drafters: [], rank: 0 }];
  const kept = new Set(step.path);
  const numChildren = [0];
  step.nodes.forEach((node, i) => {
    const rank = ++numChildren[node.parent];
    numChildren.push(0);
    nodes.push({
      ...node,
      place: i + 1,
      kind: kept.has(i + 1) ? "kept" : "left",
      depth: nodes[node.parent].depth + 1,
      rank,
    });
  });
  if (step.next) {
    const parent = step.path.at(-1) ?? 0;
    const depth = nodes[parent].depth + 1;
    nodes.push({ ...step.next, place: nodes.length, kind: "target", parent, depth, drafters: [], rank: 0 });
  }
  return nodes;
}

export function layOut(step) {
  const nodes = nodesOf(step);
  const children = nodes.map(() => []);
  for (const node of nodes.slice(1)) children[node.parent].push(node);
  const order = { kept: 0, target: 0, left: 1 };
  for (const siblings of children) siblings.sort((a, b) => order[a.kind] - order[b.kind]);

  const widths = [];
  for (const node of nodes) {
    node.label = clipped(visible(node.text, node.token), LONGEST);
    node.chance = node.kind === "root" ? "" : percent(node.p);
    const marks = node.kind === "target" ? 1 : Math.min(node.drafters.length, 3);
    node.marks = 6 + marks * 12;
    node.width = node.marks + columns(node.label) * CHAR + (node.chance ? 8 + node.chance.length * 6 : 0) + 10;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const starts = [MARGIN];
  for (const width of widths) starts.push(starts.at(-1) + width + GAP);

  place(nodes, children);
  let rows = 0;
  for (const node of nodes) {
    node.x = starts[node.depth];
    node.y = MARGIN + node.row * ROW;
    rows = Math.max(rows, node.row);
  }
  return {
    nodes,
    children,
    width: starts.at(-1) - GAP + MARGIN,
    height: MARGIN * 2 + rows * ROW + HEIGHT,
  };
}

// Rows: a first child stands beside its parent, and every other subtree as high as those above it let it.
function place(nodes, children) {
  const spans = nodes.map(() => []); // of each subtree: its first and last row at each depth, counted from its root
  for (const node of nodes.toReversed()) { // children stand after their parents
    const span = spans[node.place];
    span.push([0, 0]);
    for (const child of children[node.place]) {
      const below = spans[child.place];
      const taken = (depth) => span[depth + 1]?.[1] ?? -1;
      child.shift = Math.max(...below.map(([first], depth) => taken(depth) + 1 - first));
      below.forEach(([first, last], depth) => {
        span[depth + 1] = [span[depth + 1]?.[0] ?? first + child.shift, last + child.shift];
      });
    }
  }
  nodes[0].row = 0;
  for (const node of nodes.slice(1)) node.row = nodes[node.parent].row + node.shift;
}

export function percent(chance) {
  if (chance === null || chance === undefined) return "";
  const hundredths = chance * 100;
  if (hundredths >= 99.95) return "100";
  if (hundredths >= 9.95) return hundredths.toFixed(0);
  if (hundredths >= 0.095) return hundredths.toFixed(1);
  return "<0.1";
}

export function joint(from, to) {
  const x1 = from.x + from.width;
  const y1 = from.y + HEIGHT / 2;
  const y2 = to.y + HEIGHT / 2;
  if (y1 === y2) return `M${x1} ${y1}H${to.x}`;
  const bend = to.x - 22; // rows of siblings leave their parent's row at the same place
  return `M${x1} ${y1}H${bend - 6}Q${bend} ${y1} ${bend} ${y1 + 6}V${y2 - 6}Q${bend} ${y2} ${bend + 6} ${y2}H${to.x}`;
}
