#!/usr/bin/env python3
"""Writes the profiles of the 29 programs of [Policies] (data/workloads) from its tables 1 and 2, which are their inputs.

    scripts/numa-workloads.py            writes the files
    scripts/numa-workloads.py --check    fails if a file differs from what would be written
    scripts/numa-workloads.py --fit      prints published and fitted figures of table 1

How each figure is derived:

- Imbalance, first-touch. 48 threads, one per CPU of amd48, 8 nodes. A share s of all accesses goes to memory that one thread
  touched first, all of it on one node; the rest is even over nodes. The relative standard deviation of accesses per node is
  then s * sqrt(7), so s is the published figure over sqrt(7).
- Imbalance, round-4K. P hot pages, dealt round robin, are on P of 8 nodes, one on each: a share f of accesses to them results in
  f * sqrt(P (8 - P)) / P. The hot pages are part of the memory that one thread touched first (f <= s). Of P = 1 to 7 the
  value is taken that fits the interconnect columns best.
- Hot pages that would need more than HOT_MOST of the accesses are left out: a few pages lie in the private caches, which only
  lines that threads pass to each other leave. The round-4K column of imbalance then shows what it shows.
- Interconnect. The load of the most loaded link over its own capacity, on average over the run. If a program's LLC accesses per
  kilo-instruction were measured, that rate stays, and two other figures are fitted to the two columns by least squares: the
  time that a thread rests (it reads input, or is in a phase that table 1 does not tell apart), which is the same under both
  policies, and the share h of accesses to memory that all threads touch and use. X-Stream rests while it waits for its disk, so
  its profiles have no rests but the disk's bytes. The rate is fitted in place of the rest if it was not measured, or if the
  measured one loads links too little even without rests (kmeans, x264: the paper's inputs differ). The load is that of the
  twin's own equations (hardware/core.rs, hardware/fabric.rs), repeated below: one thread per CPU, native, 4 KiB pages, LLC
  shared evenly by the node's six threads, pages placed by the policy. Threads that meet at barriers all run at the speed of the
  slowest, and rest together.
- Footprint: table 2, divided over the regions like the accesses, but for sizes that scripts/profiles/windows.py has from the
  programs' sources. That table also says which arrays a region has, which part of it is in use at a time, and how hot pages were
  in a run.
- Network: NETWORK below says what belongs to a context switch of two programs.
- Context switches and disk: table 2, rates per second of the whole machine, over its instructions per second in the solution
  for first-touch (table 2 does not name the policy). If a program meets at sleeping barriers, each of 47 threads sleeps
  once per barrier, and this accounts for all its context switches.
- Instructions: for the NPB programs from operation counts; for the others such that a first-touch run lasts 60 seconds, since
  the paper prints no running times.
- Misses in flight, write share, shape of the miss ratio and translation: measured under emulation if MEASURED below names a run of
  scripts/profiles.py (data/measured/profiles.toml), else estimated, program by program. Cycles per instruction are estimated. None
  of it was fitted; the fit above starts from it.

Limits of the fit: an imbalance can come from threads that use their own memory unevenly, which a profile cannot express. A
program with much imbalance and an idle interconnect (psearchy, ft.C, lu.C, dc.B under first-touch) therefore loads its
links too much.
"""

import csv
import itertools
import math
import pathlib
import re
import sys
import tomllib

import profiles as measuring

sys.path.insert(0, str(measuring.SOURCES))
import windows
from programs import K, M, MEETINGS, PROGRAMS, STREAM_UNIT

ROOT = pathlib.Path(__file__).resolve().parent.parent
NODES, CPUS_PER_NODE, LINE, PAGE = 8, 6, 64.0, 4096.0
# Share of LLC accesses that at most seven pages may get: more would need threads that do little but pass lines on. Estimate, .05 to
# .3: an outside reading of 2026-11-26 called profiles above .15 impossible.
HOT_MOST = 0.15
# Share of table 1's loads that a measured rate must reach under some policy without any rest; else the run was not of the paper's
# input. Estimate: kmeans reaches at most .36 of them and x264 .61; every other program reaches .9 under one of the policies.
REACHED = 0.67
THREADS = NODES * CPUS_PER_NODE
SOLO_S = 60.0
FULL = 0.985  # hardware/fabric.rs
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}


