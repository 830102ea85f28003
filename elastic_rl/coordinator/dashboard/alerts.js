// The firing alerts, the responses to each, and the button that silences it.

import { badge, el, keyed, since, text } from "./dom.js";
import { plural } from "./format.js";
import { firing, responses } from "./health.js";

const CAP = 6;
const LEVEL = { error: "bad", warning: "warn", info: "idle" };

export class Alerts {
  #all = false;

  constructor(section, actions) {
    this.actions = actions;
    this.list = section.querySelector(".list");
    this.sum = section.querySelector(".sum");
    this.none = el("p", { class: "none" });
    this.more = el("button", { type: "button", class: "more quiet",
      onclick: () => { this.#all = !this.#all; this.render(this.model); } });
    section.append(this.none, this.more);
  }

  render(model) {
    this.model = model;
    const alerts = firing(model);
    const pending = [...model.alerts.values()].filter((a) => a.phase === "pending").length;
    text(this.sum, alerts.length ? `${plural(alerts.length, "alert")}` : "");
    keyed(this.list, this.#all ? alerts : alerts.slice(0, CAP), (a) => a.id, () => this.#make(),
      (node, a) => this.#fill(node, a, model));
    this.list.hidden = !alerts.length;
    this.none.hidden = alerts.length > 0;
    text(this.none, `No alert is firing.${pending ? ` ${plural(pending, "alert is", "alerts are")} pending.` : ""}`);
    this.more.hidden = alerts.length <= CAP;
    text(this.more, this.#all ? `Show the first ${CAP}` : `Show all ${alerts.length} alerts`);
  }

  #make() {
    const parts = { level: el("span"), kind: el("strong"), when: el("time"), message: el("p", { class: "message" }),
      responses: el("ol", { class: "responses" }), silenced: el("span", { class: "silenced" }),
      silence: el("button", { type: "button", class: "quiet", text: "Silence…" }) };
    const node = el("li", { class: "alert" },
      el("div", { class: "line" }, parts.level, parts.kind, parts.when, parts.silenced, parts.silence),
      parts.message, parts.responses);
    node.parts = parts;
    parts.silence.addEventListener("click", () => this.actions.silence(node.item));
    return node;
  }

  #fill(node, alert, model) {
    const { parts } = node;
    node.item = alert;
    badge(parts.level, LEVEL[alert.severity], alert.severity);
    text(parts.kind, `${alert.kind} ${alert.subject}`);
    since(parts.when, alert.since);
    text(parts.message, alert.message);
    const silenced = Boolean(alert.silenced_by);
    text(parts.silenced, silenced ? "silenced" : "");
    parts.silence.hidden = silenced;
    parts.silence.setAttribute("aria-label", `Silence ${alert.kind} ${alert.subject}`);
    const found = responses(alert, model);
    keyed(parts.responses, found.length ? found : [{ id: "-", at: 0, what: "No response was recorded yet." }], (r) => r.id,
      () => { const when = el("time"), what = el("span"); return Object.assign(el("li", {}, what, " ", when), { when, what }); },
      (li, r) => { text(li.what, r.what); if (r.at) since(li.when, r.at); });
  }
}
