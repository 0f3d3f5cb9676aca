// Draws a series over time. Charts below each other share their axis, the time shown and the marked ranges.

import { h, s } from "./dom.js";
import { clock } from "./format.js";
import { ticks } from "./time.js";

const HEIGHT = 70;
const AXIS = 22;
// Pixels that the pointer must move for a drag; less is a click.
const DRAG_MIN = 6;

// Returns the next round number, for the top of a scale.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((one) => one >= value * 0.999);
}

// Returns the value in force at a time, or null if it is not known.
export function valueAt(points, at, step) {
  const found = points.findLast(([time]) => time <= at);
  return found && at - found[0] <= 2 * step ? found[1] : null;
}

// Splits points at gaps: one longer than two steps breaks the line.
function unbroken(points, step) {
  const parts = [];
  let last = null;
  for (const point of points) {
    if (point[1] === null) { last = null; continue; }
    if (last === null || point[0] - last[0] > 2.5 * step) parts.push([]);
    parts.at(-1).push(point);
    last = point;
  }
  return parts;
}

// `series`: { name, text(value), points: [[ms, value]], most?, least? }; `view`: { from, to, at, step, width, stretches: [{ from, to, kind }] }.
export function chart(series, view) {
  const { from, to, at, step, width, stretches } = view;
  const x = (ms) => (width * (ms - from)) / (to - from);
  const highest = Math.max(...series.points.map(([, value]) => value ?? 0), 0);
  const top = series.most ?? round(Math.max(highest, series.least ?? 0) || 1);
  const y = (value) => HEIGHT - 2 - (HEIGHT - 16) * Math.min(value / top, 1);
  const parts = unbroken(series.points, step);
  const line = (part) => part.map(([time, value], index) => `${index ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const area = (part) => `${line(part)}L${x(part.at(-1)[0]).toFixed(1)} ${HEIGHT - 2}L${x(part[0][0]).toFixed(1)} ${HEIGHT - 2}Z`;
  const now = valueAt(series.points, at, step);
  return h("figure", { class: "chart", "data-key": series.name },
    h("figcaption", {}, h("span", {}, series.name), h("output", { class: "figure" }, series.text(now))),
    s("svg", {
      width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
      "aria-label": `${series.name}: ${series.text(now)} at ${clock(at)}, at most ${series.text(highest)} in the time shown`,
    },
    stretches.map((one) => stretch(one, x, HEIGHT)),
    ticks(from, to, width / 90).map((time) => s("line", { class: "grid moving", x1: x(time), x2: x(time), y1: 0, y2: HEIGHT })),
    s("line", { class: "grid", x1: 0, x2: width, y1: HEIGHT - 2, y2: HEIGHT - 2 }),
    s("line", { class: "grid", x1: 0, x2: width, y1: y(top), y2: y(top) }),
    s("text", { class: "scale", x: 4, y: y(top) - 3 }, series.text(top)),
    parts.map((part) => [s("path", { class: "area", d: area(part) }), s("path", { class: "line", d: line(part) })]),
    s("line", { class: "at", x1: x(at), x2: x(at), y1: 0, y2: HEIGHT }),
    now !== null && s("circle", { class: "dot", cx: x(at), cy: y(now), r: 3 })));
}

// Draws stacked layers: { name, text, layers: [{ name, points }] }, all at the same times.
export function stack({ name, text, layers }, view) {
  const { from, to, at, step, width, stretches } = view;
  const x = (ms) => (width * (ms - from)) / (to - from);
  const sums = (layers[0]?.points ?? []).map(([time], index) => {
    const below = [0];
    for (const { points } of layers) below.push(below.at(-1) + points[index][1]);
    return [time, below];
  });
  const most = round(Math.max(...sums.map(([, below]) => below.at(-1)), 1));
  const y = (value) => HEIGHT - 2 - (HEIGHT - 16) * (value / most);
  const said = layers.map((layer) => [layer.name, valueAt(layer.points, at, step)]).filter(([, value]) => value);
  const parts = unbroken(sums, step);
  const edge = (part, layer) => part.map(([time, below]) => `${x(time).toFixed(1)} ${y(below[layer]).toFixed(1)}`);
  return h("figure", { class: "chart", "data-key": name },
    h("figcaption", {}, h("span", {}, name), h("output", { class: "figure" }, said.map(([node, value]) => `${node}: ${text(value)}`).join("  "))),
    s("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
      "aria-label": `${name}: ${said.map(([node, value]) => `${text(value)} on node ${node}`).join(", ")} at ${clock(at)}` },
    layers.map((layer, index) => parts.map((part) => s("path", { class: `part n${layer.name % 8}`,
      d: `M${edge(part, index).join("L")}L${edge(part, index + 1).reverse().join("L")}Z` }, s("title", {}, `node ${layer.name}`)))),
    stretches.map((one) => stretch(one, x, HEIGHT)),
    s("line", { class: "grid", x1: 0, x2: width, y1: HEIGHT - 2, y2: HEIGHT - 2 }),
    s("text", { class: "scale", x: 4, y: 11 }, text(most)),
    s("line", { class: "at", x1: x(at), x2: x(at), y1: 0, y2: HEIGHT })));
}

function stretch({ from, to, kind }, x, height) {
  return s("rect", { class: `stretch ${kind}`, x: x(from), y: 0, width: Math.max(x(to) - x(from), 1), height });
}

export function axis({ from, to, width }) {
  const x = (ms) => (width * (ms - from)) / (to - from);
  return s("svg", { class: "axis time", width, height: AXIS, viewBox: `0 0 ${width} ${AXIS}`, "aria-hidden": "true" },
    ticks(from, to, width / 90).filter((time) => x(time) > 28 && x(time) < width - 28).map((time) => s("text", { x: x(time), y: 15, "text-anchor": "middle" },
      (to - from) > 600_000 ? clock(time).slice(0, 5) : clock(time))));
}

// Where the pointer went down. It is kept across redraws, which happen with each cycle of the agent.
let begun = null;

// Pointer handlers that all charts share: a click goes to a time, a drag shows a range.
export function pointing(view, { onTime, onStretch }) {
  const time = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    return view.from + share * (view.to - view.from);
  };
  const select = (event, end) => {
    const box = event.currentTarget.querySelector(".select");
    const [low, high] = [begun.time, end].sort((a, b) => a - b).map((ms) => (100 * (ms - view.from)) / (view.to - view.from));
    box.style.setProperty("left", `${low}%`);
    box.style.setProperty("width", `${high - low}%`);
  };
  const clear = (event) => event.currentTarget.querySelector(".select").style.setProperty("width", "0");
  return {
    pointerdown: (event) => {
      if (event.button !== 0 || event.target.closest("a, button")) return;
      begun = { x: event.clientX, time: time(event) };
      event.currentTarget.setPointerCapture?.(event.pointerId);
    },
    pointermove: (event) => {
      if (begun && Math.abs(event.clientX - begun.x) > DRAG_MIN) select(event, time(event));
    },
    pointerup: (event) => {
      if (!begun) return;
      const [first, last] = [begun.time, time(event)];
      const isStretch = Math.abs(event.clientX - begun.x) > DRAG_MIN;
      begun = null;
      clear(event);
      if (isStretch) onStretch(Math.min(first, last), Math.max(first, last));
      else onTime(last);
    },
    pointercancel: (event) => { begun = null; clear(event); },
  };
}