def size(text):
    number, unit = re.fullmatch(r"([0-9.]+)([KMG]iB|GB)(?:/s)?", text).groups()
    return float(number) * UNITS[unit]


def table(name):
    rows = [line for line in (ROOT / "data/published" / name).read_text().splitlines() if not line.startswith("#")]
    return {row["app"]: row for row in csv.DictReader(rows)}


# ---- The machine and the twin's equations ------------------------------------------------------------------------------


class Machine:
    """amd48: the figures that the equations use."""

    def __init__(self):
        file = tomllib.loads((ROOT / "data/machines/amd48.toml").read_text())
        hardware = file["hardware"]
        self.ghz = float(hardware["clock"].removesuffix("GHz"))
        self.llc = size(file["llc"]["size"])
        self.l2 = size(hardware["l2"])
        self.reach = hardware["tlb_entries_4k"] * PAGE
        self.refs = hardware["walk"]["native_refs"]
        self.in_flight_max = hardware["misses_in_flight_max"]
        self.latency = hardware["latency"]
        self.scattered_excess = 1 / hardware.get("scattered_throughput", 1) - 1
        curves = hardware["memory_curve"], hardware["link"]["curve"]
        controller = size(file["shape"]["memory_bandwidth_per_node"]) / 1e9
        # Resources: (idle ns, curve, bytes per ns); controllers first, then each link in both directions.
        self.resources = [(self.latency["memory_ns"], curves[0], controller)] * NODES
        links = []
        for group in file["links"]:
            for a, b in group["between"]:
                for ends in ((a, b), (b, a)):
                    links.append(ends)
                    self.resources.append((hardware["link"]["hop_ns"], curves[1], size(group["bandwidth"]) / 1e9))
        stated = {(nodes[0], nodes[-1]): nodes for nodes in file["routes"]["directed"]}
        self.routes = [[route(links, stated.get((a, b)), a, b) for b in range(NODES)] for a in range(NODES)]


def route(links, stated, start, end):
    """Like Machine::route: the stated route, else one of fewest hops, in a tie the first links listed."""
    if stated:
        return [NODES + links.index(hop) for hop in itertools.pairwise(stated)]
    reached, frontier = {start: []}, [start]
    while end not in reached:
        following = []
        for node in frontier:
            for at, (a, b) in enumerate(links):
                if a == node and b not in reached:
                    reached[b] = reached[node] + [NODES + at]
                    following.append(b)
        frontier = following
    return reached[end]


def miss_ratio(curve, capacity):
    m_inf, c0, k = curve
    return m_inf + (1 - m_inf) * math.exp(-((capacity / c0) ** k))


def streamed(program, ratio):
    """Share of missed lines that belong to streams, like Program::streamed without a value in the profile."""
    return min(program["miss"][0] / ratio, program["flight"] - 1, 1)


def growth(curve, u):
    return 1 + curve["alpha"] * u + curve["beta"] * u * math.sqrt(u) / (1 - u)


def consistent(resource, now, load):
    """Latency at which the load is consistent if it answers as 1 / latency (hardware/fabric.rs): u g(u) = traffic."""
    idle, curve, capacity = resource
    alpha, beta = curve["alpha"], curve["beta"]
    traffic = load * now / (idle * capacity * 1.02)
    if FULL * growth(curve, FULL) <= traffic:
        return max(idle * growth(curve, FULL), now * load / capacity)
    u = min(traffic, FULL)
    for _ in range(6):
        excess = u + alpha * u * u + beta * u * u * math.sqrt(u) / (1 - u) - traffic
        slope = 1 + 2 * alpha * u + beta * u * math.sqrt(u) * (2.5 - 1.5 * u) / (1 - u) ** 2
        u -= excess / slope
        if abs(excess) < 1e-6:
            break
    return max(idle * growth(curve, u), now * load / capacity)


