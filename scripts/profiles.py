#!/usr/bin/env python3
"""Measures figures that profiles in data/workloads would otherwise estimate, by running programs under 'homenode profile'.

    scripts/profiles.py measure [NAME ...]   runs these (default: all, about an hour), writes data/measured/profiles.toml
    scripts/profiles.py apply                puts the measurements into data/workloads, in place of estimates
    scripts/profiles.py --check              fails if a file of data/workloads differs from what 'apply' would write

Programs are Debian's if available; else they are scripts/profiles/*.c and *.java, own code from published descriptions. It
installs missing packages by apt-get, builds into target/profiles, and makes its inputs there, always the same. Each program runs
once with one thread; those whose threads share memory a second time with four, to measure the sharing.

'homenode' and its plugin must have been built (make release). All measurements, with their rules, are in docs/PROFILE.md.
The profiles of [Policies] are written by scripts/numa-workloads.py, which reads the same measurements.
"""

import argparse
import gzip
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "scripts/profiles"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
WORK = TARGET / "profiles"
MEASURED = ROOT / "data/measured/profiles.toml"
OWN = "own code"

# Machine whose private caches are modelled, and its window (docs/PROFILE.md).
R910, AMD48 = ("r910", 128), ("amd48", 72)

# Name: package, machine, command, and the meaning of its number of instructions. In commands {in} is the folder of inputs,
# {bin} that of built programs. Names of profiles that a measurement serves are in APPLIED.
RUNS = {
    # The parts of NPB that were written here: iterations are those of the timed part (of CG inner ones).
    "cg.B": (OWN, R910, "{bin}/npb cg B 5"),
    "mg.B": (OWN, R910, "{bin}/npb mg B 1"),
    "ft.A": (OWN, R910, "{bin}/npb ft A 1"),
    "is.A": (OWN, R910, "{bin}/npb is A 2"),
    "ep.B": (OWN, R910, "{bin}/npb ep B 20"),
    "cg.C-amd48": (OWN, AMD48, "{bin}/npb cg C 2"),
    "mg.B-amd48": (OWN, AMD48, "{bin}/npb mg B 1"),
    "ft.A-amd48": (OWN, AMD48, "{bin}/npb ft A 1"),
    "ep.B-amd48": (OWN, AMD48, "{bin}/npb ep B 20"),
    "stream": (OWN, R910, "{bin}/kernels stream 4000000 2"),
    # SPEC CPU2006's programs, or their successors; bzip2, hmmer, lbm and xalancbmk have published accesses beyond 512 KiB of L2.
    "bzip2": ("bzip2", AMD48, "bzip2 -9 -c {in}/mixed"),
    # 403.gcc "runs as a compiler with many of its optimization flags enabled", "has had its inlining heuristics altered slightly, so as to
    # inline more code", "and use more memory"; inputs are preprocessed C files (its description in SPEC CPU2006's documents). The limit
    # for inlining is twice gcc's default of 600.
    "gcc": ("cpp-12", R910, "/usr/lib/gcc/x86_64-linux-gnu/12/cc1 -O3 -finline-limit=1200 -quiet {in}/large.i -o {in}/large.s"),
    "hmmer": ("hmmer2", AMD48, "hmm2search --cpu 0 {in}/pkinase.hmm /usr/share/doc/hmmer2/examples/tutorial/globins630.fa"),
    "povray": ("povray", R910, "povray +I{in}/chess2.pov +W40 +H30 +WT1 -D -GA +O{in}/picture.png"),
    "xalancbmk": ("xalan", AMD48, "Xalan -o {in}/page.html {in}/data.xml {in}/page.xsl"),
    "lbm": (OWN, AMD48, "{bin}/kernels lbm 20 3"),
    "hpl": ("libopenblas0-pthread", R910, "{bin}/hpl 2000"),
    # Parsec
    "x264": (
        "x264",
        AMD48,
        "x264 --quiet --qp 20 --partitions b8x8,i4x4 --ref 5 --direct auto --b-pyramid normal --weightb --no-fast-pskip --me umh"
        " --subme 7 --threads 1 -o {in}/video.264 {in}/video.y4m",
    ),
    "vips": ("libvips-tools", R910, "vips sharpen {in}/picture.ppm {in}/picture.v"),
    "blackscholes": (OWN, R910, "{bin}/kernels blackscholes 1000000 2"),
    "canneal": (OWN, R910, "{bin}/kernels canneal 1000000 20"),
    "streamcluster": (OWN, AMD48, "{bin}/kernels streamcluster 200000 3"),
    # Metis, X-Stream
    "kmeans": (OWN, AMD48, "{bin}/kernels kmeans 2000000 1"),
    "pca": (OWN, AMD48, "{bin}/kernels pca 3000 10"),
    "wc": (OWN, AMD48, "{bin}/kernels wc 10000000 1"),
    "wr": (OWN, AMD48, "{bin}/kernels wr 10000000 1"),
    "pagerank": (OWN, AMD48, "{bin}/kernels pagerank 131072 3"),
    "bfs": (OWN, AMD48, "{bin}/kernels bfs 131072 8"),
    "cc": (OWN, AMD48, "{bin}/kernels cc 131072 6"),
    "sssp": (OWN, AMD48, "{bin}/kernels sssp 131072 8"),
    # A Java virtual machine that collects garbage.
    "jbb2005": (
        "openjdk-17-jre-headless",
        R910,
        "java -XX:+UseSerialGC -XX:-UsePerfData -XX:TieredStopAtLevel=1 -Xmx128m -cp {bin} Warehouse 20000",
    ),
    "sphinx3": (
        "pocketsphinx",
        R910,
        "pocketsphinx_continuous -infile {in}/noise.wav -hmm /usr/share/pocketsphinx/model/en-us/en-us"
        " -dict /usr/share/pocketsphinx/model/en-us/cmudict-en-us.dict -lm /usr/share/pocketsphinx/model/en-us/en-us.lm.bin",
    ),
}
CAPACITIES = [half << (n - 1) for n in range(18, 28) for half in (2, 3)] + [2**28]
REACHES = [2**n for n in range(18, 31)]
# Those whose threads share memory, with a class small enough to be run with four.
SHARING = {"cg.B": "{bin}/npb cg A 2", "mg.B": "{bin}/npb mg W 1", "ft.A": "{bin}/npb ft W 1", "is.A": "{bin}/npb is W 2"}


