// Keys that work on every screen. Everything is reachable with Tab, too.

import { tell } from "./ask.js";

const HELP = [
  ["Tab", "the next link, button or field"],
  ["/", "filter VMs or decisions"],
  ["← →", "earlier, later (Shift: ten times as far)"],
  ["[ ]", "the stretch of time before, after"],
  ["l", "live: follow the agent"],
  ["p", "play the past, or stop"],
  ["w", "on a VM's page: why was it slow?"],
  ["h d r", "host, decisions, recommendations"],
  ["t", "colours: as the system has them, light, dark"],
  ["?", "this"],
  ["Esc", "close, or leave a field"],
];

export const help = () => tell("Keys", HELP, "In charts: click to go to a time, drag to see a stretch.");

const isTyping = (element) => element.matches?.("input:not([type=range]), select, textarea, [contenteditable]");

// `does` maps each key to its action.
export function keyboard(does) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    // The slider handles arrow keys itself.
    if (event.target.matches?.("input[type=range]") && event.key.startsWith("Arrow")) return;
    const action = event.key === "?" ? help : does[event.key];
    if (!action) return;
    event.preventDefault();
    action(event);
  });
}