class Solution:
    """48 threads of a program with their accesses spread over nodes by `weights[cpu node][memory node]`, each of which rests
    `rest_ns` per instruction. `load_pct` is the mean load of the most loaded link over the run, rests included."""

    def __init__(self, machine, program, accesses, rest_ns, shared_share, region_bytes, weights, start):
        held = min(machine.llc / CPUS_PER_NODE, region_bytes)
        capacity = held * (1 + shared_share * (CPUS_PER_NODE - 1))
        accesses /= 1000
        misses = accesses * miss_ratio(program["miss"], capacity)
        busy = program["cpi"] + (accesses - misses) * machine.latency["llc_cycles"] / program["hits"]
        waits = misses / min(program["flight"], machine.in_flight_max)
        per_kilo, *curve = program["tlb"]
        refs = per_kilo / 1000 * miss_ratio(curve, machine.reach) * machine.refs
        pages = max(program["footprint"] / PAGE * 8, 8)
        in_l2 = min(machine.l2 / pages, 1)
        beyond = refs * (1 - in_l2)
        missed = beyond * max(1 - capacity / pages, 0)
        busy += refs * in_l2 * machine.latency["l2_cycles"] + (beyond - missed) * machine.latency["llc_cycles"]
        self.machine, self.program, self.weights, self.rest_ns = machine, program, weights, rest_ns
        scattered = misses * (1 - streamed(program, misses / accesses)) + missed
        self.excess = machine.scattered_excess * scattered / (misses + missed)
        self.busy_ns, self.waits, self.bytes = busy / machine.ghz, waits + missed, (misses + missed) * LINE
        self.solve(start)

    def solve(self, start):
        machine = self.machine
        now = start or [idle for idle, _, _ in machine.resources]
        for _ in range(200):
            loads = self.loads(now)
            following = [consistent(*of) for of in zip(machine.resources, now, loads)]
            change = max(abs(b - a) / a for a, b in zip(now, following))
            now = [0.5 * (a + b) for a, b in zip(now, following)]
            if change < 1e-3:
                break
        self.now, loads = now, self.loads(now)
        busiest = max(100 * load / capacity for load, (_, _, capacity) in zip(loads[NODES:], machine.resources[NODES:]))
        self.load_pct = busiest * self.at_work if self.program["barrier"] else busiest
        self.instructions_per_ns *= self.at_work if self.program["barrier"] else 1

    def loads(self, now):
        machine, write = self.machine, self.program["write"]
        routes = machine.routes
        ns = []
        for cpu in range(NODES):
            latency = sum(
                weight * (now[node] + sum(now[link] for link in routes[node][cpu]))
                for node, weight in enumerate(self.weights[cpu])
                if weight > 0
            )
            ns.append(self.busy_ns + self.waits * latency)
        if self.program["barrier"]:
            ns = [max(ns)] * NODES
        # Threads that meet at barriers rest together: at work they load the machine as if there were no rests. Others rest each
        # by itself: on average the machine has fewer threads at work.
        self.at_work = ns[0] / (ns[0] + self.rest_ns)
        if not self.program["barrier"]:
            ns = [each + self.rest_ns for each in ns]
        self.instructions_per_ns = sum(CPUS_PER_NODE / each for each in ns)
        loads = [0.0] * len(machine.resources)
        for cpu in range(NODES):
            rate = CPUS_PER_NODE * self.bytes / ns[cpu]
            for node, weight in enumerate(self.weights[cpu]):
                read = rate * weight
                loads[node] += read * (1 + write) * (1 + self.excess)
                for link in routes[node][cpu]:
                    loads[link] += read
                for link in routes[cpu][node]:
                    loads[link] += read * write
        return loads


# ---- The fit -----------------------------------------------------------------------------------------------------------


def first_touch(s, h):
    """Where accesses go: the memory of one thread on node 0, memory touched by all everywhere, the rest at home."""
    return [
        [(s if node == 0 else 0) + h / NODES + (1 - s - h if node == cpu else 0) for node in range(NODES)]
        for cpu in range(NODES)
    ]


def round_4k(f, pages):
    """All pages dealt in turn; the hot ones came first."""
    row = [(f / pages if node < pages else 0) + (1 - f) / NODES for node in range(NODES)]
    return [row] * NODES


def relative_deviation(pages):
    return math.sqrt(pages * (NODES - pages)) / pages


