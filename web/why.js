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

// Returns the window in question: around the time shown, or the whole range shown.
function stretch({ range, params, about }) {
  const name = params.get("window") ?? "300s";
  if (name === SHOWN) return { from: range.from, to: range.to };
  const length = WINDOWS[Object.hasOwn(WINDOWS, name) ? name : "300s"];
  const last = Date.parse(about.time);
  const to = Math.min((isLive(range) ? last : range.at) + length / 2, last);
  return { from: to - length, to };
}

// Returns the longest window up to the same time, or until now, that leaves four times as much of the history before it; null
// if there is none that is shorter than the window asked about.
function fitting({ from, to }, recorded) {
  const length = recorded ? (to - Date.parse(recorded.from)) / 5 : 0;
  return length >= SHORTEST && length < to - from ? { from: to - length, to } : null;
}

const question = (name, { from, to }) => {
  const window = Math.max(to - from, SHORTEST);
  return get(ofVm(name, "/why"), { at: stamp((from + to) / 2), window: `${Math.floor(window / 1000)}s` });
};

let kept = { key: null, answer: null };

// Returns the answer to the URL's question, if it has one. It is cached, since it costs the agent work and the past does not
// change; the rest of the screen is shown without waiting for it.
export function asked(page, name, recorded) {
  if (!page.params.has("why")) return null;
  const { from, to } = stretch(page);
  const key = JSON.stringify([name, from, to, page.about.started]);
  if (kept.key !== key) {
    const mine = { key, answer: { isWaiting: true, stretches: [{ from, to, kind: "asked" }] } };
    kept = mine;
    const shorter = fitting({ from, to }, recorded);
    question(name, { from, to }).catch((error) => {
      // A history that has just begun has a shorter stretch to compare.
      if (!(error instanceof Problem && error.kind === "nothing-known" && shorter)) throw error;
      return question(name, shorter).then((said) => ({ ...said, isShortened: true }));
    }).then(told, (error) => {
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

function told(said) {
  const part = (from, to, kind) => ({ from: Date.parse(from), to: Date.parse(to), kind });
  return {
    said,
    stretches: [
      part(said.compared_from, said.asked.from, "before"),
      part(said.asked.from, said.asked.to, "asked"),
      ...(said.causes.length ? [part(said.slow.from, said.slow.to, "slow")] : []),
    ],
  };
}

// Shows the question, with its answer below.
export function panel(page, name, answer, seen) {
  const { range, params } = page;
  const window = params.get("window") ?? "300s";
  const isWindow = window === SHOWN || Object.hasOwn(WINDOWS, window);
  if (!isWindow) page.wrong.push(`${quoted(`window=${window}`)} is not a stretch to ask about.`);
  // Leave live mode, or each cycle of the agent would ask about another time.
  const ask = () => page.go({ why: 1 }, isLive(range) ? moveTo({ ...range, last: null }, range.to) : range);
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
      : [answer.problem ? trouble(answer, seen?.recorded) : verdict(page, name, answer.said),
        (answer.problem || answer.said.isShortened) && present(name, seen)])
      : h("p", { class: "quiet" }, "Compares the stretch with four times as long before it, and says what changed, by how much, and who changed it."));
}

function trouble({ problem, stretches: [{ from }] }, recorded) {
  const begun = recorded ? Date.parse(recorded.from) : 0;
  const hint = begun > from ? `The history begins at ${clock(begun)}: there is something to compare with a minute later.`
    : "A later time, or a shorter stretch, leaves more before it to compare with.";
  return h("div", { class: "problem" },
    h("h3", {}, problem.title), h("p", {}, problem.message), h("p", { class: "quiet" }, hint));
}

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

function verdict(page, name, said) {
  const time = (text) => h("time", { class: "time" }, clock(Date.parse(text)));
  const notes = said.notes.map((note) => h("li", {}, note));
  const [slowFrom, slowTo] = [said.slow.from, said.slow.to].map(time);
  return [
    said.isShortened && h("p", { class: "answer quiet" }, "Too little is recorded before the stretch that was asked about. ",
      `Compared are the last ${span(Date.parse(said.asked.to) - Date.parse(said.asked.from))} of it.`),
    said.causes.length === 0
      ? h("p", { class: "answer" }, "Nothing slowed it down from ", time(said.asked.from), " to ", time(said.asked.to), ", compared with the time since ",
        time(said.compared_from), ". A VM that has been slow for long is explained where it became slow: go to that time, or ask about a longer stretch.")
      : h("p", { class: "answer" }, h("b", {}, said.name), " lost ", h("b", {}, percent(said.lost)), " of its speed from ", slowFrom, " to ", slowTo,
        ", compared with the time since ", time(said.compared_from), "."),
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
