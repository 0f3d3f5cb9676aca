// One VM over time: what affects its speed, decisions about it, and why it was slow.

import { Problem, get, getSeldom, ofVm } from "./api.js";
import { axis, chart, pointing, stack } from "./chart.js";
import { h, room } from "./dom.js";
import { bare } from "./events.js";
import { bytes, clock, count, decimals, nodes, perSecond, percent, quoted, rate, span } from "./format.js";
import { SIGNS, ofVm as levels } from "./limits.js";
import { changed, href } from "./router.js";
import { fixed, isLive, moveTo, stamp } from "./time.js";
import { shares } from "./vms.js";
import { asked, panel } from "./why.js";

// Marks that are closer than this share of the width are merged.
const APART = 0.012;
const MARKS_MOST = 500;
// Pixels next to the charts, and of their borders: as in the style sheet.
const SIDE = 424;
const EDGES = 2;

// Name, key, formatter, top of the scale if it is fixed, and otherwise its minimum.
const SERIES = [
  ["Speed against its usual", "speed_ratio", percent, null, 1],
  ["Instructions per second", "instructions_per_s", perSecond],
  ["Cycles per instruction", "cycles_per_instruction", (value) => decimals(value, 2)],
  ["CPUs used", "cpus_used", (value) => decimals(value, 2)],
  ["vCPUs waiting", "vcpus_waiting", (value) => decimals(value, 2), null, 0.5],
  ["Local accesses", "local_access_ratio", percent, 1],
  ["LLC misses of references", "llc_miss_rate", percent, 1],
  ["Memory bandwidth", "bandwidth_bytes_per_s", rate],
];

export async function vm(page) {
  const { range, params, signal } = page;
  const name = params.get("vm") ?? "";
  if (!name) throw new Problem(404, "no-such-vm", "The address names no VM", "Choose one from the host's table.");
  const at = isLive(range) ? null : stamp(range.at);
  const window = { from: stamp(range.from), to: stamp(range.to) };
  // While live, answers are reused for no longer than the duration of a point.
  const about = JSON.stringify([name, range.last ?? window]);
  const apart = Math.min(Math.max((range.to - range.from) / 300, 1000), 10_000);
  const [seen, past, made] = await Promise.all([
    orNone(get("/v1/overview", { at }, signal)),
    orNone(getSeldom(about, apart, "/v1/history", { vm: name, ...window }, signal)),
    orNone(getSeldom(about, apart, "/v1/decisions", { vm: name, ...window, limit: MARKS_MOST }, signal)),
  ]);
  const found = seen.vms?.find((one) => one.name === name || one.id === name);
  if (past.problem && !found) throw past.problem.kind === "no-history" ? await noSuchVm(name, signal, past.problem) : past.problem;
  // By id, since a browser treats a name of dots as part of the path.
  const answer = asked(page, found?.id ?? name);
  const decided = made.decisions ?? [];
  return {
    title: found?.name ?? name,
    recorded: seen.recorded,
    tree: [
      h("div", { class: "row head" },
        h("h1", {}, h("span", { class: "quiet" }, "VM "), found?.name ?? name),
        h("p", { class: "grow" }, found ? figures(found)
          : h("span", { class: "quiet" }, seen.problem ? seen.problem.message : `did not run at ${clock(range.at)}`)),
        h("a", { href: href("decisions", { vm: name }, range) }, "All its decisions")),
      h("div", { class: "columns vm" },
        h("div", { "data-key": "time" },
          past.problem ? problem(past.problem) : timeline(page, past, decided, answer), chosen(page, decided)),
        h("div", { "data-key": "side" }, panel(page, name, answer, past.problem ? null : seen), found && more(found))),
    ],
  };
}

// Shows an error in place of missing data; the rest of the screen is still shown.
async function orNone(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error instanceof Problem) return { problem: error };
    throw error;
  }
}

