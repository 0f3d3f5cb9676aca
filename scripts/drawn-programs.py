#!/usr/bin/env python3
"""Draws programs that the memory advisor cannot have been tuned to (data/experiments/policies/held-out.toml).

    scripts/drawn-programs.py            draws them, and writes them into the experiment
    scripts/drawn-programs.py --check    fails if the experiment has others; with a folder, the experiment there

The seed follows from the advisor's code (crates/policy/src/advisor.rs and its modules, without comments and tests). A change of the advisor
therefore draws other programs, and the experiment must run again. Each figure is drawn by itself, evenly over its range or over
the logarithm of its range. Ranges are those of the programs that were measured (docs/PROFILE.md) or, if marked, our choice.
"""

import hashlib
import math
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ADVISOR = "crates/policy/src/advisor.rs"
EXPERIMENT = "data/experiments/policies/held-out.toml"
BEGIN, END = "# drawn: begin\n", "# drawn: end\n"
PROGRAMS = 12
THREADS = 48
KINDS = ["initialised-by-one", "shared", "private"]


def seed(root):
    modules = sorted((root / ADVISOR).with_suffix("").glob("*.rs"))
    files = [root / ADVISOR] + [module for module in modules if module.name != "tests.rs"]
    codes = [file.read_text().partition("#[cfg(test)]")[0] for file in files]
    lines = [line.strip() for code in codes for line in code.splitlines()]
    code = "\n".join(line for line in lines if line and not line.startswith("//"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


class Chance(random.Random):
    def even(self, low, high):
        return low + (high - low) * self.random()

    def scale(self, low, high):
        return low * (high / low) ** self.random()


def kib(size):
    """GiB in whole pages."""
    return f'"{4 * max(1, round(size * 2**20 / 4))}KiB"'


def regions(chance):
    """Memory by the threads that touch it; each kind is there in two of three programs (our choice)."""
    kinds = []
    while not kinds:
        kinds = [kind for kind in KINDS if chance.random() < 2 / 3]
    # Lengths between random points of a stick, so that no kind is preferred.
    weights = [-math.log(1 - chance.random()) for _ in kinds]
    shares = [round(weight / sum(weights), 4) for weight in weights]
    shares[-1] = round(1.0 - sum(shares[:-1]), 4)
    footprint = chance.scale(0.5, 16)  # GiB, our choice: all fit into the VM
    out = []
    for kind, share in zip(kinds, shares):
        size = footprint * share / (THREADS if kind == "private" else 1)
        # The hottest tenth of pages gets at most 80 percent of accesses; in half of the regions all pages are alike (our choice).
        hottest = round(chance.even(0.1, 0.8), 3)
        heat = f", heat = [{{ page_share = 0.1, access_share = {hottest} }}, {{ page_share = 0.9, access_share = {round(1 - hottest, 3)} }}]"
        heat = heat if chance.random() < 0.5 else ""
        out.append(f'    {{ kind = "{kind}", size = {kib(size)}, access_share = {share}{heat} }},\n')
    return "regions = [\n" + "".join(out) + "]\n"


def program(chance, number):
    m_inf, c0 = round(chance.even(0.05, 1.0), 3), kib(chance.scale(0.5, 8) / 1024)
    text = f"""
[[labels.drawn-{number}.workload]]
name = "drawn-{number}"
about = "Drawn program {number}"

[labels.drawn-{number}.workload.program]
threads = "one-per-vcpu"
instructions_g_per_thread = 100.0
cpi_core = {chance.even(0.5, 1.4):.2f}
llc_accesses_per_kilo_instruction = {chance.scale(0.5, 120):.2f}
misses_in_flight = {chance.scale(1.5, 25):.2f}
hits_in_flight = {chance.even(3, 10):.2f}
write_share = {chance.even(0, 0.75):.3f}
miss_ratio = {{ m_inf = {m_inf}, c0 = {c0}, k = 1.0 }}
"""
    if chance.random() < 0.5:
        interval, imbalance = chance.scale(5, 150), chance.even(0.01, 0.05)
        text += f"barrier = {{ interval_m_instructions = {interval:.1f}, imbalance = {imbalance:.3f} }}\n"
        text += 'waiting = "spin"\n'
    return text + regions(chance)


def main(arguments):
    check = arguments[:1] == ["--check"]
    if len(arguments) > 1 + check or (arguments and not check):
        sys.exit(__doc__)
    root = pathlib.Path(arguments[1]) if len(arguments) > 1 else ROOT
    from_code = seed(root)
    chance = Chance(int(from_code, 16))
    drawn = f"# Seed {from_code}, from the advisor's code.\n"
    drawn += "".join(program(chance, number + 1) for number in range(PROGRAMS))
    text = (root / EXPERIMENT).read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + drawn + END + after
    if not check:
        (root / EXPERIMENT).write_text(wanted)
    elif text != wanted:
        print(f"{EXPERIMENT}: the advisor's code draws other programs: run scripts/drawn-programs.py, then the claim again")
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
