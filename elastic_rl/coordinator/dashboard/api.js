// Requests to the admin API, the token, and its problems (RFC 9457) as text that says what to do.

const SLOT = "elastic-rl-token";
const TIMEOUT_MS = 15_000;
const KIND = "urn:elastic-rl:problem:";

const ADVICE = {
  unauthorized: "Give a token: press Token… at the top.",
  "unknown-token": "Give another token: press Token… at the top.",
  forbidden: "This needs the token of an operator: press Token… at the top and give one.",
  "no-leader": "A leader is being elected. Wait some seconds and press Try again; nothing is done twice.",
  "store-unavailable": "etcd does not answer. What runs goes on; look after etcd, then press Try again.",
  "outcome-unknown": "Press Try again: the same request is never carried out twice.",
  conflict: "Look at what has changed, then try again if you still want it.",
  "precondition-failed": "Look at what has changed, then try again if you still want it.",
  "not-found": "It is gone meanwhile; there is nothing left to do.",
  invalid: "Correct it and try again.",
  gone: "It was carried out before; look among the operations.",
  "idempotency-key-reused": "Go back and ask again.",
  overloaded: "The replica has much to do: wait some seconds and press Try again; nothing is done twice.",
  stopping: "The replica is about to end: open the page of another replica.",
  "token-table": "The replica cannot read its table of tokens; its log says why.",
  "too-many-streams": "Close other dashboards of this replica, or open the page of another replica.",
  unreachable: "Is the replica up, and can this machine reach it? Press Try again; nothing is done twice.",
};

/** An answer that is an error; `advice` is what to do about it. */
export class Problem extends Error {
  constructor({ status = 0, kind = "", title = "", detail = "" }) {
    super(detail || title);
    Object.assign(this, { status, kind, title, detail });
    this.advice = ADVICE[kind] ?? (status >= 500 ? "Try again; the replica's log says more." : "");
  }
}

export const token = {
  get: () => sessionStorage.getItem(SLOT) ?? "",
  set: (value) => sessionStorage.setItem(SLOT, value),
  clear: () => sessionStorage.removeItem(SLOT),
};

async function problemOf(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // not from the API: a proxy's page, or an answer that was cut off
  }
  const kind = String(body.type ?? "").startsWith(KIND) ? body.type.slice(KIND.length) : "";
  return new Problem({ status: answer.status, kind, title: body.title ?? `HTTP ${answer.status}`, detail: body.detail });
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  let answer;
  try {
    answer = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new Problem({ kind: "unreachable", title: "The replica does not answer",
      detail: options.signal?.aborted ? `no answer within ${TIMEOUT_MS / 1000} s` : "the connection failed" });
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

/** Opens the stream of changes. Throws Problem. */
export const openChanges = (headers, signal) =>
  ask("v1/changes", { headers: { Accept: "text/event-stream", ...headers }, signal });

/** Asks for a change. The same `key` twice is one change. Returns what the API answers; throws Problem. */
export async function change(method, path, body, key) {
  const headers = { Accept: "application/json", "Idempotency-Key": key };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await ask(path, { method, headers, signal: AbortSignal.timeout(TIMEOUT_MS),
    body: body === undefined ? undefined : JSON.stringify(body) });
  return answer.status === 204 ? null : answer.json();
}

/** A fresh Idempotency-Key. crypto.randomUUID is there on https and localhost only, so this is made by hand. */
export function newKey() {
  const raw = crypto.getRandomValues(new Uint8Array(16));
  return `dashboard-${Array.from(raw, (b) => b.toString(16).padStart(2, "0")).join("")}`;
}