async function noSuchVm(name, signal, otherwise) {
  await get(ofVm(name), {}, signal);
  return otherwise;
}

const problem = (error) => h("div", { class: "problem" }, h("h2", {}, error.title), h("p", {}, error.message));

// Returns the VM's figures at the time shown.
function figures(found) {
  const level = levels(found);
  const one = (which, text) => h("span", { class: level[which] ?? "fine" }, SIGNS[level[which]] ?? "", SIGNS[level[which]] && " ", text);
  const said = [
    h("span", {}, found.home ? `home ${nodes(found.home)}` : "unplaced"),
    ...(typeof found.speed_ratio === "number" ? [h("span", {}, `${percent(found.speed_ratio)} of its usual speed`)] : []),
    h("span", {}, `${decimals(found.cpus_used)} CPUs used`),
    one("waiting", `${decimals(found.vcpus_waiting)} vCPUs waiting`),
    one("local", `${percent(found.local_access_ratio)} local`),
    h("span", {}, `${bytes(found.memory_bytes)}`),
    found.mode !== "act" && h("span", {}, `mode ${found.mode}`),
  ].filter(Boolean);
  return said.flatMap((part, index) => (index ? [" · ", part] : [part]));
}

function timeline(page, past, decided, answer) {
  const { range } = page;
  const across = room(document.getElementById("screen"));
  const width = Math.max((innerWidth > 1000 ? across - SIDE : across) - EDGES, 280);
  const points = past.points.map((point) => ({ ...point, ms: Date.parse(point.time) }));
  const view = { ...range, step: Math.max(past.step_ns / 1e6, 1000), width, stretches: answer?.stretches ?? [] };
  const series = SERIES.map(([name, key, text, most, least]) =>
    ({ name, text, most, least, points: points.map((point) => [point.ms, point[key] ?? null]) }));
  const isKnown = (one) => one.points.some(([, value]) => value !== null);
  const drawn = points.length ? series.filter(isKnown) : [];
  const unknown = points.length ? series.filter((one) => !isKnown(one)) : [];
  return h("section", { class: "timeline", "aria-label": "Over time" },
    marks(page, decided),
    h("div", {
      class: "charts", on: pointing(view, {
        onTime: (at) => page.go({}, moveTo(range, Math.min(at, page.now))),
        onStretch: (from, to) => page.go({}, fixed(from, to, to)),
      }),
    }, unknown.length > 0 && uncounted(unknown), drawn.map((one) => chart(one, view)), lies(points, view), axis(view),
    h("span", { class: "select", "aria-hidden": "true" })),
    points.length === 0 && h("p", { class: "quiet" }, "Nothing is recorded of this VM in the time shown."));
}

// Says what has no chart, and where to learn why.
const uncounted = (series) => h("p", { class: "uncounted quiet", "data-key": "uncounted" },
  `Not counted on this host in the time shown: ${series.map(({ name }) => name).join(", ")}. `,
  h("code", {}, "homenode doctor"), " says why.");

// Draws the location of its memory, stacked by node.
function lies(points, view) {
  const known = points.filter((point) => point.memory_by_node?.length);
  if (known.length === 0) return null;
  const on = [...new Set(known.flatMap((point) => point.memory_by_node.map(({ node }) => node)))].sort((a, b) => a - b);
  const layers = on.map((node) => ({
    name: node, points: known.map((point) => [point.ms, point.memory_by_node.find((part) => part.node === node)?.memory_bytes ?? 0]),
  }));
  return stack({ name: "Memory touched, by node", text: bytes, layers: layers.filter(({ points: some }) => some.some(([, value]) => value > 0)) }, view);
}

