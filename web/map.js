// The host at one time: nodes with their VMs, links, a table of VMs, and events.

import { get, getSeldom } from "./api.js";
import { h, room } from "./dom.js";
import { happened } from "./events.js";
import { bytes, clock, count, decimals, moment, nodes as nodeList, percent, rate, span } from "./format.js";
import { SIGNS, controllerShare, ofNode, ofVm, trouble, worst } from "./limits.js";
import { HEIGHT, band } from "./links.js";
import { href } from "./router.js";
import { isLive, stamp } from "./time.js";
import { isWanted, shares, table } from "./vms.js";

// With more VMs to draw on nodes than this, or more nodes, each VM is a small square, and the table shows their figures.
const CHIPS_MOST = 32;
const NODES_MOST = 8;
// Height of the band of links between compact nodes.
const BAND_LOW = 40;
// Most VMs that are named of those left on a drained node.
const LEFT_MOST = 3;
// Milliseconds for which an answer about the past is used again.
const PAST_APART = 30_000;
// Width of a phone's window, as in the style sheet.
const NARROW = 700;

export async function map(page) {
  const at = isLive(page.range) ? null : stamp(page.range.at);
  // The past stays as it is, so that a filter or an order needs no further look at the history.
  const apart = at ? PAST_APART : 0;
  const seen = await getSeldom(`${at} ${page.about.started}`, apart, "/v1/overview", { at }, page.signal);
  const isDrained = seen.nodes.some((node) => node.is_drained);
  // What keeps VMs on a drained node is known of now only.
  const drains = isDrained && !at ? (await get("/v1/maintenance", {}, page.signal)).drains : [];
  const filter = page.params.get("filter") ?? "";
  const inTrouble = seen.vms.filter((vm) => trouble(vm) > 0);
  const drawn = drawnOn(seen.vms);
  const isCompact = seen.nodes.length > NODES_MOST || [...drawn.values()].flat().length > CHIPS_MOST;
  const title = `${count(seen.vms.length, "VM")} on ${count(seen.nodes.length, "node")}`;
  return {
    title: "Host",
    recorded: seen.recorded,
    tree: [
      h("div", { class: "row head" },
        h("h1", {}, title),
        h("p", { class: "grow" }, inTrouble.length
          ? [h("span", { class: "warn" }, `${SIGNS.warn} ${count(inTrouble.length, "VM is", "VMs are")} past a limit`), ": ",
            worstNamed(page, inTrouble)]
          : h("span", { class: "quiet" }, "No VM is past a limit.")),
        h("p", { class: "quiet time" }, `as of ${at ? moment(Date.parse(seen.time)) : clock(Date.parse(seen.time))}`)),
      maintained(page, seen, drains),
      laidOut(isCompact, picture(page, seen, { drawn, filter, isCompact }), table(page, seen.vms, filter), happened(page, seen)),
    ],
  };
}

// The table comes first where there is no room for anything beside it.
function laidOut(isCompact, nodes, vms, events) {
  if (innerWidth <= NARROW) return [vms, nodes, events];
  return [nodes, h("div", { class: isCompact ? "columns compact" : "columns", "data-key": "columns" }, vms, events)];
}

// Says that the agent is paused, and what is left on drained nodes.
function maintained({ range }, { paused_for_ns: paused, nodes }, drains) {
  const left = ({ vms }) => [...vms.slice(0, LEFT_MOST).map((vm, index) => [index > 0 && "; ",
    h("a", { href: href("vm", { vm: vm.name }, range) }, vm.name), vm.memory_bytes ? ` with ${bytes(vm.memory_bytes)}` : "",
    vm.why ? `: ${vm.why}` : ""]), vms.length > LEFT_MOST && `; and ${vms.length - LEFT_MOST} more`];
  const drained = nodes.filter((node) => node.is_drained).map(({ node }) => {
    const known = drains.find((drain) => drain.node === node);
    const empty = known ? ", and empty." : ".";
    return h("p", { class: "note short", "data-key": `drained-${node}` }, h("b", {}, `Node ${node} is drained`),
      known?.vms.length ? [`, with ${count(known.vms.length, "VM")} left on it: `, left(known)] : empty);
  });
  return [paused && h("p", { class: "note short", "data-key": "paused" },
    h("b", {}, `The agent is paused for another ${span(paused / 1e6)}`), ": it changes nothing meanwhile."), drained];
}

const worstNamed = ({ range }, vms) => [...vms].sort((a, b) => trouble(b) - trouble(a)).slice(0, 3)
  .map((vm, index) => [index > 0 && ", ", h("a", { href: href("vm", { vm: vm.name }, range) }, vm.name)]);

const most = (list, key) => (list?.length ? list.reduce((best, on) => (on[key] > best[key] ? on : best)) : null);

// Returns the VMs to draw on each node, with the number of their vCPUs there. A VM whose vCPUs have not run yet is drawn at its
// home, or where most of its memory is.
function drawnOn(vms) {
  const all = new Map();
  for (const vm of vms) {
    const main = most(vm.vcpus_by_node, "vcpus")?.node ?? vm.home?.[0] ?? most(vm.pages_by_node, "pages")?.node;
    const on = vm.vcpus_by_node.length ? vm.vcpus_by_node : [{ node: main, vcpus: 0 }];
    for (const { node, vcpus } of on) all.set(node, [...(all.get(node) ?? []), { vm, vcpus, isMain: node === main }]);
  }
  for (const here of all.values()) here.sort((a, b) => a.vm.name.localeCompare(b.vm.name));
  return all;
}

