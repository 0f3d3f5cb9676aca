// Asks the agent why a VM was slow, and shows its answer with the figures.

import { Problem, get, ofVm } from "./api.js";
import { h } from "./dom.js";
import { clock, decimals, percent, quoted, span } from "./format.js";
import { controllerShare, level, ofNode, ofVm as levels } from "./limits.js";
import { changed, href } from "./router.js";
import { isLive, moveTo, stamp } from "./time.js";

// Lengths of the window around the time shown, in the agent's format, and in milliseconds.
const WINDOWS = { "60s": 60_000, "300s": 300_000, "900s": 900_000, "3600s": 3_600_000 };
const SHOWN = "shown";
const SHORTEST = 10_000;

// Texts of the causes, as in docs/WHY.md.
const CAUSES = {
  "waiting": "its vCPUs waited for CPUs",
  "quota": "a CPU quota kept its vCPUs from running",
  "permit": "the agent limited it to the cache pollution of its permit",
  "remote-memory": "more of its memory was on nodes other than those of its vCPUs",
  "llc-pollution": "others filled the last-level cache that it uses",
  "controller": "a memory controller that it uses was busier",
  "link": "a link between nodes that it uses was busier",
  "smt-sibling": "the hyperthreads beside its vCPUs were busier",
  "page-moves": "its pages were being moved",
  "balloon": "it had less memory than it used, and swapped",
  "clock": "its cores ran at a lower clock",
  "own-phase": "its guest did different work than before",
};

// Returns the window in question: around the time shown, or the whole range shown. `at` is the time that the agent keeps in
// the window if a short history makes it shorten that: null for the last time recorded.
function stretch({ range, params, about }) {
  const name = params.get("window") ?? "300s";
  const last = Date.parse(about.time);
  if (name === SHOWN) {
    const { from, to } = range;
    return { from, to, at: to < last ? (from + to) / 2 : null };
  }
  const length = WINDOWS[Object.hasOwn(WINDOWS, name) ? name : "300s"];
  const at = isLive(range) ? null : range.at;
  const to = Math.min((at ?? last) + length / 2, last);
  return { from: to - length, to, at };
}

const question = (name, { from, to, at }) => {
  const window = Math.max(to - from, SHORTEST);
  return get(ofVm(name, "/why"), { at: at === null ? null : stamp(at), window: `${Math.floor(window / 1000)}s` });
};

let kept = { key: null, answer: null };

// Returns the answer to the URL's question, if it has one. It is cached until the button is pressed again, since it costs the
// agent work; the rest of the screen is shown without waiting for it.
export function asked(page, name) {
  if (!page.params.has("why")) return null;
  const { range, params, about } = page;
  const wanted = stretch(page);
  // The question, not the stretch: with time that follows the agent the stretch is another in each cycle.
  const window = params.get("window");
  const past = window === SHOWN ? [range.from, range.to] : range.at;
  const key = JSON.stringify([name, window, isLive(range) ? null : past, about.started]);
  if (kept.key !== key) {
    const mine = { key, answer: { isWaiting: true, stretches: [{ from: wanted.from, to: wanted.to, kind: "asked" }] } };
    kept = mine;
    question(name, wanted).then(told, (error) => {
      if (error instanceof Problem) return { problem: error, stretches: mine.answer.stretches };
      // The agent did not answer: ask again once it does.
      mine.key = null;
      return mine.answer;
    }).then((answer) => {
      mine.answer = answer;
      if (kept === mine) page.again();
    });
  }
  return kept.answer;
}

// Returns whether enough is recorded to tell whether the VM was slow.
const isCompared = ({ speed }) => (speed?.ratio ?? null) !== null;

function told(said) {
  const part = (from, to, kind) => ({ from: Date.parse(from), to: Date.parse(to), kind });
  return {
    said,
    stretches: [
      ...(isCompared(said) ? [part(said.compared_from, said.asked.from, "before")] : []),
      part(said.asked.from, said.asked.to, "asked"),
      ...(said.lost > 0 ? [part(said.slow.from, said.slow.to, "slow")] : []),
    ],
  };
}

