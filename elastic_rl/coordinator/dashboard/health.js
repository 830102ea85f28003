// Is it fine, what is broken, and what was done about it. Pure: the model and the time come in.

import { duration, plural } from "./format.js";
import { RUN_OVER } from "./model.js";

const RANK = { error: 0, warning: 1, info: 2 };

export const firing = (model) => [...model.alerts.values()]
  .filter((a) => a.phase === "firing")
  .sort((a, b) => Boolean(a.silenced_by) - Boolean(b.silenced_by) || RANK[a.severity] - RANK[b.severity] || b.since - a.since);

/** {level: ok | warn | bad | idle, title, reasons}: the first thing that an operator reads. */
export function verdict(model, now) {
  const { status } = model;
  const reasons = [];
  const add = (level, what) => reasons.push({ level, what });
  const alerts = firing(model);
  const loud = alerts.filter((a) => a.severity !== "info");
  for (const a of loud.filter((x) => !x.silenced_by).slice(0, 4)) {
    add(a.severity === "error" ? "bad" : "warn", `${a.kind} ${a.subject}: ${a.message}`);
  }
  if (!model.job?.leader) add("bad", "No coordinator leads: what runs goes on, but nothing new is decided.");
  if (status?.phase === "failed") add("bad", `The run has failed: ${status.message || "no reason was given"}`);
  const over = status && RUN_OVER.includes(status.phase);
  if (!over) {
    for (const what of short(model)) add("warn", what);
    const torn = [...model.engines.values()].filter((e) => e.state === "quarantined");
    if (torn.length) add("warn", `${plural(torn.length, "engine is", "engines are")} quarantined.`);
    const quiet = status ? now - status.updated_at : 0;
    const usual = Math.max(60, 10 * model.stepSeconds);
    if (status?.updated_at && quiet > usual) {
      add("warn", `No progress for ${duration(quiet)}; the last word was step ${status.step} (${status.phase}).`);
    }
  }
  const level = reasons.some((r) => r.level === "bad") ? "bad" : reasons.length ? "warn" : over || !status ? "idle" : "ok";
  const hushed = loud.filter((a) => a.silenced_by).length;
  if (hushed) reasons.push({ level: "idle", what: `${plural(hushed, "alert is", "alerts are")} silenced.` });
  return { level, title: title(level, model), reasons };
}

function title(level, model) {
  const { status } = model;
  const active = model.active().length;
  const doing = active ? ` ${plural(active, "operation")} under way.` : "";
  if (level === "bad") return `Something is broken.${doing || " Nothing is under way."}`;
  if (level === "warn") return `It runs, but not all is well.${doing}`;
  if (!status) return "No run yet. The cluster is up.";
  if (status.phase === "finished") return `The run has finished after ${plural(status.step, "step")}.`;
  return `All is well.${doing}`;
}

function* short(model) {
  const pools = [...model.pools.values()].filter((p) => p.ready < p.desired);
  if (pools.length > 3) yield `${pools.length} pools have fewer engines than wanted.`;
  else {
    for (const p of pools) {
      const coming = p.starting ? `, ${p.starting} starting` : "";
      yield `Pool ${p.name} has ${p.ready} of ${p.desired} engines ready${coming}.`;
    }
  }
}

const mentions = (message, subject) =>
  message.split(/[\s,:;()]+/).some((word) => word.replace(/\.$/, "") === subject);

/** What followed an alert: events about its subject since, and operations on it; the newest first. */
export function responses(alert, model) {
  const found = [];
  const group = alert.kind.split(".")[0];
  for (const e of model.events.values()) {
    if (e.at < alert.since - 1 || (e.severity === "error" && e.kind === alert.kind)) continue;
    const same = e.subject === alert.subject || mentions(e.message, alert.subject)
      || (group === "trainer" && /^(trainer|run)\./.test(e.kind));
    if (same && e.kind !== alert.kind) found.push({ at: e.at, what: e.message || e.kind, id: e.id });
  }
  for (const o of model.operations.values()) {
    if (o.created_at >= alert.since - 1 && (o.target === group || o.target.endsWith(`/${alert.subject}`))) {
      found.push({ at: o.created_at, what: `${describe(o)}: ${o.state}`, id: o.id });
    }
  }
  return found.sort((a, b) => b.at - a.at).slice(0, 3);
}

/** What an operation does, in words. */
export function describe(o) {
  const name = o.target.slice(o.target.indexOf("/") + 1);
  if (o.kind === "scale") return `Scale ${name} to ${o.params?.desired ?? "?"}`;
  if (o.kind === "drain") return `Drain ${name}`;
  if (o.kind === "register") return `Register engine ${name}`;
  if (o.target === "job") return "Restart the whole compute plane";
  if (o.target === "trainer") return "Restart the trainer";
  return `Restart ${o.target.startsWith("roles/") ? "role " : "engine "}${name}`;
}