// Draws the nodes in two rows, with the links between them.
function picture(page, seen, { drawn, filter, isCompact }) {
  const { nodes, links } = seen;
  const columns = Math.max(Math.ceil(nodes.length / 2), 1);
  const rows = [nodes.slice(0, columns), nodes.slice(columns)];
  const places = new Map(rows.flatMap((row, number) => row.map(({ node }, index) =>
    [node, { row: number, middle: (index + 0.5) / row.length }])));
  const width = Math.max(room(document.getElementById("screen")), 300);
  const draw = (row) => h("div", { class: "nodes", css: { "--columns": row.length } },
    row.map((node) => card(page, node, drawn.get(node.node) ?? [], { filter, isCompact })));
  const height = isCompact ? BAND_LOW : HEIGHT;
  return h("section", { class: isCompact ? "map compact" : "map", "aria-label": "Nodes", "data-key": "map" },
    draw(rows[0]), rows[1].length > 0 && [band(links, (node) => places.get(node), width, height), draw(rows[1])],
    isCompact && legend());
}

// Says what squares show. Like them it is for the eye: the table says the same in words.
const legend = () => h("p", { class: "legend quiet", "aria-hidden": "true" },
  "A square is a VM, filled as far as its vCPUs are busy; dashed: most of them are on another node; ",
  `${SIGNS.warn} past a limit, ${SIGNS.bad} far past it.`);

function meter(label, share, level, text) {
  return h("div", { class: `meter ${level}` },
    h("span", { class: "label" }, label),
    h("span", { class: "bar", "aria-hidden": "true" }, h("i", { css: { width: `${100 * Math.min(share ?? 0, 1)}%` } })),
    h("span", { class: "figure" }, SIGNS[level], SIGNS[level] && " ", text));
}

function card(page, node, here, { filter, isCompact }) {
  const levels = ofNode(node);
  const ofCpus = (some) => (some === null ? null : some / Math.max(node.cpus, 1));
  const used = node.memory_bytes ? 1 - node.memory_free_bytes / node.memory_bytes : null;
  const controller = controllerShare(node);
  const one = isCompact ? square : chip;
  return h("article", { class: `node ${worst(...Object.values(levels))}`, "data-key": `node-${node.node}` },
    h("h2", {}, `Node ${node.node}`, h("span", { class: "quiet" }, ` ${count(here.length, "VM")}`),
      node.is_drained && h("span", { class: "drained" }, " ⏏ drained")),
    h("div", { class: "meters" },
      meter("CPUs", ofCpus(node.cpus_busy), "fine", `${decimals(node.cpus_busy)} / ${node.cpus}`),
      meter("Waiting", ofCpus(node.vcpus_waiting), levels.waiting, decimals(node.vcpus_waiting)),
      meter(isCompact ? "Free" : "Memory", used, levels.free, `${bytes(node.memory_free_bytes)}${isCompact ? "" : " free"}`),
      meter("Controller", controller, levels.controller, controller === null ? rate(node.bandwidth_bytes_per_s) : percent(controller))),
    h("ul", isCompact ? { class: "squares", "aria-hidden": "true" } : { class: "chips" },
      here.map((drawn) => one(page, drawn, filter))));
}

function known({ range }, { vm, vcpus, isMain }) {
  const all = vm.vcpus_by_node.reduce((sum, on) => sum + on.vcpus, 0);
  const where = vm.home ? `home ${nodeList(vm.home)}` : "unplaced";
  const lies = shares(vm.pages_by_node).map(({ node, share }) => `node ${node}: ${percent(share)}`);
  const level = worst(...Object.values(ofVm(vm)));
  const part = vcpus < all ? `${vcpus} of ${all} vCPUs here` : null;
  const said = [where, part, `${decimals(vm.cpus_used)} CPUs`, `${decimals(vm.vcpus_waiting)} waiting`,
    `${percent(vm.local_access_ratio)} local`].filter(Boolean).join(", ");
  return {
    all, level, part,
    link: {
      class: `${level} ${isMain ? "" : "part"}`, href: href("vm", { vm: vm.name }, range),
      title: `${vm.name}\n${said}\nmemory: ${lies.join(", ") || "not known"}`,
    },
    label: `${vm.name}: ${said}${level === "fine" ? "" : `, ${level === "bad" ? "far " : ""}past a limit`}`,
  };
}

// Draws a VM on a node of its vCPUs: its name, its load, and where its memory is.
function chip(page, drawn, filter) {
  const { vm } = drawn;
  const { level, part, link, label } = known(page, drawn);
  return h("li", { "data-key": `vm-${vm.id}`, class: isWanted(vm, filter) ? null : "dim" },
    h("a", { ...link, class: `chip ${link.class}`, "aria-label": label },
      h("b", {}, SIGNS[level], SIGNS[level] && " ", vm.name),
      h("span", { class: "figures" }, part ?? [`${decimals(vm.cpus_used)} CPU · ${percent(vm.local_access_ratio)}`,
        h("span", { class: "word" }, " local")]),
      h("span", { class: "lies", "aria-hidden": "true" }, shares(vm.pages_by_node).map(({ node, share }) =>
        h("i", { css: { width: `${100 * share}%` }, class: `n${node % 8}` }, share > 0.12 ? String(node) : "")))));
}

// Draws a VM as a square filled by its load. It is for the pointer: the table below has the same links, with figures.
function square(page, drawn, filter) {
  const { vm } = drawn;
  const { all, level, link } = known(page, drawn);
  const load = Math.min((vm.cpus_used ?? 0) / Math.max(all, 1), 1);
  return h("li", { "data-key": `vm-${vm.id}`, class: isWanted(vm, filter) ? null : "dim" },
    h("a", { ...link, class: `square ${link.class}`, tabindex: "-1" },
      h("i", { css: { height: `${100 * load}%` } }), SIGNS[level] && h("b", {}, SIGNS[level])));
}
