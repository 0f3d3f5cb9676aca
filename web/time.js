// The range of time that is shown and the time in it, in milliseconds since 1970, and their form in a URL:
//   ?last=15m              live: the last quarter of an hour, and now
//   ?from=…&to=…           a range, at its end
//   ?from=…&to=…&at=…      a range, at a time in it
//   ?at=…                  a time, and the range around it
// Now is the agent's time: its clock may differ from the browser's, and a twin's runs as fast as it can.

import { count, day, moment, quoted } from "./format.js";

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

const STAMP = /^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}/;

// Returns the time in a parameter, or null if it is absent or invalid. A time without a day is one of today.
function time(text, now) {
  const ms = parse(text ?? "", now) ?? (STAMP.test(text) ? Date.parse(text) : NaN);
  return ms >= 0 && ms < LATEST ? ms : null;
}

// The agent's times are nanoseconds in 63 bits.
const LATEST = Date.parse("2262-01-01T00:00:00Z");
const ENDS = ["from", "to", "at"];

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// Returns the range in a URL, given the current time. Ignores invalid parameters, of which `wrongTimes` tells.
export function read(params, now) {
  const [from, to, at] = ENDS.map((name) => time(params.get(name), now));
  if (from !== null && to !== null && to > from) return fixed(from, to, at ?? to);
  if (at !== null) return fixed(at - 10 * MINUTE, at + 5 * MINUTE, at);
  const asked = params.get("last");
  const last = SPANS.some(([name]) => name === asked) ? asked : USUAL;
  const length = Object.fromEntries(SPANS)[last];
  return { last, from: now - length, to: now, at: now };
}

export const notTime = (text) => `${quoted(text)} is not a time: write 2026-11-24 03:12:00, or 03:12.`;

// Returns sentences about times in a URL that are not shown as they are written there.
export function wrongTimes(params, now) {
  const [from, to, at] = ENDS.map((name) => time(params.get(name), now));
  const invalid = ENDS.filter((name) => params.has(name) && time(params.get(name), now) === null);
  const said = invalid.map((name) => notTime(`${name}=${params.get(name)}`));
  const last = params.get("last");
  if (last !== null && !SPANS.some(([name]) => name === last)) {
    said.push(`${quoted(`last=${last}`)} is none of the lengths of time: ${SPANS.map(([name]) => name).join(", ")}.`);
  }
  if (invalid.length) return said;
  if (params.has("from") !== params.has("to")) said.push("A range needs both from and to.");
  else if (from !== null && to <= from) said.push(`The range ends at ${moment(to)}, before it begins at ${moment(from)}.`);
  else if (from !== null && to - from > LONGEST) said.push(`At most six hours are shown at once: those from ${moment(from)} on.`);
  else if (from !== null && (at < from || at > to) && at !== null) said.push(`${moment(at)} is not in the range shown.`);
  return said;
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
  const date = written ?? day(other);
  const ms = Date.parse(`${date}T${hours.padStart(2, "0")}:${minutes}:${seconds}`);
  // Browsers take the 31st of February for a day in March.
  return Number.isNaN(ms) || day(ms) !== date ? null : ms;
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
