#!/usr/bin/env python3
"""Counts, on the guest that it runs on, how the kernel moves a program's threads between vCPUs and how a Java machine's rest.

    sudo scripts/guest-threads.py [--minutes M]   counts, and writes data/measured/guest-threads.toml
    scripts/guest-threads.py --collections        counts why Java's threads wait, and writes data/measured/collections.toml

Each program runs with a thread per vCPU and no pinning. It counts in windows of 5 s, from the kernel's events sched_switch and
sched_migrate_task. A window counts if other programs used at most 5 percent of one vCPU, as a quiet server's daemons do, and if
the host took away no more than that. Between windows the program is stopped until the guest is quiet. It needs gcc, a JDK, and a
kernel with tracefs. The counts of --collections do not depend on the guest's other load: they are per second of CPU time.

--build FOLDER only compiles the programs; --built FOLDER takes them from there, if there is no compiler.
"""

import argparse
import collections
import os
import pathlib
import platform
import re
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "scripts/profiles"
MEASURED = ROOT / "data/measured/guest-threads.toml"
COLLECTIONS = ROOT / "data/measured/collections.toml"
VCPUS = os.cpu_count()
WINDOW_S = 5.0
WINDOWS = 24
# In it heaps fill and code is compiled.
WARM_UP_S = 30
# Most that others may use in a window, and most that the host may take, in vCPUs.
OTHERS = 0.05
# A move lasts if the thread is still elsewhere at the next of these instants.
SAMPLE_S = 0.1
HEADER = """\
# How the kernel of a guest moves a program's threads between its vCPUs, and how the threads of a Java virtual machine rest: data.
# One thread per vCPU, not pinned, nothing else on the guest but a server's daemons; sums of all windows of 5 s. `moves` are the
# kernel's migrations of the program's threads; `lasting` are those after which a thread is found on another vCPU than 100 ms
# before, two for an exchange. `rests` are the times that a vCPU fell idle while the program ran, `idle_s` is how long all vCPUs
# together did. Written by scripts/guest-threads.py; counts differ from run to run.
version = 1
"""
SWITCH = re.compile(
    r"\[(\d+)\]\s+\S+\s+([\d.]+): sched_switch: prev_comm=.* prev_pid=(\d+) prev_prio=\S+ prev_state=(\S+) ==> "
    r".* next_pid=(\d+)"
)
MIGRATE = re.compile(r"([\d.]+): sched_migrate_task: comm=.* pid=(\d+) ")

# Side of swim's 13 grids of doubles: a thread's part is the 240 MiB of data/workloads/omp2012/swim.toml.
GRID = int((VCPUS * 240 * 2**20 / (13 * 8)) ** 0.5)
SWIM = ["{work}/swim", str(GRID), "100000000"]
# Java: the heap is what HotSpot takes by itself in the VMs of 12 GB of [XPV, section 4.1.2], a quarter of their memory.
WAREHOUSES = ["-Xmx3g", "-cp", "{work}", "Warehouses", str(VCPUS), "2000000000"]
RUNS = {
    "swim": (SWIM, {}),
    "swim, threads spin": (SWIM, {"OMP_WAIT_POLICY": "active"}),
    "warehouses, ParallelGC": (["java", "-XX:+UseParallelGC", *WAREHOUSES], {}),
    "warehouses, default collector": (["java", *WAREHOUSES], {}),
    "warehouses, SerialGC": (["java", "-XX:+UseSerialGC", *WAREHOUSES], {}),
}


def build(work):
    subprocess.run(["gcc", "-O2", "-fopenmp", SOURCES / "swim.c", "-o", work / "swim"], check=True)
    subprocess.run(["javac", "-d", work, SOURCES / "Warehouse.java", SOURCES / "Warehouses.java"], check=True)


def vcpu_s():
    """Returns the time that all vCPUs have been busy or taken away, and the time that they were taken away."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    values = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[:8]]
    return sum(values) - values[3] - values[4], values[7]


def quiet():
    before, _ = vcpu_s()
    time.sleep(2)
    return vcpu_s()[0] - before <= OTHERS * 2


class Trace:
    """The kernel's scheduling events, in an instance of tracefs of its own."""

    def __init__(self, tracefs):
        self.at = tracefs / "instances/guest-threads"
        self.at.mkdir(exist_ok=True)
        (self.at / "buffer_size_kb").write_text("32768")
        (self.at / "trace_clock").write_text("mono")
        for event in ("sched_switch", "sched_migrate_task"):
            (self.at / "events/sched" / event / "enable").write_text("1")
        (self.at / "tracing_on").write_text("0")

    def window(self):
        """Returns the events of one window, and its bounds."""
        (self.at / "trace").write_text("")
        (self.at / "tracing_on").write_text("1")
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        time.sleep(WINDOW_S)
        end = time.clock_gettime(time.CLOCK_MONOTONIC)
        (self.at / "tracing_on").write_text("0")
        return (self.at / "trace").read_text(errors="replace"), start, end


