// The event stream: reports each cycle of the agent, and when the agent is gone and comes back.

const AGAIN = 2000;

export class Live {
  // `onNews` is called at most once in `apart` milliseconds, and not while the page is hidden.
  constructor({ onNews, onState, apart = 1000 }) {
    Object.assign(this, { onNews, onState, apart, last: 0, timer: null, isThere: null, stream: null });
    // A browser opens at most six connections to a server for all of its tabs, so hidden tabs close theirs.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.end() : this.start()));
    window.addEventListener("pagehide", () => this.end());
    window.addEventListener("pageshow", (event) => event.persisted && this.start());
  }

  start() {
    this.end();
    const stream = new EventSource("/v1/events");
    this.stream = stream;
    stream.addEventListener("open", () => this.is(true));
    stream.addEventListener("cycle", () => this.news());
    stream.addEventListener("gap", () => this.news());
    stream.addEventListener("error", () => {
      this.is(false);
      // The browser reconnects after a lost connection, but not after a refused one.
      if (stream.readyState === EventSource.CLOSED) setTimeout(() => this.stream === stream && this.start(), AGAIN);
    });
  }

  end() {
    this.stream?.close();
    this.stream = null;
  }

  is(there) {
    if (there === this.isThere) return;
    this.isThere = there;
    this.onState(there);
  }

  news() {
    if (document.hidden || this.timer !== null) return;
    const wait = Math.max(this.last + this.apart - performance.now(), 0);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.last = performance.now();
      this.onNews();
    }, wait);
  }
}
