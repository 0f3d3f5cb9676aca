// The time bar on every screen: the range shown, the time in it, and whether it is live.

import { h, show } from "./dom.js";
import { clock, moment, span } from "./format.js";
import { SPANS, fixed, isLive, moveTo, notTime, parse, read, shift, spanText } from "./time.js";

// An arrow key moves by this fraction of the range.
const STEPS = 60;
const PLAY_APART = 600;

export class Bar {
  // `onRange(range)` is called when the user goes to another time; playing waits while `isDrawing()`.
  constructor(root, onRange, isDrawing) {
    Object.assign(this, { root, isDrawing, range: null, marks: [], recorded: null, playing: null, wrong: null });
    this.onRange = (to) => {
      this.wrong = null;
      onRange(to);
    };
  }

  draw(range, { marks, recorded, now }) {
    if (isLive(range)) this.stop();
    Object.assign(this, { range, now, marks: marks ?? this.marks, recorded: recorded ?? this.recorded });
    const length = range.to - range.from;
    const step = Math.max(Math.round(length / 900 / 1000) * 1000, 1000);
    show(this.root,
      h("div", { class: "row times" },
        this.button("◀", "The stretch before ([)", () => this.shift(-1)),
        this.field("from", "From"),
        h("span", { class: "quiet word", "aria-hidden": "true" }, "to"),
        this.field("to", "To"),
        this.button("▶", "The stretch after (])", () => this.shift(1)),
        h("label", { class: "row" }, h("span", { class: "quiet word" }, "Show"), h("select", {
          id: "last", "aria-label": "How long a stretch", value: this.spanName(),
          on: { change: (event) => this.length(event.target.value) },
        }, h("option", { value: "", disabled: true, selected: this.spanName() === "" }, span(length)),
        SPANS.map(([name]) => h("option", { value: name, selected: name === this.spanName() }, spanText(name))))),
        h("span", { class: "grow" }),
        h("output", { id: "now", class: "cursor time", for: "at", title: moment(range.at) }, clock(range.at)),
        h("button", {
          type: "button", id: "play", "aria-pressed": String(this.playing !== null), title: "Play the past (p)",
          "aria-label": "Play", on: { click: () => this.play() },
        }, this.playing === null ? "▷" : "❚❚"),
        h("button", {
          type: "button", id: "live", "aria-pressed": String(isLive(range)), title: "Follow the agent (l)",
          on: { click: () => this.live() },
        }, isLive(range) ? "● Live" : "○ Live")),
      this.wrong && h("p", { id: "wrong", class: "bad", role: "alert" }, this.wrong.text),
      h("div", { class: "track" },
        h("div", { class: "marks", "aria-hidden": "true" }, this.shown()),
        h("input", {
          type: "range", id: "at", min: range.from, max: range.to, step, value: String(range.at),
          "aria-label": "Time shown", "aria-valuetext": moment(range.at),
          on: { input: (event) => this.go(Number(event.target.value)), keydown: (event) => this.arrow(event) },
        })));
  }

  // Marks of decisions, and the parts that are not recorded.
  shown() {
    const { from, to } = this.range;
    const left = (ms) => `${(100 * (ms - from)) / (to - from)}%`;
    const all = this.marks.filter((at) => at >= from && at <= to).map((at) => h("i", { css: { left: left(at) } }));
    const first = this.recorded ? Date.parse(this.recorded.from) : null;
    if (first !== null && first > from) {
      all.unshift(h("b", { css: { width: left(Math.min(first, to)) }, title: "nothing is recorded of this time" }));
    }
    return all;
  }

  // An input for an end of the range, in the format of the command line.
  field(end, label) {
    const isWrong = this.wrong?.end === end;
    return h("input", {
      id: end, class: "time", size: 19, "aria-label": `${label}: a day and a time, or a time`,
      title: "2026-11-24 03:12:00, or 03:12", value: moment(this.range[end]),
      "aria-invalid": String(isWrong), "aria-describedby": isWrong ? "wrong" : null,
      on: {
        change: (event) => this.typed(event.target, end),
        keydown: (event) => event.key === "Enter" && this.typed(event.target, end),
      },
    });
  }

  button(text, label, click) {
    return h("button", { type: "button", "aria-label": label, title: label, on: { click } }, text);
  }

  spanName() {
    const length = this.range.to - this.range.from;
    return SPANS.find(([, ms]) => Math.abs(ms - length) < 1000)?.[0] ?? "";
  }

  // The slider itself moves in steps of a second or more; arrow keys move as far as elsewhere on the page.
  arrow(event) {
    const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    this.step(way * (event.shiftKey ? 10 : 1));
  }

  // Moves by `by` sixtieths of the range.
  step(by) {
    const far = Math.max((this.range.to - this.range.from) / STEPS, 1000);
    this.go(this.range.at + by * far);
  }

  go(at) {
    this.onRange(moveTo(this.range, Math.min(at, this.now)));
  }

  shift(by) {
    const moved = shift(this.range, by);
    if (moved.to >= this.now && by > 0) this.live();
    else this.onRange(moved);
  }

  // Moves the other end along if this one passes it.
  typed(input, end) {
    const ms = parse(input.value, this.range[end]);
    const isSame = ms !== null && moment(ms) === moment(this.range[end]);
    if (ms === null || isSame) {
      this.wrong = isSame ? null : { end, text: notTime(input.value) };
      this.draw(this.range, { now: this.now });
      return;
    }
    const length = this.range.to - this.range.from;
    const [from, to] = end === "from"
      ? [ms, ms < this.range.to ? this.range.to : ms + length]
      : [ms > this.range.from ? this.range.from : ms - length, ms];
    this.onRange(fixed(from, to, Math.min(Math.max(this.range.at, from), to)));
  }

  length(name) {
    const live = read(new URLSearchParams({ last: name }), this.now);
    const ms = live.to - live.from;
    if (isLive(this.range)) this.onRange(live);
    else this.onRange(fixed(this.range.at - ms / 2, this.range.at + ms / 2, this.range.at));
  }

  live() {
    const last = this.spanName() || "15m";
    this.onRange(read(new URLSearchParams({ last }), this.now));
  }

  // Plays the range, a sixtieth at a time.
  play() {
    if (this.playing !== null) {
      this.stop();
      this.draw(this.range, { now: this.now });
      return;
    }
    const { from, to, at } = this.range;
    if (isLive(this.range) || at >= to) this.onRange(fixed(from, to, from));
    this.playing = setInterval(() => {
      if (this.range.at >= this.range.to) this.play();
      else if (!this.isDrawing()) this.step(1);
    }, PLAY_APART);
    this.draw(this.range, { now: this.now });
  }

  stop() {
    clearInterval(this.playing);
    this.playing = null;
  }
}
