// A draft tree as a picture: tokens by how far they stand behind the newest one, each with the one in front of it.

import { shape } from "./plot.js";

const WIDTH = 240;
const STEP = 22; // from one depth to the next
const MARGIN = 5;

/** How many tokens of a tree stand at each depth. `parents` are, for each token, the one in front of it; -1 for none. */
export function countByDepth(parents) {
  const counts = [];
  for (const depth of depthsOf(parents)) counts[depth - 1] = (counts[depth - 1] ?? 0) + 1;
  return counts;
}

/** The tree with the newest token at its top. */
export function drawTree(parents) {
  const depths = depthsOf(parents);
  const children = childrenOf(parents);
  const columns = [];
  let leaves = 0;
  const place = (node) => {
    const below = (children.get(node) ?? []).map(place);
    const column = below.length ? (below[0] + below[below.length - 1]) / 2 : leaves++;
    if (node >= 0) columns[node] = column;
    return column;
  };
  const root = place(-1);
  const x = (column) => MARGIN + ((WIDTH - 2 * MARGIN) * (column + 0.5)) / leaves;
  const y = (depth) => MARGIN + STEP * depth;
  const radius = Math.max(0.8, Math.min(3, WIDTH / leaves / 2.6));
  const lines = parents.map((parent, node) => {
    const [above, from] = parent < 0 ? [root, 0] : [columns[parent], depths[parent]];
    return shape("line", { x1: x(above), y1: y(from), x2: x(columns[node]), y2: y(depths[node]) });
  });
  const dots = parents.map((_, node) => shape("circle", { cx: x(columns[node]), cy: y(depths[node]), r: radius }));
  const top = shape("circle", { class: "root", cx: x(root), cy: y(0), r: Math.max(2.5, radius) });
  const height = y(Math.max(...depths)) + MARGIN;
  const svg = shape("svg", { class: "tree", viewBox: `0 0 ${WIDTH} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `A draft: a tree of ${parents.length} tokens, ${countByDepth(parents).join(", ")} by depth`);
  svg.append(...lines, ...dots, top);
  return svg;
}

/** Of each token, from 1 on. Those of a window may come in any order. */
function depthsOf(parents) {
  const known = [];
  const depthOf = (node) => (node < 0 ? 0 : (known[node] ??= depthOf(parents[node]) + 1));
  return parents.map((_, node) => depthOf(node));
}

function childrenOf(parents) {
  const children = new Map();
  parents.forEach((parent, node) => children.set(parent, [...(children.get(parent) ?? []), node]));
  return children;
}
