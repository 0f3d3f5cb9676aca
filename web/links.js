// Draws links between nodes by their load, in a band between the two rows of nodes, so that none runs behind a node.

import { s } from "./dom.js";
import { percent, rate } from "./format.js";
import { SIGNS, level } from "./limits.js";

export const HEIGHT = 104;
// Links below this share have no label.
const LABELLED = 0.1;

// Returns both directions of each linked pair of nodes.
function pairs(links) {
  const all = new Map();
  for (const link of links) {
    const key = [Math.min(link.from, link.to), Math.max(link.from, link.to)].join("-");
    all.set(key, [...(all.get(key) ?? []), link]);
  }
  return [...all.values()];
}

const busier = (both) => both.reduce((most, link) => ((link.busy ?? 0) > (most.busy ?? 0) ? link : most));

const said = (link) => `${link.from} → ${link.to}: ${rate(link.bandwidth_bytes_per_s)}${link.busy === null ? "" : `, ${percent(link.busy)}`}`;

// Draws a band of `height` pixels below the first row of nodes. `place(node)` has its row (0 or 1) and its middle, from 0 to 1.
export function band(links, place, width, height) {
  const x = (node) => place(node).middle * width;
  const drawn = pairs(links).filter((both) => both.every(({ from, to }) => place(from) && place(to)));
  const shapes = drawn.map((both) => {
    const most = busier(both);
    const [a, b] = [Math.min(most.from, most.to), Math.max(most.from, most.to)];
    const [from, to] = [place(a), place(b)];
    const y = (end) => (end.row === 0 ? 0 : height);
    const isArc = from.row === to.row;
    const apart = Math.abs(x(a) - x(b)) / width;
    const depth = isArc ? (0.3 + 0.5 * apart) * height : 0;
    const bend = from.row === 0 ? depth : height - depth;
    const path = isArc
      ? `M${x(a)} ${y(from)} C${x(a)} ${bend} ${x(b)} ${bend} ${x(b)} ${y(to)}`
      : `M${x(a)} ${y(from)} C${x(a)} ${height / 2} ${x(b)} ${height / 2} ${x(b)} ${y(to)}`;
    const middle = isArc ? { x: (x(a) + x(b)) / 2, y: y(from) + 0.75 * (bend - y(from)) }
      : diagonal(x(a), x(b), from.row, height);
    return { both, most, path, middle, busy: most.busy ?? 0 };
  });
  // The busiest last, on top of the others.
  shapes.sort((one, other) => one.busy - other.busy);
  const lines = shapes.map(({ both, busy, path, most }) => s("path", {
    d: path, class: `link ${level("link", most.busy)}`, "stroke-width": 1.5 + 9 * Math.min(busy, 1), "data-key": `${most.from}-${most.to}`,
  }, s("title", {}, both.map(said).join("\n"))));
  const labels = shapes.filter(({ busy }) => busy >= LABELLED).map(({ most, middle }) => {
    const sign = SIGNS[level("link", most.busy)];
    return s("text", { x: middle.x, y: middle.y + 4, class: `figure ${level("link", most.busy)}`, "text-anchor": "middle" },
      `${sign}${sign && " "}${most.from}→${most.to} ${percent(most.busy)}`);
  });
  const about = shapes.length ? `Links between nodes, the busiest ${said(shapes.at(-1).most)}` : "No traffic between nodes is counted";
  return s("svg", {
    class: "band", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": about, "data-key": "band",
  }, lines, labels);
}

// Returns the position of the label of a line between the rows: a third along, so that the labels of two crossing lines do
// not overlap.
function diagonal(from, to, row, height) {
  const share = 0.3;
  const t = row === 0 ? share : 1 - share;
  const bezier = (a, b, c, d) => a * (1 - t) ** 3 + 3 * b * (1 - t) ** 2 * t + 3 * c * (1 - t) * t ** 2 + d * t ** 3;
  return { x: bezier(from, from, to, to), y: bezier(0, height / 2, height / 2, height) };
}
