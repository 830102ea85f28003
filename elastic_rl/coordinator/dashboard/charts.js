// A chart over the steps of the run, as SVG: axes, faults as marks, and the value at the pointer or by the arrow keys.

import { attr, el, keyed, svg, text } from "./dom.js";
import { number } from "./format.js";

const PAD = { left: 46, right: 10, top: 8, bottom: 20 };
const HEIGHT = 132;
const TABLE_ROWS = 100;
const MOST_PARTS = 6; // of a stack; further ones are drawn as one
const OTHERS = "others";

/** At most `count` round numbers that cover [low, high]. */
export function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let v = Math.floor(low / step) * step; v < high + step * 0.999; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}

/** Exponential moving average. */
function smoothed(points) {
  let mean = null;
  return points.map(([x, y]) => [x, (mean = mean === null ? y : mean + 0.15 * (y - mean))]);
}

export class Chart {
  #points = [];
  #marks = [];
  #at = -1; // index of the point whose value is shown, -1: the last one
  #width = 0;
  #drawn = "";
  #names = []; // of the parts of a stack, the largest first

  /**
   * `low`, `high`: values that the axis always covers. `smooth`: draws the values faintly under their average. `parts`:
   * set where each value is a sum, which is drawn as a stack of its parts. `lines`: set where a value has parts of
   * which it is no sum: each is a line, and the value is not drawn.
   */
  constructor({ id, title, unit = "", low = null, high = null, smooth = false, digits = undefined, parts = null, lines = null }) {
    Object.assign(this, { title, unit, low, high, smooth, digits });
    this.stacked = Boolean(parts);
    this.many = Boolean(lines);
    this.legend = parts || lines ? el("ul", { class: "legend" }) : null;
    this.value = el("span", { class: "value" });
    this.where = el("span", { class: "where" });
    this.svg = svg("svg", { height: HEIGHT, "aria-hidden": "true", focusable: "false" });
    this.plot = el("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": `${title} by step`,
      "aria-orientation": "horizontal", "aria-readonly": "true", "aria-valuemin": "0", "aria-valuemax": "0",
      "aria-valuenow": "0" }, this.svg);
    this.body = el("tbody");
    this.details = el("details", { class: "asTable" }, el("summary", { text: "as a table" }),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title} by step, as a table` },
        el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "Step" }),
          el("th", { scope: "col", text: title + (unit ? ` (${unit})` : "") }))), this.body)));
    this.node = el("figure", { class: "chart", id: `metric-${id}` },
      el("figcaption", {}, el("span", { class: "name", text: title }), this.value, this.where), this.plot, this.legend ?? "",
      this.details);
    this.plot.addEventListener("pointermove", (e) => this.#point(e));
    this.plot.addEventListener("pointerdown", (e) => this.#point(e));
    this.plot.addEventListener("pointerleave", () => this.#showValue(-1));
    this.plot.addEventListener("blur", () => this.#showValue(-1));
    this.plot.addEventListener("keydown", (e) => this.#key(e));
    this.details.addEventListener("toggle", () => this.#table());
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width && width !== this.#width) { this.#width = width; this.#draw(); }
    }).observe(this.plot);
  }

  /** `all`: points [step, value, parts by name, note], by step. `marks`: {step, what} of faults. */
  show(all, marks) {
    const points = this.many ? all.filter(([, , parts]) => Object.keys(parts ?? {}).length) : all;
    const last = points.at(-1);
    const drawn = `${points.length} ${points[0]?.[0]} ${last} ${marks.length}`;
    this.#points = points;
    this.#marks = marks;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    if (this.legend) this.#nameParts();
    if (this.#at >= points.length) this.#at = -1;
    this.#draw();
    this.#table();
  }

  /** Names of the parts, the largest first; those of a stack beyond the largest ones become one. */
  #nameParts() {
    const sums = new Map();
    for (const [, , parts] of this.#points) {
      for (const [name, value] of Object.entries(parts ?? {})) sums.set(name, (sums.get(name) ?? 0) + Math.abs(value));
    }
    const ordered = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a) || a.localeCompare(b));
    if (ordered.length <= MOST_PARTS) this.#names = ordered;
    else this.#names = this.many ? ordered.slice(0, MOST_PARTS) : [...ordered.slice(0, MOST_PARTS - 1), OTHERS];
  }

  /** The values of a point's parts, in the order of `#names`. */
  #values([, total, parts]) {
    if (this.many) return this.#names.map((name) => parts?.[name]);
    const named = this.#names.filter((name) => name !== OTHERS).map((name) => parts?.[name] ?? 0);
    if (this.#names.includes(OTHERS)) named.push(Math.max(0, total - named.reduce((a, b) => a + b, 0)));
    return named;
  }