class Fit:
    def __init__(self, machine, name, program, row):
        self.machine, self.name, self.program = machine, name, program
        self.published = float(row["interconnect_first_touch_pct"]), float(row["interconnect_round_4k_pct"])
        self.imbalance = float(row["imbalance_first_touch_pct"]) / 100, float(row["imbalance_round_4k_pct"]) / 100
        self.s = self.imbalance[0] / math.sqrt(NODES - 1)
        hot = [(pages, self.imbalance[1] / relative_deviation(pages)) for pages in range(1, NODES)]
        hot = [(pages, f) for pages, f in hot if f <= min(self.s, HOT_MOST)] or [(1, 0.0)]
        self.measured, self.starts = program.get("accesses"), [None, None]
        best = self.fit(hot, self.measured) if self.measured else None
        if best and all(here.load_pct < REACHED * there for here, there in zip(self.solutions(*best[1:]), self.published)):
            best, self.measured = None, None
        _, self.accesses, rest_ns, self.h, self.pages, self.f = best or self.fit(hot, None)
        self.accesses = round(self.accesses, 2)
        # A rest of less than a percent of the time is none.
        self.rest_ns = round(rest_ns, 4) if rest_ns > 0.003 else 0.0
        self.s, self.f = round(self.s, 4), round(self.f, 4)
        self.h = min(self.h, round(1 - self.s, 4))
        self.starts = [None, None]
        self.first, self.round = self.solutions(self.accesses, self.rest_ns, self.h, self.pages, self.f)

    def fit(self, hot, measured):
        """The best error, accesses, rest, share h, hot pages and their share: accesses are as measured, or there is no rest."""
        self.best = None
        # Either the time at rest, in ns per instruction, or the accesses.
        low, high = (1e-4, 100) if measured else (0.05, 200)
        of = (lambda log: (measured, math.exp(log))) if measured else (lambda log: (math.exp(log), 0.0))
        for pages, f in hot:
            self.h = min(0.05, 1 - self.s)
            for _ in range(4):
                log = least(lambda log: self.error(*of(log), self.h, pages, f), math.log(low), math.log(high))
                self.h = least(lambda h: self.error(*of(log), h, pages, f), 0.0, 1 - self.s)
            error = self.error(*of(log), self.h, pages, f)
            if self.best is None or error < self.best[0] - 0.05:
                self.best = error, *of(log), round(self.h, 3), pages, f
        return self.best

    def solutions(self, accesses, rest_ns, h, pages, f):
        shared = self.s + h
        footprint = self.program["footprint"]
        region_bytes = footprint * (shared + (1 - shared) / THREADS)
        found = []
        for at, weights in enumerate((first_touch(self.s, h), round_4k(f, pages))):
            start = self.starts[at]
            found.append(Solution(self.machine, self.program, accesses, rest_ns, shared, region_bytes, weights, start))
            self.starts[at] = found[at].now
        return found

    def error(self, accesses, rest_ns, h, pages, f):
        found = self.solutions(accesses, rest_ns, h, pages, f)
        squares = sum((a.load_pct - b) ** 2 for a, b in zip(found, self.published))
        # Of nearly equal fits, as when a resource is saturated, the one with the fewest accesses and the least rest.
        return squares + math.log(accesses) + 0.1 * rest_ns + 0.001 * h


def least(function, low, high):
    """Smallest value of a function with one valley, by golden section."""
    golden = 0.5 * (math.sqrt(5) - 1)
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(14):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = function(b)
    return 0.5 * (low + high)


