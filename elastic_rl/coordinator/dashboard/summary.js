// The top of the page: the verdict with its reasons, and the run's numbers.

import { el, keyed, since, text, attr } from "./dom.js";
import { clock, duration, now, number, plural, seconds, visible } from "./format.js";
import { verdict } from "./health.js";
import { RUN_ENDED } from "./model.js";

const EVAL = { reward: "Eval reward", exact_match: "Eval exact match" };
const SIGN = { ok: "", idle: "", warn: "(!) ", bad: "(!!) " };

export class Summary {
  constructor(section) {
    this.section = section;
    this.title = section.querySelector("#verdict");
    this.reasons = section.querySelector("#reasons");
    this.tiles = new Map();
    this.grid = section.querySelector("#tiles");
    for (const [id, name] of [["step", "Step"], ["reward", "Reward"], ["eval_accuracy", "Eval"],
      ["throughput", "Throughput"], ["step-time", "Step time"], ["staleness", "Staleness"], ["version", "Version"],
      ["leader", "Leader"]]) {
      const value = el("span", { class: "value" });
      const note = el("span", { class: "note" });
      const title = el("dt", { text: name });
      this.tiles.set(id, { value, note, title });
      this.grid.append(el("div", { id: `tile-${id}` }, title, el("dd", {}, value, note)));
    }
    this.progress = el("progress", { "aria-label": "Steps done", max: "1", value: "0" });
    this.tiles.get("step").note.before(this.progress);
    this.changed = el("time");
    this.eta = el("span");
    this.tiles.get("step").note.append(this.eta, this.changed);
  }

  render(model) {
    const found = verdict(model, now());
    attr(this.section, "data-level", found.level);
    text(this.title, found.title);
    keyed(this.reasons, found.reasons, (r) => r.what, () => el("li"), (node, r) => {
      attr(node, "class", r.level);
      text(node, r.what);
    });
    const job = model.job?.name;
    text(document.getElementById("job"), job ?? "elastic-rl");
    document.title = `${SIGN[found.level]}${job ?? "elastic-rl"}${job ? " · elastic-rl" : ""}`;
    this.#numbers(model);
  }

  #tile(id, value, note = "") {
    const tile = this.tiles.get(id);
    text(tile.value, value);
    if (id !== "step") text(tile.note, note);
  }

  #numbers(model) {
    const { status, job } = model;
    const points = model.points();
    const last = points.at(-1);
    const sft = status?.phase === "sft";
    const [step, steps] = sft ? [status.sft_step, status.sft_steps] : [status?.step, status?.steps];
    this.#tile("step", status ? `${sft ? "SFT " : ""}${step}${steps ? ` / ${steps}` : ""}` : "–");
    attr(this.progress, "max", steps || 1);
    attr(this.progress, "value", step ?? 0);
    const left = status?.phase === "rl" ? (status.steps - status.step) * model.stepSeconds : 0;
    const doing = [status?.phase, RUN_ENDED.includes(status?.phase) ? "" : visible(status?.stage)].filter(Boolean).join(": ");
    text(this.eta, [doing, left > 0 ? `${duration(left)} left at most` : ""].filter(Boolean).join(" · ")
      + (status ? " · " : "no run"));
    if (status) since(this.changed, status.updated_at);
    this.#tile("reward", number(status?.reward, 3), trend(points.map((p) => p.reward)));
    const evaluated = points.filter((p) => p.eval_accuracy !== null && p.eval_accuracy !== undefined);
    text(this.tiles.get("eval_accuracy").title, EVAL[status?.eval_measure] ?? "Eval");
    const from = evaluated.length ? status?.eval_start ?? null : null;
    this.#tile("eval_accuracy", number(status?.eval_accuracy, 3),
      [from === null ? "" : `from ${number(from, 3)} at step 0`, evaluated.length ? `after step ${evaluated.at(-1).step}` : "", ...Object.entries(status?.eval_sets ?? {})
        .slice(0, 3).map(([name, accuracy]) => `${visible(name)} ${number(accuracy, 3)}`)].filter(Boolean).join(" · "));
    const rates = points.slice(-20).filter((p) => p.seconds?.total > 0).map((p) => p.samples / p.seconds.total);
    this.#tile("throughput", rates.length ? number(mean(rates)) : "–", "samples/s, last 20 steps");
    this.#tile("step-time", seconds(model.stepSeconds), last ? slowest(last) : "");
    this.#tile("staleness", status ? String(status.staleness) : "–", "versions, oldest sample");
    this.#tile("version", String(model.head || "–"), lagging(model));
    const leader = job?.leader?.replica;
    this.#tile("leader", leader ?? "none", `epoch ${job?.epoch ?? "–"}${job?.replica ? ` · this page: ${job.replica}` : ""}`);
    attr(this.tiles.get("leader").value, "class", leader ? "value" : "value bad");
    const startedAt = status?.started_at;
    attr(this.grid, "title", startedAt ? `started ${clock(startedAt)}${RUN_ENDED.includes(status.phase) ? "" : ` (${duration(now() - startedAt)})`}` : null);
  }
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function trend(values) {
  if (values.length < 20) return "";
  const change = mean(values.slice(-10)) - mean(values.slice(-20, -10));
  return `${change >= 0 ? "+" : "−"}${number(Math.abs(change), 3)} over 10 steps`;
}

function slowest(point) {
  const parts = Object.entries(point.seconds ?? {}).filter(([name]) => name !== "total").sort((a, b) => b[1] - a[1]);
  return parts.length ? `mostly ${parts[0][0].replace("_", " ")}: ${seconds(parts[0][1])}` : "";
}

function lagging(model) {
  const ready = [...model.engines.values()].filter((e) => e.state === "ready");
  if (!ready.length) return "no engine is ready";
  const behind = ready.filter((e) => e.version < model.head).length;
  return behind ? `${plural(behind, "engine")} of ${ready.length} behind` : `all ${plural(ready.length, "engine")} have it`;
}
