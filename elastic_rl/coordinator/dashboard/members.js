// The processes of the job.

import { buttons, plain, time } from "./columns.js";
import { attr, text } from "./dom.js";
import { plural } from "./format.js";
import { TRAINER_GROUPS } from "./groups.js";
import { Listing } from "./listing.js";

const isRestartable = (role) => !["coordinator", "dcs", "engine"].includes(role);
/** Whether the target of a restart is the role itself. */
const isTarget = (role) => role === "driver" || TRAINER_GROUPS.has(role);

export class Members {
  constructor(section, actions) {
    this.sum = section.querySelector(".sum");
    this.leader = "";
    this.listing = new Listing(section, {
      noun: "processes", cap: 10, key: (m) => `${m.role}/${m.id}`, empty: "No process is registered.",
      words: (m) => `${m.role} ${m.id} ${m.host} ${m.phase}`,
      columns: [
        plain("Process", (m) => (m.id === m.role ? m.role : `${m.role} ${m.id}`)),
        { head: "Phase", fill: (cell, m) => {
          text(cell, m.role === "coordinator" ? (m.id === this.leader ? "leader" : "follower")
            : [m.phase, m.step ? `step ${m.step}` : ""].filter(Boolean).join(", ") || "–");
          attr(cell, "class", m.id === this.leader && m.role === "coordinator" ? "leads" : null);
        } },
        time("Progress", (m) => m.progress_at),
        plain("Host", (m) => m.host, "minor"),
        plain("Pid", (m) => m.pid, "num minor"),
        buttons([{ label: () => "Restart…", enabled: (m) => isRestartable(m.role),
          name: (m) => `Restart ${isTarget(m.role) ? `the ${m.role}` : `role ${m.role}`}`,
          run: (m) => actions.restart(isTarget(m.role) ? m.role : `roles/${m.role}`) }]),
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
