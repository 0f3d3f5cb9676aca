// Dialogs: confirm a change, and show what is not part of a screen.

import { h } from "./dom.js";

function open(dialog) {
  document.body.append(dialog);
  const before = document.activeElement;
  dialog.addEventListener("close", () => {
    dialog.remove();
    before?.focus?.();
  });
  dialog.showModal();
  return dialog;
}

// Asks for confirmation; resolves to whether the user agrees.
export function isSure({ title, text, yes }) {
  return new Promise((answer) => {
    const dialog = h("dialog", { "aria-labelledby": "asked" },
      h("h2", { id: "asked" }, title),
      h("p", {}, text),
      h("form", { method: "dialog", class: "row end" },
        h("button", { value: "no", type: "submit" }, "Cancel"),
        h("button", { value: "yes", type: "submit", class: "strong" }, yes)));
    dialog.addEventListener("close", () => answer(dialog.returnValue === "yes"));
    open(dialog);
  });
}

// Shows rows of two columns until the user closes them.
export function tell(title, rows, note) {
  if (document.querySelector("dialog[open]")) return;
  open(h("dialog", { "aria-labelledby": "told" },
    h("h2", { id: "told" }, title),
    h("table", { class: "plain" }, h("tbody", {}, rows.map(([key, text]) =>
      h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, text))))),
    note && h("p", { class: "quiet" }, note),
    h("form", { method: "dialog", class: "row end" }, h("button", { type: "submit", class: "strong" }, "Close"))));
}
