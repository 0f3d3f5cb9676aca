// Builds elements from data. Text becomes text nodes only, whatever it contains. A screen is built whole each time, and the
// document is changed only where it differs, so that focus, scrolling and input in progress stay.

const SVG = "http://www.w3.org/2000/svg";

// Creates an element: attributes by name; `on` handlers by event; `css` properties; `value` and `checked` of controls.
// Children that are null or false are left out.
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

// Creates an SVG element likewise.
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") listen(element, value);
    else if (name === "css") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else if (name === "value") { element.value = value; element.wanted = value; }
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function listen(element, handlers) {
  element.handlers = handlers;
  element.heard ??= new Set();
  for (const type of Object.keys(handlers)) {
    if (element.heard.has(type)) continue;
    element.heard.add(type);
    element.addEventListener(type, (event) => element.handlers?.[type]?.(event));
  }
}

// Returns the width available inside an element, in pixels.
export function room(element) {
  const { paddingLeft, paddingRight } = getComputedStyle(element);
  return element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}

// Makes `tree` the children of `root`, changing only what differs.
export function show(root, ...tree) {
  const next = root.cloneNode(false);
  next.append(...tree.flat(Infinity).filter(Boolean));
  const focused = document.activeElement;
  children(root, next);
  if (focused && focused !== document.activeElement && root.contains(focused)) focused.focus({ preventScroll: true });
}

function children(old, next) {
  const keyed = new Map();
  for (const child of old.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let at = old.firstChild;
  for (const child of [...next.childNodes]) {
    const key = child.dataset?.key;
    const match = key ? keyed.get(key) : at;
    if (match && isAlike(match, child)) {
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      become(match, child);
    } else {
      old.insertBefore(child, at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function isAlike(a, b) {
  return a.nodeName === b.nodeName && a.dataset?.key === b.dataset?.key;
}

function become(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // The user opens and closes details.
    if (!next.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of [...next.attributes]) {
    if (name === "style") old.style.cssText = next.style.cssText;
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (next.handlers || old.handlers) listen(old, next.handlers ?? {});
  children(old, next);
  // Do not overwrite what the user is typing.
  if (next.wanted !== undefined && old !== document.activeElement) old.value = next.wanted;
}
