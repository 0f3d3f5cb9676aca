#!/usr/bin/env python3
"""Takes figures that documents quote from the files in which they were generated.

    scripts/figures.py                  writes the figures and tables into the documents
    scripts/figures.py --check          writes nothing, and fails with a line PLACE: MESSAGE for each that differs
    scripts/figures.py --check FOLDER   the same for the documents of another folder

A figure is quoted as 0.25<!--=FILE#KEY-->. The comment is not shown. FILE is a path from the document, and the figure keeps its
number of decimals. After the key, :2 takes the second number of a text or cell. A document may shorten what its sources begin
with: <!-- figures: near=FILE#SECTION --> lets it write 0.25<!--=near/ROW/COLUMN-->. Keys:

- In Markdown SECTION/ROW/COLUMN: a cell of a table of the section with this heading, by the row's first cell and the column's
  head. SECTION/~WORDS is the first number after these words. Names are in lower case, with - for all but letters, digits and
  underscores. Exactly one cell or place must have them; SECTION@2 is the section's second table.
- In TOML the keys that lead to a value: program[name=cg.B]/write_share takes the first table with this name from a list, and
  run[drawn_as=operations:-1]/cases the last one.

A whole table is between <!-- table: NAME --> and <!-- /table -->; TABLES says how each is made.
"""

import functools
import pathlib
import re
import sys
import tomllib
from decimal import ROUND_HALF_UP, Decimal

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Documents that quote; those that are generated as a whole quote nothing.
DOCUMENTS = ["README.md", "docs/*.md", "data/workloads/README.md"]
GENERATED = ["DECISIONS.md", "REPRODUCTION.md", "REPRODUCTION-DETAILS.md", "VALIDATION.md"]
NUMBER = r"(?:(?<![\w.])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
QUOTE = re.compile(rf"({NUMBER})?<!--=([^>]*?)-->")
SHORT = re.compile(r"<!-- figures: (.*?) -->", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


class Wrong(Exception):
    """What is wrong with a quotation."""


# ---- Single figures ------------------------------------------------------------------------------------------------------


def slug(text):
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")


@functools.cache
def read(path):
    try:
        return path.read_text()
    except OSError as error:
        raise Wrong(f"cannot read {path.name}: {error.strerror}") from error


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables_of(text):
    """The tables of a section: the cells of the heads, then those of each row."""
    found, lines = [], text.splitlines()
    for at, line in enumerate(lines):
        if re.fullmatch(r"\|[ \-|:]+\|", line) and at > 0:
            found.append([cells(lines[at - 1])])
        elif line.startswith("|") and found and lines[at - 1].startswith("|"):
            found[-1].append(cells(line))
    return found


def sections(text):
    """Heading and text of each section, without code."""
    found, in_code = [], False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if not in_code and line.startswith("#"):
            found.append((slug(line), []))
        elif found:
            found[-1][1].append(line)
    return [(name, "\n".join(lines)) for name, lines in found]


def only(found, key):
    if len(found) != 1:
        raise Wrong(f"{len(found)} places are called '{key}', and one is needed")
    return found[0]


def in_markdown(text, key):
    section, _, place = key.partition("/")
    section, _, number = section.partition("@")
    text = only([text for name, text in sections(text) if name == section], section)
    if place.startswith("~"):
        # Words are compared as names are: whatever is between them does not count.
        words = re.escape(place[1:]).replace(r"\-", "-").replace("-", r"[^a-zA-Z0-9_]+")
        return only(re.findall(rf"(?i)\b{words}\b[^0-9]*({NUMBER}.*)", text), key)
    row, _, column = place.partition("/")
    tables = tables_of(text)
    if number:
        tables = tables[int(number) - 1 : int(number)]
    found = [
        line[at]
        for heads, *rows in tables
        for line in rows
        if slug(line[0]) == row
        for at, head in enumerate(heads)
        if slug(head) == column and at < len(line)
    ]
    return only(found, key)


def in_toml(text, key):
    value = tomllib.loads(text)
    for part in key.split("/"):
        name, _, which = part.partition("[")
        if not isinstance(value, dict) or name not in value:
            raise Wrong(f"there is no '{name}' of '{key}'")
        value = value[name]
        if which:
            field, _, wanted = which.rstrip("]").partition("=")
            wanted, _, number = wanted.partition(":")
            found = [one for one in value if str(one.get(field)) == wanted]
            if not found:
                raise Wrong(f"there is no {part}")
            value = found[int(number or 0)]
    return str(value)


def figure(document, source, decimals):
    """The figure that a document is to quote, with this many decimals."""
    path, _, key = source.partition("#")
    matched = re.fullmatch(r"(.*?)(?::(\d+))?", key)
    key, number = matched[1], int(matched[2] or 1)
    path = document.parent / path
    text = (in_toml if path.suffix == ".toml" else in_markdown)(read(path), key)
    numbers = re.findall(NUMBER, text)
    if len(numbers) < number:
        raise Wrong(f"'{text}' has no number {number}")
    return Decimal(numbers[number - 1].replace(",", "")).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)


