#!/usr/bin/env python3
"""Compares 'homenode profile' with Valgrind's Cachegrind on the same program and the same caches.

    scripts/compare-cachegrind.py [--homenode target/release/homenode] -- gzip -9 -c FILE

Private cache: L2 of the machine (r910: 256 KiB, 8 ways), which is Cachegrind's D1; its LL takes each of the capacities below in
turn. Both replace the least recently used line. Cachegrind has no L1 in front (hits in ours do not count as uses in L2), sets in
its LL (16 ways; ours is a list over all lines) and code in its LL (ours only holds data). Needs valgrind.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CAPACITIES = [512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20]
WAYS = 16


def cachegrind(command, private_bytes, llc_bytes):
    """Loads, stores, misses of the private cache and of LL, all of data."""
    options = [
        "--tool=cachegrind",
        "--cache-sim=yes",
        f"--D1={private_bytes},8,64",
        f"--LL={llc_bytes},{WAYS},64",
        "--cachegrind-out-file=/dev/null",
    ]
    done = subprocess.run(["valgrind", *options, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    number = lambda what: [int(n.replace(",", "")) for n in re.findall(r"[\d,]{1,}", re.search(what + r":(.*)", done.stderr)[1])]
    data = number("D   refs")
    return {
        "instructions": number("I   refs")[0],
        "reads": data[1],
        "writes": data[2],
        "llc_accesses": number("D1  misses")[0],
        "misses": number("LLd misses")[0],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--homenode", default="target/release/homenode", type=Path)
    parser.add_argument("--rate", default="1%")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = ["--output", f"{folder}/profile.toml"]
        options = ["profile", "--json", "--rate", args.rate, *output, "--", *args.command]
        ours = json.loads(subprocess.run([args.homenode, *options], stdout=subprocess.PIPE, check=True).stdout)["measured"]
    theirs = {bytes_: cachegrind(args.command, ours["private_bytes"], bytes_) for bytes_ in CAPACITIES}
    first = theirs[CAPACITIES[0]]
    line = lambda what, a, b: print(f"{what:<28}{a:>16,}{b:>16,}{(a / b - 1) * 100 if b else 0:>9.2f}%")
    print(f"{'':<28}{'homenode':>16}{'Cachegrind':>16}{'off':>10}")
    for key in ["instructions", "reads", "writes", "llc_accesses"]:
        line(key, ours[key], first[key])
    curve = {point["bytes"]: point["miss_ratio"] for point in ours["curve"]}
    errors = []
    for bytes_, found in theirs.items():
        ratio = found["misses"] / max(found["llc_accesses"], 1)
        errors.append(abs(curve[bytes_] - ratio))
        print(f"{f'miss ratio, {bytes_ >> 10} KiB':<28}{curve[bytes_]:>16.4f}{ratio:>16.4f}{curve[bytes_] - ratio:>+10.4f}")
    print(f"mean distance of miss ratios {sum(errors) / len(errors):.4f}")


if __name__ == "__main__":
    sys.exit(main())