// Shows the question, with its answer below.
export function panel(page, name, answer, seen) {
  const { range, params } = page;
  const window = params.get("window") ?? "300s";
  const isWindow = window === SHOWN || Object.hasOwn(WINDOWS, window);
  if (!isWindow) page.wrong.push(`${quoted(`window=${window}`)} is not a stretch to ask about.`);
  // Leave live mode: the answer is about a time that stays.
  const ask = () => {
    kept = { key: null, answer: null };
    page.go({ why: 1 }, isLive(range) ? moveTo({ ...range, last: null }, range.to) : range);
  };
  return h("section", { class: "why", "aria-label": "Why", "data-key": "why" },
    h("h2", {}, "Why was it slow?"),
    h("div", { class: "row" },
      h("select", { "aria-label": "Stretch that is asked about", value: window,
        on: { change: (event) => page.replace({ window: event.target.value }) } },
      Object.entries(WINDOWS).map(([value, ms]) => h("option", { value, selected: value === window }, `${span(ms)} around ${clock(range.at)}`)),
      h("option", { value: SHOWN, selected: window === SHOWN }, `the time shown: ${span(range.to - range.from)}`)),
      h("button", { type: "button", class: "strong", "data-why": true, title: "Why was it slow? (w)", on: { click: ask } }, "Why?"),
      params.has("why") && h("a", { href: changed({ why: null, window: null }, range) }, "close")),
    answer ? h("div", { role: "status" }, answer.isWaiting ? h("p", { class: "quiet answer" }, "The agent compares…")
      : [answer.problem ? trouble(answer.problem) : verdict(page, name, answer.said),
        (answer.problem || !isCompared(answer.said)) && present(name, seen)])
      : h("p", { class: "quiet" }, "Compares the stretch with four times as long before it, and says what changed, by how much, and who changed it."));
}

const trouble = ({ title, message }) => h("div", { class: "problem" }, h("h3", {}, title), h("p", {}, message));

// Returns what is past a limit for the VM at the time shown: that needs nothing to compare with.
function present(name, seen) {
  const vm = seen?.vms?.find((one) => one.name === name || one.id === name);
  if (!vm) return null;
  const own = levels(vm);
  const on = new Set([...vm.vcpus_by_node, ...(vm.traffic_by_node ?? [])].map(({ node }) => node));
  const near = seen.nodes.filter(({ node }) => on.has(node)).map((node) => ({ node, past: ofNode(node) }));
  const links = seen.links.filter(({ from, to, busy }) => level("link", busy) !== "fine" && (on.has(from) || on.has(to)));
  const found = [
    own.waiting !== "fine" && `${decimals(vm.vcpus_waiting)} of its vCPUs wait for a CPU`,
    own.local !== "fine" && `${percent(vm.local_access_ratio)} of its accesses are local`,
    own.permit !== "fine" && "it uses more than its permit, or a quota limits it",
    own.memory !== "fine" && "it has less memory than it needs",
    ...near.map(({ node, past }) => past.waiting !== "fine" && `vCPUs wait for CPUs of node ${node.node}`),
    ...near.map(({ node, past }) => past.controller !== "fine"
      && `node ${node.node}'s controller is ${percent(controllerShare(node))} busy`),
    ...links.map(({ from, to, busy }) => `the link from node ${from} to node ${to} is ${percent(busy)} busy`),
  ].filter(Boolean);
  return h("div", { class: "present" }, h("h3", {}, "Without a comparison"),
    found.length ? h("ul", { class: "notes" }, found.map((text) => h("li", {}, text)))
      : h("p", { class: "quiet" }, "No figure of the VM, or of its nodes, is past a limit at the time shown."));
}

