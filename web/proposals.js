// Recommendations of the agent, to apply or reject, and its reservations for VMs that have not started.

import { Gone, Problem, change, get, hasKey } from "./api.js";
import { isSure } from "./ask.js";
import { h } from "./dom.js";
import { bytes, gain, moment, nodes } from "./format.js";
import { href } from "./router.js";

const SIGNS = { open: "○", approved: "◔", applied: "✓", rejected: "✕", expired: "◷" };

// The result of the last button pressed.
let said = null;

export async function proposals(page) {
  const [recommended, reserved] = await Promise.all([
    orNot(get("/v1/recommendations", {}, page.signal)),
    orNot(get("/v1/reservations", {}, page.signal)),
  ]);
  return {
    title: "Recommendations",
    tree: [
      h("div", { class: "row head" }, h("h1", {}, "Recommendations"),
        h("p", { class: "quiet" }, "What the agent would do, and leaves to you.")),
      said && h("div", { class: said.isGood ? "note good" : "note bad", role: "status" },
        h("p", {}, `${said.isGood ? "✓" : "✕"} ${said.text}`),
        said.parts && h("ul", { class: "notes" }, said.parts.map(([what, texts]) =>
          h("li", {}, h("b", {}, `${what}: `), texts.join("; ") || "none")))),
      !hasKey() && location.protocol === "http:" && hint(),
      recommended.problem ? missing(recommended.problem, "recommendations") : recommendations(page, recommended.recommendations),
      h("div", { class: "row head" }, h("h2", {}, "Reservations"),
        h("p", { class: "quiet" }, "Room that is kept for VMs that are to start.")),
      reserved.problem ? missing(reserved.problem, "reservations") : reservations(page, reserved.reservations),
    ],
  };
}

async function orNot(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error instanceof Problem) return { problem: error };
    throw error;
  }
}

// With TLS there are passwords instead.
const hint = () => h("p", { class: "note" }, "You may read here, and change nothing: this tab has no key. The agent prints the "
  + "address with the key as it starts, ", h("code", {}, "…/#key=…"), ", and keeps the key in ", h("code", {}, "http.key"),
  " in its state directory.");

const missing = (problem, what) => h("p", { class: "note" }, problem.status === 404
  ? `This agent has no ${what}: it is of a version before them, or none are made with its settings.`
  : `${problem.title}. ${problem.message}`);

const HEADS = [["VM"], ["Nodes"], ["vCPUs", "right"], ["Memory", "right"], ["Made"], ["Until"], [""]];

const isOpen = ({ state }) => state === "open";

// Returns the open recommendations, those that were predicted together in one group.
function arrangements(open) {
  const groups = [];
  for (const one of open) {
    const isOf = (other) => other.together.includes(one.id) || one.together.includes(other.id);
    const joined = groups.filter((group) => group.some(isOf));
    for (const group of joined) groups.splice(groups.indexOf(group), 1);
    groups.push([...joined.flat(), one]);
  }
  return groups;
}

function recommendations(page, all) {
  const newest = [...all].sort((a, b) => b.id - a.id);
  if (newest.length === 0) return h("p", { class: "quiet" }, "There are none now: nothing would make a VM faster by enough.");
  const open = arrangements(newest.filter(isOpen));
  const over = newest.filter((one) => !isOpen(one));
  return h("ul", { class: "cards", "data-key": "recommendations" },
    open.map((group) => (group.length > 1 ? together(page, group) : alone(page, group[0]))), over.map((one) => alone(page, one)));
}

function alone(page, one) {
  return h("li", { class: one.state, "data-key": String(one.id) }, about(page, one, "h2"), isOpen(one) && judge(page, [one]));
}

// The gains of an arrangement are predicted for all of it, so it is applied or rejected as a whole.
function together(page, group) {
  return h("li", { class: "open group", "data-key": `group-${Math.min(...group.map(({ id }) => id))}` },
    h("h2", { class: "grow" }, `${group.length} that belong together`,
      h("span", { class: "quiet" }, ": each gain is predicted for all of them")),
    judge(page, group),
    h("ul", {}, group.map((one) => h("li", { "data-key": String(one.id) }, about(page, one, "h3")))));
}