  #scale() {
    const { low, high } = this;
    const xs = this.#points.map(([x]) => x);
    const ys = this.many ? this.#points.flatMap((point) => this.#values(point)).filter(Number.isFinite)
      : this.#points.map(([, y]) => y);
    const steps = ticks(Math.min(low ?? Infinity, ...ys), Math.max(high ?? -Infinity, ...ys), 3);
    const [x0, x1] = [xs[0], Math.max(xs.at(-1), xs[0] + 1)];
    const [y0, y1] = [low ?? steps[0], steps.at(-1)];
    const right = this.#width - PAD.right;
    const bottom = HEIGHT - PAD.bottom;
    return { x0, x1, right, bottom, steps: steps.filter((s) => s >= y0),
      x: (v) => PAD.left + ((v - x0) / (x1 - x0)) * (right - PAD.left),
      y: (v) => bottom - ((v - y0) / (y1 - y0 || 1)) * (bottom - PAD.top) };
  }

  #draw() {
    if (!this.#width) return;
    attr(this.svg, "width", this.#width);
    attr(this.svg, "viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    if (!this.#points.length) {
      this.svg.replaceChildren(svg("text", { class: "none", x: this.#width / 2, y: HEIGHT / 2, text: "no data yet" }));
      text(this.value, "–");
      text(this.where, "");
      return;
    }
    const s = this.#scale();
    const parts = s.steps.flatMap((v) => [
      svg("line", { class: "grid", x1: PAD.left, x2: s.right, y1: s.y(v), y2: s.y(v) }),
      svg("text", { class: "tick y", x: PAD.left - 6, y: s.y(v) + 3.5, text: number(v) })]);
    for (const v of ticks(s.x0, s.x1, Math.max(2, Math.floor(this.#width / 50)))) {
      if (v < s.x0 || v > s.x1 || !Number.isInteger(v)) continue;
      parts.push(svg("text", { class: "tick x", x: s.x(v), y: HEIGHT - 5, text: String(v) }));
    }
    for (const mark of this.#marks) {
      if (mark.step < s.x0 || mark.step > s.x1) continue;
      parts.push(svg("line", { class: "fault", x1: s.x(mark.step), x2: s.x(mark.step), y1: PAD.top, y2: s.bottom }));
    }
    const line = (points, name) => svg("polyline", { class: name,
      points: points.map(([x, y]) => `${s.x(x).toFixed(1)},${s.y(y).toFixed(1)}`).join(" ") });
    if (this.stacked) parts.push(...this.#areas(s));
    else if (this.many) parts.push(...this.#lines(line));
    else parts.push(line(this.#points, this.smooth ? "raw" : "mean"));
    if (this.smooth) parts.push(line(smoothed(this.#points), "mean"));
    this.cursor = svg("line", { class: "cursor", y1: PAD.top, y2: s.bottom, visibility: "hidden" });
    this.dot = svg("circle", { class: "dot", r: 3 });
    this.svg.replaceChildren(...parts, this.cursor, this.dot);
    this.#showValue(this.#at);
  }

  /** One area for each part, each on top of the one before. */
  #areas(s) {
    let base = this.#points.map(() => 0);
    const stacks = this.#points.map((point) => this.#values(point));
    return this.#names.map((_, n) => {
      const top = base.map((below, i) => below + stacks[i][n]);
      const at = (values) => values.map((v, i) => `${s.x(this.#points[i][0]).toFixed(1)},${s.y(v).toFixed(1)}`);
      const area = svg("polygon", { class: `area part${n}`, points: [...at(top), ...at(base).reverse()].join(" ") });
      base = top;
      return area;
    });
  }

  /** One line for each part. */
  #lines(line) {
    return this.#names.map((name, n) => line(this.#points.map(([x, , parts]) => [x, parts?.[name]])
      .filter(([, y]) => Number.isFinite(y)), `partLine part${n}`));
  }

  #showValue(at) {
    this.#at = at;
    const points = this.#points;
    if (!points.length || !this.cursor) return;
    const index = at < 0 ? points.length - 1 : at;
    const [step, value, , note] = points[index];
    const s = this.#scale();
    attr(this.cursor, "x1", s.x(step));
    attr(this.cursor, "x2", s.x(step));
    attr(this.cursor, "visibility", at < 0 ? "hidden" : "visible");
    attr(this.dot, "visibility", this.many ? "hidden" : "visible");
    attr(this.dot, "cx", s.x(step));
    attr(this.dot, "cy", s.y(value));
    const shown = `${number(value, this.digits)}${this.unit ? ` ${this.unit}` : ""}`;
    const near = this.#marks.find((m) => Math.abs(s.x(m.step) - s.x(step)) < 4);
    text(this.value, this.many ? "" : shown);
    text(this.where, [note, at < 0 ? "" : `step ${step}`, at < 0 ? "" : near?.what].filter(Boolean).join(" · "));
    if (this.legend) this.#showParts(points[index]);
    attr(this.plot, "aria-valuemin", points[0][0]);
    attr(this.plot, "aria-valuemax", points.at(-1)[0]);
    attr(this.plot, "aria-valuenow", step);
    attr(this.plot, "aria-valuetext", `step ${step}: ${shown}${this.#said(points[index])}${near && at >= 0 ? `, ${near.what}` : ""}`);
  }

  /** The parts of a point in words. */
  #said(point) {
    return this.#values(point).map((v, n) => `, ${this.#names[n]} ${number(v, this.digits)}`).join("");
  }

  #showParts(point) {
    const values = this.#values(point);
    keyed(this.legend, this.#names.map((name, n) => ({ name, n })), (p) => p.name,
      () => el("li", {}, el("i", { "aria-hidden": "true" }), el("span")), (node, p) => {
        attr(node.firstChild, "class", `part${p.n}`);
        text(node.lastChild, `${p.name} ${number(values[p.n], this.digits)}`);
      });
  }

  #point(event) {
    if (!this.#points.length) return;
    const s = this.#scale();
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    let best = 0;
    for (let i = 1; i < this.#points.length; i += 1) {
      if (Math.abs(s.x(this.#points[i][0]) - x) < Math.abs(s.x(this.#points[best][0]) - x)) best = i;
    }
    this.#showValue(best);
  }

  #key(event) {
    const last = this.#points.length - 1;
    const at = this.#at < 0 ? last : this.#at;
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageUp: at + 10,
      PageDown: at - 10, Home: 0, End: last, Escape: -1 }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#showValue(event.key === "Escape" ? -1 : Math.max(0, Math.min(last, to)));
  }

  #table() {
    if (!this.details.open) return;
    const newest = this.#points.slice(-TABLE_ROWS).reverse();
    this.body.replaceChildren(...newest.map((point) => el("tr", {}, el("th", { scope: "row", text: point[0] }),
      el("td", { text: number(point[1], this.digits) + this.#said(point) }))));
  }
}
