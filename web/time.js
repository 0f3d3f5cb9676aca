// The range of time that is shown and the time in it, in milliseconds since 1970, and their form in a URL:
//   ?last=15m              live: the last quarter of an hour, and now
//   ?from=…&to=…           a range, at its end
//   ?from=…&to=…&at=…      a range, at a time in it
//   ?at=…                  a time, and the range around it
// Now is the agent's time: its clock may differ from the browser's, and a twin's runs as fast as it can.

import { count, day } from "./format.js";

const MINUTE = 60_000;
export const SPANS = [["1m", MINUTE], ["5m", 5 * MINUTE], ["15m", 15 * MINUTE], ["1h", 60 * MINUTE], ["6h", 360 * MINUTE]];
const USUAL = "15m";
const SHORTEST = 10_000;
// The longest range of one answer of the history.
const LONGEST = 360 * MINUTE;

export const spanText = (name) => {
  const minutes = Object.fromEntries(SPANS)[name] / MINUTE;
  return minutes < 60 ? count(minutes, "minute") : count(minutes / 60, "hour");
};

// Returns a time in the agent's format.
export const stamp = (ms) => new Date(Math.round(ms)).toISOString();

const time = (text) => {
  const ms = text === null ? NaN : Date.parse(text);
  return Number.isNaN(ms) ? null : ms;
};

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// Returns the range in a URL, given the current time. Ignores invalid parameters.
export function read(params, now) {
  const [from, to, at] = ["from", "to", "at"].map((name) => time(params.get(name)));
  if (from !== null && to !== null && to > from) return fixed(from, to, at ?? to);
  if (at !== null) return fixed(at - 10 * MINUTE, at + 5 * MINUTE, at);
  const asked = params.get("last");
  const last = SPANS.some(([name]) => name === asked) ? asked : USUAL;
  const length = Object.fromEntries(SPANS)[last];
  return { last, from: now - length, to: now, at: now };
}

// Returns a range, limited to the shortest and the longest.
export function fixed(from, to, at) {
  const end = clamp(to, from + SHORTEST, from + LONGEST);
  return { last: null, from, to: end, at: clamp(at, from, end) };
}

export const isLive = (range) => range.last !== null;

// Parses a time typed by a user, 2026-11-24 03:12:00, or 03:12 for the day of `other`; null if it is invalid.
export function parse(text, other) {
  const found = /^(?:(\d{4}-\d{2}-\d{2})[ T])?(\d{1,2}):(\d{2})(?::(\d{2}))?$/.exec(text.trim());
  if (!found) return null;
  const [, written, hours, minutes, seconds = "00"] = found;
  const ms = Date.parse(`${written ?? day(other)}T${hours.padStart(2, "0")}:${minutes}:${seconds}`);
  return Number.isNaN(ms) ? null : ms;
}

// Returns the URL parameters of a range.
export function write(range) {
  if (isLive(range)) return range.last === USUAL ? {} : { last: range.last };
  return { from: stamp(range.from), to: stamp(range.to), at: stamp(range.at) };
}

// Returns the range at another time, moved along if the time is outside.
export function moveTo(range, at) {
  const beyond = Math.min(at - range.from, 0) + Math.max(at - range.to, 0);
  return fixed(range.from + beyond, range.to + beyond, at);
}

// Returns the range moved by `by` times its length.
export function shift(range, by) {
  const far = by * (range.to - range.from);
  return fixed(range.from + far, range.to + far, range.at + far);
}

// Returns times for an axis: about `most` at most, at round values.
export function ticks(from, to, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200];
  const step = 1000 * (steps.find((seconds) => (to - from) / (1000 * seconds) <= most) ?? 7200);
  const zone = new Date(from).getTimezoneOffset() * MINUTE;
  const first = Math.ceil((from - zone) / step) * step + zone;
  const all = [];
  for (let at = first; at <= to; at += step) all.push(at);
  return all;
}
