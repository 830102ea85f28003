// Wires the page: the stream feeds the model, and what has changed is drawn, at most some times a second.

import { Access } from "./access.js";
import { Actions } from "./actions.js";
import { Alerts } from "./alerts.js";
import { openChanges } from "./api.js";
import { Connection } from "./connection.js";
import { tick } from "./dom.js";
import { Engines, Pools } from "./engines.js";
import { Events } from "./events.js";
import { setClock } from "./format.js";
import { Members } from "./members.js";
import { Model } from "./model.js";
import { Notices } from "./notices.js";
import { Operations } from "./operations.js";
import { Samples } from "./samples.js";
import { StepMetrics } from "./step_metrics.js";
import { Stream } from "./stream.js";
import { Summary } from "./summary.js";
import { Versions } from "./versions.js";

const DRAW_EVERY_MS = 250;

const part = (id) => document.getElementById(id);
const model = new Model();
const notices = new Notices(part("notices"), model);
const actions = new Actions(model, notices);
notices.cancel = (operation) => actions.cancel(operation);

// Each view with the kinds of records that it shows.
const views = [
  [new Summary(part("summary")), ["time", "job", "alerts", "pools", "engines", "operations", "steps", "versions"]],
  [new Alerts(part("alerts"), actions), ["alerts", "events", "operations"]],
  [new Operations(part("operations"), actions), ["operations"]],
  [notices, ["operations"]],
  [new StepMetrics(part("step-metrics")), ["steps", "events"]],
  [new Samples(part("samples")), ["steps", "time"]],
  [new Pools(part("pools"), actions), ["pools"]],
  [new Engines(part("engines"), actions), ["engines", "versions", "job"]],
  [new Events(part("events")), ["events"]],
  [new Versions(part("versions")), ["versions", "job"]],
  [new Members(part("members"), actions), ["members", "job"]],
];

let scheduled = 0;
let drawnAt = 0;

function draw() {
  scheduled = 0;
  drawnAt = performance.now();
  const dirty = new Set(model.dirty);
  model.dirty.clear();
  for (const [view, kinds] of views) if (kinds.some((kind) => dirty.has(kind))) view.render(model);
}

function scheduleDraw() {
  if (scheduled || !model.known || !model.dirty.size) return;
  scheduled = setTimeout(() => requestAnimationFrame(draw), Math.max(0, drawnAt + DRAW_EVERY_MS - performance.now()));
}

const stream = new Stream(async (headers, signal) => {
  const answer = await openChanges(headers, signal);
  setClock(answer.headers.get("date"));
  return answer;
}, {
  onframe({ event, data }) {
    if (event === "snapshot") model.snapshot(JSON.parse(data));
    else if (event === "change") model.change(JSON.parse(data));
    connection.received();
    scheduleDraw();
  },
  onstate(state, detail) {
    connection.show(state, detail);
    if (state === "denied") access.explain(detail.reason);
  },
});

const connection = new Connection(model, () => stream.retry());
const access = new Access(part("access"), () => stream.retry({ fresh: true }));

part("access-button").addEventListener("click", () => access.show());
part("restart").addEventListener("click", () => actions.restart());
addEventListener("online", () => stream.retry());
addEventListener("hashchange", async () => {
  await access.useLink();
  stream.retry({ fresh: true });
});
setInterval(() => {
  tick();
  connection.tick();
  model.dirty.add("time"); // "no progress for" grows without a change
  scheduleDraw();
}, 1000);

await access.useLink();
stream.run();
