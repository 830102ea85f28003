// Pools and engines.

import { buttons, plain, time } from "./columns.js";
import { attr, badge, el, text } from "./dom.js";
import { plural, seconds } from "./format.js";
import { Listing } from "./listing.js";

const ORDER = { quarantined: 0, dead: 1, draining: 2, starting: 3, syncing: 4, released: 5, ready: 6 };
const LEVEL = { ready: "ok", released: "idle", syncing: "busy", starting: "busy", draining: "warn", quarantined: "bad",
  dead: "bad" };

const leaving = (e) => (e.external ? "Deregister" : "Drain");
const canLeave = (e) => ["starting", "syncing", "ready", "released"].includes(e.state);

export class Pools {
  constructor(section, actions) {
    this.sum = section.querySelector(".sum");
    this.listing = new Listing(section, {
      noun: "pools", cap: 8, key: (p) => p.name, words: (p) => p.name, empty: "There is no pool yet.",
      columns: [
        plain("Pool", (p) => p.name),
        { head: "Engines", class: "fill", fill: gauge },
        plain("Ready", (p) => (p.released ? `${p.ready} + ${p.released} released` : p.ready), "num"),
        plain("Starting", (p) => p.starting, "num"),
        plain("Draining", (p) => p.draining, "num"),
        plain("Desired", (p) => p.desired, "num"),
        buttons([{ label: () => "Scale…", name: (p) => `Scale pool ${p.name}`, run: (p) => actions.scale(p) }]),
      ] });
  }

  render(model) {
    const pools = [...model.pools.values()]
      .sort((a, b) => (missing(b) > 0) - (missing(a) > 0) || a.name.localeCompare(b.name));
    const ready = pools.reduce((n, p) => n + p.ready, 0);
    const desired = pools.reduce((n, p) => n + p.desired, 0);
    text(this.sum, pools.length > 1 ? `${pools.length} pools, ${ready} of ${plural(desired, "engine")} ready` : "");
    this.listing.render(pools);
  }
}

/** Engines that a pool lacks; a released one waits for the trainer's phase to end, as it should. */
export const missing = (p) => p.desired - p.ready - p.released;

function gauge(cell, p) {
  if (!cell.firstChild) cell.append(el("div", { class: "gauge", "aria-hidden": "true" }, el("i"), el("i"), el("i"), el("i")));
  const serving = p.ready + p.released;
  const whole = Math.max(p.desired, serving + p.starting) + p.draining || 1;
  [serving, p.starting, p.draining, Math.max(0, missing(p) - p.starting)].forEach((n, i) => {
    const width = `${(100 * n) / whole}%`;
    const part = cell.firstChild.children[i];
    if (part.style.width !== width) part.style.width = width;
  });
}

export class Engines {
  constructor(section, actions) {
    this.sum = section.querySelector(".sum");
    this.head = 0;
    this.listing = new Listing(section, {
      noun: "engines", cap: 12, key: (e) => e.id, empty: "There is no engine yet.",
      words: (e) => `${e.id} ${e.pool} ${e.state} ${e.host} v${e.version}`,
      columns: [
        plain("Engine", (e) => (e.external ? `${e.id} (external)` : e.id)),
        { head: "State", fill: (cell, e) => {
          if (!cell.firstChild) cell.append(el("span"));
          badge(cell.firstChild, LEVEL[e.state] ?? "idle", e.state);
          attr(cell, "title", e.reason || null);
        } },
        plain("Version", (e) => (e.applying ? `${e.version || "–"} → ${e.applying}` : e.version || "–"), "num"),
        { head: "Lag", class: "num", fill: (cell, e) => {
          const lag = e.version ? this.head - e.version : null;
          text(cell, lag === null ? "–" : Math.max(0, lag));
          attr(cell, "class", lag > 1 ? "num late" : "num");
        } },
        plain("Load", (e) => (e.waiting ? `${e.running} + ${e.waiting}` : e.running), "num minor"),
        plain("Pull + apply", (e) => seconds(e.pull_apply_s), "num"),
        plain("Pool", (e) => e.pool, "minor"),
        time("Changed", (e) => e.updated_at, "minor"),
        buttons([
          { label: (e) => `${leaving(e)}…`, name: (e) => `${leaving(e)} engine ${e.id}`, enabled: canLeave,
            run: (e) => (e.external ? actions.deregister(e) : actions.drain(e)) },
          { label: () => "Restart…", name: (e) => `Restart engine ${e.id}`, run: (e) => actions.restart(`engines/${e.id}`),
            enabled: (e) => e.state !== "dead" },
        ]),
      ] });
  }

  render(model) {
    this.head = model.head;
    const engines = [...model.engines.values()]
      .sort((a, b) => ORDER[a.state] - ORDER[b.state] || a.version - b.version || a.id.localeCompare(b.id));
    const counts = new Map();
    for (const e of engines) counts.set(e.state, (counts.get(e.state) ?? 0) + 1);
    text(this.sum, [...counts].map(([state, n]) => `${n} ${state}`).join(", "));
    this.listing.render(engines);
  }
}
