// Signing in: the one-time link in the address, and the dialog that explains it, takes a token, and signs out.

import { Problem, SIGN_IN, session } from "./api.js";
import { el, field, text } from "./dom.js";
import { clock } from "./format.js";

const LINK = /^#link=([\w-]+)$/;

export class Access {
  /** `changed()` is called when there is another session, or none. */
  constructor(dialog, changed) {
    this.dialog = dialog;
    this.changed = changed;
  }

  /** Uses the link in the address, if there is one, and takes it out of the address. Never throws. */
  async useLink() {
    const link = LINK.exec(location.hash)?.[1];
    if (!link) return;
    history.replaceState(null, "", location.pathname + location.search);
    try {
      await session.openWithLink(link);
      this.dialog.close();
    } catch (error) {
      // A session that this browser had before still counts.
      if (await session.get().catch(() => null)) return;
      this.explain(error.message);
    }
  }

  /** Says why there is no access, and what to type. */
  explain(why) {
    if (!this.dialog.open) this.#show(why, null);
  }

  /** Shows who is signed in. */
  async show() {
    const caller = await session.get().catch((error) => error);
    if (caller instanceof Problem) this.#show(caller.message, null);
    else this.#show(`Signed in as ${caller.name} (${caller.role})${caller.expires_at ? ` until ${clock(caller.expires_at)}` : ""}.`, caller);
  }

  #show(what, caller) {
    const error = el("p", { class: "problem", role: "alert" });
    const input = el("input", { type: "password", autocomplete: "off", spellcheck: "false" });
    const close = el("button", { type: "button", text: caller ? "Close" : "Go back", onclick: () => this.dialog.close() });
    const use = el("button", { type: "submit", class: "primary", text: "Use the token" });
    const signOut = el("button", { type: "button", text: "Sign out", onclick: () => this.#run(async () => {
      await session.end();
      location.reload(); // what is shown was for the one who signs out
    }, error) });
    const form = el("form", { novalidate: true }, el("h2", { id: "access-h", text: "Access" }), el("p", { class: "what", text: what }),
      ...(caller ? [] : [el("p", { class: "effect", text: SIGN_IN }), el("pre", { text: "elastic-rl dashboard" })]),
      field(caller ? "Use another token" : "Or use a token", input,
        "It opens a session and is not kept. A viewer's token reads; an operator's token changes things as well."),
      error, el("div", { class: "choices" }, close, ...(caller ? [signOut] : []), use));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const token = input.value.trim();
      if (token) this.#run(() => session.openWithToken(token), error);
      else input.focus();
    });
    this.dialog.replaceChildren(form);
    if (!this.dialog.open) this.dialog.showModal();
    (caller ? close : input).focus();
  }

  async #run(action, error) {
    text(error, "");
    try {
      await action();
      this.dialog.close();
      this.changed();
    } catch (problem) {
      text(error, problem.message);
    }
  }
}
