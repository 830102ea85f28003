// The run's step metrics as charts, with the faults marked in them.

import { Chart } from "./charts.js";

const METRICS = [
  { id: "reward", title: "Reward", smooth: true, digits: 3, of: (p) => p.reward },
  { id: "eval_accuracy", title: "Eval accuracy", low: 0, high: 1, digits: 3, of: (p) => p.eval_accuracy },
  { id: "throughput", title: "Throughput", unit: "samples/s", low: 0, smooth: true,
    of: (p) => (p.seconds?.total > 0 && p.samples ? p.samples / p.seconds.total : null) },
  { id: "staleness", title: "Staleness", unit: "versions", low: 0, high: 1, digits: 0, of: (p) => p.staleness },
  { id: "step-time", title: "Step time", unit: "s", low: 0, smooth: true, digits: 2,
    of: (p) => (p.seconds?.total > 0 ? p.seconds.total : null) },
];

export class StepMetrics {
  constructor(section) {
    this.charts = METRICS.map((metric) => ({ ...metric, chart: new Chart(metric) }));
    section.querySelector(".charts").append(...this.charts.map((c) => c.chart.node));
  }

  render(model) {
    const points = model.points();
    const marks = faults(model, points);
    for (const { chart, of } of this.charts) {
      chart.show(points.map((p) => [p.step, of(p)]).filter(([, v]) => v !== null && v !== undefined), marks);
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