# Profile: the run it is measured by; how much larger its reused memory is than in the run (by the class definition: planes of MG's
# grid have 16 times the points of class B's); how the profile's memory relates to the run's, None if the run's curve does not apply.
# For EP: a run of one thread lacks what its threads pass to each other. Not used: wc and wr, whose page walks alone would load links
# more than table 1 states, so our code and its words are not Metis'. Then instructions: the multiple of those of the run, over 48
# threads, the reason, and meetings at barriers.
MEASURED = {
    "cg.C": ("cg.C-amd48", 1, measuring.AS_RUN, (75 * 26 / 3, "75 outer iterations of 26 products, 3 of them measured", 9750)),
    "mg.D": ("mg.B-amd48", 16, measuring.AS_RUN, (50 * 64, "50 cycles over 64 times class B's points, 1 over these measured", 600)),
    "ft.C": ("ft.A-amd48", 1, measuring.LARGER, (20 * 16 * 27 / 23, "20 iterations, 16 times class A's points, 27 / 23 of its steps", 100)),
    "ep.D": ("ep.B-amd48", 1, None, (2**36 / (20 * 2**16), "2^36 pairs, 20 x 2^16 of them measured", None)),
    "streamcluster": ("streamcluster", 1, measuring.LARGER, None),
    "x264": ("x264", 1, measuring.AS_RUN, None),
    "kmeans": ("kmeans", 1, measuring.LARGER, None),
    "pca": ("pca", 1, measuring.LARGER, None),
    "pagerank": ("pagerank", 1, measuring.LARGER, None),
    "bfs": ("bfs", 1, measuring.LARGER, None),
    "cc": ("cc", 1, measuring.LARGER, None),
    "sssp": ("sssp", 1, measuring.LARGER, None),
}


def with_measured(name, program, rows):
    """A program's figures, with measured values replacing estimates; `why` says which."""
    run, scale, how, length = MEASURED.get(name, (None, 1, None, None))
    if run not in rows:
        return program | {"why": {}, "heat": ""}
    row = rows[run]
    tlb = measuring.reach_curve(row["tlb_misses_per_million"])
    out = program | {
        "flight": measuring.in_flight(row["misses_in_flight"]) or program["flight"],
        "hits": measuring.in_flight(row["hits_in_flight"]) or program["hits"],
        "write": round(row["write_share"], 3),
    }
    out["why"] = {"run": f"{run}, beyond L2 of {row['machine']}"} | {group: f"measured: {run}, {measuring.what_of(group, row, how or measuring.AS_RUN)}" for group in ("flight", "hits", "write", "tlb", "miss")}
    for group, key in (("flight", "misses_in_flight"), ("hits", "hits_in_flight")):
        if not measuring.in_flight(row[key]):
            del out["why"][group]
    if tlb:
        out["tlb"] = (row["accesses_per_kilo_instruction"], 0.0, *tlb)
    else:
        del out["why"]["tlb"]
    classes = ", ".join(f"{{ page_share = {pages}, access_share = {accesses} }}" for pages, accesses in windows.heat_classes(row))
    out["heat"] = f"heat = [{classes}] # measured: {run}, pages by heat, without what the LLC keeps\n" if classes else ""
    out["accesses"] = row["llc_accesses_per_kilo_instruction"]
    if how:
        out["accesses"], m_inf, c0_kib, k = measuring.curve_of(row, how)[0]
        out["miss"] = (m_inf, c0_kib * scale * K, k)
        if scale > 1:
            out["why"]["miss"] += f"; c0 {scale} times that of the run, by the class"
    else:
        del out["why"]["miss"]
    if length:
        times, how, meetings = length
        instructions = float(f"{row['instructions'] * times / 48e9:.3g}")
        out["instructions"] = instructions, f"measured instructions of {how}, over 48 threads"
        if meetings:
            waiting, _, imbalance = program["barrier"]
            out["barrier"] = waiting, float(f"{instructions * 1e3 / meetings:.3g}"), imbalance
    out["run"] = f"{row['command'].split(' ')[0]}, {row['package']}"
    return out


def fits(only=None):
    machine, rows = Machine(), measuring.load()
    behaviour = table("numa-policies-table2.csv")
    for name, row in table("numa-policies-table1.csv").items():
        if only and name not in only:
            continue
        chosen = with_measured(name, PROGRAMS[name], rows) | {"footprint": float(behaviour[name]["footprint_mb"]) * M}
        yield Fit(machine, name, chosen, row), behaviour[name]


# ---- Writing -------------------------------------------------------------------------------------------------------------

