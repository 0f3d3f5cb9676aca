// All VMs, one row each, those over most limits first.

import { h } from "./dom.js";
import { NONE, bytes, count, decimals, nodes, percent, rate } from "./format.js";
import { SIGNS, ofVm, trouble, waitingShare, worst } from "./limits.js";
import { href } from "./router.js";

export const isWanted = (vm, filter) => vm.name.toLowerCase().includes(filter.toLowerCase());

// Returns the shares of pages by node, without those that would round to none.
export function shares(pages) {
  const total = (pages ?? []).reduce((sum, on) => sum + on.pages, 0);
  return (pages ?? []).map(({ node, pages: some }) => ({ node, share: some / Math.max(total, 1) })).filter(({ share }) => share >= 0.005);
}

// Sort keys: lowest first, or highest first; unknown values last.
const low = (value) => value ?? 2;
const high = (value) => -(value ?? -1);

const marked = (text, level) => h("td", { class: `right ${level}` }, SIGNS[level], SIGNS[level] && " ", text);

const placed = (vm) => vm.vcpus_by_node.map(({ node, vcpus }) => `${node}:${vcpus}`).join(" ");

// Heading, sort key and cell of each column. Optional columns are hidden if empty for all VMs.
const COLUMNS = {
  name: { text: "VM", key: (vm) => vm.name, cell: (vm, { range }) => h("th", { scope: "row" },
    SIGNS[worst(...Object.values(ofVm(vm)))], " ", h("a", { href: href("vm", { vm: vm.name }, range) }, vm.name)) },
  home: { text: "Home", key: (vm) => (vm.home ? nodes(vm.home) : "~"), cell: (vm) => h("td", {}, vm.home ? nodes(vm.home) : "none") },
  vcpus: { text: "vCPUs on", key: placed, cell: (vm) => h("td", { class: "quiet" }, placed(vm)) },
  cpus: { text: "CPUs", isRight: true, key: (vm) => high(vm.cpus_used), cell: (vm) => marked(decimals(vm.cpus_used), "fine") },
  wait: { text: "Waiting", isRight: true, key: (vm) => high(waitingShare(vm)), cell: (vm) => marked(decimals(vm.vcpus_waiting), ofVm(vm).waiting) },
  local: { text: "Local", isRight: true, key: (vm) => low(vm.local_access_ratio), cell: (vm) => marked(percent(vm.local_access_ratio), ofVm(vm).local) },
  llc: { text: "LLC misses", isRight: true, key: (vm) => high(vm.llc_miss_rate), cell: (vm) => marked(percent(vm.llc_miss_rate), "fine") },
  traffic: { text: "Bandwidth", isRight: true, isThere: (vm) => vm.bandwidth_bytes_per_s != null,
    key: (vm) => high(vm.bandwidth_bytes_per_s), cell: (vm) => marked(rate(vm.bandwidth_bytes_per_s), "fine") },
  permit: { text: "Permit", isThere: (vm) => vm.permit.permit !== null, key: (vm) => vm.permit.permit ?? "~",
    cell: (vm) => marked(vm.permit.permit ? `${vm.permit.standing ?? ""} ${vm.permit.permit}` : NONE, ofVm(vm).permit) },
  memory: { text: "Memory", isRight: true, key: (vm) => high(vm.memory_bytes), cell: (vm) => marked(bytes(vm.memory_bytes), ofVm(vm).memory) },
};

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

export function table(page, vms, filter) {
  const asked = page.params.get("sort");
  const sort = Object.hasOwn(COLUMNS, asked) ? asked : "worst";
  const key = sort === "worst" ? (vm) => -trouble(vm) : COLUMNS[sort].key;
  const wanted = vms.filter((vm) => isWanted(vm, filter));
  wanted.sort((a, b) => compare(key(a), key(b)) || a.name.localeCompare(b.name));
  const columns = Object.entries(COLUMNS).filter(([, { isThere }]) => !isThere || vms.some(isThere));
  const heading = ([name, { text, isRight }]) => h("th", { scope: "col", class: isRight ? "right" : null, "aria-sort": name === sort ? "ascending" : null },
    h("button", { type: "button", class: "sort", title: `Sort by this; again: those in trouble first`,
      on: { click: () => page.replace({ sort: name === sort ? null : name }) } }, text, name === sort ? " ↓" : ""));
  return h("section", { "aria-label": "VMs", "data-key": "vms" },
    h("div", { class: "row" },
      h("h2", {}, "VMs"),
      h("input", { type: "search", id: "filter", placeholder: "Filter by name  ( / )", "aria-label": "Filter VMs by name", "data-filter": true, value: filter,
        on: { input: (event) => page.replace({ filter: event.target.value }) } }),
      h("span", { class: "quiet" }, filter ? `${wanted.length} of ${count(vms.length, "VM")}` : sort === "worst" ? "those past most limits first" : "")),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, columns.map(heading))),
      h("tbody", {}, wanted.map((vm) => h("tr", { "data-key": vm.id }, columns.map(([, { cell }]) => cell(vm, page))))))),
    wanted.length === 0 && h("p", { class: "quiet" }, vms.length ? "No VM has that in its name." : "No VM runs here."));
}
