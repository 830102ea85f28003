// Whether what is shown is true now: live, or of when, and what can be done about it.

import { attr, el, text } from "./dom.js";
import { clock, duration } from "./format.js";

const NAMES = { connecting: "connecting", live: "live", lost: "connection lost, trying again", denied: "no access" };
const PATIENCE_MS = 1500; // a connection that comes back sooner is no news

export class Connection {
  #state = "connecting";
  #detail = {};
  #heardAt = 0;
  #lostAt = 0;

  constructor(model, retry) {
    this.model = model;
    this.chip = document.getElementById("connection").querySelector(".text");
    this.banner = document.getElementById("banner");
    this.banner.querySelector(".again").addEventListener("click", retry);
  }

  /** Something came over the stream: what is shown is of now. */
  heard() { this.#heardAt = Date.now(); }

  show(state, detail) {
    if (state === "live") { this.#lostAt = 0; this.heard(); }
    else if (state !== "connecting" && !this.#lostAt) this.#lostAt = Date.now();
    if (state === "connecting" && this.#lostAt) return; // one try after the other is one loss
    this.#state = state;
    this.#detail = detail;
    this.tick();
  }

  tick() {
    const state = this.#state;
    attr(document.body, "data-connection", state);
    text(this.chip, NAMES[state]);
    const stale = this.#lostAt && (state === "denied" || Date.now() - this.#lostAt > PATIENCE_MS);
    attr(document.body, "data-stale", stale ? "" : null);
    this.banner.hidden = !stale;
    if (!stale) return;
    const shown = this.#heardAt ? `What you see is of ${clock(this.#heardAt / 1000)}, ${duration((Date.now() - this.#heardAt) / 1000)} ago.` : "Nothing was received yet.";
    text(this.banner.querySelector(".what"), `${state === "denied" ? "No access" : "Connection lost, trying again"}: ${this.#detail.reason}. ${shown}`);
    this.#elsewhere(this.banner.querySelector(".then"));
  }

  /** Other replicas show the same job. */
  #elsewhere(node) {
    const here = this.model.job?.replica;
    const others = [...this.model.members.values()].filter((m) => m.role === "coordinator" && m.id !== here && /^https?:\/\//.test(m.url));
    const said = others.map((m) => m.url).join(" ");
    if (node.dataset.said === said) return;
    node.dataset.said = said;
    node.replaceChildren(...(others.length ? ["Other replicas show the same: ", ...others.flatMap((m, i) => [i ? ", " : "", el("a", { href: m.url, text: m.id, rel: "noreferrer" })])] : []));
  }
}
