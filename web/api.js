// Requests to the agent, and its answers.

const KEY = "homenode.key";
// Milliseconds without an answer after which the agent counts as gone.
const PATIENCE = 35_000;
// Most cached answers.
const KEPT_MOST = 20;

// An error from the agent (RFC 9457).
export class Problem extends Error {
  constructor(status, kind, title, detail) {
    super(detail);
    Object.assign(this, { status, kind, title });
  }
}

// The agent does not answer.
export class Gone extends Error {}

// The key in the URL makes the user an operator. It is kept for as long as the tab is open, and removed from the URL, which
// users copy and show to others. Returns null if there is none, and otherwise whether it can be a key.
export function takeKey() {
  const [, key] = /^#key=(.*)$/.exec(location.hash) ?? [];
  if (key === undefined) return null;
  const isKey = /^[!-~]+$/.test(key);
  if (isKey) sessionStorage.setItem(KEY, key);
  history.replaceState(history.state, "", location.pathname + location.search);
  return isKey;
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

const path = (route, params) => {
  const said = Object.entries(params ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(said).toString();
  return query ? `${route}?${query}` : route;
};

async function ask(method, route, { signal, headers } = {}) {
  let answer;
  try {
    const patience = AbortSignal.timeout(PATIENCE);
    const until = signal ? AbortSignal.any([signal, patience]) : patience;
    answer = await fetch(route, { method, signal: until, headers, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("the agent does not answer");
  }
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  const said = await answer.json().catch(() => ({}));
  const kind = String(said.type ?? "").split(":").at(-1);
  throw new Problem(answer.status, kind, said.title ?? `The agent answered ${answer.status}`, said.detail ?? "");
}

export const get = (route, params, signal) => ask("GET", path(route, params), { signal });

const kept = new Map();

// Like `get`, but at most once in `apart` milliseconds for the same `about`: reading the history costs the agent work.
export async function getSeldom(about, apart, route, params, signal) {
  const key = `${route} ${about}`;
  const last = kept.get(key);
  if (last && performance.now() - last.when < apart) return last.answer;
  const answer = await get(route, params, signal);
  if (kept.size >= KEPT_MOST) kept.clear();
  kept.set(key, { when: performance.now(), answer });
  return answer;
}

// Sends a change, as an operator.
export function change(method, route) {
  const key = sessionStorage.getItem(KEY);
  return ask(method, route, { headers: key ? { authorization: `Bearer ${key}` } : {} });
}

// Returns the path of a VM; a name may contain any characters.
export const ofVm = (name, what = "") => `/v1/vms/${encodeURIComponent(name)}${what}`;
