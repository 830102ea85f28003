// The two dialogs: one asks whether a change is meant and makes it, the other asks for the token.

import { Problem, change, newKey, token } from "./api.js";
import { el, text } from "./dom.js";

const box = document.getElementById("action");
let inFlight = false;

box.addEventListener("cancel", (event) => { if (inFlight) event.preventDefault(); }); // Escape waits for the answer

/**
 * Asks, and carries it out when it is confirmed. `fields`: nodes to show; `request()` gives {method, path, body} or
 * throws what is wrong with the fields; `ready()` whether it may be confirmed; `done(answer)` gets the API's answer.
 * The same request keeps its Idempotency-Key over every further try, so it is carried out at most once.
 */
export function confirm({ title, what, fields = [], verb, danger = false, request, ready = () => true, done }) {
  const error = el("div", { class: "problem", role: "alert" });
  const go = el("button", { type: "submit", class: danger ? "danger" : "primary", text: verb });
  const back = el("button", { type: "button", text: "Go back", onclick: () => box.close() });
  let key = newKey();
  let sent = "";
  const form = el("form", { novalidate: true }, el("h2", { id: "action-h", text: title }),
    el("p", { class: "what", text: what }), ...fields, error, el("div", { class: "choices" }, back, go));
  const check = () => { go.disabled = inFlight || !ready(); };
  form.addEventListener("input", check);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (inFlight || !ready()) return;
    let wanted;
    try {
      wanted = request();
    } catch (e) {
      return show(error, e);
    }
    const said = JSON.stringify(wanted);
    if (sent && sent !== said) key = newKey();
    sent = said;
    inFlight = true;
    error.replaceChildren();
    text(go, "Asking…");
    check();
    try {
      const answer = await change(wanted.method, wanted.path, wanted.body, key);
      box.close();
      done(answer);
    } catch (e) {
      show(error, e);
      if (e.status >= 400 && e.status < 500 && e.status !== 409) key = newKey(); // refused for good: nothing was begun
    } finally {
      inFlight = false;
      text(go, error.hasChildNodes() ? "Try again" : verb);
      check();
    }
  });
  box.replaceChildren(form);
  check();
  box.showModal();
  (form.querySelector("input:not([type=checkbox]), select") ?? (danger ? back : go)).focus();
}

function show(node, error) {
  const known = error instanceof Problem;
  node.replaceChildren(el("p", { class: "title", text: known ? error.title : "That cannot be asked" }),
    ...(error.message && error.message !== error.title ? [el("p", { text: error.message })] : []),
    ...(known && error.advice ? [el("p", { class: "advice", text: error.advice })] : []));
}

export const field = (label, input, note = "") =>
  el("label", { class: "field" }, el("span", { text: label }), input, note ? el("small", { text: note }) : null);

const tokenBox = document.getElementById("token");

/** Asks for the token; it stays in this tab's session only. `why`: what the API said. */
export function askToken(why, changed) {
  if (tokenBox.open) return;
  const input = el("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const give = el("button", { type: "submit", class: "primary", text: "Use it" });
  const forget = el("button", { type: "button", text: "Forget the token", onclick: () => { token.clear(); tokenBox.close(); changed(); } });
  const form = el("form", {}, el("h2", { id: "token-h", text: "Access" }), el("p", { class: "what", text: why }),
    field("Token", input, "It is kept in this tab only, until the tab is closed. A viewer's token reads; an operator's also changes."),
    el("div", { class: "choices" }, el("button", { type: "button", text: "Go back", onclick: () => tokenBox.close() }),
      ...(token.get() ? [forget] : []), give));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!input.value.trim()) return;
    token.set(input.value.trim());
    tokenBox.close();
    changed();
  });
  tokenBox.replaceChildren(form);
  tokenBox.showModal();
  input.focus();
}