def quoted(document, written, source):
    """How a document is to write the figure that it now writes in some form."""
    if written is None:
        raise Wrong("no number is before the comment")
    value = figure(document, source, len(written.partition(".")[2]))
    text = f"{value:,}" if "," in written else f"{value}"
    return text.removeprefix("0") if written.startswith(".") else text


# ---- Whole tables --------------------------------------------------------------------------------------------------------


def show(number, decimals=2):
    """At most three digits, and at most this many decimals."""
    decimals = min(decimals, 0 if number >= 100 else 1 if number >= 10 else 2)
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" if line[0] != "---" else "|" + "---|" * len(line) + "\n" for line in lines)


def profiles(root):
    """Programs that were measured, beside what their profiles use."""
    measured = tomllib.loads(read(root / "data/measured/profiles.toml"))["program"]
    runs, rows = {run["name"]: run for run in measured}, []
    for path in sorted((root / "data/workloads").glob("*/*.toml")):
        text = read(path)
        named = re.findall(r"^\w+ = .* # measured: ([^,;]+)[,;]", text, re.MULTILINE)
        run = next((runs[name] for name in named if name in runs), None)
        if run is None:
            continue
        used, origin = re.search(r"^llc_accesses_per_kilo_instruction = (\S+) # ([a-z]+)", text, re.MULTILINE).groups()
        name, short = path.name.removesuffix(".toml"), run["name"].removesuffix("-amd48")
        least, rule, most = (show(bound, 1) for bound in run["misses_in_flight"])
        # The capacities are 256, 384, 512 KiB … in half octaves.
        missing = "/".join(f"{100 * run['miss_ratios'][at]:.0f}" for at in (4, 8, 12))
        rows.append([
            f"`{name}`" + (f" ({short})" if short != name else ""),
            show(run["llc_accesses_per_kilo_instruction"]),
            f"{show(float(used))}, {origin}",
            f"{rule} ({least}-{most})",
            f"{100 * run['write_share']:.0f}",
            missing,
        ])
    heads = ["profile (run)", "LLC accesses", "used, and its origin", "misses in flight", "write share, %", "missing at 1/4/16 MiB, %"]
    return markdown(heads, rows)


def page_log_programs(root):
    """What programs use and write of their memory, and what PRL makes of it."""
    rows = []
    for program in tomllib.loads(read(root / "data/measured/page-log-programs.toml"))["program"]:
        mib = lambda pages: f"{pages * 4 / 1024:.1f}"
        shares = lambda what: [100 * program[when + what] / program[when + "used"] for when in ("", "intervals_")]
        both = lambda what: ", ".join(f"{share:.0f} %" for share in shares(what))
        rows.append([
            program["name"] + (" (PARSEC)" if program["parsec"] else ""),
            mib(program["used"]),
            both("written"),
            "yes" if shares("written")[1] >= 95 else "no",
            both("logged"),
            mib(program["prl"]["hot"]),
            mib(program["prl_repaired"]["hot"]),
        ])
    heads = ["program", "used, MiB", "written: whole run, intervals", "PML alone accurate", "logged by PRL: whole run, intervals"]
    return markdown([*heads, "PRL, tau 50: hot, MiB", "repaired: hot, MiB"], rows)


