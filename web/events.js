// Recent events, newest first, and the sentences that describe them.

import { h } from "./dom.js";
import { clock } from "./format.js";
import { href } from "./router.js";

const MOST = 40;
// A sign for each kind of event.
const SIGNS = { decided: "●", found: "○", refused: "✕", appeared: "+", vanished: "−", "changed-by-other": "!" };

// Returns a sentence in which the VM's name links to the VM.
export function sentence({ range }, text, vm) {
  const at = vm ? text.indexOf(`VM ${vm}`) : -1;
  if (at < 0) return text;
  const begin = at + "VM ".length;
  return [text.slice(0, begin), h("a", { href: href("vm", { vm }, range) }, vm), text.slice(begin + vm.length)];
}

// Returns a sentence without policy and VM, where they are shown next to it.
export function bare(text, policy, vm) {
  const rest = text.startsWith(`${policy}: `) ? text.slice(policy.length + 2) : text;
  return vm && rest.startsWith(`VM ${vm}: `) ? rest.slice(vm.length + 5) : rest;
}

export function happened(page, { events, time }) {
  const seen = Date.parse(time);
  const newest = events.slice(-MOST).reverse();
  return h("section", { "aria-label": "What happened", "data-key": "happened" },
    h("h2", {}, "What happened"),
    newest.length === 0 && h("p", { class: "quiet" }, "Nothing lately."),
    h("ol", { class: "events" }, newest.map((event) => h("li", { class: event.kind, "data-key": `${event.at_ns} ${event.kind} ${event.text}` },
      h("span", { class: "sign", title: event.kind.replaceAll("-", " ") }, SIGNS[event.kind] ?? "·"),
      h("time", { class: "time" }, clock(seen - event.age_ns / 1e6)),
      h("span", {}, sentence(page, event.text, event.vm), event.count > 1 && h("span", { class: "quiet" }, ` ×${event.count}`))))));
}
