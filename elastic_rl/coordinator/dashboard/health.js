// The verdict on the job, its firing alerts, and what was done about each. Pure: model and time are arguments.

import { missing } from "./engines.js";
import { duration, plural, visible } from "./format.js";
import { TRAINER_GROUPS, componentOf } from "./groups.js";
import { RUN_ENDED } from "./model.js";

const LONG_WAIT_S = 60;

const RANK = { error: 0, warning: 1, info: 2 };

export const firing = (model) => [...model.alerts.values()]
  .filter((a) => a.phase === "firing")
  .sort((a, b) => Boolean(a.silenced_by) - Boolean(b.silenced_by) || RANK[a.severity] - RANK[b.severity] || b.since - a.since);

/** {level: ok | warn | bad | idle, title, reasons}: what an operator reads first. */
export function verdict(model, now) {
  const { status } = model;
  const reasons = [];
  const add = (level, what) => reasons.push({ level, what });
  const alerts = firing(model);
  const serious = alerts.filter((a) => a.severity !== "info");
  // That the run waits is said below, with how long it has been waiting by now.
  const said = (a) => a.kind === "run.waiting" && status?.waiting_for && a.subject === status.waiting_kind;
  for (const a of serious.filter((x) => !x.silenced_by && !said(x)).slice(0, 4)) {
    add(a.severity === "error" ? "bad" : "warn", `${a.kind} ${a.subject}: ${a.message}`);
  }
  if (!model.job?.leader) add("bad", "There is no leader: running work continues, but no new decisions are made.");
  if (model.job && model.job.health !== "ok") add("bad", `The leader decides nothing about this job: ${visible(model.job.message)}`);
  if (status?.phase === "failed") add("bad", `The run has failed: ${status.message || "no reason is known"}`);
  const ended = status && RUN_ENDED.includes(status.phase);
  const waits = !ended && status?.waiting_for;
  const waited = waits && status.waiting_since ? Math.max(0, now - status.waiting_since) : 0;
  const waitsLong = waits && (waited >= LONG_WAIT_S || serious.some(said));
  const waiting = () => `Waiting for ${duration(waited)} for ${visible(status.waiting_for)}`;
  if (!ended) {
    for (const what of shortPools(model)) add("warn", what);
    const quarantined = [...model.engines.values()].filter((e) => e.state === "quarantined");
    if (quarantined.length) add("warn", `${plural(quarantined.length, "engine is", "engines are")} quarantined.`);
    const sinceProgress = status ? now - status.updated_at : 0;
    const usual = Math.max(60, 10 * model.stepSeconds);
    if (waitsLong) add("warn", waiting());
    else if (!waits && status?.updated_at && sinceProgress > usual) {
      add("warn", `No progress for ${duration(sinceProgress)}; the last report was step ${status.step} (${status.phase}).`);
    }
  }
  const level = reasons.some((r) => r.level === "bad") ? "bad" : reasons.length ? "warn" : ended || !status ? "idle" : "ok";
  if (waits && !waitsLong) reasons.push({ level: "idle", what: waiting() });
  const silenced = serious.filter((a) => a.silenced_by).length;
  if (silenced) reasons.push({ level: "idle", what: `${plural(silenced, "alert is", "alerts are")} silenced.` });
  return { level, title: title(level, model, waitsLong), reasons };
}

function title(level, model, waitsLong) {
  const { status } = model;
  const active = model.active().length;
  const operations = active ? ` ${plural(active, "operation")} running.` : "";
  if (level === "bad") return `Something is broken.${operations || " No operation is running."}`;
  if (level === "warn" && waitsLong) return `The run waits.${operations}`;
  if (level === "warn" && status?.phase === "finished") return `The run finished after ${plural(status.step, "step")}, with warnings.`;
  if (level === "warn" && status?.phase === "stopped") return `The run was ${status.message || "stopped"}; there are warnings.`;
  if (level === "warn") return `The job runs with warnings.${operations}`;
  if (!status) return "No run yet. The cluster is up.";
  if (status.phase === "finished") return `The run finished after ${plural(status.step, "step")}.`;
  if (status.phase === "stopped") return `The run was ${status.message || "stopped"}.`;
  return `All is well.${operations}`;
}

function* shortPools(model) {
  const pools = [...model.pools.values()].filter((p) => missing(p) > 0);
  if (pools.length > 3) yield `${pools.length} pools have fewer engines than desired.`;
  else {
    for (const p of pools) {
      const starting = p.starting ? `, ${p.starting} starting` : "";
      yield `Pool ${p.name} has ${p.ready} of ${p.desired} engines ready${starting}.`;
    }
  }
}

const mentions = (message, subject) =>
  message.split(/[\s,:;()]+/).some((word) => word.replace(/\.$/, "") === subject);

/** Responses to an alert: later events about its subject, and operations on it; the newest first. */
export function responses(alert, model) {
  const found = [];
  const group = componentOf(alert);
  for (const e of model.events.values()) {
    if (e.at < alert.since - 1 || (e.severity === "error" && e.kind === alert.kind)) continue;
    const same = e.subject === alert.subject || mentions(e.message, alert.subject)
      || (group === "trainer" && (TRAINER_GROUPS.has(componentOf(e)) || componentOf(e) === "run"));
    if (same && e.kind !== alert.kind) found.push({ at: e.at, what: e.message || e.kind, id: e.id });
  }
  for (const o of model.operations.values()) {
    if (o.created_at >= alert.since - 1 && (o.target === group || o.target.endsWith(`/${alert.subject}`))) {
      found.push({ at: o.created_at, what: `${describe(o)}: ${o.state}`, id: o.id });
    }
  }
  return found.sort((a, b) => b.at - a.at).slice(0, 3);
}

/** An operation in words. */
export function describe(o) {
  const name = o.target.slice(o.target.indexOf("/") + 1);
  if (o.kind === "scale") return `Scale ${name} to ${o.params?.desired ?? "?"}`;
  if (o.kind === "drain") return `Drain ${name}`;
  if (o.kind === "register") return `Register engine ${name}`;
  if (o.target === "job") return "Restart the whole compute plane";
  if (o.target === "driver") return "Restart the driver";
  if (TRAINER_GROUPS.has(o.target)) return `Restart the group ${o.target}`;
  return `Restart ${o.target.startsWith("roles/") ? "role " : "engine "}${name}`;
}