def tids(pid):
    return {int(name) for name in os.listdir(f"/proc/{pid}/task")}


def count(text, start, end, own):
    """Returns the figures of one window. `own` are the program's threads."""
    spans = collections.defaultdict(list)  # by thread: (start, end, cpu)
    since = {}
    slept = collections.Counter()
    rests, idle_s, others_s = 0, 0.0, 0.0
    for line in text.splitlines():
        if not (found := SWITCH.search(line)):
            continue
        cpu, at, before, state, after = int(found[1]), float(found[2]), int(found[3]), found[4], int(found[5])
        began = since.get(cpu, start)
        if before == 0:
            idle_s += at - began
        elif before in own:
            spans[before].append((began, at, cpu))
            if not state.startswith("R"):
                slept[before] += 1
        else:
            others_s += at - began
        rests += after == 0
        since[cpu] = at
        if at > end:
            break
    # What runs at the end is not in any switch: it is one of the program's threads, or the window is refused below.
    moves = sum(1 for line in text.splitlines() if (m := MIGRATE.search(line)) and int(m[2]) in own)
    workers = [tid for tid in own if sum(e - s for s, e, _ in spans[tid]) > 0.2 * (end - start)]
    lasting = 0
    for tid in workers:
        places, at = [], start
        runs = iter(spans[tid])
        run = next(runs)
        while at < end:
            while run and run[1] < at:
                run = next(runs, None)
            if not run:
                break
            places.append(run[2])
            at += SAMPLE_S
        lasting += sum(a != b for a, b in zip(places, places[1:]))
    return {
        "seconds": end - start,
        "workers": len(workers),
        "moves": moves,
        "lasting": lasting,
        "worker_sleeps": sum(slept[tid] for tid in workers),
        "other_own_sleeps": sum(slept[tid] for tid in own if tid not in workers),
        "worker_ran_s": sum(e - s for tid in workers for s, e, _ in spans[tid]),
        "rests": rests,
        "idle_s": idle_s,
        "others_s": others_s,
    }


class Run:
    """A program that is stopped but in its windows."""

    def __init__(self, name, work):
        self.name, (command, environment) = name, RUNS[name]
        command = [part.replace("{work}", str(work)) for part in command]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.program = subprocess.Popen(command, env=os.environ | environment, **nowhere)
        time.sleep(WARM_UP_S)
        self.program.send_signal(signal.SIGSTOP)
        self.kept, self.refused = [], 0

    def window(self, trace):
        self.program.send_signal(signal.SIGCONT)
        time.sleep(1)
        _, stolen_before = vcpu_s()
        window = count(*trace.window(), tids(self.program.pid))
        self.program.send_signal(signal.SIGSTOP)
        window["stolen_s"] = vcpu_s()[1] - stolen_before
        if max(window["others_s"], window["stolen_s"]) <= OTHERS * window["seconds"]:
            self.kept.append(window)
        else:
            self.refused += 1

    def end(self):
        self.program.send_signal(signal.SIGCONT)
        self.program.kill()
        self.program.wait()


def measure(work, trace, until):
    """Returns the runs with their windows. Each window goes to the run that has fewest."""
    runs = []
    try:
        for name in RUNS:
            runs.append(Run(name, work))
        while time.time() < until:
            run = min(runs, key=lambda run: len(run.kept))
            if len(run.kept) == WINDOWS:
                break
            if quiet():
                run.window(trace)
                print({run.name: (len(run.kept), run.refused) for run in runs}, flush=True)
        return runs
    finally:
        for run in runs:
            run.end()


COLLECTIONS_HEADER = """\
# Why the threads of a Java virtual machine wait: data. Warehouses (scripts/profiles/Warehouses.java), a thread each, ran for some
# time after a warm-up of 20 s. `waits` are all voluntary context switches of the warehouses' threads, `ran_s` their CPU time;
# `collections` are the pauses of the garbage collector, `collector_s` its CPU time in them, `allocated_mib` the median of what
# all threads allocated between two of them. The guest was busy with other work, which changes none of these.
# Written by scripts/guest-threads.py --collections; counts differ from run to run.
version = 1
"""
PAUSE = re.compile(r"\[([\d.]+)s\] GC\(\d+\) Pause .*? (\d+)M->(\d+)M\(\d+M\) [\d.]+ms")
SPENT = re.compile(r"GC\(\d+\) User=([\d.]+)s Sys=([\d.]+)s")
COUNTED_S = 55
SETTLED_S = 20