// Draws decisions as marks above the charts; adjacent ones share a mark.
function marks(page, decided) {
  const { from, to } = page.range;
  const groups = [];
  for (const one of [...decided].reverse()) {
    const share = (Date.parse(one.time) - from) / (to - from);
    const last = groups.at(-1);
    if (last && share - last.share < APART) last.all.push(one);
    else groups.push({ share, all: [one] });
  }
  const shown = page.params.get("decision");
  const rest = decided.length === MARKS_MOST ? `the last ${MARKS_MOST} decisions` : count(decided.length, "decision");
  return h("div", { class: "lane", "data-key": "lane" },
    h("span", { class: "quiet" }, rest),
    groups.map(({ share, all }) => {
      const id = String(all[0].id);
      const isShown = all.some((one) => String(one.id) === shown);
      return h("button", {
        type: "button", class: `mark ${isFruitless(all) ? "fruitless" : ""}`, css: { left: `${100 * share}%` }, "aria-pressed": String(isShown),
        "aria-label": `${clock(Date.parse(all[0].time))}: ${all.map((one) => one.text).join("; ")}`, title: all.map((one) => one.text).slice(0, 8).join("\n"),
        on: { click: () => page.replace({ decision: isShown ? null : id }) }, "data-key": id,
      }, all.length > 1 ? String(all.length) : "");
    }));
}

// Returns whether none of the decisions had an effect.
const isFruitless = (all) => all.every((one) => !["done", "moved", "renewed"].includes(one.outcome));

// Shows the decision of the selected mark, and those near it.
function chosen(page, decided) {
  const { from, to } = page.range;
  const one = decided.find((row) => String(row.id) === page.params.get("decision"));
  if (!one) {
    const asked = page.params.get("decision");
    if (asked) page.wrong.push(`Decision ${quoted(asked)} is none of this VM's in the time shown.`);
    return null;
  }
  const near = decided.filter((row) => Math.abs(Date.parse(row.time) - Date.parse(one.time)) / (to - from) < APART && row.id >= one.id).reverse();
  return h("section", { class: "chosen", "aria-label": "What was decided", role: "status", "data-key": "chosen" },
    h("ul", {}, near.map((row) => h("li", { "data-key": String(row.id) },
      h("time", { class: "time" }, clock(Date.parse(row.time))), " ", h("b", {}, row.policy), " ", bare(row.text, row.policy, row.name), " ",
      h("a", { href: changed({ decision: one.id }, moveTo(page.range, Date.parse(row.time))) }, "go there")))));
}

// Shows everything else known about it, at the time shown.
function more(found) {
  const on = (list) => shares(list).map(({ node, share }) => `${node}: ${percent(share)}`).join(", ");
  const told = found.topology.told_age_ns === null ? found.topology.why_not : `${span(found.topology.told_age_ns / 1e6)} ago`;
  const rows = [
    ["Mode", `${found.mode}${found.mode_chosen ? ", chosen for this VM" : ""}`],
    ["vCPUs on nodes", found.vcpus_by_node.map(({ node, vcpus }) => `${node}: ${vcpus}`).join(", ")],
    ["Memory on nodes", on(found.pages_by_node)],
    ["Traffic to nodes", found.traffic_by_node?.map(({ node, bytes_per_s: some }) => `${node}: ${rate(some)}`).join(", ")],
    ["Memory policy", found.memory_policy],
    ["Memory stays", found.memory_fixed],
    ["Permit", found.permit.permit && `${found.permit.permit}, ${found.permit.standing ?? "not metered yet"}, was OVER ${count(found.permit.punished_count, "time")}`],
    ["Memory limit", found.memory.limit_bytes && `${bytes(found.memory.limit_bytes)} of ${bytes(found.memory.maximum_bytes)}`],
    ["Why", found.memory.why],
    ["Left alone", found.left_alone],
    ["Guest told of nodes", told],
    ["Counted by", found.counted_by === "model" ? "a model of caches" : found.counted_by],
    ["UUID", found.id],
  ];
  return h("section", { class: "facts", "aria-label": "Facts", "data-key": "facts" }, h("h2", {}, "At this time"),
    h("dl", {}, rows.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
}