CLAIM = "calibrated: policies.imbalance"
# Bytes of one request: large where files are streamed.
REQUEST = {"npb": "64KiB", "mosbench": "128KiB", "xstream": "1MiB", "ycsb": "16KiB"}
# Network of the two programs that "continuously wait for network packets" [Policies, section 5.4.1]: bytes per context switch
# of table 2, whether a thread waits for each, and why. The paper prints no rates of its network.
#
# - memcached: Mosbench's load generator (memcached/mcload/mdc_udp.cc, memcached/__init__.py) has one thread for each server, and
#   one server for each core. It sends 20 requests of 25 bytes, reads the 20 answers, and begins again: a server that has
#   answered waits for the next 20. The key is never set, so an answer has 13 bytes. With 42 bytes of UDP, IP and Ethernet, and
#   frames of at least 60: 20 * (67 + 60). A server sleeps once per 20 (estimate: at most once, at worst for each request).
# - cassandra: YCSB's workload A (workloads/workloada) reads whole records of 10 fields of 100 bytes, and updates one field, each
#   half of the time: 550 bytes, and 230 of keys, names and headers (estimate). One operation per context switch (estimate: 1 / 3
#   to 1, as an operation passes several threads). It has many clients, so a thread does not wait for one of them.
#
# Then the packets of both directions: each memcached request and answer is one, and so is each of an operation (less than 1500 B).
NETWORK = {
    "memcached": (2540, True, 40, "source: Mosbench, mdc_udp.cc: 20 requests and answers, then the next 20"),
    "cassandra": (780, False, 2, "estimate: YCSB's workload A: records of 1 kB read, fields of 100 B written"),
}


def network_ns():
    """Latency of amd48's network for a native system."""
    devices = tomllib.loads((ROOT / "data/machines/amd48.toml").read_text())["devices"]
    latency = next(device["latency"] for device in devices if device["class"].startswith("0x02"))
    return float(latency.removesuffix("us")) * 1e3


def text_of(size):
    """A size in whole pages."""
    kib = max(4, 4 * round(size / 4096))
    return f"{kib // 1024}MiB" if kib % 1024 == 0 else f"{kib}KiB"


def curve(name, values, why):
    m_inf, c0, k = values
    size = f"{c0 // M}MiB" if c0 % M == 0 else f"{c0 // K}KiB" if c0 % K == 0 else f"{c0}B"
    return f"""
[{name}]
m_inf = {m_inf} # {why}
c0 = "{size}" # {why}
k = {float(k)} # {why}
"""


def region(kind, size, share, why, used=""):
    return f"""
[[program.regions]]
kind = "{kind}"
size = "{text_of(size)}" # computed: {why}
access_share = {share} # {CLAIM} table 1
{used}"""


def regions(fit):
    """The regions of a program: hot pages, what one thread touched first, what all use, and what each thread has for itself."""
    footprint, window = fit.program["footprint"], windows.WINDOWS[fit.name]
    divided = f"table 2, {footprint / M:.0f} MB, divided as the accesses are"
    private, one = round(1 - fit.s - fit.h, 4), round(fit.s - fit.f, 4)
    passed = {}
    if window["parts"] > 1 and "arrays" not in window:
        why = f"source: {window['source']}"
        passed[window["kind"]] = f"window = {{ parts = {window['parts']}, passes = {window['passes']} }} # {why}\n"
    used = lambda kind: passed.get(kind, "")
    out, left = "", footprint
    if fit.f > 0:
        out += region("initialised-by-one", fit.pages * PAGE, fit.f, f"hot pages: {fit.pages}")
    if one > 0:
        size, why = fit.s * footprint, divided
        if window["kind"] == "initialised-by-one" and "mib" in window:
            size, why = window["mib"] * M, window["source"]
        out += region("initialised-by-one", size, one, why, used("initialised-by-one"))
        left -= size
    if fit.h > 0:
        out += region("shared", fit.h * footprint, fit.h, divided, used("shared"))
        left -= fit.h * footprint
    if private > 0:
        arrays = window.get("arrays") or [("", 1.0, 1.0)]
        whole, shares = sum(size for _, size, _ in arrays), [round(private * share, 4) for _, _, share in arrays]
        shares[0] = round(private - sum(shares[1:]), 4)
        heat = "" if passed or "arrays" in window else fit.program["heat"]
        for (name, size, _), share in zip(arrays, shares):
            why = f"{name}: {window['source']}" if name else divided
            out += region("private", left * size / whole / THREADS, share, why, used("private") or heat)
    return out


