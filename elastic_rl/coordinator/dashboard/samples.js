// Samples of the last steps: what the model wrote, and its rewards. They are not part of the stream of changes: they are
// read while they are shown. Every text is set as text, with what cannot be seen made visible.

import { samples } from "./api.js";
import { attr, badge, el, keyed, since, text } from "./dom.js";
import { number, plural, visible } from "./format.js";

const FIRST = 8;
const ALL = 1000;
const EVERY_MS = 5000;
const TYPING_MS = 400;

export class Samples {
  #open = false;
  #limit = FIRST;
  #step = -1; // of the run, when they were read
  #readAt = 0;
  #newest = -1;
  #reading = false;
  #again = false; // what is wanted has changed while they were read
  #typing = 0;

  constructor(section) {
    this.sum = section.querySelector(".sum");
    this.toggle = el("button", { type: "button", class: "quiet filter", text: "Show samples", "aria-expanded": "false",
      "aria-controls": "samples-panel", onclick: () => this.#show(!this.#open) });
    section.querySelector("header").append(this.toggle);
    const field = (name, label, props) => el("label", {}, el("span", { text: label }),
      el("input", { type: "number", name, autocomplete: "off", ...props }));
    this.form = el("form", { class: "choose", onsubmit: (e) => { e.preventDefault(); this.#read(); },
      oninput: () => { clearTimeout(this.#typing); this.#typing = setTimeout(() => this.#read(), TYPING_MS); } },
    field("step", "Step", { min: "0", step: "1" }), field("min_reward", "Least reward", { step: "any" }),
    field("max_reward", "Largest reward", { step: "any" }));
    this.problem = el("p", { class: "refused", role: "status" });
    this.list = el("ol", { class: "list" });
    this.none = el("p", { class: "none", text: "No sample matches, or none was kept yet." });
    this.more = el("button", { type: "button", class: "more quiet", text: "Show all samples",
      onclick: () => { this.#limit = ALL; this.#read(); } });
    this.panel = el("div", { id: "samples-panel", hidden: true }, this.form, this.problem, this.list, this.none, this.more);
    section.append(this.panel);
  }

  render(model) {
    this.#newest = model.status?.step ?? -1;
    const due = this.#newest !== this.#step && performance.now() - this.#readAt > EVERY_MS;
    if (this.#open && due && !document.hidden) this.#read();
  }

  #show(open) {
    this.#open = open;
    this.panel.hidden = !open;
    attr(this.toggle, "aria-expanded", String(open));
    text(this.toggle, open ? "Hide samples" : "Show samples");
    if (open) this.#read();
  }

  #query() {
    const query = { limit: String(this.#limit) };
    for (const input of this.form.elements) if (input.value !== "" && input.validity.valid) query[input.name] = input.value;
    return query;
  }

  async #read() {
    if (this.#reading) { this.#again = true; return; }
    this.#reading = true;
    this.#step = this.#newest;
    try {
      do {
        this.#again = false;
        const page = await samples(this.#query());
        this.#draw(page.items, Boolean(page.next));
        text(this.problem, "");
      } while (this.#again);
    } catch (error) {
      text(this.problem, `They cannot be read: ${error.message}. ${error.advice ?? ""}`);
    } finally {
      this.#readAt = performance.now();
      this.#reading = false;
    }
  }

  #draw(items, more) {
    keyed(this.list, items, (s) => `${s.step}/${s.group}/${s.index}/${s.at}`, make, fill);
    this.none.hidden = items.length > 0;
    this.more.hidden = !more;
    text(this.sum, items.length ? `${plural(items.length, "sample")} of the last steps` : "");
  }
}

function make() {
  const said = (name) => el("div", {}, el("h3", { text: name }),
    el("pre", { class: "said", dir: "auto", tabindex: "0", role: "group", "aria-label": name }));
  return el("li", { class: "sample" },
    el("p", { class: "line" }, el("strong"), el("span"), el("time"), el("span", { class: "message" })),
    el("div", { class: "texts" }, said("Prompt"), said("Response")));
}

function fill(node, s) {
  const [where, reward, time, facts] = node.firstChild.children;
  text(where, `Step ${s.step}, group ${s.group}, sample ${s.index}`);
  badge(reward, s.advantage > 0 ? "ok" : s.advantage < 0 ? "warn" : "idle", `reward ${number(s.reward)}`);
  since(time, s.at);
  const parts = Object.entries(s.reward_parts ?? {}).map(([name, value]) => `${visible(name)} ${number(value)}`);
  text(facts, [`advantage ${number(s.advantage)}`, ...parts, `${s.prompt_tokens} + ${s.response_tokens} tokens`,
    visible(s.finish_reason), s.versions?.length ? `version ${s.versions.join(", ")}` : "",
    s.cut ? "the middle of a text was left out" : ""].filter(Boolean).join(" · "));
  const [prompt, response] = node.querySelectorAll("pre");
  text(prompt, visible(s.prompt));
  text(response, visible(s.response));
}
