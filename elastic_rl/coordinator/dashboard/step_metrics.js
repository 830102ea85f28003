// The run's step metrics as charts in groups, with the faults marked in them.

import { Chart } from "./charts.js";
import { el } from "./dom.js";
import { number } from "./format.js";

const of = (name) => (p) => p.update?.[name];
const rate = (name) => (p) => p.throughput?.[name];
const percent = (value) => (value === undefined || value === null ? value : 100 * value);
const lengths = (p) => p.response_tokens?.mean > 0;
const MOST_OWN = 16; // charts of what an algorithm of the user's own reports

// Charts with ``has`` are shown once a step has such a value; those without are always there.
const update = (name, title, more = {}) => ({ id: name.replaceAll("_", "-"), title, of: of(name),
  has: (p) => of(name)(p) !== undefined, ...more });
const several = (names) => (p) => Object.fromEntries(Object.entries(names).map(([title, name]) => [title, of(name)(p)])
  .filter(([, value]) => value !== undefined));
const GROUPS = [
  { id: "learning", title: "Learning", charts: [
    { id: "reward", title: "Reward", smooth: true, digits: 3, of: (p) => p.reward },
    { id: "reward-parts", title: "Reward, by part", digits: 3, lines: (p) => p.reward_parts ?? {},
      has: (p) => Object.keys(p.reward_parts ?? {}).length > 1, of: (p) => p.reward },
    { id: "eval_accuracy", title: "Eval reward", low: 0, high: 1, digits: 3, of: (p) => p.eval_accuracy,
      start: (status) => status?.eval_start },
    { id: "response-length", title: "Length", unit: "tokens", low: 0, smooth: true, has: lengths,
      of: (p) => p.response_tokens?.mean, note: (p) => `max ${number(p.response_tokens?.max)}` },
    { id: "truncated", title: "Truncated", unit: "%", low: 0, digits: 1, has: lengths,
      of: (p) => (lengths(p) ? 100 * p.truncated : null) },
  ] },
  { id: "update", title: "Policy update", charts: [
    update("kl", "KL to sampler", { unit: "nats", low: 0 }),
    update("kl_reference", "KL to reference", { unit: "nats", low: 0,
      note: (p) => (of("reference_step")(p) ? `of step ${of("reference_step")(p)}` : "") }),
    update("kl_teacher", "KL to teacher", { unit: "nats" }),
    update("kl_teacher_top", "KL to teacher, top tokens", { unit: "nats", low: 0 }),
    update("teacher_refused", "Refused by the teacher", { unit: "%", low: 0, of: (p) => percent(of("teacher_refused")(p)) }),
    update("entropy", "Entropy", { unit: "nats", low: 0 }),
    update("clip_fraction", "Clip fraction", { unit: "%", low: 0, of: (p) => percent(of("clip_fraction")(p)) }),
    update("ratio_mean", "Ratio, mean"),
    update("gate_mean", "Gate, mean", { low: 0 }),
    update("advantage_std", "Advantages", { lines: several({ max: "advantage_max", std: "advantage_std", min: "advantage_min" }) }),
    update("grad_norm", "Gradient norm", { low: 0 }),
    update("lr", "Learning rate", { low: 0 }),
    update("loss", "Loss"),
    update("logprob_diff_max", "Log-prob difference", { low: 0,
      lines: several({ max: "logprob_diff_max", mean: "logprob_diff_mean" }) }),
    update("tis_weight_mean", "TIS weight, mean", { low: 0,
      note: (p) => `${number(percent(of("tis_capped_fraction")(p)))} % at the cap` }),
    update("critic_loss", "Loss of the critic", { low: 0 }),
    update("explained_variance", "Explained variance"),
    update("value_mean", "Values and returns, mean", { lines: several({ value: "value_mean", return: "return_mean" }) }),
    update("value_clip_fraction", "Value clip fraction", { unit: "%", low: 0,
      of: (p) => percent(of("value_clip_fraction")(p)) }),
    update("critic_grad_norm", "Gradient norm of the critic", { low: 0 }),
    update("critic_lr", "Learning rate of the critic", { low: 0 }),
  ] },
  { id: "throughput", title: "Throughput", charts: [
    { id: "step-time", title: "Step time", unit: "s", low: 0, digits: 2, of: (p) => (p.seconds?.total > 0 ? p.seconds.total : null),
      parts: ({ seconds }) => Object.fromEntries(Object.entries(seconds ?? {}).filter(([name]) => name !== "total")
        .map(([name, spent]) => [name.replace("_", " "), spent])) },
    { id: "idle", title: "Waiting in a step", unit: "s", low: 0, digits: 2, has: (p) => Object.keys(p.idle_s ?? {}).length,
      of: (p) => Object.values(p.idle_s ?? {}).reduce((a, b) => a + b, 0), parts: (p) => p.idle_s ?? {} },
    { id: "throughput", title: "Samples", unit: "samples/s", low: 0, smooth: true,
      of: (p) => (p.seconds?.total > 0 && p.samples ? p.samples / p.seconds.total : null) },
    { id: "train-rate", title: "Trained", unit: "tokens/s", low: 0, smooth: true, of: rate("train_tokens_per_s"),
      has: rate("train_tokens_per_s") },
    { id: "generate-rate", title: "Generated", unit: "tokens/s", low: 0, smooth: true, of: rate("generate_tokens_per_s"),
      has: rate("generate_tokens_per_s") },
    { id: "mfu", title: "MFU", unit: "%", low: 0, smooth: true, of: (p) => percent(rate("mfu")(p)), has: rate("mfu") },
    { id: "flops", title: "Model FLOPs", unit: "TFLOP/s", low: 0, smooth: true, of: rate("tflops_per_rank"),
      has: rate("tflops_per_rank") },
    { id: "memory", title: "Memory, peak", unit: "GiB", low: 0, has: rate("peak_memory_bytes"),
      of: (p) => (rate("peak_memory_bytes")(p) === undefined ? null : rate("peak_memory_bytes")(p) / 2 ** 30) },
    { id: "staleness", title: "Staleness", unit: "versions", low: 0, high: 1, digits: 0, of: (p) => p.staleness },
    update("staleness_mean", "Staleness of groups", { unit: "versions", low: 0, digits: 2,
      lines: several({ max: "staleness_max", mean: "staleness_mean", min: "staleness_min" }) }),
    update("groups_queued", "Groups in flight", { unit: "groups", low: 0, digits: 0,
      lines: several({ queued: "groups_queued", generating: "groups_leased" }) }),
    update("producer_wait_s", "Generation waits", { unit: "s", low: 0, digits: 2,
      lines: several({ waiting: "producer_wait_s", idle: "producer_no_room_s" }) }),
    update("groups_stale", "Generated again", { unit: "groups", low: 0, digits: 0,
      lines: several({ "too stale": "groups_stale", lost: "groups_lost" }) }),
  ] },
];
// These are shown in the chart of another one.
const SHOWN = new Set(["reference_step", "advantage_mean", "advantage_min", "advantage_max", "logprob_diff_mean", "tis_capped_fraction",
  "staleness_min", "staleness_max", "groups_leased", "groups_lost"]);