def render(fit, behaviour):
    program = fit.program
    why_of = program["why"].get
    first = fit.first
    per_thread = first.instructions_per_ns / THREADS
    switches, disk = float(behaviour["context_switches_k_per_s"]) * 1e3, float(behaviour["disk_mb_per_s"]) * 1e6
    all_per_s = first.instructions_per_ns * 1e9
    if program["instructions"]:
        instructions, why = program["instructions"]
        length = f"computed: {why}"
    else:
        instructions = float(f"{per_thread * SOLO_S:.3g}")
        length = f"computed: {SOLO_S:.0f} s alone under first-touch (our choice, the running time is not known)"
    wakeups, barrier = switches / all_per_s * 1e6, ""
    network, between = NETWORK.get(fit.name), THREADS * per_thread * 1e9 / switches if switches else 0.0
    if network and network[1]:
        # A thread computes for what is left of the time between two context switches.
        between -= per_thread * network_ns()
        # It sleeps for its requests, and no thread wakes another.
        wakeups = 0.0
    if program["barrier"]:
        waiting, interval, imbalance = program["barrier"]
        how = "computed: instructions over parallel loops (as class B)"
        if interval is None:
            per_s = switches / (THREADS - 1)
            interval, wakeups = float(f"{per_thread * 1e9 / per_s / 1e6:.3g}"), 0.0
            how = f"{CLAIM} table 2: {per_s:.0f} barriers per second, at each of which 47 threads sleep"
        elif interval == "stream unit":
            interval = float(f"{STREAM_UNIT * all_per_s / disk / THREADS / MEETINGS / 1e6:.3g}")
            how = f"source: X-Stream's core/x-lib.hpp and split_stream.hpp, {MEETINGS} barriers for each stream unit, read at table 2's rate"
        barrier = f"""
[program.barrier]
interval_m_instructions = {interval} # {how}
imbalance = {imbalance} # estimate
"""
    else:
        waiting = None
    accesses, resting = f"{fit.accesses} # {CLAIM} table 1, interconnect", ""
    at_rest = f"LLC accesses per kilo-instruction: fitted {fit.accesses}, not measured"
    if fit.measured is None and "accesses" in program:
        at_rest = f"LLC accesses per kilo-instruction: fitted {fit.accesses}; measured {program['accesses']}, which loads links too little"
    elif fit.measured:
        accesses = f"{fit.accesses} # measured: {program['why']['run']}"
        at_rest = f"LLC accesses per kilo-instruction: measured {fit.accesses}; time at rest: fitted {100 * fit.rest_ns * per_thread:.0f} percent"
    of_disk = program["barrier"] and program["barrier"][1] == "stream unit"
    if fit.rest_ns and of_disk:
        # Such a program rests while it waits for its disk, which carries table 2's bytes below: the twin's disk makes it wait.
        at_rest += ", waiting for the disk"
    elif fit.rest_ns:
        each = float(f"{100 / (1 / per_thread - fit.rest_ns):.3g}")
        resting = f"""
[program.rest]
interval_m_instructions = {each} # estimate: ten rests per second at work
mean = "{fit.rest_ns * each * 1e3:.0f}us" # {CLAIM} table 1, interconnect
"""
    known = f"; runs about {instructions / per_thread:.0f} s alone under first-touch" if program["instructions"] else ""
    measured = f"# measured: {program['run']}: scripts/profiles.py, data/measured/profiles.toml\n" if "run" in program else ""
    out = f"""# {SUITES[program["suite"]]}: {fit.name} as in [Policies], one thread per vCPU, work divided over 48 threads{known}.
# Written by scripts/numa-workloads.py, which says how each figure comes about; edit that. Inputs: [Policies, tables 1 and 2].
#   Imbalance first-touch / round-4K: published {fit.imbalance[0] * 100:.0f} / {fit.imbalance[1] * 100:.0f} percent, here \
{100 * fit.s * math.sqrt(7):.0f} / {100 * fit.f * relative_deviation(fit.pages):.0f}.
#   Most loaded link: published {fit.published[0]:.0f} / {fit.published[1]:.0f} percent, here \
{first.load_pct:.0f} / {fit.round.load_pct:.0f}, at {per_thread:.2f} and {fit.round.instructions_per_ns / THREADS:.2f} \\
G instructions/s per thread.
#   {at_rest}.
{measured}name = "{fit.name}"
about = "{program["about"]}"
calibrated_to = ["policies.imbalance"]

[program]
threads = "one-per-vcpu"
instructions_g_per_thread = {instructions} # {length}
cpi_core = {program["cpi"]} # estimate
llc_accesses_per_kilo_instruction = {accesses}
misses_in_flight = {float(program["flight"])} # {why_of("flight", "estimate")}
hits_in_flight = {float(program["hits"])} # {why_of("hits", "estimate")}
write_share = {program["write"]} # {why_of("write", "estimate")}
""".replace("\\\n", "")
    if waiting:
        why = {
            "spin": "source: X-Stream's utils/barrier.h" if program["suite"] == "xstream" else
            "estimate: table 2 has far fewer context switches than barriers times threads, so libgomp's threads spin",
            "sleep": "source: [Policies, section 5.3.2 and table 2], threads often leave the processor to wait",
        }[waiting]
        out += f'waiting = "{waiting}" # {why}\n'
    if wakeups > 0:
        out += f"wakeups_per_m_instructions = {wakeups:.3g} # {CLAIM} table 2: {switches / 1e3:.1f} k context switches/s\n"
    if program["release_us"]:
        per_s, each_us = all_per_s / THREADS, program["release_us"]
        releases = f"{1e6 / (per_s * each_us * 1e-6):.3g}"
        why = f"source: [Policies, section 4.2.3], a page every {each_us} us; of each thread (our reading), at {per_s / 1e9:.2f} G/s"
        out += f"page_releases_per_m_instructions = {releases} # {why}\n"
    guess = f"estimate: {program['note'] or 'kind of program'}"
    out += curve("program.miss_ratio", program["miss"], why_of("miss", guess))
    per_kilo, *ratio = program["tlb"]
    out += f"""
[program.translation]
accesses_per_kilo_instruction = {float(per_kilo)} # {why_of("tlb", "estimate: loads and stores")}
"""
    out += curve("program.translation.miss_ratio", ratio, why_of("tlb", "estimate: kind of program"))
    out += barrier + resting
    if disk:
        out += f"""
[[program.io]]
device = "disk"
bytes_per_kilo_instruction = {disk / all_per_s * 1e3:.3g} # {CLAIM} table 2: {disk / 1e6:.0f} MB/s
request = "{REQUEST[program["suite"]]}" # estimate
"""
    if network:
        size, waits, packets, why = network
        out += f"""
[[program.io]]
device = "network"
bytes_per_kilo_instruction = {size / between * 1e3:.3g} # {CLAIM} table 2: a request per context switch
request = "{size}B" # {why}
packets = {packets} # {why}
"""
        out += "waits = true # source: the same\n" if waits else ""
    return out + regions(fit)


