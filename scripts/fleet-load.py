#!/usr/bin/env python3
"""Runs many agents on twins on one machine, as load for fleet clients: measures their cost, and the time to query all of them.

    cargo build --release --package homenode-cli
    scripts/fleet-load.py target/release/homenode [--hosts 100] [--seconds 60]

Each host is an r910 with six VMs of 2 vCPUs, three of them busy. An agent's cost includes its twin: simulating a host costs more
than monitoring it.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "deploy/shims"))
from homenode_shims.ask import Agents  # noqa: E402

VM = '[[vm]]\nname = "{name}"\nvcpus = 2\nmemory = "4GiB"\nworkload = "{workload}"\nwork_share = 100000.0\n'
REPEATS = 15
TICKS = os.sysconf("SC_CLK_TCK")


def scenario():
    vms = [VM.format(name=f"{workload.replace('.', '-').lower()}-{n}", workload=workload) for n, workload in enumerate(["idle", "cg.B", "idle", "povray", "idle", "soplex"])]
    return 'name = "load"\nmachine = "r910"\nduration = "36000s"\n' + "".join(vms)


def free_ports(count):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def cpu_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pss_mib(pid):
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def times(what):
    """Time of a call in milliseconds: the median, the maximum, and the CPU time of children, over several calls."""
    took, before = [], os.times()
    for _ in range(REPEATS):
        begun = time.monotonic()
        what()
        took.append(1000 * (time.monotonic() - begun))
    after = os.times()
    cpu = 1000 * (after.children_user + after.children_system - before.children_user - before.children_system) / REPEATS
    return {"median_ms": round(statistics.median(took), 1), "longest_ms": round(max(took), 1), "children_cpu_ms": round(cpu, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("homenode", type=pathlib.Path)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    program = given.homenode.resolve()
    with tempfile.TemporaryDirectory(prefix="homenode-load-") as name:
        folder = pathlib.Path(name)
        (folder / "load.toml").write_text(scenario())
        ports = free_ports(given.hosts)
        agents = []
        try:
            for port in ports:
                command = [program, "run", "--json", "--host", f"twin:{folder}/load.toml", "--listen", f"127.0.0.1:{port}", "--state", folder / str(port)]
                agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
            print(json.dumps(measured(program, agents, ports, given.seconds), indent=1))
        finally:
            for agent in agents:
                agent.kill()
            for agent in agents:
                agent.wait()


def measured(program, agents, ports, seconds):
    hosts = [f"127.0.0.1:{port}" for port in ports]
    asker = Agents("http://{host}")
    wanted = {"vcpus": 2, "memory_bytes": 4 << 30}
    for _ in range(600):
        scores, troubles = asker.scores(hosts, wanted, 10.0)
        if not troubles:
            break
        time.sleep(0.5)
    assert not troubles, troubles
    time.sleep(5)
    before = [cpu_s(agent.pid) for agent in agents]
    begun = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - begun
    alone = sum(cpu_s(agent.pid) for agent in agents) - sum(before)
    top = [program, "fleet", "top", "--json", *hosts]

    def refresh():
        said = json.loads(subprocess.run(top, check=True, capture_output=True).stdout)
        assert all(host["trouble"] is None for host in said["hosts"]), said

    silent = []

    def ask():
        _, troubles = asker.scores(hosts, wanted, 0.3)
        silent.append(len(troubles))

    return {
        "hosts": len(hosts),
        "cpus": os.cpu_count(),
        "agents_cpus_unasked": round(alone / elapsed, 3),
        "agents_pss_mib": round(sum(pss_mib(agent.pid) for agent in agents), 1),
        "fleet_top_once": times(refresh),
        "scores_in_300_ms": times(ask) | {"without_answer": silent},
    }


if __name__ == "__main__":
    main()
