// The Server-Sent Events of the API, read with fetch: EventSource does not show the status and body of a refusal.

const FIRST_MS = 500;
const LONGEST_MS = 10_000;
const SILENCE_MS = 25_000; // the replica sends a comment every 10 s; after this it counts as gone

/** Parses a stream of text into frames {id, event, data}. */
export class Parser {
  #rest = "";
  #frame = { id: null, event: "message", data: [] };

  push(chunk) {
    const frames = [];
    const lines = (this.#rest + chunk).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#frame.data.length) frames.push({ ...this.#frame, data: this.#frame.data.join("\n") });
        this.#frame = { id: null, event: "message", data: [] };
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") this.#frame.data.push(value);
      else if (field === "event") this.#frame.event = value;
      else if (field === "id") this.#frame.id = value;
    }
    return frames;
  }
}

/**
 * Keeps a stream open. `onframe(frame)` gets every frame; `onstate(state, detail)` gets "connecting", "live",
 * "lost" ({reason, retryAt in ms}) and "denied" (401: it waits for `retry`). `open(headers, signal)` makes the request.
 */
export class Stream {
  #open; #onframe; #onstate;
  #lastId = "";
  #failures = 0;
  #wake = null;
  #abort = null;

  constructor(open, { onframe, onstate }) {
    this.#open = open;
    this.#onframe = onframe;
    this.#onstate = onstate;
  }

  async run() {
    for (;;) {
      try {
        await this.#follow();
        this.#failures = Math.max(1, this.#failures);
        await this.#pause("the replica closed the stream");
      } catch (error) {
        this.#failures += 1;
        if (error.status === 401) {
          this.#onstate("denied", { reason: error.message });
          await new Promise((resolve) => { this.#wake = resolve; });
        } else await this.#pause(error.message);
      }
    }
  }

  /** Retries now. `fresh`: from a new snapshot, such as after a change of the session. */
  retry({ fresh = false } = {}) {
    if (fresh) { this.#lastId = ""; this.#abort?.abort(new Error("reconnecting")); }
    this.#failures = 0;
    this.#wake?.();
  }

  async #pause(reason) {
    const longest = Math.min(LONGEST_MS, FIRST_MS * 2 ** Math.min(this.#failures - 1, 8));
    const wait = longest * (0.5 + Math.random() / 2);
    this.#onstate("lost", { reason, retryAt: Date.now() + wait });
    await new Promise((resolve) => { this.#wake = resolve; setTimeout(resolve, wait); });
    this.#wake = null;
  }

  async #follow() {
    this.#onstate("connecting", {});
    const abort = this.#abort = new AbortController();
    let watchdog = null;
    const received = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(new Error("the replica is silent")), SILENCE_MS);
    };
    try {
      received();
      const answer = await this.#open(this.#lastId ? { "Last-Event-ID": this.#lastId } : {}, abort.signal);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new Parser();
      this.#failures = 0;
      this.#onstate("live", {});
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        received();
        for (const frame of parser.push(value)) {
          this.#onframe(frame);
          if (frame.id) this.#lastId = frame.id;
        }
      }
    } catch (error) {
      throw abort.signal.aborted ? abort.signal.reason : error;
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }
}
