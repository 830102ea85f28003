// Columns of a Listing that several tables have.

import { attr, el, since, text } from "./dom.js";

/** A text. */
export const plain = (head, of, name = "") => ({ head, class: name, fill: (cell, item) => text(cell, of(item)) });

/** How long ago something was; `of(item)` in unix seconds. */
export const time = (head, of, name = "") => ({ head, class: name, fill: (cell, item) => {
  if (!cell.firstChild) cell.append(el("time"));
  since(cell.firstChild, of(item));
} });

/** Buttons in the last cell of a row. `items`: {label(item), name(item), run(item), enabled(item)}. */
export const buttons = (items) => ({
  head: "Actions", quiet: true, class: "actions",
  fill(cell, item, row) {
    row.item = item;
    if (!cell.firstChild) {
      for (const { run } of items) {
        cell.append(el("button", { type: "button", class: "quiet", onclick: () => run(row.item) }));
      }
    }
    items.forEach(({ label, name, enabled = () => true }, i) => {
      const button = text(cell.children[i], label(item));
      attr(button, "aria-label", name(item));
      attr(button, "disabled", !enabled(item));
    });
  },
});
