// Events: a timeline, and a list.

import { attr, badge, el, keyed, since, svg, text } from "./dom.js";
import { clock, duration, now } from "./format.js";
import { TRAINER_GROUPS, componentOf } from "./groups.js";

const CAP = 14;
const LEVEL = { error: "bad", warning: "warn", info: "idle" };
// Each lane with the components of its events; the last one has all others.
const LANES = [
  ["engines", new Set(["engine", "pool", "router"])],
  ["training", new Set([...TRAINER_GROUPS, "run", "actor", "logprob", "rollout", "advantages", "genrm", "teacher", "reward", "filter",
    "generate", "train", "responses", "samples", "queue", "groups"])],
  ["versions", new Set(["version", "dcs"])],
  ["control", { has: () => true }],
];
const LANE_HEIGHT = 18;
const LEFT = 62;

export class Events {
  #all = false;
  #width = 0;

  constructor(section) {
    this.sum = section.querySelector(".sum");
    this.strip = svg("svg", { class: "strip", "aria-hidden": "true", height: LANES.length * LANE_HEIGHT + 18 });
    this.list = el("ol", { class: "list events", reversed: true });
    this.none = el("p", { class: "none", text: "There is no event yet." });
    this.more = el("button", { type: "button", class: "more quiet", onclick: () => { this.#all = !this.#all; this.render(this.model); } });
    this.choice = el("select", { class: "filter", "aria-label": "Which events", onchange: () => this.render(this.model) },
      el("option", { value: "all", text: "all" }), el("option", { value: "faults", text: "warnings and errors" }),
      el("option", { value: "error", text: "errors" }));
    section.querySelector("header").append(this.choice);
    const holder = el("div", { class: "stripHolder" }, this.strip);
    section.append(holder, this.list, this.none, this.more);
    new ResizeObserver(([entry]) => {
      this.#width = Math.floor(entry.contentRect.width);
      if (this.model) this.#draw([...this.model.events.values()]);
    }).observe(holder);
  }

  render(model) {
    this.model = model;
    const wanted = { all: () => true, faults: (e) => e.severity !== "info", error: (e) => e.severity === "error" };
    const all = [...model.events.values()].sort((a, b) => b.at - a.at || (a.id < b.id ? 1 : -1));
    const found = all.filter(wanted[this.choice.value]);
    const faults = all.filter((e) => e.severity === "error").length;
    text(this.sum, faults ? `${faults} of the last ${all.length} are errors` : "");
    keyed(this.list, this.#all ? found : found.slice(0, CAP), (e) => e.id, make, fill);
    this.none.hidden = found.length > 0;
    text(this.none, all.length ? "No event of this kind." : "There is no event yet.");
    this.more.hidden = found.length <= CAP;
    text(this.more, this.#all ? `Show the newest ${CAP}` : `Show all ${found.length} events`);
    this.#draw(all);
  }

  #draw(events) {
    this.strip.parentElement.hidden = !events.length;
    if (!this.#width || !events.length) return;
    const end = now();
    const begin = Math.min(...events.map((e) => e.at), end - 60);
    const x = (at) => LEFT + ((at - begin) / (end - begin)) * (this.#width - LEFT - 8);
    attr(this.strip, "width", this.#width);
    attr(this.strip, "viewBox", `0 0 ${this.#width} ${LANES.length * LANE_HEIGHT + 18}`);
    const parts = [];
    LANES.forEach(([name], i) => {
      const y = i * LANE_HEIGHT + LANE_HEIGHT / 2;
      parts.push(svg("text", { class: "tick", x: 0, y: y + 4, text: name }),
        svg("line", { class: "grid", x1: LEFT, x2: this.#width, y1: y, y2: y }));
    });
    const y = LANES.length * LANE_HEIGHT + 12;
    parts.push(svg("text", { class: "tick", x: LEFT, y, text: `${duration(end - begin)} ago` }),
      svg("text", { class: "tick y", x: this.#width, y, text: "now" }));
    for (const e of [...events].sort((a, b) => (a.severity === "info" ? 0 : 1) - (b.severity === "info" ? 0 : 1))) {
      const lane = LANES.findIndex(([, components]) => components.has(componentOf(e)));
      const node = svg("circle", { class: LEVEL[e.severity], cx: x(e.at).toFixed(1), cy: lane * LANE_HEIGHT + LANE_HEIGHT / 2,
        r: e.severity === "info" ? 3 : 4.5 });
      node.append(svg("title", { text: `${clock(e.at)} ${e.kind} ${e.subject}: ${e.message}` }));
      parts.push(node);
    }
    this.strip.replaceChildren(...parts);
  }
}

function make() {
  const parts = { level: el("span"), kind: el("strong"), when: el("time"), message: el("p", { class: "message" }) };
  return Object.assign(el("li", { class: "event" }, el("div", { class: "line" }, parts.level, parts.kind, parts.when),
    parts.message), { parts });
}

function fill(node, e) {
  const { parts } = node;
  badge(parts.level, LEVEL[e.severity], e.severity);
  text(parts.kind, `${e.kind} ${e.subject}`);
  since(parts.when, e.at);
  text(parts.message, e.message);
}
