// Requests to the admin API with the browser's session, and its problems (RFC 9457) as text that says what to do.

const TIMEOUT_MS = 15_000;
const ROOT = new URL("../", import.meta.url); // of the cluster's paths, also behind a proxy that has them below another one
const JOB = /\/jobs\/([^/]+)$/.exec(location.pathname)?.[1]; // the page's job, as it is in the address
const KIND = "urn:elastic-rl:problem:";

export const SIGN_IN = "Run “elastic-rl dashboard” where the cluster was started: it opens this page with a link that works once.";

const ADVICE = {
  unauthorized: SIGN_IN,
  "unknown-token": "Check the token, or press Access… for another way.",
  "unknown-session": SIGN_IN,
  "unknown-link": SIGN_IN,
  forbidden: "This needs an operator's session. Run “elastic-rl dashboard” without --viewer.",
  "cross-site": "Open this page by the address of the coordinator itself.",
  "unknown-host": "Open this page by an address in coordinator.allowed_hosts.",
  "no-leader": "A leader is being elected. Wait some seconds and press Try again; nothing is done twice.",
  "etcd-unavailable": "etcd does not answer. Running work continues; check etcd, then press Try again.",
  "outcome-unknown": "Press Try again: the same request is never applied twice.",
  conflict: "Check what has changed, then try again if you still want it.",
  "precondition-failed": "Check what has changed, then try again if you still want it.",
  "not-found": "It is gone; there is nothing left to do.",
  invalid: "Correct it and try again.",
  gone: "It was carried out before; see the operations.",
  "idempotency-key-reused": "Go back and start again.",
  overloaded: "The replica is overloaded: wait some seconds and press Try again; nothing is done twice.",
  stopping: "The replica is stopping: open the page of another replica.",
  "token-table": "The replica cannot read its token table; its log says why.",
  "too-many-streams": "Close other dashboards of this replica, or open the page of another replica.",
  unreachable: "Is the replica running, and can this machine reach it? Press Try again; nothing is done twice.",
};

/** An error answer; `advice` is what to do about it. */
export class Problem extends Error {
  constructor({ status = 0, kind = "", title = "", detail = "" }) {
    super(detail || title);
    Object.assign(this, { status, kind, title, detail });
    this.advice = ADVICE[kind] ?? (status >= 500 ? "Try again; the replica's log has more." : "");
  }
}

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

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { ...options, credentials: "same-origin", cache: "no-store",
      redirect: "error" });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new Problem({ kind: "unreachable", title: "The replica does not answer",
      detail: options.signal?.aborted ? `no answer within ${TIMEOUT_MS / 1000} s` : "the connection failed" });
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

async function send(method, path, body, headers = {}) {
  const answer = await request(path, { method, signal: AbortSignal.timeout(TIMEOUT_MS),
    headers: { Accept: "application/json", ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
    body: body === undefined ? undefined : JSON.stringify(body) });
  return answer.status === 204 ? null : answer.json();
}

const ofJob = (path) => `v1/jobs/${JOB}/${path}`;

/** Address of a job's page; `root`: that of a replica. */
export const pageOf = (job, root = ROOT) => new URL(`jobs/${encodeURIComponent(job)}`, root).href;

/** The jobs of the cluster, by name. Throws Problem. */
export const jobs = async () => (await send("GET", "v1/jobs?limit=1000")).items;

/** Opens the stream of the job's changes. Throws Problem. */
export const openChanges = (headers, signal) =>
  request(ofJob("changes"), { headers: { Accept: "text/event-stream", ...headers }, signal });

/** A page of samples. Throws Problem. */
export const samples = (query) => send("GET", ofJob(`samples?${new URLSearchParams(query)}`));

/** Requests a change; `path` is below that of the job. The same `key` twice is one change. Returns the API's answer; throws Problem. */
export const change = (method, path, body, key) => send(method, ofJob(path), body, { "Idempotency-Key": key });

/** The browser's session: {name, role, expires_at}. Each throws Problem. */
export const session = {
  get: () => send("GET", "v1/session"),
  /** Opens one with a one-time link. */
  openWithLink: (link) => send("POST", "v1/session", { link }),
  /** Opens one with a token, which is kept nowhere. */
  openWithToken: (token) => send("POST", "v1/session", {}, { Authorization: `Bearer ${token}` }),
  end: () => send("DELETE", "v1/session"),
};

/** A new Idempotency-Key. crypto.randomUUID exists on https and localhost only, so this is made by hand. */
export function newKey() {
  const raw = crypto.getRandomValues(new Uint8Array(16));
  return `dashboard-${Array.from(raw, (b) => b.toString(16).padStart(2, "0")).join("")}`;
}
