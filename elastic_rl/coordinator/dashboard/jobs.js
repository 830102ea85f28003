// The page of the cluster: it lists the jobs, and goes to the only one.

import { Access } from "./access.js";
import { jobs, pageOf } from "./api.js";
import { badge, el, keyed, since, text, tick } from "./dom.js";
import { plural, visible } from "./format.js";

const EVERY_MS = 5000;
const LEVEL = { failed: "bad", finished: "ok" };

const part = (id) => document.getElementById(id);
const sum = part("jobs").querySelector(".sum");
const list = part("jobs").querySelector(".list");
const access = new Access(part("access"), show);
let timer = 0;

function make(job) {
  return el("li", {}, el("div", { class: "line" }, el("strong", {}, el("a", { href: pageOf(job.name), text: job.name })),
    el("span"), el("span", { class: "message" }), el("time")));
}

function update(node, { status, health, message }) {
  const [, phase, steps, changed] = node.firstChild.children;
  if (health === "ok") {
    badge(phase, LEVEL[status?.phase] ?? (status ? "busy" : "idle"), status?.phase ?? "no run");
    text(steps, status?.steps ? `step ${status.step} of ${status.steps}` : "");
  } else {
    badge(phase, "bad", health);
    text(steps, visible(message));
  }
  since(changed, status?.updated_at);
}

async function show() {
  clearTimeout(timer);
  try {
    const found = await jobs();
    if (found.length === 1 && found[0].health !== "not-open") { // one that is not open has no page
      location.replace(pageOf(found[0].name));
      return;
    }
    keyed(list, found, (job) => job.name, make, update);
    text(sum, plural(found.length, "job"));
  } catch (problem) {
    if (problem.status === 401) {
      text(sum, "No access");
      access.explain(problem.message); // which calls this again when there is a session
      return;
    }
    text(sum, problem.message);
  }
  timer = setTimeout(show, EVERY_MS);
}

part("access-button").addEventListener("click", () => access.show());
addEventListener("hashchange", async () => {
  await access.useLink();
  show();
});
setInterval(tick, 1000);

await access.useLink();
show();