# ---- Programs and inputs ---------------------------------------------------------------------------------------------------


def version_of(package):
    found = subprocess.run(["dpkg-query", "-W", "-f=${Version}", package], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return found.stdout if found.returncode == 0 else ""


# Packages that build programs and make inputs, in addition to the programs' own.
NEEDED = ["gcc", "libc6-dev", "libopenblas-dev", "libstb-dev", "povray-examples", "povray-includes", "openjdk-17-jdk-headless", "qemu-user"]
NEEDED += ["pocketsphinx-en-us"]


def install(names):
    packages = NEEDED + [RUNS[name][0] for name in names if RUNS[name][0] != OWN]
    missing = sorted({package for package in packages if not version_of(package)})
    if missing:
        become = [] if os.geteuid() == 0 else ["sudo"]
        print("installing " + " ".join(missing), file=sys.stderr)
        subprocess.run([*become, "apt-get", "-q", "-q", "update"], check=True)
        subprocess.run([*become, "apt-get", "-q", "-y", "--no-install-recommends", "install", *missing], check=True)


def build():
    into = WORK / "bin"
    into.mkdir(parents=True, exist_ok=True)
    for name, libraries in (("npb", []), ("kernels", []), ("hpl", ["-lopenblas"])):
        command = ["gcc", "-O3", "-fopenmp", "-Wall", "-Wextra", "-o", into / name, SOURCES / f"{name}.c", *libraries, "-lm"]
        subprocess.run(command, check=True)
    subprocess.run(["javac", "-d", into, SOURCES / "Warehouse.java"], check=True)
    return into


class Noise:
    """Always the same numbers."""

    def __init__(self, seed):
        self.state = seed

    def next(self, below):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % below


def grey(noise, x, y, frame):
    """Moving shapes on a slope, and a little noise: with motion for a coder to find."""
    shape = 60 if ((x + 2 * frame) // 32 + (y + frame) // 24) % 3 == 0 else 0
    return min(255, 40 + (x + y) // 8 % 100 + shape + noise.next(12))


def video(path, width=352, height=288, frames=6):
    noise = Noise(1)
    with path.open("wb") as file:
        file.write(f"YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C420jpeg\n".encode())
        for frame in range(frames):
            file.write(b"FRAME\n")
            for w, h in ((width, height), (width // 2, height // 2), (width // 2, height // 2)):
                file.write(bytes(grey(noise, x, y, 3 * frame) for y in range(h) for x in range(w)))


def picture(path, width=1500, height=1000):
    noise = Noise(2)
    row = lambda y: bytes(grey(noise, at // 3, y, 40 * (at % 3)) for at in range(3 * width))
    path.write_bytes(f"P6\n{width} {height}\n255\n".encode() + b"".join(map(row, range(height))))


def mixed(path):
    """Text, a program and numbers, as SPEC's inputs mix them."""
    text = b"".join(file.read_bytes() for file in sorted((ROOT / "crates").rglob("*.rs")))[: 700 << 10]
    program = pathlib.Path("/usr/lib/gcc/x86_64-linux-gnu/12/cc1").read_bytes()[: 500 << 10]
    noise = Noise(3)
    path.write_bytes(text + program + bytes(noise.next(256) & noise.next(256) for _ in range(300 << 10)))


def large(path):
    """Most of the single-file libraries of libstb-dev, implemented: 30,000 lines."""
    parts = ["IMAGE", "IMAGE_RESIZE", "IMAGE_WRITE", "RECT_PACK", "TRUETYPE", "DS", "DXT", "SPRINTF", "HERRINGBONE_WANG_TILE"]
    parts += ["PERLIN", "HEXWAVE", "C_LEXER", "DIVIDE", "VORBIS"]
    source = "".join(f"#define STB_{part}_IMPLEMENTATION\n" for part in parts)
    source += "".join(f"#include <stb/stb_{part.lower()}.h>\n" for part in parts)
    c = path.with_suffix(".c")
    c.write_text(source)
    subprocess.run(["cpp", c, "-o", path], check=True)


def hmm(path):
    examples = pathlib.Path("/usr/share/doc/hmmer2/examples/tutorial")
    subprocess.run(["hmm2build", "-F", path, examples / "pkinase.sto"], check=True, stdout=subprocess.DEVNULL)


def scene(path):
    """A game of chess, like SPEC's own."""
    found = pathlib.Path("/usr/share/doc/povray/examples/advanced") / path.name
    packed = found.with_name(found.name + ".gz")
    path.write_bytes(found.read_bytes() if found.exists() else gzip.decompress(packed.read_bytes()))


def xml(path):
    noise, lines = Noise(4), []
    for at in range(6000):
        fields = "".join(f"<f{k}>{noise.next(100000)}</f{k}>" for k in range(6))
        lines.append(f'<record id="{at}" group="g{noise.next(50)}"><name>n{noise.next(3000)}</name>{fields}</record>')
    path.write_text("<?xml version=\"1.0\"?>\n<all>\n" + "\n".join(lines) + "\n</all>\n")
    path.with_name("page.xsl").write_text("""<?xml version="1.0"?>
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
<xsl:key name="by-group" match="record" use="@group"/>
<xsl:template match="/all"><html><body>
<xsl:for-each select="record[generate-id() = generate-id(key('by-group', @group)[1])]">
<xsl:sort select="@group"/><h2><xsl:value-of select="@group"/></h2><table>
<xsl:for-each select="key('by-group', @group)"><xsl:sort select="name"/><xsl:apply-templates select="."/></xsl:for-each>
</table></xsl:for-each></body></html></xsl:template>
<xsl:template match="record"><tr><td><xsl:value-of select="name"/></td>
<xsl:for-each select="*[starts-with(local-name(), 'f')]"><td><xsl:value-of select="format-number(. div 3, '0.00')"/></td></xsl:for-each>
<td><xsl:value-of select="sum(*[number(.) = number(.)])"/></td></tr></xsl:template>
</xsl:stylesheet>
""")


def sound(path):
    """Half a second of tones and noise at 16 kHz: no speech, but a search through the same model."""
    import struct

    noise = Noise(5)
    tone = lambda at: int(3000 * math.sin(at * (0.05 + 0.04 * math.sin(at / 3000)))) + noise.next(2000) - 1000
    data = struct.pack("<8000h", *map(tone, range(8000)))
    header = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    path.write_bytes(header + b"data" + struct.pack("<I", len(data)) + data)


INPUTS = {
    "video.y4m": video, "picture.ppm": picture, "mixed": mixed, "large.i": large, "pkinase.hmm": hmm, "chess2.pov": scene,
    "data.xml": xml, "noise.wav": sound,
}


def inputs(command):
    into = WORK / "in"
    into.mkdir(parents=True, exist_ok=True)
    for name, make in INPUTS.items():
        if "{in}/" + name in command and not (into / name).exists():
            make(into / name)
    return into


# ---- Measuring -------------------------------------------------------------------------------------------------------------


def profile(homenode, command, machine, window, threads):
    shown = WORK / "profile.toml"
    # Waiting threads must not be counted as working.
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", OPENBLAS_NUM_THREADS="1")
    options = ["--json", "--machine", machine, "--window", str(window), "--output", shown]
    if command.startswith(str(WORK)):
        options.append("--announced")
    run = ["nice", homenode, "profile", *options, "--", *command.split()]
    done = subprocess.run(run, stdout=subprocess.PIPE, env=environment, cwd=WORK / "in", check=True)
    found = json.loads(done.stdout)
    if found["exit_status"] != 0:
        sys.exit(f"{command}: ended with {found['exit_status']}")
    return found


def figures(name, found, command):
    package, (machine, window), _ = RUNS[name]
    log = found["measured"]
    kilo = log["instructions"] / 1000
    ratio = lambda a, b: round(a / b, 4) if b else 0.0
    # Too few accesses are not reported.
    flights = lambda which, key: ratio(log[which]["accesses"], log[which][f"latencies_{key}"]) if log[which]["accesses"] > 1000 else 0.0
    at = lambda points, bytes_: next(point["miss_ratio"] for point in points if point["bytes"] == bytes_)
    row = {
        "name": name,
        "package": package if package == OWN else f"{package} {version_of(package)}",
        "command": command.replace("{in}/", "").replace("{bin}/", "").replace("{bin}", "."),
        "machine": machine,
        "window": window,
        "instructions": log["instructions"],
        "accesses_per_kilo_instruction": round((log["reads"] + log["writes"]) / kilo, 1),
        "llc_accesses_per_kilo_instruction": round(log["llc_accesses"] / kilo, 4),
        "write_share": ratio(log["written_back"], log["llc_accesses"]),
        "miss_ratios": [round(at(log["curve"], bytes_), 4) for bytes_ in CAPACITIES],
        "footprint_mib": round(log["footprint_bytes"] / 2**20, 1),
        "misses_in_flight": [flights("misses", key) for key in ("least", "rule", "most")],
        "misses_foreseen": ratio(log["misses"]["foreseen"], log["misses"]["accesses"]),
        "hits_in_flight": [flights("hits", key) for key in ("least", "rule", "most")],
        "hits_foreseen": ratio(log["hits"]["foreseen"], log["hits"]["accesses"]),
        "pages": log["pages"]["used"],
        "heat": [round(share, 4) for share in log["pages"]["heat"]],
        "pages_only_read": round(log["pages"]["only_read"], 4),
        "tlb_misses_per_million": [round(at(log["translation"], bytes_) * 1e6, 2) for bytes_ in REACHES],
    }
    return row


def text_bytes(text):
    if not isinstance(text, str):
        return int(text)
    number, unit = re.fullmatch(r"([0-9.]+) ?([KMG]i)?B", text).groups()
    return int(float(number) * {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[unit])


def measure(homenode, names):
    install(names)
    folder = build()
    rows = load()
    for name in names:
        _, (machine, window), command = RUNS[name]
        shown, began = command, time.monotonic()
        command = command.format(**{"in": inputs(command), "bin": folder})
        try:
            found = profile(homenode, command, machine, window, 1)
        except (subprocess.CalledProcessError, SystemExit) as failed:
            print(f"{name}: {failed}", file=sys.stderr)
            continue
        rows[name] = figures(name, found, shown)
        if name in SHARING:
            shared = SHARING[name]
            pages = profile(homenode, shared.format(bin=folder), machine, window, 4)["measured"]["pages"]
            rows[name] |= {"shared_command": shared.replace("{bin}/", "")}
            rows[name] |= {"shared_pages": round(pages["shared"], 4), "shared_accesses": round(pages["shared_accesses"], 4)}
        save(rows)
        print(f"{name}: {time.monotonic() - began:.0f} s, {found['measured']['instructions'] / 1e9:.2f} G instructions", file=sys.stderr, flush=True)


HEAD = """# What programs do to caches and pages, measured under emulation: data. Written by scripts/profiles.py, which names each figure's
# run; docs/PROFILE.md has the rule for what is in flight and explains the rest. `miss_ratios` are at 256, 384, 512 KiB ... 256 MiB, two
# to an octave, `heat` is the share of accesses to the hottest 1, 2, 5, 10, 20, 30, 50, 70 and 90 percent of pages; in flight: least, by the rule, most;
# `tlb_misses_per_million` loads and stores at 256 KiB, 512 KiB ... 1 GiB of reach.
version = 1
"""


def load():
    if not MEASURED.exists():
        return {}
    return {row["name"]: row for row in tomllib.loads(MEASURED.read_text())["program"]}


def save(rows):
    text = HEAD
    for name in RUNS:
        if name in rows:
            text += "\n[[program]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows[name].items())
    MEASURED.write_text(text)


# ---- Into the profiles -----------------------------------------------------------------------------------------------------

# Profile: the run, the parts of it that apply, and whether the profile's own counts by hand ("computed: see above") are replaced, too.
# flight, hits: accesses in flight; write: written share; miss: accesses to the LLC and their curve; tlb: translation; heat: classes
# inside a footprint that the run had too; shared: accesses to memory that threads share. The 29 of [Policies] are in
# scripts/numa-workloads.py. Measured and not applied: xalancbmk (0.4 accesses where 23 are published: the document is too small),
# hpl (OpenBLAS selects kernels for the processor that QEMU reports), sphinx3 (a different program from SPEC's).
ALL = {"flight", "hits", "write", "miss", "tlb"}
# How the profile's memory relates to the run's. AS_RUN: the curve is the run's. LARGER: there is more of it, used in the same way: the
# curve is fitted up to a quarter of the run's memory, where its size does not show. LONGER: the same memory, used for much longer: first
# uses, which miss in any cache, are left out.
AS_RUN, LARGER, LONGER = "as run", "larger", "longer"
APPLIED = {
    "cg.B": ("cg.B", ALL | {"shared"}, AS_RUN),
    "mg.B": ("mg.B", ALL | {"shared"}, AS_RUN),
    "ft.B": ("ft.A", ALL | {"shared"}, LARGER),
    "is.B": ("is.A", ALL | {"shared"}, LARGER),
    "ep.B": ("ep.B", ALL, LONGER),
    "stream": ("stream", {"flight", "hits", "tlb"}, LARGER),
    "bzip2": ("bzip2", ALL, AS_RUN),
    "gcc": ("gcc", ALL, LARGER),  # 403.gcc uses 900 MiB
    "hmmer": ("hmmer", ALL, LONGER),
    "povray": ("povray", ALL, LONGER),
    "lbm": ("lbm", ALL - {"flight"}, LARGER),  # flight: fitted to the solo IPC with cpi_core
    "vips": ("vips", ALL, AS_RUN),
    "blackscholes": ("blackscholes", ALL, LARGER),
    "canneal": ("canneal", {"flight", "hits", "write"}, LARGER),  # what is reused grows with its net list
    "jbb2005": ("jbb2005", ALL, AS_RUN),
}
# 10^9 instructions of one of four threads, by the class: the number of measured runs it contains. FT's points are
# four times those of class A, with 25 binary digits instead of 23.
INSTRUCTIONS = {
    "cg.B": (75 * 26 / 6, "75 outer iterations of 26 products, 6 of them measured"),
    "mg.B": (20, "20 cycles"),
    "ft.B": (20 * 4 * 25 / 23, "20 iterations of 4 times class A's points and 25 / 23 of its steps"),
    "is.B": (11 / 2 * 4, "11 rounds over 4 times class A's keys, 2 of them measured"),
    "ep.B": (2**30 / (20 * 2**16), "2^30 pairs, 20 x 2^16 of them measured"),
}
BARRIERS = {"cg.B": 9750, "mg.B": 240, "ft.B": 100, "is.B": 44}


def reach_curve(points):
    """Like 'homenode profile' fits translation (crates/calibrate/src/profile/write.rs): c0 in bytes, and k."""
    at = lambda bytes_: points[REACHES.index(bytes_)] * 1e-6
    told = [(math.log(bytes_), math.log(-math.log(at(bytes_)))) for bytes_ in REACHES if 2**19 <= bytes_ <= 2**26 and 0 < at(bytes_) < 1]
    if not 0 < at(2**21) < 1:
        return None
    x0, y0 = math.log(2**21), math.log(-math.log(at(2**21)))
    x, y = (sum(column) / len(told) for column in zip(*told))
    slope = sum((a - x) * (b - y) for a, b in told) / max(sum((a - x) ** 2 for a, _ in told), 1e-9)
    k = max(slope, y0 / x0)
    return max(1, int(math.exp(x0 - y0 / k))), round(k, 3)


def curve_of(row, how):
    """Accesses to the LLC per thousand instructions, m_inf, c0 in KiB, k; and the mean and maximum error of the curve."""
    smallest = {"r910": 2**18, "amd48": 2**19}[row["machine"]]
    most = row["footprint_mib"] * 2**20 / 4 if how == LARGER else 2**28
    first_uses = row["miss_ratios"][-1] if how == LONGER else 0.0
    points = [
        (bytes_, max(miss - first_uses, 0.0) / (1 - first_uses))
        for bytes_, miss in zip(CAPACITIES, row["miss_ratios"])
        if smallest <= bytes_ <= max(most, 4 * smallest)
    ]
    m_inf, c0, k = fit(points)
    off = [abs(miss_ratio((m_inf, c0, k), bytes_) - miss) for bytes_, miss in points]
    accesses = row["llc_accesses_per_kilo_instruction"] * (1 - first_uses)
    return (accesses, round(m_inf, 3), max(1, round(c0 / 1024)), round(k, 2)), (sum(off) / len(off), max(off))


def miss_ratio(curve, bytes_):
    m_inf, c0, k = curve
    return m_inf + (1 - m_inf) * math.exp(-((bytes_ / c0) ** k))


def fit(points):
    """Like crates/twin/src/workload/fit.rs: for any c0 and k the best m_inf has a closed form; a grid that narrows finds these."""

    def best_m_inf(c0, k):
        e = [math.exp(-((bytes_ / c0) ** k)) for bytes_, _ in points]
        above = sum((1 - a) * (miss - a) for a, (_, miss) in zip(e, points))
        below = sum((1 - a) ** 2 for a in e)
        return (min(max(above / below, 0.0), 1.0) if below > 0 else 0.0), c0, k

    squares = lambda curve: sum((miss_ratio(curve, bytes_) - miss) ** 2 for bytes_, miss in points)
    middle = (points[0][1] + points[-1][1]) / 2
    c0, k, width = next(bytes_ for bytes_, miss in points if miss <= middle), 1.0, 4.0
    steps = [step / 4 for step in range(-4, 5)]
    for _ in range(16):
        tries = [(c0 * width**a, min(max(k * width**b, 0.2), 20.0)) for a in steps for b in steps]
        c0, k = min(tries, key=lambda of: squares(best_m_inf(*of)))
        width **= 0.7
    return best_m_inf(c0, k)


def told(row, how):
    """Measured figures by section and key of a profile, each with the group it belongs to."""
    (accesses, m_inf, c0_kib, k), _ = curve_of(row, how)
    tlb = reach_curve(row["tlb_misses_per_million"])
    found = {
        ("program", "llc_accesses_per_kilo_instruction"): ("miss", round(accesses, 3)),
        ("program", "misses_in_flight"): ("flight", in_flight(row["misses_in_flight"])),
        ("program", "hits_in_flight"): ("hits", in_flight(row["hits_in_flight"])),
        ("program", "write_share"): ("write", round(row["write_share"], 3)),
        ("program.miss_ratio", "m_inf"): ("miss", m_inf),
        ("program.miss_ratio", "c0"): ("miss", f'"{c0_kib}KiB"'),
        ("program.miss_ratio", "k"): ("miss", k),
        ("program.translation", "accesses_per_kilo_instruction"): ("tlb", row["accesses_per_kilo_instruction"]),
    }
    if tlb:
        found[("program.translation.miss_ratio", "c0")] = ("tlb", f'"{tlb[0]}B"')
        found[("program.translation.miss_ratio", "k")] = ("tlb", tlb[1])
        found[("program.translation.miss_ratio", "m_inf")] = ("tlb", 0.0)
    # Events too rare to measure keep their estimates.
    return {key: figure for key, figure in found.items() if figure[0] not in ("flight", "hits") or figure[1] > 0}


def in_flight(bounds):
    return round(bounds[1], 1)


def guessed(comment, by_hand):
    return comment.startswith(("estimate", "measured")) or (by_hand and comment.startswith("computed:") and "see above" in comment)


def applied(name, text, rows):
    """The text of a profile with measurements in place of estimates."""
    run, groups, how = APPLIED[name]
    if run not in rows:
        return text
    row, by_hand = rows[run], name in INSTRUCTIONS
    figures, section, regions, out = told(row, how), "", [], []
    lines = [line for line in text.splitlines() if not line.startswith("# measured: ")]
    # A curve with a source for one figure stays whole.
    whole = all(guessed(comment_of(line), by_hand) for line in lines_of(lines, "program.miss_ratio"))
    for line in lines:
        if line.startswith("["):
            section = line.strip("[]")
        key = line.split(" = ")[0]
        group, value = figures.get((section, key), (None, None))
        comment = comment_of(line)
        curve = section != "program.miss_ratio" or whole
        if group in groups and curve and guessed(comment, by_hand):
            line = f"{key} = {value} # measured: {run}, {what_of(group, row, how)}"
        elif section == "program" and key == "instructions_g_per_thread" and by_hand:
            times, of = INSTRUCTIONS[name]
            line = f"{key} = {row['instructions'] * times / 4e9:.3g} # computed: measured instructions of {of}, over 4 threads"
        elif section == "program.barrier" and key == "interval_m_instructions" and name in BARRIERS:
            interval = row["instructions"] * INSTRUCTIONS[name][0] / 4e6 / BARRIERS[name]
            line = f"{key} = {interval:.3g} # computed: instructions over {BARRIERS[name]} barriers"
        elif section == "program.regions" and key == "kind":
            regions.append(line)
            hotter = 0.0
        elif section == "program.regions" and key == "access_share" and "shared" in groups and guessed(comment, False):
            share = row["shared_accesses"] if "shared" in regions[-1] else 1 - row["shared_accesses"]
            line = f"{key} = {round(share, 3)} # measured: {run} with four threads, of accesses to the LLC"
        elif section == "program.regions.heat" and key == "page_share":
            below, hotter = hotter, hotter + float(line.split(" = ")[1].split(" #")[0])
        elif section == "program.regions.heat" and key == "access_share" and "heat" in groups and guessed(comment, False):
            line = f"{key} = {round(heat_between(row, below, hotter), 3)} # measured: {run}, pages by heat"
        out.append(line)
    if name in SOLO_IPC:
        at = next(at for at, line in enumerate(out) if line.startswith("cpi_core = "))
        out[at] = f"cpi_core = {core_cycles(name, tomllib.loads(chr(10).join(out))['program'])} # {CORE}"
    at = next(at for at, line in enumerate(out) if line.startswith("name = "))
    out.insert(at, f"# measured: {row['command'].split(' ')[0]}, {row['package']}: scripts/profiles.py, data/measured/profiles.toml")
    return "\n".join(out) + "\n"


# Solo instructions per cycle (vtselfa/manager's instr_60s table, 2.2 GHz, 30 MB LLC; read for facts/simulators.md).
SOLO_IPC = {"bzip2": 1.26, "hmmer": 1.40, "povray": 1.91, "xalancbmk": 1.62, "lbm": 1.63}
LLC_CYCLES, MEMORY_CYCLES = 45, 200
CORE = (
    "computed: what the solo IPC of vtselfa/manager's instr_60s table (2.2 GHz, 30 MB LLC) leaves after the LLC and memory terms,"
    f" at {LLC_CYCLES} and {MEMORY_CYCLES} cycles"
)


def core_cycles(name, program):
    curve = program["miss_ratio"]
    misses = curve["m_inf"] + (1 - curve["m_inf"]) * math.exp(-((30 * 2**20 / text_bytes(curve["c0"])) ** curve["k"]))
    accesses = program["llc_accesses_per_kilo_instruction"] / 1000
    hits = accesses * (1 - misses) * LLC_CYCLES / program["hits_in_flight"]
    return round(max(1 / SOLO_IPC[name] - hits - accesses * misses * MEMORY_CYCLES / program["misses_in_flight"], 0.2), 2)


def heat_between(row, low, high):
    """Share of accesses to the pages between two places in the order of heat."""
    of_hottest = lambda part: 0.0 if part < 1e-9 else 1.0 if part > 1 - 1e-9 else row["heat"][PARTS.index(round(part, 2))]
    return of_hottest(high) - of_hottest(low)


PARTS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9]


def comment_of(line):
    return line.split(" # ", 1)[1] if " # " in line else ""


def lines_of(lines, section):
    at = lines.index(f"[{section}]") + 1
    end = next((end for end in range(at, len(lines)) if lines[end].startswith("[")), len(lines))
    return [line for line in lines[at:end] if " = " in line]


def what_of(group, row, how):
    mean, most = curve_of(row, how)[1]
    to = {AS_RUN: "", LARGER: ", up to a quarter of what the run used", LONGER: ", first uses left out"}[how]
    bounds = lambda which: f"{row[which][0]:.1f} to {row[which][2]:.1f} by what the rule cannot see, window {row['window']}"
    return {
        "flight": bounds("misses_in_flight"),
        "hits": bounds("hits_in_flight"),
        "write": "written lines over lines fetched, beyond L2",
        "miss": f"beyond L2 of {row['machine']}; curve {mean:.3f} off on average, {most:.3f} at most{to}",
        "tlb": f"{row['tlb_misses_per_million'][3]:.3g} misses in a million at 2 MiB of reach",
    }[group]


def profiles(rows):
    for name in APPLIED:
        path = next((ROOT / "data/workloads").rglob(f"{name}.toml"))
        text = path.read_text()
        yield path, text, applied(name, text, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--homenode", default=TARGET / "release/homenode", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("what", nargs="?", choices=["measure", "apply"])
    parser.add_argument("names", nargs="*")
    args = parser.parse_intermixed_args()
    if args.what == "measure":
        measure(args.homenode.resolve(), args.names or list(RUNS))
    elif args.what == "apply":
        for path, _, text in profiles(load()):
            path.write_text(text)
    elif args.check:
        stale = [str(path.relative_to(ROOT)) for path, text, wanted in profiles(load()) if text != wanted]
        if stale:
            sys.exit("differ from what 'scripts/profiles.py apply' writes: " + ", ".join(stale))
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
