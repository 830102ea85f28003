// A table of records that shows the first ones or many; rows keep their nodes, so a change touches one cell.

import { el, keyed, text, attr } from "./dom.js";

const MOST = 200; // rows at once: a browser lays out thousands too slowly; the filter finds the others

export class Listing {
  #all = false;
  #query = "";
  #items = [];

  /**
   * `columns`: {head, class, fill(cell, item)}; `key(item)`; `words(item)`: text for the filter, null: no filter;
   * `empty`: text of the empty table.
   */
  constructor(section, { columns, key, cap, noun, empty, words = null, head = "" }) {
    Object.assign(this, { columns, key, cap, noun, empty, words });
    this.body = el("tbody");
    this.table = el("table", { "aria-labelledby": `${section.id}-h` },
      el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { scope: "col", class: c.class },
        el("span", { class: c.quiet ? "hidden" : null, text: c.head }))))), this.body);
    this.none = el("p", { class: "none", text: empty });
    this.more = el("button", { type: "button", class: "more quiet", onclick: () => { this.#all = !this.#all; this.#draw(); } });
    this.box = el("div", { class: "scroll" }, this.table);
    section.append(...(head ? [head] : []), this.box, this.none, this.more);
    if (words) {
      this.filter = el("input", { type: "search", class: "filter", placeholder: `Filter ${noun}`,
        "aria-label": `Filter ${noun}`, autocomplete: "off", spellcheck: "false",
        oninput: (e) => { this.#query = e.target.value.trim().toLowerCase(); this.#draw(); } });
      section.querySelector("header").append(this.filter);
    }
  }

  render(items) {
    this.#items = items;
    this.#draw();
  }

  #draw() {
    const { columns, cap } = this;
    const found = this.#query
      ? this.#items.filter((item) => this.words(item).toLowerCase().includes(this.#query)) : this.#items;
    const shown = found.slice(0, this.#all ? MOST : cap);
    keyed(this.body, shown, this.key,
      () => el("tr", {}, ...columns.map((c, i) => el(i === 0 ? "th" : "td", { class: c.class, scope: i ? null : "row" }))),
      (row, item) => columns.forEach((c, i) => c.fill(row.children[i], item, row)));
    this.box.hidden = !shown.length;
    const hidden = this.#all ? found.length - shown.length : 0;
    this.none.hidden = shown.length > 0 && !hidden;
    text(this.none, hidden ? `${hidden} more: use the filter.`
      : this.#query && this.#items.length ? `None of ${this.#items.length} ${this.noun} matches.` : this.empty);
    this.more.hidden = found.length <= cap;
    text(this.more, this.#all ? `Show the first ${cap}`
      : found.length > MOST ? `Show ${MOST} of ${found.length} ${this.noun}` : `Show all ${found.length} ${this.noun}`);
    attr(this.more, "aria-expanded", String(this.#all));
    if (this.filter) this.filter.hidden = this.#items.length <= cap && !this.#query;
  }
}
