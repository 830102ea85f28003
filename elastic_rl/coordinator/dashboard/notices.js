// Results of the operator's own changes: a card for each operation, updated until it has ended.

import { el, text } from "./dom.js";
import { describe } from "./health.js";
import { ENDED } from "./model.js";
import { OperationCard } from "./operations.js";

const MOST = 3;
const SHOWN_MS = 12_000; // of a success; a failure stays until it is closed

export class Notices {
  #cards = new Map();

  constructor(root, model) {
    this.root = root;
    this.model = model;
    this.cancel = () => {};
  }

  follow(operation) {
    const known = this.model.operations.get(operation.id);
    const newest = known && known.updated_at > operation.updated_at ? known : operation;
    if (!known) this.model.change({ kind: "operation", id: operation.id, object: operation });
    if (!this.#cards.has(operation.id)) {
      const card = new OperationCard("div", (o) => this.cancel(o));
      card.node.classList.add("notice");
      this.#add(card.node, describe(operation));
      this.#cards.set(operation.id, card);
    }
    this.#show(operation.id, newest);
  }

  say(what) {
    const node = el("div", { class: "notice" }, el("div", { class: "line" }, el("strong", { text: what })));
    this.#add(node, what);
    setTimeout(() => node.remove(), SHOWN_MS);
  }

  render(model) {
    for (const id of this.#cards.keys()) {
      const operation = model.operations.get(id);
      if (operation) this.#show(id, operation);
    }
  }

  #show(id, operation) {
    const card = this.#cards.get(id);
    card.show(operation);
    if (!ENDED.includes(operation.state) || card.ended) return;
    card.ended = true;
    if (operation.state !== "failed") setTimeout(() => this.#drop(id), SHOWN_MS);
  }

  #add(node, name) {
    const close = el("button", { type: "button", class: "quiet close", "aria-label": `Close: ${name}`, text: "×", onclick: () => {
      node.remove();
      for (const [id, card] of this.#cards) if (card.node === node) this.#cards.delete(id);
    } });
    node.querySelector(".line").append(close);
    this.root.append(node);
    while (this.root.children.length > MOST) this.root.firstElementChild.querySelector(".close").click();
  }

  #drop(id) {
    const card = this.#cards.get(id);
    if (!card || card.node.contains(document.activeElement)) return;
    this.#cards.delete(id);
    card.node.remove();
  }
}
