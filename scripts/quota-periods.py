#!/usr/bin/env python3
"""Measures what a CPU quota (`cpu.max`) lets through in one slice of 30 ms, and what it costs, by the length of its period.

    sudo scripts/quota-periods.py [--seconds S]    prints a line for each period and share (45 s with 2 s each)

A thread of this script is always busy in a cgroup of its own, pinned to one CPU, and reads the clock all the time. A gap in what
it read is a time without CPU. From these it prints, for each quota: the share of the CPU that it got, the most that it ran in any
30 ms (as a share of what the quota pays for), its longest wait, and the work that it lost per second of its CPU time, compared
with rounds without a quota before and after. Other load on the CPU makes shares smaller and waits longer. The cgroup is removed
at the end. It works with cgroup v1 and v2.
"""

import argparse
import os
import pathlib
import platform
import time

PERIODS_MS = (10, 30, 100)
SHARES = (0.05, 0.1, 0.3, 0.5)
SLICE_NS = 30_000_000
# Shorter gaps are interrupts.
GAP_NS = 200_000
# The kernel's shortest quota.
RUN_US_MIN = 1000


class Group:
    """A cgroup of the cpu controller for this thread."""

    def __init__(self):
        name = f"quota-periods-{os.getpid()}"
        v1 = pathlib.Path("/sys/fs/cgroup/cpu")
        self.is_v1 = (v1 / "cpu.shares").exists()
        self.root = v1 if self.is_v1 else pathlib.Path("/sys/fs/cgroup")
        self.path = self.root / name
        self.path.mkdir()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def set(self, run_us, period_us):
        """Sets a quota; `None` removes it."""
        if not self.is_v1:
            (self.path / "cpu.max").write_text(f"{run_us or 'max'} {period_us}")
            return
        (self.path / "cpu.cfs_quota_us").write_text("-1")
        (self.path / "cpu.cfs_period_us").write_text(str(period_us))
        if run_us:
            (self.path / "cpu.cfs_quota_us").write_text(str(run_us))

    def remove(self):
        (self.root / "cgroup.procs").write_text(str(os.getpid()))
        self.path.rmdir()


def busy(seconds):
    """Returns the times for which the thread ran, its work (readings of the clock), and its CPU time in ns."""
    clock, gap = time.perf_counter_ns, GAP_NS
    runs, work, cpu = [], 0, time.thread_time_ns()
    begun = last = clock()
    end = begun + int(seconds * 1e9)
    while last < end:
        now = clock()
        work += 1
        if now - last > gap:
            runs.append((begun, last))
            begun = now
        last = now
    runs.append((begun, last))
    return runs, work, time.thread_time_ns() - cpu


def most_in_a_slice(runs):
    """Returns the longest time run in any 30 ms. Such a window can begin where a run begins, or end where one ends."""
    starts = [start for start, _ in runs] + [end - SLICE_NS for _, end in runs]

    def ran_from(at):
        return sum(max(0, min(end, at + SLICE_NS) - max(start, at)) for start, end in runs)

    return max(ran_from(at) for at in starts)


def speed(seconds):
    _, work, cpu_ns = busy(seconds)
    return work / cpu_ns


def measure(group, share, period_ms, seconds):
    run_us = round(share * period_ms * 1000)
    if run_us < RUN_US_MIN:
        return f"{period_ms:>6} ms {share:>6.2f}   refused: the kernel's shortest quota is {RUN_US_MIN} us"
    group.set(None, 100_000)
    before = speed(seconds / 2)
    group.set(run_us, period_ms * 1000)
    runs, work, cpu_ns = busy(seconds)
    group.set(None, 100_000)
    after = speed(seconds / 2)
    got = sum(end - start for start, end in runs) / (runs[-1][1] - runs[0][0])
    most = most_in_a_slice(runs) / (share * SLICE_NS)
    wait = max(after[0] - before[1] for before, after in zip(runs, runs[1:])) / 1e6 if len(runs) > 1 else 0
    lost = 100 * (1 - 2 * work / cpu_ns / (before + after))
    return f"{period_ms:>6} ms {share:>6.2f} {got:>7.3f} {most:>11.2f} {wait:>9.1f} ms {lost:>7.2f} %"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=2, help="length of a round")
    seconds = options.parse_args().seconds
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"Linux {platform.release()}, {time.strftime('%Y-%m-%d')}")
    print("   period  share     got  most/slice  longest wait  work lost")
    try:
        group = Group()
    except OSError as error:
        raise SystemExit(f"cannot make a cgroup of the cpu controller: {error}; run as root")
    try:
        for share in SHARES:
            for period_ms in PERIODS_MS:
                print(measure(group, share, period_ms, seconds), flush=True)
    finally:
        group.remove()


if __name__ == "__main__":
    main()
