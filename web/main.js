// Ties the page together: the URL determines what is shown, and the agent provides the data.

import { Gone, Problem, get, takeKey } from "./api.js";
import { Bar } from "./bar.js";
import { decisions } from "./decisions.js";
import { h, show } from "./dom.js";
import { clock } from "./format.js";
import { help, keyboard } from "./keyboard.js";
import { Live } from "./live.js";
import { map } from "./map.js";
import { proposals } from "./proposals.js";
import { Router, changed, here, href } from "./router.js";
import { theme } from "./theme.js";
import { isLive, read, stamp } from "./time.js";
import { vm } from "./vm.js";

const SCREENS = { map, vm, decisions, proposals };
const NAMES = [["map", "Host", "h"], ["decisions", "Decisions", "d"], ["proposals", "Recommendations", "r"]];
// Milliseconds between requests for decision marks while the page is live.
const MARKS_APART = 5000;

const part = (id) => document.getElementById(id);

class Page {
  constructor() {
    takeKey();
    Object.assign(this, { about: null, now: Date.now(), marks: [], asking: null, marksOf: {} });
    const onRange = (range) => this.router.go(changed({ cursor: null }, range), { replace: true });
    this.bar = new Bar(part("bar"), onRange, () => this.isDrawing);
    this.router = new Router(() => this.move());
    this.live = new Live({
      onNews: () => this.news(),
      onState: (isThere) => this.state(isThere),
    });
    theme(part("theme"));
    part("help").addEventListener("click", help);
    const go = (view) => () => this.router.go(href(view, {}, this.range()));
    keyboard({
      "/": () => document.querySelector("[data-filter]")?.focus(),
      "ArrowLeft": (event) => this.bar.step(event.shiftKey ? -10 : -1),
      "ArrowRight": (event) => this.bar.step(event.shiftKey ? 10 : 1),
      "[": () => this.bar.shift(-1),
      "]": () => this.bar.shift(1),
      "l": () => this.bar.live(),
      "p": () => this.bar.play(),
      "w": () => document.querySelector("[data-why]")?.click(),
      "t": () => part("theme").click(),
      ...Object.fromEntries(NAMES.map(([view, , key]) => [key, go(view)])),
    });
  }

  range() {
    return read(here().params, this.now);
  }

  // Loads the agent's status, and takes its time as now.
  async learn() {
    const status = await get("/v1/status");
    this.now = Date.parse(status.time);
    this.about = status;
    const runs = `${status.host} · ${status.policies}${status.mode === "act" ? "" : `, ${status.mode}`}`;
    show(part("about"), h("span", { title: `version ${status.version}, commit ${status.commit}` }, runs));
    return status;
  }

  async start() {
    this.live.start();
    await this.move();
  }

  // Shows what the URL now names.
  async move() {
    const { view } = here();
    const range = this.range();
    show(part("screens"), NAMES.map(([name, text, key]) => h("a", {
      href: href(name, {}, range), "aria-current": name === view ? "page" : null, title: `${text} (${key})`, "data-key": name,
    }, text)));
    document.querySelector(".brand").setAttribute("href", href("map", {}, range));
    if (view !== this.view) {
      window.scrollTo(0, 0);
      this.view = view;
    }
    await this.draw();
  }

  // A cycle of the agent is over.
  async news() {
    // Skip cycles while a slower answer is pending.
    if (this.isDrawing) return;
    if (isLive(this.range())) await this.draw();
    else await this.learn().then(() => this.bar.draw(this.range(), { now: this.now }), () => {});
  }

  // Requests and shows what the URL names; cancels an older request.
  async draw() {
    this.asking?.abort();
    const asking = new AbortController();
    this.asking = asking;
    this.isDrawing = true;
    const { view, params } = here();
    const screen = SCREENS[view];
    try {
      await this.learn();
      const range = this.range();
      this.bar.draw(range, { marks: this.marks, now: this.now });
      const page = {
        range, params, about: this.about, now: this.now, signal: asking.signal,
        go: (more, to = range) => this.router.go(changed(more, to)),
        replace: (more, to = range) => this.router.go(changed(more, to), { replace: true }),
        again: () => this.draw(),
      };
      const [drawn] = await Promise.all([screen(page), this.ask(range, params, asking.signal)]);
      if (asking.signal.aborted) return;
      document.title = `${drawn.title} · Homenode`;
      show(part("screen"), drawn.tree);
      part("screen").dataset.drawn = view;
      this.bar.draw(range, { marks: this.marks, recorded: drawn.recorded, now: this.now });
      this.pulse(range);
      this.trouble(this.about.trouble && `The agent cannot read its host: ${this.about.trouble}`);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.failed(error);
    } finally {
      if (this.asking === asking) this.isDrawing = false;
    }
  }

  // Returns the times of decisions, for the bar; none without a history.
  async ask(range, params, signal) {
    const name = params.get("vm");
    const asked = { vm: name, from: stamp(range.from), to: stamp(range.to), limit: 500 };
    const isSame = this.marksOf.vm === name && Math.abs(this.marksOf.from - range.from) < MARKS_APART && this.marksOf.to - range.to > -MARKS_APART
      && performance.now() - this.marksOf.when < MARKS_APART;
    if (isSame) return;
    try {
      const { decisions: made } = await get("/v1/decisions", asked, signal);
      this.marks = made.map((one) => Date.parse(one.time));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.marks = [];
    }
    this.marksOf = { vm: name, from: range.from, to: range.to, when: performance.now() };
  }

  pulse(range) {
    show(part("pulse"), isLive(range) ? h("span", { class: "live" }, "● live") : h("span", { class: "past" }, "◷ past"));
  }

  state(isThere) {
    if (isThere) this.draw();
    else this.gone();
  }

  gone() {
    const since = this.about ? ` since ${clock(this.now)}` : "";
    show(part("pulse"), h("span", { class: "gone" }, "✕ no agent"));
    this.trouble(`The agent has not answered${since}: it has ended, or is being restarted. What you see is the last that it said; `
      + "this page goes on when it answers again.");
  }

  failed(error) {
    if (error instanceof Gone) {
      this.gone();
    } else if (error instanceof Problem) {
      show(part("screen"), h("div", { class: "problem", role: "alert" }, h("h1", {}, error.title), h("p", {}, error.message),
        h("p", {}, h("a", { href: "/" }, "To the host as it is now"))));
      part("screen").dataset.drawn = "problem";
      this.pulse(this.range());
    } else {
      throw error;
    }
  }

  trouble(text) {
    const box = part("trouble");
    box.hidden = !text;
    show(box, text ? h("p", {}, text) : null);
  }
}

new Page().start();