def warehouse_threads(pid):
    """Returns the voluntary switches and the CPU time of all warehouses' threads."""
    waits, ran_s = 0, 0.0
    for tid in tids(pid):
        task = pathlib.Path(f"/proc/{pid}/task/{tid}")
        if task.joinpath("comm").read_text().startswith("warehouse"):
            waits += int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", task.joinpath("status").read_text())[1])
            ran_s += int(task.joinpath("schedstat").read_text().split()[0]) / 1e9
    return waits, ran_s


def under_collector(name, work):
    """Returns the table of a run of warehouses under one collector."""
    command = [part.replace("{work}", str(work)) for part in RUNS[name][0]]
    with tempfile.NamedTemporaryFile() as log:
        logged = [command[0], f"-Xlog:gc,gc+cpu:file={log.name}:uptime", *command[1:]]
        program = subprocess.Popen(logged, stdout=subprocess.DEVNULL)
        try:
            time.sleep(SETTLED_S)
            before = warehouse_threads(program.pid)
            time.sleep(COUNTED_S)
            after = warehouse_threads(program.pid)
        finally:
            program.kill()
            program.wait()
        lines = pathlib.Path(log.name).read_text().splitlines()
    pauses, spent_s = [], []
    for line in lines:
        if found := PAUSE.search(line):
            pauses.append([float(found[1]), int(found[2]), int(found[3])])
        elif (found := SPENT.search(line)) and len(spent_s) < len(pauses):
            spent_s.append(float(found[1]) + float(found[2]))
    inside = [at for at, pause in enumerate(pauses) if SETTLED_S <= pause[0] <= SETTLED_S + COUNTED_S]
    allocated = sorted(pauses[at][1] - pauses[at - 1][2] for at in inside if at > 0)
    shown = " ".join(command).replace(str(work), ".")
    return "\n".join(
        [
            f'[[run]]\nname = "{name}"\ncommand = "{shown}"\nthreads = {VCPUS}',
            f"waits = {after[0] - before[0]}\nran_s = {after[1] - before[1]:.2f}",
            f"collections = {len(inside)}\ncollector_s = {sum(spent_s[at] for at in inside if at < len(spent_s)):.2f}",
            f"allocated_mib = {allocated[len(allocated) // 2] if allocated else 0}\n",
        ]
    )


def write_collections(built):
    with tempfile.TemporaryDirectory() as folder:
        work = built or pathlib.Path(folder)
        if not built:
            build(work)
        entries = [under_collector(name, work) for name in RUNS if name.startswith("warehouses")]
    COLLECTIONS.write_text(COLLECTIONS_HEADER + "\n".join([*head(), "", *entries]))


def head():
    """Returns what the counts were made with."""
    java = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr.split("\n")[1]
    return [f'kernel = "{platform.release().split("-")[0]}"', f"vcpus = {VCPUS}", f'java = "{java}"']


def entry(name, windows, refused):
    """Returns the table of a run."""
    command, environment = RUNS[name]
    sums = {key: sum(window[key] for window in windows) for key in windows[0]}
    workers = sums.pop("workers") / len(windows)
    per_minute = sums["lasting"] / 2 / sums["seconds"] * 60
    shown = " ".join([f"{key}={value}" for key, value in environment.items()] + command)
    shown = shown.replace("{work}/", "").replace("{work}", ".")
    lines = [f'[[run]]\nname = "{name}"', f'command = "{shown}"', f"windows = {len(windows)}", f"windows_refused = {refused}"]
    lines += [f"workers = {workers:g}"]
    lines += [f"{key} = {value:.3f}" if isinstance(value, float) else f"{key} = {value}" for key, value in sums.items()]
    lines += [f"thread_moves_per_minute = {per_minute:.2f}"]
    return "\n".join(lines) + "\n"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--minutes", type=float, default=60, help="how long to wait for quiet windows, at most")
    arguments.add_argument("--output", type=pathlib.Path, default=MEASURED, help="file to write instead")
    arguments.add_argument("--collections", action="store_true", help="count only why Java's threads wait")
    arguments.add_argument("--build", type=pathlib.Path, metavar="FOLDER")
    arguments.add_argument("--built", type=pathlib.Path, metavar="FOLDER")
    given = arguments.parse_args()
    if given.build:
        build(given.build)
        return
    if given.collections:
        write_collections(given.built)
        return
    until = time.time() + given.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        work = given.built or pathlib.Path(folder)
        if not given.built:
            build(work)
        tracefs = pathlib.Path(folder) / "tracefs"
        tracefs.mkdir()
        subprocess.run(["mount", "-t", "tracefs", "none", tracefs], check=True)
        trace = None
        try:
            trace = Trace(tracefs)
            runs = measure(work, trace, until)
        finally:
            if trace:
                trace.at.rmdir()
            subprocess.run(["umount", tracefs], check=True)
    entries = [entry(run.name, run.kept, run.refused) for run in runs if run.kept]
    given.output.write_text(HEADER + "\n".join([*head(), "", *entries]))


if __name__ == "__main__":
    main()
