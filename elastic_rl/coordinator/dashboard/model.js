// The job by the stream of changes: maps by kind, bounded, and values derived from them.

const LIMITS = { events: 500, versions: 100, operations: 200, steps: 1000 };
const PLURAL = { pool: "pools", engine: "engines", version: "versions", operation: "operations", alert: "alerts",
  event: "events", member: "members", step: "steps" };
const ID = {
  pools: (o) => o.name,
  engines: (o) => o.id,
  versions: (o) => `${o.stream}/${o.number}`,
  operations: (o) => o.id,
  alerts: (o) => `${o.kind}/${o.subject}`,
  events: (o) => o.id,
  members: (o) => `${o.role}/${o.id}`,
  steps: (o) => String(o.step),
};

export const ENDED = ["succeeded", "failed", "cancelled"];
export const RUN_ENDED = ["finished", "failed", "stopped"];

export class Model {
  constructor() {
    this.job = null;
    this.known = false;
    for (const kind of Object.values(PLURAL)) this[kind] = new Map();
    this.dirty = new Set();
  }

  snapshot(data) {
    this.job = data.job ?? null;
    for (const kind of Object.values(PLURAL)) {
      this[kind] = new Map((data[kind] ?? []).map((object) => [ID[kind](object), object]));
      this.dirty.add(kind);
    }
    this.known = true;
    this.dirty.add("job");
  }

  change({ kind, id, object }) {
    if (kind === "job") {
      this.job = object;
      this.dirty.add("job");
      return;
    }
    const many = PLURAL[kind];
    if (!many) return; // of a newer replica
    const map = this[many];
    if (object === null) map.delete(String(id));
    else {
      map.set(ID[many](object), object);
      if (map.size > (LIMITS[many] ?? Infinity)) this.#trim(many);
    }
    this.dirty.add(many);
  }

  #trim(many) {
    const map = this[many];
    if (many === "steps") { // drops every second point of the older half, so that a chart keeps its shape
      const old = [...map.values()].sort((a, b) => a.step - b.step).slice(0, map.size / 2);
      old.forEach((point, i) => { if (i % 2 && point.eval_accuracy === null) map.delete(String(point.step)); });
      if (map.size <= LIMITS.steps) return;
    }
    const oldest = [...map.entries()].filter(([, o]) => many !== "operations" || ENDED.includes(o.state))
      .sort(([, a], [, b]) => age(b) - age(a));
    for (const [id] of oldest.slice(0, Math.ceil(map.size / 10))) map.delete(id);
  }

  get status() { return this.job?.status ?? null; }

  /** Newest committed version of the policy. */
  get head() {
    let head = this.status?.policy_version ?? 0;
    for (const v of this.versions.values()) {
      if (v.stream === "policy" && v.state === "committed") head = Math.max(head, v.number);
    }
    return head;
  }

  points() { return [...this.steps.values()].sort((a, b) => a.step - b.step); }

  /** Median seconds of the last 20 steps; 0 where none are known. */
  get stepSeconds() {
    const last = this.points().slice(-20).map((p) => p.seconds?.total ?? 0).filter((s) => s > 0).sort((a, b) => a - b);
    return last.length ? last[Math.floor(last.length / 2)] : 0;
  }

  active() { return [...this.operations.values()].filter((o) => !ENDED.includes(o.state)); }
}

const age = (o) => -(o.at ?? o.created_at ?? o.step ?? 0);
