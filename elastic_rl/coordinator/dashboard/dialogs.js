// The dialog that confirms a change and requests it.

import { Problem, change, newKey } from "./api.js";
import { el, text } from "./dom.js";

const box = document.getElementById("action");
let inFlight = false;

box.addEventListener("cancel", (event) => { if (inFlight) event.preventDefault(); }); // Escape waits for the answer

/**
 * Asks, and requests the change when it is confirmed. `fields`: nodes to show; `request()` returns {method, path, body},
 * or throws what is wrong with the fields; `ready()`: whether it may be confirmed; `done(answer)` gets the API's answer.
 * A retry keeps the Idempotency-Key, so the change is applied at most once.
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
    let requested;
    try {
      requested = request();
    } catch (e) {
      return show(error, e);
    }
    const content = JSON.stringify(requested);
    if (sent && sent !== content) key = newKey();
    sent = content;
    inFlight = true;
    error.replaceChildren();
    text(go, "Sending…");
    check();
    try {
      const answer = await change(requested.method, requested.path, requested.body, key);
      box.close();
      done(answer);
    } catch (e) {
      show(error, e);
      if (e.status >= 400 && e.status < 500 && e.status !== 409) key = newKey(); // refused: nothing was started
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
  node.replaceChildren(el("p", { class: "title", text: known ? error.title : "The request is not valid" }),
    ...(error.message && error.message !== error.title ? [el("p", { text: error.message })] : []),
    ...(known && error.advice ? [el("p", { class: "advice", text: error.advice })] : []));
}
