// Formats numbers and times for people. Unknown values are a dash.

export const NONE = "–";

const or = (value, text) => (value === null || value === undefined || Number.isNaN(value) ? NONE : text(value));

export const percent = (share) => or(share, (x) => `${Math.round(100 * x)} %`);

// Returns a change as a share, with its sign and the class of its colour; one that rounds to nothing has neither.
export function gain(share) {
  const rounded = Math.round(100 * share);
  if (rounded === 0) return { text: "0 %", kind: "quiet" };
  return rounded > 0 ? { text: `+${rounded} %`, kind: "gain" } : { text: `−${-rounded} %`, kind: "loss" };
}

export const decimals = (value, digits = 1) => or(value, (x) => x.toFixed(digits));

function scaled(value, base, units) {
  let at = 0;
  let rest = value;
  while (Math.abs(rest) >= base && at < units.length - 1) {
    rest /= base;
    at += 1;
  }
  return `${at === 0 || rest >= 100 ? Math.round(rest) : rest.toFixed(1)} ${units[at]}`;
}

export const bytes = (value) => or(value, (x) => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]));
export const perSecond = (value) => or(value, (x) => scaled(x, 1000, ["/s", "k/s", "M/s", "G/s", "T/s"]));
export const rate = (value) => or(value, (x) => scaled(x, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]));

const two = (number) => String(number).padStart(2, "0");

// Returns the time of day, in the browser's time zone; `ms` is in milliseconds.
export function clock(ms) {
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function day(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

export const moment = (ms) => `${day(ms)} ${clock(ms)}`;

// Returns a duration; `ms` is in milliseconds.
export function span(ms) {
  const seconds = Math.round(ms / 1000);
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// Formats node numbers as the kernel writes lists: 0-2,5.
export function nodes(list) {
  if (typeof list === "string") return list;
  const parts = [];
  for (const node of [...(list ?? [])].sort((a, b) => a - b)) {
    const last = parts.at(-1);
    if (last && last[1] === node - 1) last[1] = node;
    else parts.push([node, node]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(",");
}

// Returns what a user wrote, in quotation marks, cut if it is long.
export const quoted = (text) => `“${text.length > 60 ? `${text.slice(0, 60)}…` : text}”`;

export const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;
