// Numbers and times as text. Times are unix seconds of the cluster's clock.

let skew = 0; // seconds that this browser's clock is ahead of the replica's

/** Compares the browser's clock with the replica's, by the Date header of an answer (whole seconds, so 2 s are noise). */
export function setClock(date) {
  const ahead = date ? Date.now() / 1000 - Date.parse(date) / 1000 : 0;
  skew = Math.abs(ahead) > 2 ? ahead : 0;
}

export const now = () => Date.now() / 1000 - skew;

/** A number with about three significant digits; an en dash where there is none. */
export function number(value, digits) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (digits !== undefined) return value.toFixed(digits);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size < 1e-4) return value.toExponential(1);
  if (size < 0.01) return String(Number(value.toPrecision(2)));
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : value.toFixed(3);
}

export function seconds(value) {
  if (!value || !Number.isFinite(value)) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : value < 120 ? `${number(value)} s` : duration(value);
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

/** A duration in at most two units: "8 s", "3 min 20 s", "2 h 5 min", "4 d 2 h". */
export function duration(value) {
  let left = Math.max(0, Math.round(value));
  const parts = UNITS.map(([size, unit]) => {
    const n = Math.floor(left / size);
    left -= n * size;
    return [n, unit];
  });
  const first = parts.findIndex(([n]) => n > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).filter(([n]) => n > 0).map(([n, unit]) => `${n} ${unit}`).join(" ");
}

/** How long ago, in one unit: what is old changes rarely, and the page is not laid out again every second. */
export function ago(at) {
  const age = Math.round(now() - at);
  const [size, unit] = UNITS.find(([seconds]) => age >= seconds) ?? [];
  return size ? `${Math.floor(age / size)} ${unit} ago` : "now";
}

const two = (n) => String(n).padStart(2, "0");

/** Local time of day, with the date unless it is today. */
export function clock(at) {
  const date = new Date(at * 1000);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const today = date.toDateString() === new Date(now() * 1000).toDateString();
  return today ? time : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

/**
 * Text of a model, with every character that cannot be seen or that reorders what is around it as a visible sign. Line
 * breaks, tabs and the joiners of scripts and emoji stay.
 */
export const visible = (value) => String(value ?? "").replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, (c) => {
  const code = c.codePointAt(0);
  if (c === "\n" || c === "\t" || code === 0x200c || code === 0x200d) return c;
  return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
});

export const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
