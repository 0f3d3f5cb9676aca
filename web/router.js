// Maps URLs to screens and back. The URL has the whole state of the page, so it can be saved and sent, and the back button
// works.

import { quoted } from "./format.js";
import { write, wrongTimes } from "./time.js";

const VIEWS = ["map", "vm", "decisions", "proposals"];
const TIMES = ["from", "to", "at", "last"];
const KNOWN = ["view", "vm", "filter", "sort", "policy", "cursor", "decision", "why", "window", ...TIMES];

// Returns the state in the current URL.
export function here() {
  const params = new URLSearchParams(location.search);
  const view = params.get("view") ?? "map";
  return { view: VIEWS.includes(view) ? view : "map", params };
}

// Returns sentences about what the current URL says wrongly; a screen may add to them.
export function wrong(now) {
  const { params } = here();
  const view = params.get("view");
  const said = wrongTimes(params, now);
  if (view !== null && !VIEWS.includes(view)) said.push(`There is no screen ${quoted(view)}. This is the host.`);
  const unknown = [...new Set(params.keys())].filter((name) => !KNOWN.includes(name));
  if (unknown.length) said.push(`The page does not know ${unknown.map(quoted).join(", ")} in its address.`);
  return said;
}

// Returns the URL of a screen at a time, without empty parameters.
export function href(view, more, range) {
  const said = { view: view === "map" ? null : view, ...more, ...write(range) };
  const query = new URLSearchParams(Object.entries(said).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return query.size ? `/?${query}` : "/";
}

// Returns the URL of the current screen with some parameters changed.
export function changed(more, range) {
  const { view, params } = here();
  const kept = [...params].filter(([name]) => name !== "view" && KNOWN.includes(name) && !TIMES.includes(name));
  return href(view, { ...Object.fromEntries(kept), ...more }, range);
}

// Calls `onMove` when the page must show another URL, and says whether it is another screen.
export class Router {
  constructor(onMove) {
    this.onMove = onMove;
    window.addEventListener("popstate", () => onMove());
    document.addEventListener("click", (event) => this.click(event));
  }

  // Links within the page do not reload it; the browser opens those meant for another tab.
  click(event) {
    const link = event.target.closest?.("a[href]");
    const isElsewhere = event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
    if (!link || isElsewhere || event.defaultPrevented || link.origin !== location.origin || link.pathname !== "/" || link.hash) return;
    event.preventDefault();
    this.go(link.getAttribute("href"));
  }

  go(address, { replace = false } = {}) {
    history[replace ? "replaceState" : "pushState"](null, "", address);
    this.onMove();
  }
}
