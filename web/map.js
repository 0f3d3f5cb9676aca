// The host at one time: nodes with their VMs, links, a table of VMs, and events.

import { get } from "./api.js";
import { h, room } from "./dom.js";
import { happened } from "./events.js";
import { bytes, clock, count, decimals, moment, nodes as nodeList, percent, rate } from "./format.js";
import { SIGNS, controllerShare, ofNode, ofVm, trouble, worst } from "./limits.js";
import { band } from "./links.js";
import { href } from "./router.js";
import { isLive, stamp } from "./time.js";
import { isWanted, shares, table } from "./vms.js";

export async function map(page) {
  const at = isLive(page.range) ? null : stamp(page.range.at);
  const seen = await get("/v1/overview", { at }, page.signal);
  const filter = page.params.get("filter") ?? "";
  const inTrouble = seen.vms.filter((vm) => trouble(vm) > 0);
  const title = `${count(seen.vms.length, "VM")} on ${count(seen.nodes.length, "node")}`;
  return {
    title: "Host",
    recorded: seen.recorded,
    tree: [
      h("div", { class: "row head" },
        h("h1", {}, title),
        h("p", { class: "grow" }, inTrouble.length
          ? [h("span", { class: "warn" }, `${SIGNS.warn} ${count(inTrouble.length, "VM is", "VMs are")} past a limit`), ": ", worstNamed(page, inTrouble)]
          : h("span", { class: "quiet" }, "No VM is past a limit.")),
        h("p", { class: "quiet time" }, `as of ${at ? moment(Date.parse(seen.time)) : clock(Date.parse(seen.time))}`)),
      picture(page, seen, filter),
      h("div", { class: "columns" },
        table(page, seen.vms, filter),
        happened(page, seen)),
    ],
  };
}

const worstNamed = ({ range }, vms) => [...vms].sort((a, b) => trouble(b) - trouble(a)).slice(0, 3)
  .map((vm, index) => [index > 0 && ", ", h("a", { href: href("vm", { vm: vm.name }, range) }, vm.name)]);

// Returns the node to draw a VM on: its home, or that of most of its memory, or of its vCPUs; the first of several.
function nodeOf(vm) {
  const most = (list, key) => list?.length ? list.reduce((best, on) => (on[key] > best[key] ? on : best)) : null;
  const pages = vm.pages_by_node?.filter((on) => !vm.home || vm.home.includes(on.node));
  const [memory, vcpus] = [most(pages, "pages"), most(vm.vcpus_by_node, "vcpus")];
  return memory?.pages ? memory.node : vm.home?.[0] ?? vcpus?.node;
}

// Draws the nodes in two rows, with the links between them.
function picture(page, seen, filter) {
  const { nodes, links, vms } = seen;
  const columns = Math.max(Math.ceil(nodes.length / 2), 1);
  const rows = [nodes.slice(0, columns), nodes.slice(columns)];
  const places = new Map(rows.flatMap((row, number) => row.map(({ node }, index) => [node, { row: number, middle: (index + 0.5) / row.length }])));
  const width = Math.max(room(document.getElementById("screen")), 300);
  const on = Map.groupBy(vms, nodeOf);
  const draw = (row) => h("div", { class: "nodes", css: { "--columns": row.length } },
    row.map((node) => card(page, node, on.get(node.node) ?? [], filter)));
  return h("section", { class: "map", "aria-label": "Nodes", "data-key": "map" },
    draw(rows[0]), rows[1].length > 0 && [band(links, (node) => places.get(node), width), draw(rows[1])]);
}

function meter(label, share, level, text) {
  return h("div", { class: `meter ${level}` },
    h("span", { class: "label" }, label),
    h("span", { class: "bar", "aria-hidden": "true" }, h("i", { css: { width: `${100 * Math.min(share ?? 0, 1)}%` } })),
    h("span", { class: "figure" }, SIGNS[level], SIGNS[level] && " ", text));
}

function card(page, node, vms, filter) {
  const levels = ofNode(node);
  const used = node.memory_bytes ? 1 - node.memory_free_bytes / node.memory_bytes : null;
  const controller = controllerShare(node);
  const sorted = [...vms].sort((a, b) => a.name.localeCompare(b.name));
  return h("article", { class: `node ${worst(...Object.values(levels))}`, "data-key": `node-${node.node}` },
    h("h2", {}, `Node ${node.node}`, h("span", { class: "quiet" }, ` ${count(vms.length, "VM")}`)),
    h("div", { class: "meters" },
      meter("CPUs", node.cpus_busy === null ? null : node.cpus_busy / Math.max(node.cpus, 1), "fine", `${decimals(node.cpus_busy)} / ${node.cpus}`),
      meter("Waiting", node.vcpus_waiting === null ? null : node.vcpus_waiting / Math.max(node.cpus, 1), levels.waiting, decimals(node.vcpus_waiting)),
      meter("Memory", used, levels.free, `${bytes(node.memory_free_bytes)} free`),
      meter("Controller", controller, levels.controller, controller === null ? rate(node.bandwidth_bytes_per_s) : percent(controller))),
    h("ul", { class: "chips" }, sorted.map((vm) => chip(page, vm, filter))));
}

// Draws a VM on its node: its name, its load, and how much of its memory is on the node.
function chip(page, vm, filter) {
  const levels = ofVm(vm);
  const level = worst(...Object.values(levels));
  const where = vm.home ? `home ${nodeList(vm.home)}` : "unplaced";
  const said = [where, `${decimals(vm.cpus_used)} CPUs`, `${decimals(vm.vcpus_waiting)} waiting`, `${percent(vm.local_access_ratio)} local`];
  const lies = shares(vm.pages_by_node).map(({ node, share }) => `node ${node}: ${percent(share)}`);
  return h("li", { "data-key": `vm-${vm.name}`, class: isWanted(vm, filter) ? null : "dim" },
    h("a", {
      class: `chip ${level}`, href: href("vm", { vm: vm.name }, page.range), title: `${vm.name}\n${said.join(", ")}\nmemory: ${lies.join(", ") || "not known"}`,
      "aria-label": `${vm.name}: ${said.join(", ")}${level === "fine" ? "" : `, ${level === "bad" ? "far " : ""}past a limit`}`,
    },
    h("b", {}, SIGNS[level], SIGNS[level] && " ", vm.name),
    h("span", { class: "figures" }, `${decimals(vm.cpus_used)} CPU · ${percent(vm.local_access_ratio)}`, h("span", { class: "word" }, " local")),
    h("span", { class: "lies", "aria-hidden": "true" }, shares(vm.pages_by_node).map(({ node, share }) =>
      h("i", { css: { width: `${100 * share}%` }, class: `n${node % 8}` }, share > 0.12 ? String(node) : "")))));
}