def scoreboard(root):
    """The scoreboard's totals, a column for each set of policies."""
    text = read(root / "docs/DECISIONS.md")
    policies = ["ff-pin", "autonuma", "numad", "tavo", "homenode", "best known"]
    cell = lambda policy, column: re.match(NUMBER, in_markdown(text, f"all-cases/{slug(policy)}/{column}"))[0]
    rows = [
        [name, *(cell(policy, column) for policy in policies)]
        for name, column in (("mean", "mean"), ("worst VM", "worst-vm"), ("VMs slowed", "vms-slowed"))
    ]
    heads = ["", "ff-pin", "kernel's balancing", "numad", "[TAVO] as published", "Homenode", "best known"]
    return markdown(heads, rows)


def calibration(root):
    """Programs whose interconnect load in the twin is more than five points from the published one."""
    section = dict(sections(read(root / "docs/REPRODUCTION-DETAILS.md")))["policies-imbalance"]
    # Each row has the program, then published and ours of imbalance and of interconnect load, under first-touch and round-4K.
    _, *programs = next(table for table in tables_of(section) if len(table[0]) == 9)
    off = [row for row in programs if any(abs(float(row[at]) - float(row[at + 1])) > 5 for at in (5, 7))]
    heads = ["program", "first-touch: published", "ours", "round-4K: published", "ours"]
    return markdown(heads, [[row[0], *row[5:]] for row in off])


TABLES = {
    "calibration": calibration,
    "page-log-programs": page_log_programs,
    "profiles": profiles,
    "scoreboard": scoreboard,
}


# ---- Documents -----------------------------------------------------------------------------------------------------------


def rewritten(root, document):
    """The text that a document is to have, and what is wrong or differs: lines and messages."""
    text, wrong = read(document), []
    shortened = dict(one.split("=", 1) for matched in SHORT.findall(text) for one in matched.split())

    def differs(matched, message):
        wrong.append((matched.string.count("\n", 0, matched.start()) + 1, message))

    def single(matched):
        written, source = matched.groups()
        try:
            first, slash, rest = source.partition("/")
            wanted = quoted(document, written, shortened.get(first, first) + slash + rest)
        except (Wrong, ArithmeticError, ValueError) as error:
            differs(matched, f"'{source}': {error}")
            return matched[0]
        if wanted != written:
            differs(matched, f"{written} is {wanted} in '{source}': run scripts/figures.py, and read the sentence again")
        return f"{wanted}<!--={source}-->"

    def whole(matched):
        begin, name, written, end = matched.groups()
        if name not in TABLES:
            differs(matched, f"there is no table '{name}'")
            return matched[0]
        wanted = TABLES[name](root)
        if wanted != written:
            differs(matched, f"the table '{name}' differs from its source: run scripts/figures.py")
        return begin + wanted + end

    # Figures are on one line, so lines keep their numbers until tables are replaced.
    out = TABLE.sub(whole, QUOTE.sub(single, text))
    if out.count("<!-- table: ") != len(TABLE.findall(out)):
        wrong.append((1, "a table is not between '<!-- table: NAME -->' and '<!-- /table -->', on lines of their own"))
    return out, wrong


def main(arguments):
    check = arguments[:1] == ["--check"]
    if len(arguments) > 1 + check or (arguments and not check):
        sys.exit(__doc__)
    root = pathlib.Path(arguments[1]).resolve() if len(arguments) > 1 else ROOT
    documents = [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern)) if path.name not in GENERATED]
    failed = False
    for document in documents:
        text, wrong = rewritten(root, document)
        for line, message in wrong:
            print(f"{document.relative_to(root)}:{line}: {message}")
        if check:
            failed |= bool(wrong)
        elif text != read(document):
            document.write_text(text)
    # What cannot be looked up stays as it is, which only a check refuses.
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