export class StepMetrics {
  constructor(section) {
    this.groups = new Map();
    this.charts = [];
    this.own = new Set();
    const narrow = matchMedia("(max-width: 720px)").matches;
    for (const group of GROUPS) {
      const grid = el("div", { class: "charts" });
      const node = el("details", { class: "chart-group", id: `charts-${group.id}` },
        el("summary", {}, el("h2", { text: group.title })), grid);
      node.open = group.id === "learning" || !narrow; // pools and engines are below
      this.groups.set(group.id, { node, grid });
      section.append(node);
      for (const metric of group.charts) this.#add(group.id, metric);
    }
    this.known = new Set([...SHOWN, ...this.charts.map((c) => c.id.replaceAll("-", "_"))]);
  }

  #add(group, metric) {
    const chart = new Chart(metric);
    this.charts.push({ ...metric, chart, group });
    this.groups.get(group).grid.append(chart.node);
  }

  /** Adds a chart for what the algorithm reports beside the metrics that are known. */
  #addOwn(point) {
    for (const name of Object.keys(point?.update ?? {})) {
      if (this.known.has(name) || this.own.has(name) || this.own.size >= MOST_OWN) continue;
      this.#add("update", update(name, name, { id: `own-${this.own.size}` }));
      this.own.add(name);
    }
  }

  render(model) {
    const points = model.points();
    const marks = faults(model, points);
    this.#addOwn(points.at(-1));
    for (const { chart, of: value, has, parts, lines, note, start } of this.charts) {
      chart.node.hidden = Boolean(has) && !points.some(has);
      const before = start?.(model.status) ?? null; // before the first step, which no step's metrics have
      chart.show([...(before === null ? [] : [[0, before]]), ...points.map((p) => [p.step, value(p), (parts ?? lines)?.(p), note?.(p)])
        .filter(([, v]) => v !== null && v !== undefined)], marks);
    }
    for (const [id, { node }] of this.groups) {
      node.hidden = this.charts.every((c) => c.group !== id || c.chart.node.hidden);
    }
  }
}

/** Errors among the events, each at the step during which it happened. */
function faults(model, points) {
  if (!points.length) return [];
  const marks = [];
  for (const e of model.events.values()) {
    if (e.severity !== "error" || e.at < points[0].at - 60) continue;
    const next = points.find((p) => p.at >= e.at);
    marks.push({ step: next ? next.step : points.at(-1).step, what: `${e.kind} ${e.subject}` });
  }
  return marks;
}
