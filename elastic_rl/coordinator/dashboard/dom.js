// Building and updating the page. Values are set as text, never as markup, and only where they differ.

import { ago, clock } from "./format.js";

/** A new element. `props`: attributes; `text` its text; a key that begins with "on" is a listener. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else attr(node, name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function text(node, value) {
  const wanted = String(value);
  if (node.textContent !== wanted) node.textContent = wanted;
  return node;
}

/** Sets an attribute; null and false remove it, true sets it empty. */
export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else {
    const wanted = value === true ? "" : String(value);
    if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
  }
  return node;
}

/** An input with its label, and a note below it. */
export const field = (label, input, note = "") =>
  el("label", { class: "field" }, el("span", { text: label }), input, note ? el("small", { text: note }) : null);

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else attr(node, name, value);
  }
  node.append(...children);
  return node;
}

const rows = new WeakMap();

/**
 * Makes the children of `parent` the given items, in order, and keeps the node of each key: unchanged nodes are not
 * touched, and the focus stays. `make(item)` builds a node, `update(node, item)` fills it.
 */
export function keyed(parent, items, key, make, update) {
  const known = rows.get(parent) ?? new Map();
  const wanted = new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    if (wanted.has(id)) continue;
    const node = known.get(id) ?? make(item);
    wanted.set(id, node);
    update(node, item);
    if (node === at) at = at.nextElementSibling;
    // The node at this place moves or goes: else every later node would be moved instead.
    else if (at && node === at.nextElementSibling) at = node.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const [id, node] of known) if (!wanted.has(id)) node.remove();
  rows.set(parent, wanted);
  if (focused && document.activeElement !== focused) {
    const heading = parent.closest("section")?.querySelector("h2");
    (focused.isConnected ? focused : heading)?.focus({ preventScroll: true });
  }
}

/** A <time> that shows how long ago something was; `tick` updates it. */
export function since(node, at) {
  if (!at) { attr(node, "data-at", null); return text(node, "–"); }
  if (node.dataset.at !== String(at)) {
    node.dataset.at = at;
    attr(node, "datetime", new Date(at * 1000).toISOString());
    attr(node, "title", clock(at));
  }
  return text(node, ago(at));
}

export function tick() {
  for (const node of document.querySelectorAll("time[data-at]")) text(node, ago(Number(node.dataset.at)));
}

/** A state as a coloured badge with its name: the colour is never the only sign. */
export function badge(node, level, name) {
  attr(node, "class", `badge ${level}`);
  return text(node, name);
}
