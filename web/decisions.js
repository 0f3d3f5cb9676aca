// Decisions and their outcomes, newest first.

import { get } from "./api.js";
import { h } from "./dom.js";
import { bare } from "./events.js";
import { NONE, moment } from "./format.js";
import { href } from "./router.js";
import { moveTo, stamp } from "./time.js";

const PAGE = 50;
// Outcomes, each with a sign in addition to the colour.
const OUTCOMES = { done: ["fine", "✓"], moved: ["fine", "✓"], renewed: ["fine", "↻"], "dry-run": ["quiet", "○"], refused: ["bad", "✕"], failed: ["bad", "✕"] };

export async function decisions(page) {
  const { range, params, signal } = page;
  const [vm, policy, cursor] = ["vm", "policy", "cursor"].map((name) => params.get(name));
  const answer = await get("/v1/decisions", { vm, policy, cursor, from: stamp(range.from), to: stamp(range.to), limit: PAGE }, signal);
  const rows = answer.decisions;
  const field = (name, label, value, more) => h("label", { class: "row" }, h("span", { class: "quiet" }, label), h("input", {
    type: "search", name, value: value ?? "", ...more, on: { change: (event) => page.go({ [name]: event.target.value.trim(), cursor: null }) },
  }));
  return {
    title: "Decisions",
    tree: [
      h("div", { class: "row head" },
        h("h1", {}, "Decisions"),
        field("vm", "VM", vm, { "data-filter": true, "aria-label": "VM, by name or UUID", placeholder: "any", list: "vms" }),
        field("policy", "Policy", policy, { "aria-label": "Policy", placeholder: "any", list: "policies" }),
        list("vms", page.about.vms.map((one) => one.name)),
        list("policies", rows.map((one) => one.policy)),
        (vm || policy) && h("a", { href: href("decisions", {}, range) }, "all")),
      h("div", { class: "scroll" }, h("table", { class: "decisions" },
        h("thead", {}, h("tr", {}, ["When", "VM", "Policy", "Action", "Outcome", "What and why"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, rows.map((row) => line(page, row))))),
      rows.length === 0 && h("p", { class: "quiet" },
        `Nothing was decided in the time shown${vm ? ` about VM ${vm}` : ""}${policy ? ` by policy ${policy}` : ""}. `,
        "Choose another above, or a longer stretch."),
      h("p", { class: "row" },
        cursor && h("a", { href: href("decisions", { vm, policy }, range) }, "⇤ Newest"),
        answer.next && h("a", { id: "older", href: href("decisions", { vm, policy, cursor: answer.next }, range) }, "Older →"),
        h("span", { class: "quiet" }, answer.next || cursor ? "" : "These are all in the time shown.")),
    ],
  };
}

const list = (id, values) => h("datalist", { id }, [...new Set(values)].filter(Boolean).map((value) => h("option", { value })));

function line(page, row) {
  const at = Date.parse(row.time);
  const [kind, sign] = OUTCOMES[row.outcome] ?? ["quiet", "·"];
  const there = moveTo(page.range, at);
  return h("tr", { "data-key": String(row.id) },
    h("td", {}, h("a", { class: "time", href: href(row.name ? "vm" : "map", { vm: row.name, decision: row.id }, there) }, moment(at))),
    h("th", { scope: "row" }, row.name ? h("a", { href: href("vm", { vm: row.name }, page.range) }, row.name) : NONE),
    h("td", {}, row.policy ? h("a", { href: href("decisions", { vm: page.params.get("vm"), policy: row.policy }, page.range) }, row.policy) : NONE),
    h("td", {}, row.action ?? NONE),
    h("td", { class: kind }, `${sign} ${row.outcome ?? NONE}`),
    h("td", {}, bare(row.text, row.policy, row.name)));
}
