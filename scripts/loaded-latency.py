#!/usr/bin/env python3
"""Derives from table 3 of [Policies] how amd48 behaves under load: scattered lines of a memory controller, and latency of links.

    scripts/loaded-latency.py            prints the arithmetic, and the resulting values of the machine file
    scripts/loaded-latency.py --check    fails if the machine file differs from the result

The table has the latency of an access to one node that 48 threads access at once, by the thread's distance. A latency is
measured by dependent loads, in an order that no prefetcher follows: one line in flight per thread. By Little's law a thread at
a distance then gets one line per latency, and the node serves the sum over all threads. Idle latencies (the same table) would
demand almost three times as much, so the controller is saturated, and the sum is its sustained rate for such lines. The paper
states its sustained rate for streams (section 5.1). `scattered_throughput` is the one over the other.

The growth of a link's latency with its load (`curve.alpha`) is fitted by least squares to the three latencies, relative to each,
by the twin's own equations (hardware/fabric.rs): all threads see one latency of the saturated controller, the one at which the
sum matches, and those of the links in between. A curve does not fall, so alpha is 0 or more. At such loads `curve.beta`, the end
of the curve, has no effect that the table could show.
"""

import itertools
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINE = 64
UNITS = {"GiB": 2**30, "GB": 1e9}
# [Policies, table 3], cycles at 0, 1 and 2 hops.
IDLE, LOADED = (156, 276, 383), (697, 740, 863)


def rate(text):
    number, unit = re.fullmatch(r"([0-9.]+)(GiB|GB)/s", text).groups()
    return float(number) * UNITS[unit]


def links_of(file):
    """Ends and bandwidth of each directed link, in the file's order."""
    pairs = [(pair, rate(group["bandwidth"])) for group in file["links"] for pair in group["between"]]
    return [(a, b, width) for pair, width in pairs for a, b in (pair, pair[::-1])]


def routes_from(links, stated, start):
    """Links to each node by Machine::route: the stated route, else one of fewest hops, in a tie the first listed."""
    reached, frontier = {start: []}, [start]
    while frontier:
        following = []
        for node in frontier:
            for at, (a, b, _) in enumerate(links):
                if a == node and b not in reached:
                    reached[b] = reached[node] + [at]
                    following.append(b)
        frontier = following
    ends = [(a, b) for a, b, _ in links]
    for nodes in stated:
        if nodes[0] == start:
            reached[nodes[-1]] = [ends.index(hop) for hop in itertools.pairwise(nodes)]
    return reached


class Table3:
    """48 threads on one node of the machine."""

    def __init__(self, file):
        hardware, shape = file["hardware"], file["shape"]
        self.hz = float(hardware["clock"].removesuffix("GHz")) * 1e9
        self.hop, self.beta = hardware["link"]["hop_ns"] * self.hz / 1e9, hardware["link"]["curve"]["beta"]
        self.links, self.per_node = links_of(file), shape["cores_per_node"] * shape["threads_per_core"]
        self.routes = routes_from(self.links, file["routes"]["directed"], 0)
        self.threads = [self.per_node * sum(len(route) == hops for route in self.routes.values()) for hops in range(3)]
        self.scattered = self.served(LOADED)

    def served(self, latencies):
        """Bytes a second by Little's law."""
        return sum(count * LINE * self.hz / cycles for count, cycles in zip(self.threads, latencies))

    def share_of_link(self, link):
        """Load of a link over its bandwidth, at the published latencies."""
        users = [len(route) for route in self.routes.values() if link in route]
        return sum(self.per_node * LINE * self.hz / LOADED[hops] for hops in users) / self.links[link][2]

    def over_links(self, alpha):
        """Mean cycles that links add at 0, 1 and 2 hops."""
        sums = [[], [], []]
        for route in self.routes.values():
            loads = [self.share_of_link(link) / 1.02 for link in route]
            sums[len(route)].append(sum(self.hop * (1 + alpha * u + self.beta * u**1.5 / (1 - u)) for u in loads))
        return [sum(of) / len(of) for of in sums]

    def latencies(self, alpha):
        """By the model: the controller's latency is the one at which it serves its sustained rate."""
        extra, low, high = self.over_links(alpha), 0.0, 1e5
        while high - low > 0.01:
            middle = (low + high) / 2
            more = self.served([middle + cycles for cycles in extra]) > self.scattered
            low, high = (middle, high) if more else (low, middle)
        return [low + cycles for cycles in extra]

    def error(self, alpha):
        return sum((ours / published - 1) ** 2 for ours, published in zip(self.latencies(alpha), LOADED))


def main():
    file = tomllib.loads((ROOT / "data/machines/amd48.toml").read_text())
    hardware, table = file["hardware"], Table3(file)
    streams = rate(file["shape"]["memory_bandwidth_per_node"])
    share = table.scattered / streams
    alpha = min((step / 100 for step in range(300)), key=table.error)
    most = max(table.share_of_link(link) for link in range(len(table.links)))
    print(f"threads at 0, 1 and 2 hops: {table.threads}")
    asked = table.served(IDLE) / 1e9
    print(f"served, by Little's law: {table.scattered / 1e9:.2f} GB/s; idle latencies ask for {asked:.1f} GB/s")
    print(f"streams: {streams / 1e9:.2f} GB/s; scattered_throughput = {share:.3f}")
    print(f"links carry up to {100 * most:.0f} percent of their bandwidth; curve.alpha = {alpha:.2f} fits best")
    for hops, (ours, published) in enumerate(zip(table.latencies(alpha), LOADED)):
        print(f"{hops} hops: {ours:.0f} cycles, published {published} ({100 * (ours / published - 1):+.0f} percent)")
    stated = hardware["scattered_throughput"], hardware["link"]["curve"]["alpha"]
    if "--check" in sys.argv and (abs(stated[0] - share) > 0.0005 or abs(stated[1] - alpha) > 0.005):
        sys.exit(f"amd48.toml states {stated[0]} and {stated[1]}; {share:.3f} and {alpha:.2f} come out")


if __name__ == "__main__":
    main()
