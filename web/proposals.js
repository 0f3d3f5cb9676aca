// Recommendations of the agent, to apply or reject, and its reservations for VMs that have not started.

import { Gone, Problem, change, get, hasKey } from "./api.js";
import { isSure } from "./ask.js";
import { h } from "./dom.js";
import { bytes, moment, nodes, percent } from "./format.js";
import { href } from "./router.js";

const SIGNS = { open: "○", approved: "◔", applied: "✓", rejected: "✕", expired: "⌛" };

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
      said && h("p", { class: said.isGood ? "note good" : "note bad", role: "status" }, `${said.isGood ? "✓" : "✕"} ${said.text}`),
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
const hint = () => h("p", { class: "note" }, "You may read here, and change nothing: this tab has no key. The agent prints the address with the key "
  + "as it starts, ", h("code", {}, "…/#key=…"), ", and keeps the key in ", h("code", {}, "http.key"), " in its state directory.");

const missing = (problem, what) => h("p", { class: "note" }, problem.status === 404
  ? `This agent has no ${what}: it is of a version before them, or none are made with its settings.`
  : `${problem.title}. ${problem.message}`);

const HEADS = [["VM"], ["Nodes"], ["vCPUs", "right"], ["Memory", "right"], ["Made"], ["Until"], [""]];

const isOpen = ({ state }) => state === "open";

function recommendations(page, all) {
  const sorted = [...all].sort((a, b) => isOpen(b) - isOpen(a) || b.id - a.id);
  if (sorted.length === 0) return h("p", { class: "quiet" }, "There are none now: nothing would make a VM faster by enough.");
  return h("ul", { class: "cards", "data-key": "recommendations" }, sorted.map((one) => h("li", { class: one.state, "data-key": String(one.id) },
    h("div", { class: "grow" },
      h("h3", {}, one.vm ? [h("a", { href: href("vm", { vm: one.vm }, page.range) }, one.vm), ": "] : null, one.text),
      h("p", {}, one.reason),
      h("p", { class: "quiet" }, h("span", { class: "state" }, `${SIGNS[one.state] ?? "·"} ${one.state}`), ` · ${one.policy} · `,
        h("span", { class: "time" }, moment(Date.parse(one.time))), isOpen(one) && [", holds until ", h("span", { class: "time" }, moment(Date.parse(one.expires)))])),
    h("p", { class: "gain" }, one.gain === null || one.gain === undefined ? "" : [h("b", {}, `+${percent(one.gain)}`), " speed, predicted"]),
    isOpen(one) && h("div", { class: "row" },
      act(page, "Apply", `${one.text}?`, "strong", () => change("POST", `/v1/recommendations/${one.id}/apply`), `applied: ${one.text}`),
      act(page, "Reject", `Not: ${one.text}. The agent does not recommend it again for a while.`, "",
        () => change("POST", `/v1/recommendations/${one.id}/reject`), `rejected: ${one.text}`)))));
}

function reservations(page, all) {
  if (all.length === 0) return h("p", { class: "quiet" }, "None.");
  const row = (one) => h("tr", { "data-key": String(one.id) },
    h("th", { scope: "row" }, one.vm ?? "no name yet"), h("td", {}, nodes(one.nodes)), h("td", { class: "right" }, String(one.vcpus)),
    h("td", { class: "right" }, bytes(one.memory_bytes)), h("td", { class: "time" }, moment(Date.parse(one.made))), h("td", { class: "time" }, moment(Date.parse(one.expires))),
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
      said = { isGood: false, text: failure(error) };
    }
    page.again();
  };
  return h("button", { type: "button", class: kind, on: { click } }, name);
}

function failure(error) {
  if (error.status === 401 || error.status === 403) {
    return `The agent does not let you: ${error.message} Its key is another with each start: open the address that it printed last.`;
  }
  return error.title ? `${error.title}: ${error.message}` : error.message;
}