// How each measure of speed is told, as by `homenode why`.
const MEASURES = {
  "instructions-per-cpu-s": {
    ran: "ran at", what: "speed", unit: "billion instructions per CPU-second", text: (value) => decimals(value && value / 1e9, 2),
  },
  "share-ran": {
    ran: "got", what: "share of CPU time", unit: "percent of the CPU time that it wanted",
    text: (value) => decimals(value && 100 * value, 0),
  },
};

// Says how fast the VM was, compared with its usual speed.
function pace(said) {
  const { speed } = said;
  const time = (text) => h("time", { class: "time" }, clock(Date.parse(text)));
  const during = [" from ", time(said.slow.from), " to ", time(said.slow.to)];
  const { ran, what, unit, text } = MEASURES[speed?.measure] ?? MEASURES["instructions-per-cpu-s"];
  if (!isCompared(said)) {
    return [h("p", { class: "answer" }, "Too little is recorded to tell whether it was slow."),
      speed && h("p", {}, h("b", {}, said.name), ` ${ran} ${text(speed.then)} ${unit}`, during, ".")];
  }
  return [
    h("p", { class: "answer" }, h("b", {}, said.name), said.lost > 0 ? ` ${ran} ` : ` had no drop of speed; it ${ran} `,
      h("b", {}, percent(speed.ratio)), ` of its usual ${what}`, during,
      ` (${text(speed.usual)} → ${text(speed.then)} ${unit}).`),
    h("p", { class: "quiet" }, "Usual: since ", time(said.compared_from), ".",
      speed.measure === "share-ran" && " Its instructions are not counted, so its share of CPU time is compared.",
      said.lost === 0 && " A VM that has been slow for long is explained where it became slow: go to that time, or ask about "
        + "a longer stretch."),
  ];
}

function verdict(page, name, said) {
  const notes = said.notes.map((note) => h("li", {}, note));
  return [
    pace(said),
    h("ol", { class: "causes" }, said.causes.map((cause, index) => h("li", { "data-key": `${cause.code}-${index}`, "data-cause": cause.code },
      h("h3", {}, h("span", { class: "lost" }, percent(cause.lost)), " ", CAUSES[cause.code] ?? cause.code),
      h("span", { class: "bar", "aria-hidden": "true" }, h("i", { css: { width: `${100 * Math.min(cause.lost, 1)}%` } })),
      h("p", { class: "culprit" }, "By ", culprit(page, name, cause.culprit)),
      cause.figures.length > 0 && h("table", { class: "plain" },
        h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "col", class: "right" }, "before"), h("th", { scope: "col", class: "right" }, "then"))),
        h("tbody", {}, cause.figures.map((figure) => h("tr", {}, h("th", { scope: "row" }, figure.what),
          h("td", { class: "right" }, short(figure.before)), h("td", { class: "right" }, short(figure.during)))))),
      h("p", { class: "followed" }, h("b", {}, "Decided: "), cause.followed.text, cause.followed.id !== null && [" ",
        h("a", { href: href("decisions", { vm: name, cursor: cause.followed.id + 1 }, page.range) }, "in the list")])))),
    notes.length > 0 && h("ul", { class: "notes quiet" }, notes),
  ];
}

function culprit({ range }, name, who) {
  switch (who.who) {
    case "vm": return ["VM ", h("a", { href: href("vm", { vm: who.name }, range), "data-culprit": true }, who.name)];
    case "itself": return "the VM itself";
    case "host": return "processes of the host outside VMs";
    case "agent": return ["the agent: ", h("a", { href: href("decisions", { cursor: who.decision + 1 }, range) }, `decision ${who.decision}`)];
    case "somebody": return "another program's change";
    default: return "not known";
  }
}

function short(figure) {
  if (Math.abs(figure) >= 100) return Math.round(figure).toLocaleString("en");
  return String(Number(figure.toPrecision(3)));
}
