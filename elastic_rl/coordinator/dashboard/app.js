// Wires the page: the stream feeds the model, and what has changed is drawn, at most some times a second.

import { Actions } from "./actions.js";
import { Alerts } from "./alerts.js";
import { openChanges, token } from "./api.js";
import { Members, Versions } from "./catalog.js";
import { Connection } from "./connection.js";
import { Curves } from "./curves.js";
import { askToken } from "./dialogs.js";
import { tick } from "./dom.js";
import { Events } from "./events.js";
import { Engines, Pools } from "./fleet.js";
import { setClock } from "./format.js";
import { Model } from "./model.js";
import { Notices } from "./notices.js";
import { Operations } from "./operations.js";
import { State } from "./state.js";
import { Stream } from "./stream.js";

const DRAW_EVERY_MS = 250;

const part = (id) => document.getElementById(id);
const model = new Model();
const notices = new Notices(part("notices"), model);
const actions = new Actions(model, notices);
notices.cancel = (operation) => actions.cancel(operation);

// Each view with the kinds of records that it shows.
const views = [
  [new State(part("state")), ["time", "job", "alerts", "pools", "engines", "operations", "steps", "versions"]],
  [new Alerts(part("alerts"), actions), ["alerts", "events", "operations"]],
  [new Operations(part("operations"), actions), ["operations"]],
  [notices, ["operations"]],
  [new Curves(part("curves")), ["steps", "events"]],
  [new Pools(part("pools"), actions), ["pools"]],
  [new Engines(part("engines"), actions), ["engines", "versions", "job"]],
  [new Events(part("events")), ["events"]],
  [new Versions(part("versions")), ["versions", "job"]],
  [new Members(part("members"), actions), ["members", "job"]],
];

let planned = 0;
let drawnAt = 0;

function draw() {
  planned = 0;
  drawnAt = performance.now();
  const dirty = new Set(model.dirty);
  model.dirty.clear();
  for (const [view, kinds] of views) if (kinds.some((kind) => dirty.has(kind))) view.render(model);
}

function plan() {
  if (planned || !model.known || !model.dirty.size) return;
  planned = setTimeout(() => requestAnimationFrame(draw), Math.max(0, drawnAt + DRAW_EVERY_MS - performance.now()));
}

const stream = new Stream(async (headers, signal) => {
  const answer = await openChanges(headers, signal);
  setClock(answer.headers.get("date"));
  return answer;
}, {
  onframe({ event, data }) {
    if (event === "snapshot") model.snapshot(JSON.parse(data));
    else if (event === "change") model.change(JSON.parse(data));
    connection.heard();
    plan();
  },
  onstate(state, detail) {
    connection.show(state, detail);
    if (state === "denied") access(token.get() ? `${detail.reason}. Give another token.` : "This replica wants a token.");
  },
});

const connection = new Connection(model, () => stream.retry());
const access = (why) => askToken(why, () => stream.retry({ fresh: true }));

part("access").addEventListener("click", () => access(token.get() ? "A token is in use." : "No token is in use."));
part("restart").addEventListener("click", () => actions.restart());
addEventListener("online", () => stream.retry());
setInterval(() => {
  tick();
  connection.tick();
  model.dirty.add("time"); // "no progress for" grows without a change
  plan();
}, 1000);

stream.run();
