#!/usr/bin/env python3
"""Asks Debian's numad and Homenode's the same questions on the same hosts, and runs their answers on the twin. As root.

    scripts/numad-compare.py HOMENODE            prints the answers and seconds behind docs/NUMAD.md, in some minutes

Hosts: those recorded in crates/machine-files/tests/trees, if they have everything that numad reads, and the published machines
with two nodes or more, idle and with some of their nodes in use. Their /sys and /proc are mounted over this machine's own in a
mount namespace, so both programs read the same. The time of /proc/stat advances meanwhile.

Questions: those of libvirt when a host starts together with its VMs, one VM per node and four at most, one after the other before
any of them runs. Each needs half of a node's CPUs and four tenths of its memory. On recorded hosts that is the smallest node.

Twin: only published machines, since recorded trees have no bandwidths. VMs get the CPUs and the memory of the answered nodes, as
with libvirt. Homenode's own agent then does nothing more. Programs are published ones, in turn; a VM's speed is that of its program
relative to its speed with the other numad's answers.

Debian's numad is fetched from the machine's own apt sources into target/numad, and not installed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
TREES = ROOT / "crates/machine-files/tests/trees"
REAL = TARGET / "numad/usr/bin/numad"
PRESETS = ["r420", "r910", "xeon26x2", "amd48", "amd6344x8"]
PROGRAMS = [("cg.B", 0.3), ("soplex", 0.04), ("sp.B", 0.15), ("milc", 0.03)]
VMS_MAX = 4
# Share of CPU time, on idle nodes and on nodes in use; and share of their memory.
IDLE, IN_USE = 0.02, 0.75
MEMORY_IN_USE = 0.6

# Mounted over this machine's: what both programs read.
INSIDE = """
mount --make-rprivate /
for path in sys/devices/system/node sys/devices/system/cpu proc/meminfo proc/stat; do mount --bind "$1/$path" "/$path" || exit 1; done
mount --bind "$1/proc/self/status" "/proc/$$/status" || exit 1
mount -t tmpfs none /var/log && mount -t tmpfs none /run || exit 1
shift
exec "$@"
"""


def numbers(text):
    """A list as the kernel writes it, `0-2,5`."""
    found = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def as_list(of):
    return ",".join(map(str, of))


def write(root, path, text):
    to = root / path
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)


class Host:
    """A tree on disk, its nodes, and how busy each CPU is."""

    def __init__(self, name, root, in_use=frozenset(), preset=None):
        self.name, self.root, self.in_use, self.preset = name, root, in_use, preset
        node = root / "sys/devices/system/node"
        online = numbers((root / "sys/devices/system/cpu/online").read_text())
        self.cpus, self.memory_mib = {}, {}
        for one in sorted(numbers((node / "online").read_text())):
            of = [cpu for cpu in numbers((node / f"node{one}/cpulist").read_text()) if cpu in online]
            total = next(line for line in (node / f"node{one}/meminfo").read_text().splitlines() if "MemTotal" in line)
            self.cpus[one], self.memory_mib[one] = of, int(total.split()[3]) // 1024
        self.online = online

    def shape(self):
        """CPUs and MiB of each VM."""
        real = [one for one in self.cpus if self.cpus[one] and self.memory_mib[one]]
        cpus = min(len(self.cpus[one]) for one in real)
        return max(1, cpus // 2), int(min(self.memory_mib[one] for one in real) * 0.4)

    def count(self):
        return min(VMS_MAX, sum(1 for one in self.cpus if self.cpus[one] and self.memory_mib[one]))

    def stat(self, ticks):
        """/proc/stat a number of ticks after boot; always of the same length, so that it is overwritten at once."""
        busy = {cpu: IN_USE if node in self.in_use else IDLE for node in self.cpus for cpu in self.cpus[node]}
        lines = []
        for cpu in self.online:
            used = int(ticks * busy[cpu])
            lines.append(f"cpu{cpu} {used:012d} 0 0 {ticks - used:012d} 0 0 0 0 0 0")
        total = [sum(int(line.split()[at]) for line in lines) for at in (1, 4)]
        return f"cpu  {total[0]:014d} 0 0 {total[1]:014d} 0 0 0 0 0 0\n" + "\n".join(lines) + "\nbtime 1700000000\n"


def recorded():
    """The recorded trees with everything that numad reads."""
    for file in sorted(TREES.glob("*.tree")):
        root = pathlib.Path(tempfile.mkdtemp(prefix="tree-"))
        path, lines = None, []
        for line in file.read_text().splitlines(keepends=True) + ["=== \n"]:
            if not line.startswith("=== "):
                lines.append(line)
                continue
            if path:
                write(root, path, "".join(lines))
            path, lines = line[4:].strip(), []
        try:
            (root / "sys/devices/system/cpu/cpu0/topology/thread_siblings").read_text()
            yield Host(file.stem, root)
        except FileNotFoundError as error:
            print(f"left out: {file.stem}, which has no {error.filename.removeprefix(str(root))}", file=sys.stderr)


def published(homenode, name, in_use):
    """A machine as the kernel would describe it."""
    machine = json.loads(subprocess.check_output([homenode, "machine", "--preset", name, "--json"]))
    root = pathlib.Path(tempfile.mkdtemp(prefix="preset-"))
    nodes, cpus = machine["nodes"], machine["cpus"]
    memory_kib = {one["id"]: one["memory_bytes"] // 1024 for one in nodes}
    of_node = {one: [cpu["id"] for cpu in cpus if cpu["node"] == one] for one in memory_kib}
    for kind in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        write(root, f"sys/devices/system/node/{kind}", as_list(sorted(of_node)) + "\n")
    ids = sorted(cpu["id"] for cpu in cpus)
    for kind in ("online", "possible", "present"):
        write(root, f"sys/devices/system/cpu/{kind}", as_list(ids) + "\n")
    used = frozenset(sorted(of_node)[: int(len(of_node) * in_use)])
    total_kib = 0
    for at, one in enumerate(sorted(of_node)):
        place = f"sys/devices/system/node/node{one}"
        write(root, f"{place}/cpulist", as_list(of_node[one]) + "\n")
        write(root, f"{place}/distance", " ".join(map(str, machine["distances"][at])) + "\n")
        kib = memory_kib[one]
        free = int(kib * (1 - (MEMORY_IN_USE if one in used else 0.03)))
        total_kib += kib
        fields = {"MemTotal": kib, "MemFree": free, "MemUsed": kib - free, "FilePages": 0, "Active(file)": 0, "Inactive(file)": 0}
        write(root, f"{place}/meminfo", "".join(f"Node {one} {key}: {value:14d} kB\n" for key, value in fields.items()))
    for cpu in cpus:
        together = [other["id"] for other in cpus if other["core"] == cpu["core"]]
        mask = f"{sum(1 << one for one in together):0{(max(ids) // 32 + 1) * 8}x}"
        place = f"sys/devices/system/cpu/cpu{cpu['id']}/topology"
        groups = [mask[at : at + 8] for at in range(0, len(mask), 8)]
        write(root, f"{place}/thread_siblings", ",".join(groups) + "\n")
        write(root, f"{place}/thread_siblings_list", as_list(together) + "\n")
        write(root, f"{place}/physical_package_id", f"{cpu['socket']}\n")
    write(root, "proc/self/status", f"Cpus_allowed_list:\t{as_list(ids)}\nMems_allowed_list:\t{as_list(sorted(of_node))}\n")
    write(root, "proc/meminfo", f"MemTotal: {total_kib} kB\nMemFree: {total_kib} kB\nHugepagesize: 2048 kB\n")
    return Host(f"{name}, {len(used)} of {len(of_node)} nodes in use", root, used, name)


def answers(host, program, state):
    """The answers for each of the VMs, one after the other."""
    cpus, mib = host.shape()
    stat, done = host.root / "proc/stat", threading.Event()
    stat.write_text(host.stat(1_000_000))
    begin = time.monotonic()

    def goes_on():
        with open(stat, "r+b", buffering=0) as file:
            while not done.wait(0.005):
                file.seek(0)
                file.write(host.stat(1_000_000 + int((time.monotonic() - begin) * 100)).encode())

    clock = threading.Thread(target=goes_on)
    clock.start()
    told = []
    for _ in range(host.count()):
        command = ["unshare", "--mount", "--ipc", "sh", "-c", INSIDE, "sh", host.root, program, "-w", f"{cpus}:{mib}"]
        told.append(subprocess.run(command, env=os.environ | {"HOMENODE_STATE": state}, text=True, stdout=subprocess.PIPE).stdout.strip())
    done.set()
    clock.join()
    return told


def scenario(host, told):
    """Placements as a scenario of the twin."""
    cpus, mib = host.shape()
    text = f'name = "numad"\nmachine = "{host.preset}"\nduration = "600s"\npolicies = ["default"]\n'

    def vm(name, vcpus, mib, nodes, workload, share):
        of = as_list(cpu for node in nodes for cpu in host.cpus[node])
        return (
            f'[[vm]]\nname = "{name}"\nvcpus = {vcpus}\nmemory = "{mib}MiB"\nworkload = "{workload}"\nwork_share = {share}\n'
            f'cpus = "{of}"\nmemory_nodes = "{as_list(nodes)}"\n'
        )

    for node in sorted(host.in_use):
        text += vm(f"there{node}", int(len(host.cpus[node]) * IN_USE), int(host.memory_mib[node] * 0.55), [node], "cg.B", 9)
    for at, answer in enumerate(told):
        program, share = PROGRAMS[at % len(PROGRAMS)]
        text += vm(f"vm{at}", cpus, mib, numbers(answer), program, share)
    return text


def speeds(homenode, host, told):
    """The time of each VM's program, in seconds of the twin; None if libvirt would not start all of them there."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(scenario(host, told))
        file.flush()
        ran = subprocess.run([homenode, "sim", file.name, "--json"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if ran.returncode:
        return None, ran.stderr.strip().splitlines()[-1]
    vms = json.loads(ran.stdout)["policies"][0]["vms"]
    return [vm["runtime_s"] for vm in vms if vm["name"].startswith("vm")], None


def main():
    homenode = sys.argv[1]
    if not REAL.exists():
        fetched = REAL.parents[2]
        fetched.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "-q", "-q", "download", "numad"], cwd=fetched, check=True)
        subprocess.run(["dpkg-deb", "-x", next(fetched.glob("numad_*.deb")), fetched], check=True)
    ours = pathlib.Path(tempfile.mkdtemp(prefix="ours-")) / "numad"
    ours.symlink_to(pathlib.Path(homenode).resolve())
    hosts = list(recorded()) + [published(homenode, name, in_use) for name in PRESETS for in_use in (0, 0.5)]
    hosts += [published(homenode, name, 0.75) for name in ("r910", "amd48")]
    print("| host | each asks for | Debian's numad | ours |")
    print("|---|---|---|---|")
    rows = []
    for host in hosts:
        state = tempfile.mkdtemp(prefix="state-")
        told = [answers(host, program, state) for program in (REAL, ours)]
        cpus, mib = host.shape()
        each = [", ".join(answer or "nothing" for answer in of) for of in told]
        print(f"| {host.name} | {host.count()} × {cpus}:{mib} | {each[0]} | {each[1]} |", flush=True)
        if host.preset:
            rows.append((host, told))
    print()
    print("| host | VMs by Debian's numad | VMs by ours | speed by ours, mean | worst VM |")
    print("|---|---|---|---|---|")
    for host, told in rows:
        ran = [speeds(homenode, host, of) for of in told]
        for of, (times, why) in zip(told, ran):
            if times is None:
                print(f"{host.name}, {of}: {why}", file=sys.stderr)
        theirs, own = ran[0][0], ran[1][0]
        cells = [" ".join(f"{one:.1f}" for one in times) + " s" if times else "do not start" for times in (theirs, own)]
        ratios = [a / b for a, b in zip(theirs, own)] if theirs and own else []
        mean = f"{sum(ratios) / len(ratios):.2f}" if ratios else "-"
        worst = f"{min(ratios):.2f}" if ratios else "-"
        print(f"| {host.name} | {cells[0]} | {cells[1]} | {mean} | {worst} |", flush=True)


if __name__ == "__main__":
    main()
