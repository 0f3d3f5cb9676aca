// All VMs, one row each, those over most limits first.

import { h, show } from "./dom.js";
import { NONE, bytes, count, decimals, nodes, percent, quoted, rate } from "./format.js";
import { SIGNS, ofVm, trouble, waitingShare, worst } from "./limits.js";
import { href } from "./router.js";

// A longer table is drawn where it is scrolled to, with some rows before and after, so that Tab and a wheel find the next ones.
const ROWS_MOST = 60;
const AROUND = 10;
// Height of a row, in pixels, until one is drawn.
const ROW_HEIGHT = 29;

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
  name: { text: "VM", key: (vm) => vm.name, cell: (vm, { range }) => h("th", { scope: "row", title: vm.name },
    SIGNS[worst(...Object.values(ofVm(vm)))], " ", h("a", { href: href("vm", { vm: vm.name }, range) }, vm.name)) },
  home: { text: "Home", key: (vm) => (vm.home ? nodes(vm.home) : "~"), cell: (vm) => h("td", {}, vm.home ? nodes(vm.home) : "none") },
  vcpus: { text: "vCPUs on", key: placed, cell: (vm) => h("td", { class: "quiet" }, placed(vm)) },
  mode: { text: "Mode", isThere: (vm, { about }) => vm.mode !== about.mode, key: (vm) => vm.mode,
    cell: (vm) => h("td", {}, vm.mode) },
  cpus: { text: "CPUs", isRight: true, key: (vm) => high(vm.cpus_used), cell: (vm) => marked(decimals(vm.cpus_used), "fine") },
  wait: { text: "Waiting", isRight: true, key: (vm) => high(waitingShare(vm)),
    cell: (vm) => marked(decimals(vm.vcpus_waiting), ofVm(vm).waiting) },
  local: { text: "Local", isRight: true, key: (vm) => low(vm.local_access_ratio),
    cell: (vm) => marked(percent(vm.local_access_ratio), ofVm(vm).local) },
  llc: { text: "LLC misses", isRight: true, key: (vm) => high(vm.llc_miss_rate),
    cell: (vm) => marked(percent(vm.llc_miss_rate), "fine") },
  traffic: { text: "Bandwidth", isRight: true, isThere: (vm) => vm.bandwidth_bytes_per_s != null,
    key: (vm) => high(vm.bandwidth_bytes_per_s), cell: (vm) => marked(rate(vm.bandwidth_bytes_per_s), "fine") },
  permit: { text: "Permit", isThere: (vm) => vm.permit.permit !== null, key: (vm) => vm.permit.permit ?? "~",
    cell: (vm) => marked(vm.permit.permit ? `${vm.permit.standing ?? ""} ${vm.permit.permit}` : NONE, ofVm(vm).permit) },
  memory: { text: "Memory", isRight: true, key: (vm) => high(vm.memory_bytes),
    cell: (vm) => marked(bytes(vm.memory_bytes), ofVm(vm).memory) },
};

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

export function table(page, vms, filter) {
  const asked = page.params.get("sort");
  const isColumn = Object.hasOwn(COLUMNS, asked ?? "");
  if (asked && !isColumn) page.wrong.push(`The table has no column ${quoted(asked)} to sort by.`);
  const sort = isColumn ? asked : "worst";
  const key = sort === "worst" ? (vm) => -trouble(vm) : COLUMNS[sort].key;
  const wanted = vms.filter((vm) => isWanted(vm, filter));
  wanted.sort((a, b) => compare(key(a), key(b)) || a.name.localeCompare(b.name));
  const columns = Object.entries(COLUMNS).filter(([, { isThere }]) => !isThere || vms.some((vm) => isThere(vm, page)));
  const hint = filter ? `${wanted.length} of ${count(vms.length, "VM")}` : sort === "worst" ? "those past most limits first" : "";
  return h("section", { "aria-label": "VMs", "data-key": "vms" },
    h("div", { class: "row" },
      h("h2", {}, "VMs"),
      h("input", {
        type: "search", id: "filter", placeholder: "Filter by name  ( / )", "aria-label": "Filter VMs by name",
        "data-filter": true, value: filter, on: { input: (event) => page.replace({ filter: event.target.value }) },
      }),
      h("span", { class: "quiet", role: "status" }, hint)),
    grid(wanted, columns.map((column) => heading(page, column, sort)), (vm) => columns.map((column) => celled(page, column, vm))),
    wanted.length === 0 && h("p", { class: "quiet" }, vms.length ? "No VM has that in its name." : "No VM runs here."));
}

function celled(page, [name, { cell }], vm) {
  const drawn = cell(vm, page);
  drawn.classList.add(`of-${name}`);
  return drawn;
}

function heading(page, [name, { text, isRight }], sort) {
  const click = () => {
    document.getElementById("rows").scrollTop = 0;
    page.replace({ sort: name === sort ? null : name });
  };
  return h("th", { scope: "col", class: `of-${name} ${isRight ? "right" : ""}`, "aria-sort": name === sort ? "ascending" : null },
    h("button", { type: "button", class: "sort", title: "Sort by this; again: those in trouble first", on: { click } },
      text, name === sort ? " ↓" : ""));
}

// Draws the table, or of a long one the rows in sight. Screen readers are told of the others by their number.
function grid(wanted, headings, cells) {
  const isLong = wanted.length > ROWS_MOST;
  const row = (vm, index) => h("tr", { "data-key": vm.id, "aria-rowindex": isLong ? index + 2 : null }, cells(vm));
  const rows = () => (isLong ? inSight(wanted, row) : wanted.map(row));
  const scroll = (event) => show(event.currentTarget.querySelector("tbody"), rows());
  const long = isLong && { class: "scroll long", tabindex: "0", role: "region", "aria-label": "All VMs", on: { scroll } };
  return h("div", { class: "scroll", id: "rows", ...long },
  h("table", { "aria-rowcount": isLong ? wanted.length + 1 : null },
    h("thead", {}, h("tr", { "aria-rowindex": isLong ? 1 : null }, headings)),
    h("tbody", {}, rows())));
}

// Returns the rows in sight and those around them, and the one that has the focus, with gaps as high as the rows left out.
function inSight(wanted, row) {
  const box = document.getElementById("rows");
  const height = box?.querySelector("tbody tr[data-key]:not(.gap)")?.offsetHeight || ROW_HEIGHT;
  const top = Math.min(Math.floor((box?.scrollTop ?? 0) / height), wanted.length - 1);
  const [first, last] = [Math.max(top - AROUND, 0), Math.min(top + Math.ceil(innerHeight / height) + AROUND, wanted.length)];
  const focused = document.activeElement?.closest("#rows tbody tr")?.dataset.key;
  const isDrawn = (index) => (index >= first && index < last) || wanted[index].id === focused;
  const drawn = [...wanted.keys()].filter(isDrawn);
  const rows = [];
  let next = 0;
  for (const index of [...drawn, wanted.length]) {
    if (index > next) rows.push(gap(next, (index - next) * height));
    if (index < wanted.length) rows.push(row(wanted[index], index));
    next = index + 1;
  }
  return rows;
}

const gap = (from, height) => h("tr", { class: "gap", "aria-hidden": "true", "data-key": `gap-${from}` },
  h("td", { css: { height: `${height}px` } }));
