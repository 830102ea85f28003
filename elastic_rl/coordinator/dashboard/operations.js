// Operations: the running ones with their progress and a way to cancel, then those that have ended.

import { attr, badge, el, keyed, since, text } from "./dom.js";
import { clock, duration, now, plural } from "./format.js";
import { describe } from "./health.js";
import { ENDED } from "./model.js";

const CAP = 6;
const LEVEL = { running: "busy", succeeded: "ok", failed: "bad", cancelled: "idle" };

/** An operation as a card; used by the list and by the notices. */
export class OperationCard {
  constructor(tag, oncancel) {
    this.state = el("span");
    this.name = el("strong");
    this.bar = el("progress");
    this.phase = el("span", { class: "phase" });
    this.who = el("span", { class: "who" });
    this.when = el("time");
    this.cancel = el("button", { type: "button", class: "quiet", text: "Cancel…", onclick: () => oncancel(this.item) });
    this.message = el("p", { class: "message" });
    this.line = el("div", { class: "line" }, this.state, this.name, this.when, this.cancel);
    this.node = el(tag, { class: "operation" }, this.line,
      el("div", { class: "progress" }, this.bar, this.phase, this.who), this.message);
    this.node.card = this;
  }

  show(o) {
    this.item = o;
    const ended = ENDED.includes(o.state);
    badge(this.state, LEVEL[o.state] ?? "idle", o.state);
    text(this.name, describe(o));
    since(this.when, ended ? o.ended_at || o.updated_at : o.created_at);
    attr(this.bar, "aria-label", `Progress of: ${describe(o)}`);
    attr(this.bar, "max", o.total || 1);
    attr(this.bar, "value", ended ? o.total || 1 : o.total ? o.done : null); // without a value: indeterminate
    this.bar.hidden = ended;
    const count = o.total && !ended ? ` · ${o.done} of ${o.total}` : "";
    const late = !ended && o.deadline_at && now() > o.deadline_at ? " · past its deadline" : "";
    text(this.phase, ended ? `took ${duration((o.ended_at || o.updated_at) - o.created_at)}` : `${o.phase}${count}${late}`);
    text(this.who, [o.by ? `by ${o.by}` : "", o.params?.reason ? `“${o.params.reason}”` : ""].filter(Boolean).join(", "));
    text(this.message, o.error || o.message || "");
    this.message.hidden = !this.message.textContent;
    this.cancel.hidden = o.state !== "running" || o.kind === "drain"; // a draining engine has left the router
    attr(this.cancel, "aria-label", `Cancel: ${describe(o)}`);
    attr(this.node, "title", `${o.id}, started ${clock(o.created_at)}`);
  }
}

export class Operations {
  #all = false;

  constructor(section, actions) {
    this.actions = actions;
    this.list = section.querySelector(".list");
    this.sum = section.querySelector(".sum");
    this.none = el("p", { class: "none", text: "There is no operation." });
    this.more = el("button", { type: "button", class: "more quiet",
      onclick: () => { this.#all = !this.#all; this.render(this.model); } });
    section.append(this.none, this.more);
  }

  render(model) {
    this.model = model;
    const active = model.active().sort((a, b) => b.created_at - a.created_at);
    const ended = [...model.operations.values()].filter((o) => ENDED.includes(o.state))
      .sort((a, b) => b.ended_at - a.ended_at);
    const all = [...active, ...ended];
    const cap = Math.max(CAP, Math.min(active.length, 20));
    text(this.sum, active.length ? `${active.length} running` : "");
    keyed(this.list, this.#all ? all : all.slice(0, cap), (o) => o.id,
      () => new OperationCard("li", (o) => this.actions.cancel(o)).node, (node, o) => node.card.show(o));
    this.list.hidden = !all.length;
    this.none.hidden = all.length > 0;
    this.more.hidden = all.length <= cap;
    text(this.more, this.#all ? `Show the first ${cap}` : `Show all ${all.length} operations`);
  }
}
