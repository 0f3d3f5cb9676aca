// Which screen an address names, and the address of each. All of what is shown is in the address: it can be kept, sent and gone
// back to.

import { write } from "./time.js";

const VIEWS = ["map", "vm", "decisions", "proposals"];

// What the address of this page says.
export function here() {
  const params = new URLSearchParams(location.search);
  const view = params.get("view") ?? "map";
  return { view: VIEWS.includes(view) ? view : "map", params };
}

// The address of a screen at a time; what is empty is left out.
export function href(view, more, range) {
  const said = { view: view === "map" ? null : view, ...more, ...write(range) };
  const query = new URLSearchParams(Object.entries(said).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return query.size ? `/?${query}` : "/";
}

// The same screen with some of it changed.
export function changed(more, range) {
  const { view, params } = here();
  const kept = [...params].filter(([name]) => !["view", "from", "to", "at", "last"].includes(name));
  return href(view, { ...Object.fromEntries(kept), ...more }, range);
}

// Calls `onMove` where the page is to show another address, with whether it is another screen.
export class Router {
  constructor(onMove) {
    this.onMove = onMove;
    window.addEventListener("popstate", () => onMove());
    document.addEventListener("click", (event) => this.click(event));
  }

  // Links within the page load nothing anew; those that the reader wants in another tab are left to the browser.
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
