// Ties the page together: the URL determines what is shown, and the agent provides the data.

import { Gone, Problem, get, takeKey } from "./api.js";
import { Bar } from "./bar.js";
import { decisions } from "./decisions.js";
import { h, show } from "./dom.js";
import { clock, span } from "./format.js";
import { help, keyboard } from "./keyboard.js";
import { Live } from "./live.js";
import { map } from "./map.js";
import { proposals } from "./proposals.js";
import { Router, changed, here, href, wrong } from "./router.js";
import { theme } from "./theme.js";
import { isLive, read, stamp } from "./time.js";
import { vm } from "./vm.js";

const SCREENS = { map, vm, decisions, proposals };
const NAMES = [["map", "Host", "h"], ["decisions", "Decisions", "d"], ["proposals", "Recommendations", "r"]];
// Milliseconds between requests for decision marks while the page is live.
const MARKS_APART = 5000;
// What the agent's mode means; the usual one is not shown.
const MODES = {
  observe: "Decisions are reported, and nothing is changed",
  recommend: "Decisions wait until an operator applies them: see Recommendations",
};

const part = (id) => document.getElementById(id);

class Page {
  constructor() {
    Object.assign(this, { about: null, now: Date.now(), marks: [], asking: null, marksOf: {}, isKeyWrong: takeKey() === false });
    // Another address pasted into the same tab may only add a key, which does not load the page again.
    window.addEventListener("hashchange", () => {
      const isKey = takeKey();
      if (isKey === null) return;
      this.isKeyWrong = !isKey;
      this.draw();
    });
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
    const runs = `${status.host} · ${status.policies}`;
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
        wrong: [...wrong(this.now), ...(this.isKeyWrong ? ["What follows #key= in the address is not a key."] : [])],
        go: (more, to = range) => this.router.go(changed(more, to)),
        replace: (more, to = range) => this.router.go(changed(more, to), { replace: true }),
        again: () => this.draw(),
      };
      const [drawn] = await Promise.all([screen(page), this.ask(range, params, asking.signal)]);
      if (asking.signal.aborted) return;
      document.title = `${drawn.title} · Homenode`;
      const notes = page.wrong.map((text) => h("p", { class: "note wrong", role: "alert", "data-key": text }, text));
      show(part("screen"), notes, drawn.tree);
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
    const last = this.marksOf;
    const isSame = last.vm === name && Math.abs(last.from - range.from) < MARKS_APART && last.to - range.to > -MARKS_APART
      && performance.now() - last.when < MARKS_APART;
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
    const { mode, paused_for_ns: paused } = this.about ?? {};
    show(part("pulse"),
      isLive(range) ? h("span", { class: "live" }, "● live") : h("span", { class: "past" }, "◷ past"),
      mode && mode !== "act" && h("span", { class: "mode", title: MODES[mode] }, mode),
      paused && h("span", { class: "mode past", title: "The agent changes nothing" }, `❚❚ paused ${span(paused / 1e6)}`));
  }

  state(isThere) {
    if (isThere) this.draw();
    else this.gone();
  }

  gone() {
    const since = this.about ? ` since ${clock(this.now)}` : "";
    show(part("pulse"), h("span", { class: "gone" }, "✕ no agent"));
    this.trouble(`The agent has not answered${since}: it has ended, or is being restarted. What you see is the last that it `
      + "said; this page goes on when it answers again.");
  }

  failed(error) {
    if (error instanceof Gone) {
      this.gone();
      return;
    }
    const isKnown = error instanceof Problem;
    const title = isKnown ? error.title : "The page failed, which is a fault of the page";
    show(part("screen"), h("div", { class: "problem", role: "alert" }, h("h1", {}, title), h("p", {}, error.message),
      wrong(this.now).map((text) => h("p", {}, text)),
      h("p", {}, h("a", { href: "/" }, "To the host as it is now"))));
    part("screen").dataset.drawn = "problem";
    document.title = `${title} · Homenode`;
    this.pulse(this.range());
    if (!isKnown) throw error;
  }

  trouble(text) {
    const box = part("trouble");
    box.hidden = !text;
    show(box, text ? h("p", {}, text) : null);
  }
}

new Page().start();
