// The state of the connection: live, or how old the shown data is, and what to do about it.

import { pageOf } from "./api.js";
import { attr, el, text } from "./dom.js";
import { clock, duration } from "./format.js";

const NAMES = { connecting: "connecting", live: "live", lost: "connection lost, retrying", denied: "no access" };
const PATIENCE_MS = 1500; // a shorter loss is not shown

export class Connection {
  #state = "connecting";
  #detail = {};
  #receivedAt = 0;
  #lostAt = 0;

  constructor(model, retry) {
    this.model = model;
    this.chip = document.getElementById("connection").querySelector(".text");
    this.banner = document.getElementById("banner");
    this.banner.querySelector(".retry").addEventListener("click", retry);
  }

  /** A frame came over the stream: the shown data is current. */
  received() { this.#receivedAt = Date.now(); }

  show(state, detail) {
    if (state === "live") { this.#lostAt = 0; this.received(); }
    else if (state !== "connecting" && !this.#lostAt) this.#lostAt = Date.now();
    if (state === "connecting" && this.#lostAt) return; // repeated attempts are one loss
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
    const shown = this.#receivedAt ? `Data as of ${clock(this.#receivedAt / 1000)}, ${duration((Date.now() - this.#receivedAt) / 1000)} ago.` : "No data was received yet.";
    text(this.banner.querySelector(".what"), `${state === "denied" ? "No access" : "Connection lost, retrying"}: ${this.#detail.reason}. ${shown}`);
    this.#otherReplicas(this.banner.querySelector(".then"));
  }

  /** Links to the job's pages on the other replicas. */
  #otherReplicas(node) {
    const { name, replica: here } = this.model.job ?? {};
    const others = [...this.model.members.values()].filter((m) => m.role === "coordinator" && m.id !== here && /^https?:\/\//.test(m.url));
    const urls = others.map((m) => m.url).join(" ");
    if (node.dataset.urls === urls) return;
    node.dataset.urls = urls;
    node.replaceChildren(...(others.length ? ["Other replicas: ", ...others.flatMap((m, i) => [i ? ", " : "", el("a", { href: pageOf(name, m.url), text: m.id, rel: "noreferrer" })])] : []));
  }
}
