// The changes that an operator can make here. Each asks first, then shows the operation and follows it.

import { confirm } from "./dialogs.js";
import { el, field, text } from "./dom.js";
import { plural } from "./format.js";
import { TRAINER_GROUPS } from "./groups.js";
import { describe } from "./health.js";

const part = encodeURIComponent;

export class Actions {
  constructor(model, notices) {
    this.model = model;
    this.notices = notices;
    this.follow = (operation) => notices.follow(operation);
  }

  scale(pool) {
    const input = el("input", { type: "number", min: "1", step: "1", inputmode: "numeric", value: String(pool.desired),
      required: true });
    const effect = el("p", { class: "effect", role: "status" });
    const desired = () => (/^\d+$/.test(input.value.trim()) ? Number(input.value) : null);
    const preview = () => {
      const n = desired();
      const more = n - pool.desired;
      text(effect, n === null ? "Enter a whole number." : more === 0 ? "The same number: nothing will change."
        : more > 0 ? `${plural(more, "engine")} will be started.`
          : `${plural(-more, "engine")} will finish the requests in flight and leave.`);
    };
    input.addEventListener("input", preview);
    preview();
    confirm({ title: `Scale pool ${pool.name}`, verb: "Scale", done: this.follow,
      what: `${pool.ready} of ${pool.desired} engines are ready.`, fields: [field("Desired engines", input), effect],
      ready: () => desired() !== null,
      request: () => ({ method: "POST", path: `pools/${part(pool.name)}/scale`, body: { desired: desired() } }) });
    input.select();
  }

  drain(engine) {
    const replace = el("input", { type: "checkbox", checked: true });
    confirm({ title: `Drain engine ${engine.id}`, verb: "Drain", danger: true, done: this.follow,
      what: `It takes no new requests, finishes those in flight and leaves pool ${engine.pool}. This cannot be cancelled.`,
      fields: [el("label", { class: "check" }, replace, el("span", { text: "Start another engine in its place" }))],
      request: () => ({ method: "POST", path: `engines/${part(engine.id)}/drain`, body: { replace: replace.checked } }) });
  }

  deregister(engine) {
    confirm({ title: `Deregister engine ${engine.id}`, verb: "Deregister", danger: true, done: this.follow,
      what: `It takes no new requests, finishes those in flight and leaves pool ${engine.pool}. Its server keeps running.`,
      request: () => ({ method: "DELETE", path: `engines/${part(engine.id)}` }) });
  }

  /** `target` as the API names it; without one the dialog asks which part. */
  restart(target = "") {
    const choice = target ? null : this.#targets();
    const selected = () => target || choice.value;
    const reason = el("input", { type: "text", maxlength: "500", autocomplete: "off" });
    const effect = el("p", { class: "effect", role: "status" });
    const job = this.model.job?.name ?? "";
    const typed = el("input", { type: "text", autocomplete: "off", spellcheck: "false" });
    const confirmation = field(`To restart everything, type the job's name: ${job}`, typed);
    const explain = () => {
      text(effect, effectOf(selected()));
      confirmation.hidden = selected() !== "job";
    };
    choice?.addEventListener("change", explain);
    explain();
    confirm({ title: target ? describe({ kind: "restart", target }) : "Restart", verb: "Restart", danger: true,
      done: this.follow, what: "Committed state is kept; work since then is repeated.",
      fields: [...(choice ? [field("What", choice)] : []), effect, field("Why (is recorded)", reason), confirmation],
      ready: () => selected() !== "job" || typed.value.trim() === job,
      request: () => ({ method: "POST", path: "restarts", body: { target: selected(), reason: reason.value.trim() } }) });
  }

  #targets() {
    const roles = new Set([...this.model.members.values()].map((m) => m.role));
    for (const other of ["coordinator", "dcs", "engine", ...TRAINER_GROUPS, "driver"]) roles.delete(other);
    return el("select", {}, el("option", { value: "trainer", text: "the trainer" }),
      ...[...roles].sort().map((role) => el("option", { value: `roles/${role}`, text: `role ${role}` })),
      el("option", { value: "driver", text: "the driver" }), el("option", { value: "job", text: "the whole compute plane" }));
  }

  cancel(operation) {
    confirm({ title: `Cancel: ${describe(operation)}`, verb: "Cancel it", danger: true, done: this.follow,
      what: operation.kind === "scale" ? `The pool returns to ${plural(operation.params?.previous ?? 0, "engine")}.`
        : "This works only if it has not begun.",
      request: () => ({ method: "DELETE", path: `operations/${part(operation.id)}` }) });
  }

  silence(alert) {
    const hours = el("select", {}, ...[[1, "1 hour"], [4, "4 hours"], [12, "12 hours"], [24, "a day"]]
      .map(([n, name]) => el("option", { value: String(n), text: name })));
    const comment = el("input", { type: "text", maxlength: "500", autocomplete: "off" });
    confirm({ title: `Silence ${alert.kind} ${alert.subject}`, verb: "Silence",
      what: "Receivers are not notified of it for that time. The alert stays on this page.",
      fields: [field("For", hours), field("Why", comment)],
      done: () => this.notices.say(`${alert.kind} ${alert.subject} is silenced for ${hours.selectedOptions[0].text}.`),
      request: () => ({ method: "POST", path: "silences", body: {
        kind: alert.kind, subject: alert.subject, duration_s: Number(hours.value) * 3600, comment: comment.value.trim() } }) });
  }
}

function effectOf(target) {
  if (target === "job") return "Every engine, role and trainer process is restarted under a new epoch; the run resumes from the last committed state. This takes minutes.";
  if (target === "driver") return "The next driver takes over everything that runs.";
  if (target === "actor_fwd" || target === "reference") return `The ${target} group re-forms and loads the policy again; the run waits for it, and nothing goes back.`;
  if (TRAINER_GROUPS.has(target)) return `The ${target} group re-forms from its last committed state; engines continue within the staleness bound.`;
  if (target.startsWith("roles/")) return "The role is restarted in place; its work is assigned again.";
  return "The engine is replaced; its requests are retried elsewhere.";
}