SUITES = {
    "parsec": "Parsec 2.1",
    "npb": "NAS Parallel Benchmarks 3.3 (OpenMP)",
    "mosbench": "Mosbench",
    "xstream": "X-Stream",
    "ycsb": "YCSB",
}


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode not in ("", "--check", "--fit"):
        sys.exit(__doc__)
    stale = []
    for fit, behaviour in fits():
        if mode == "--fit":
            print(
                f"{fit.name:14} s {fit.s:.3f} h {fit.h:.3f} hot {fit.pages} x {fit.f:.3f} accesses {fit.accesses:6.2f}"
                f" rest {100 * fit.rest_ns * fit.first.instructions_per_ns / THREADS:3.0f} percent"
                f"  link {fit.published[0]:.0f} / {fit.published[1]:.0f}"
                f" here {fit.first.load_pct:.0f} / {fit.round.load_pct:.0f}"
                f"  G/s {fit.first.instructions_per_ns / THREADS:.2f} / {fit.round.instructions_per_ns / THREADS:.2f}",
                flush=True,
            )
            continue
        path, text = ROOT / "data/workloads" / fit.program["suite"] / f"{fit.name}.toml", render(fit, behaviour)
        if mode == "--check":
            if not path.exists() or path.read_text() != text:
                stale.append(str(path.relative_to(ROOT)))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        sys.exit("differ from what scripts/numa-workloads.py writes: " + ", ".join(stale))


if __name__ == "__main__":
    main()
