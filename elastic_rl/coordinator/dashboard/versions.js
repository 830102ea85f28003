// Versions of the checkpoint service.

import { plain, time } from "./columns.js";
import { badge, el, text } from "./dom.js";
import { bytes } from "./format.js";
import { Listing } from "./listing.js";

const LEVEL = { committed: "ok", staging: "busy", releasing: "idle", gone: "idle", aborted: "warn" };

export class Versions {
  constructor(section) {
    this.sum = section.querySelector(".sum");
    this.listing = new Listing(section, {
      noun: "versions", cap: 8, key: (v) => `${v.stream}/${v.number}`, empty: "No version was published yet.",
      columns: [
        plain("Stream", (v) => v.stream),
        plain("Number", (v) => v.number, "num"),
        { head: "State", fill: (cell, v) => {
          if (!cell.firstChild) cell.append(el("span"));
          badge(cell.firstChild, LEVEL[v.state] ?? "idle", v.state);
        } },
        plain("Step", (v) => v.meta?.step ?? "–", "num minor"),
        plain("Size", (v) => bytes(v.nbytes), "num minor"),
        plain("Sources", (v) => v.sources?.join(", ") || "–", "minor"),
        time("Committed", (v) => v.committed_at || v.created_at),
      ] });
  }

  render(model) {
    const versions = [...model.versions.values()].sort((a, b) => b.created_at - a.created_at || b.number - a.number);
    text(this.sum, model.head ? `policy head: ${model.head}` : "");
    this.listing.render(versions);
  }
}