function about({ range }, one, heading) {
  const predicted = one.gain == null ? null : gain(one.gain);
  return [
    h("div", { class: "grow" },
      h(heading, {}, one.vm ? [h("a", { href: href("vm", { vm: one.vm }, range) }, one.vm), ": "] : null, one.text),
      h("p", {}, one.reason),
      h("p", { class: "quiet" }, h("span", { class: "state" }, `${SIGNS[one.state] ?? "·"} ${one.state}`), ` · ${one.policy} · `,
        h("span", { class: "time" }, moment(Date.parse(one.time))),
        isOpen(one) && [", holds until ", h("span", { class: "time" }, moment(Date.parse(one.expires)))])),
    h("p", { class: "predicted" }, predicted && [h("b", { class: predicted.kind }, predicted.text), " speed, predicted"]),
  ];
}

// Draws the buttons that apply or reject one recommendation, or several.
function judge(page, group) {
  const all = group.length > 1 ? ` all ${group.length}` : "";
  const text = group.map((one) => one.text).join("; ");
  const each = (verb, past) => async () => {
    for (const [at, { id }] of group.entries()) {
      await change("POST", `/v1/recommendations/${id}/${verb}`).catch((error) => {
        if (group.length > 1) error.parts = parts(group, at, past, error);
        throw error;
      });
    }
  };
  return h("div", { class: "row" },
    act(page, `Apply${all}`, `${text}?`, "strong", each("apply", "Applied"), `applied: ${text}`),
    act(page, `Reject${all}`, `Not: ${text}. The agent does not recommend it again for a while.`, "", each("reject", "Rejected"),
      `rejected: ${text}`));
}

// Says what became of each of a group after the one at this index failed.
function parts(group, at, past, error) {
  const texts = group.map((one) => one.text);
  const failed = error instanceof Gone ? "Not known, for the agent did not answer" : "Refused";
  return [[past, texts.slice(0, at)], [failed, [texts[at]]], ["Not tried", texts.slice(at + 1)]];
}

function reservations(page, all) {
  if (all.length === 0) return h("p", { class: "quiet" }, "None.");
  const row = (one) => h("tr", { "data-key": String(one.id) },
    h("th", { scope: "row" }, one.vm ?? "no name yet"), h("td", {}, nodes(one.nodes)),
    h("td", { class: "right" }, String(one.vcpus)), h("td", { class: "right" }, bytes(one.memory_bytes)),
    h("td", { class: "time" }, moment(Date.parse(one.made))), h("td", { class: "time" }, moment(Date.parse(one.expires))),
    h("td", {}, act(page, "Drop", `The room on node ${nodes(one.nodes)} is no longer kept for ${one.vm ?? "it"}.`, "",
      () => change("DELETE", `/v1/reservations/${one.id}`), "dropped the reservation")));
  return h("div", { class: "scroll" }, h("table", { "data-key": "reservations" },
    h("thead", {}, h("tr", {}, HEADS.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
    h("tbody", {}, all.map(row))));
}

// Creates a button that asks for confirmation, acts, and shows the result.
function act(page, name, text, kind, does, done) {
  const click = async () => {
    if (!await isSure({ title: `${name}?`, text, yes: name })) return;
    try {
      await does();
      said = { isGood: true, text: done };
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Gone)) throw error;
      said = { isGood: false, text: failure(error), parts: error.parts };
    }
    page.again();
  };
  return h("button", { type: "button", class: kind, on: { click } }, name);
}

function failure(error) {
  if (error.status === 401 || error.status === 403) {
    return `The agent does not let you: ${error.message}. Its key is another with each start: open the address that it printed `
      + "last.";
  }
  return error.title ? `${error.title}: ${error.message}` : error.message;
}
