// Versions of the checkpoint service, and the processes of the job.

import { attr, badge, el, since, text } from "./dom.js";
import { bytes, plural } from "./format.js";
import { buttons, plain } from "./fleet.js";
import { Listing } from "./listing.js";

const LEVEL = { committed: "ok", staging: "busy", releasing: "idle", gone: "idle", aborted: "warn" };

const time = (head, of, name = "") => ({ head, class: name, fill: (cell, item) => {
  if (!cell.firstChild) cell.append(el("time"));
  since(cell.firstChild, of(item));
} });

export class Versions {
  constructor(section) {
    this.sum = section.querySelector(".sum");
    this.listing = new Listing(section, {
      noun: "versions", cap: 8, key: (v) => `${v.stream}/${v.number}`, empty: "Nothing was published yet.",
      columns: [
        plain("Stream", (v) => v.stream),
        plain("Number", (v) => v.number, "num"),
        { head: "State", fill: (cell, v) => {
          if (!cell.firstChild) cell.append(el("span"));
          badge(cell.firstChild, LEVEL[v.state] ?? "idle", v.state);
        } },
        plain("Step", (v) => v.meta?.step ?? "–", "num"),
        plain("Size", (v) => bytes(v.nbytes), "num"),
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

const RESTARTABLE = (role) => !["coordinator", "dcs", "engine", "driver"].includes(role);

export class Members {
  constructor(section, actions) {
    this.sum = section.querySelector(".sum");
    this.leader = "";
    this.listing = new Listing(section, {
      noun: "processes", cap: 10, key: (m) => `${m.role}/${m.id}`, empty: "No process is registered.",
      words: (m) => `${m.role} ${m.id} ${m.host} ${m.phase}`,
      columns: [
        plain("Process", (m) => (m.id === m.role ? m.role : `${m.role} ${m.id}`)),
        { head: "Does", fill: (cell, m) => {
          text(cell, m.role === "coordinator" ? (m.id === this.leader ? "leads" : "follows")
            : [m.phase, m.step ? `step ${m.step}` : ""].filter(Boolean).join(", ") || "–");
          attr(cell, "class", m.id === this.leader && m.role === "coordinator" ? "leads" : null);
        } },
        time("Progress", (m) => m.progress_at),
        plain("Host", (m) => m.host, "minor"),
        plain("Pid", (m) => m.pid, "num minor"),
        buttons([["Restart…", (m) => `Restart ${m.role === "trainer" ? "the trainer" : `role ${m.role}`}`,
          (m) => actions.restart(m.role === "trainer" ? "trainer" : `roles/${m.role}`),
          (m) => RESTARTABLE(m.role)]]),
      ] });
  }

  render(model) {
    this.leader = model.job?.leader?.replica ?? "";
    const members = [...model.members.values()]
      .sort((a, b) => (a.role === "engine") - (b.role === "engine") || a.role.localeCompare(b.role) || a.id.localeCompare(b.id));
    text(this.sum, plural(members.length, "process", "processes"));
    this.listing.render(members);
  }
}
