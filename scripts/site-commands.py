"""Runs docs/TUTORIAL.md as written, and checks that the commands and options named on the other pages exist.

    site-commands.py HOMENODE [PAGE.md]

In the tutorial (or the given page) `toml` and `python` blocks that begin with `# name.toml` or `# name.py` are written as these files into
a new directory. The `sh` blocks are then run there in one shell, in their order, with `homenode` in PATH, and with the Python that runs
this as `python`, which must find the package. Each must succeed. A `text` block is the output of the previous block: its lines must
occur in this order, and other lines may come in between only where it has `…`. What README.md quotes must be printed, too. The last line
is the count, by results.py.

With HOMENODE_WRITE_SHOWN=1 a `text` block that differs is written again in the page: as many lines between its `…` as before, those
that resemble the old ones most. Read the difference before you commit it, and the sentences around it.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from results import told

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 120
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
# A command on a page: a line of code that begins with it, up to a comment or a pipe.
SHOWN = re.compile(r"^(?: {4}|\t)?(?:sudo )?homenode( [^\n]*)$", re.M)


def differs(shown: str, printed: str) -> str | None:
    """The first shown line that was not printed at its place."""
    have = [line.rstrip() for line in printed.rstrip().splitlines()]
    at, may_skip = 0, False
    for line in (line.rstrip() for line in shown.rstrip().splitlines()):
        if line == "…":
            may_skip = True
            continue
        found = next((there for there in range(at, len(have)) if have[there] == line), None)
        if found is None or (found != at and not may_skip):
            there = "\n    ".join(have[at : at + 5])
            return f"shown, and not printed here:\n    {line}\nbut:\n    {there}"
        at, may_skip = found + 1, False
    return None if may_skip or at == len(have) else f"printed after what is shown:\n    {have[at]}"


def renewed(shown: str, printed: str) -> str:
    """The shown lines as they are printed now."""
    have = [line.rstrip() for line in printed.rstrip().splitlines()]
    parts = [part.strip("\n").splitlines() for part in re.split("^…$", shown, flags=re.M)]
    if len(parts) == 1:
        return "\n".join(have) + "\n"
    at, lines = 0, []
    for index, part in enumerate(parts):
        starts = [0] if index == 0 else range(at, len(have) - len(part) + 1)

        def likeness(start: int, part: list[str] = part) -> float:
            pairs = zip(part, have[start : start + len(part)], strict=False)
            return sum(difflib.SequenceMatcher(None, old, new).ratio() for old, new in pairs)

        start = max(starts, key=likeness, default=at)
        at = start + len(part)
        lines += (["…"] if index else []) + have[start:at]
    return "\n".join(lines) + "\n"


def run(page: Path, folder: Path, program: Path) -> list[tuple[str, str | None]]:
    """The result of each block: its name, and the error."""
    (folder / "bin").mkdir()
    (folder / "bin/homenode").symlink_to(program)
    # A link to it would not know its environment.
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "bin/python").chmod(0o755)
    work = folder / "work"
    work.mkdir()
    blocks = FENCED.findall(page.read_text())
    script = ["set -e -o pipefail"]
    for index, (language, text) in enumerate(blocks):
        name = re.match(r"# ([\w.-]+\.(?:toml|py))\n", text)
        if language in ("toml", "python") and name:
            (work / name[1]).write_text(text)
        if language == "sh":
            (folder / f"{index}.sh").write_text(text)
            script.append(f". ../{index}.sh > ../{index}.out 2> ../{index}.err; : > ../{index}.done")
    # Runs cached by an earlier test would show nothing.
    own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    shell = ["bash", "-c", "\n".join(script)]
    try:
        subprocess.run(shell, cwd=work, env=os.environ | own, check=False, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        print(f"{page.name}: not at its end after {DEADLINE_S} s", file=sys.stderr)

    results = []
    before = None
    for index, (language, text) in enumerate(blocks):
        if language == "sh":
            before = index
            errors = folder / f"{index}.err"
            wrong = None
            if not (folder / f"{index}.done").exists():
                wrong = "failed: " + errors.read_text() if errors.exists() else "not run: one before it failed"
            results.append((f"runs: {text.splitlines()[0]}", wrong))
        elif language == "text" and before is not None:
            out = folder / f"{before}.out"
            printed = out.read_text() if out.exists() else ""
            wrong = differs(text, printed)
            if wrong and printed and os.environ.get("HOMENODE_WRITE_SHOWN"):
                page.write_text(page.read_text().replace(f"```text\n{text}```", f"```text\n{renewed(text, printed)}```"))
            results.append((f"prints what is shown: {blocks[before][1].splitlines()[0]}", wrong))
    return results


def quoted(page: Path, command: str, program: Path) -> tuple[str, str | None]:
    """Whether a page's first indented block after a command's name has only lines that it prints."""
    block = re.search(rf"`{command}`.*?\n\n((?:    [^\n]*\n)+)", page.read_text(), re.S)
    ran = subprocess.run([program, *command.split()[1:]], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    printed = {line.strip().removeprefix("homenode: ") for line in ran.stdout.splitlines()}
    lines = block[1].splitlines() if block else [f"(no block follows `{command}`)"]
    missing = [line for line in lines if line.strip() not in printed]
    return f"quotes what {command} prints: {page.name}", "\n".join(["not printed:", *missing]) if missing else None


class Help:
    """The program's help for its commands, queried once each."""

    def __init__(self, program: Path):
        self.program = program
        self.known: dict[tuple[str, ...], str] = {}

    def of(self, names: tuple[str, ...]) -> str:
        if names not in self.known:
            asked = subprocess.run([self.program, *names, "--help"], capture_output=True, text=True, check=False)
            self.known[names] = asked.stdout
        return self.known[names]

    def subcommands(self, names: tuple[str, ...]) -> set[str]:
        # Commands are listed before options, under one heading or several.
        return set(re.findall(r"^  ([a-z][a-z-]*)(?=  )", self.of(names).split("\nOptions:\n")[0], re.M))

    def wrong(self, words: list[str]) -> str | None:
        """The parts of a line that the program does not know."""
        names: tuple[str, ...] = ()
        while len(words) > len(names) and words[len(names)] in self.subcommands(names):
            names += (words[len(names)],)
        if not names and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return f"there is no command {words[0]}"
        for word in words:
            if word == "--":
                break
            option = re.match(r"(--[a-z][a-z-]+)", word)
            if option and option[1] != "--version" and not re.search(rf"{option[1]}\b(?!-)", self.of(names)):
                return f"homenode {' '.join(names)} has no {option[1]}"
        return None


def held_to_help(page: Path, known: Help) -> tuple[str, str | None]:
    """Whether all commands on a page exist."""
    wrong = []
    for line in SHOWN.findall(page.read_text()):
        # Two spaces begin a column with explanations.
        said = known.wrong(re.split(r" {2,}| [|>&#]", line.strip())[0].split())
        if said:
            wrong.append(f"homenode{line}: {said}")
    return f"knows the commands of {page.relative_to(ROOT)}", "\n".join(wrong) or None


def main() -> int:
    program = Path(sys.argv[1]).resolve()
    page = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/TUTORIAL.md"
    with tempfile.TemporaryDirectory() as folder:
        results = run(page, Path(folder), program)
    results.append(quoted(ROOT / "README.md", "homenode sim epyc-services", program))
    known = Help(program)
    results += [held_to_help(other, known) for other in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    return told(results)


if __name__ == "__main__":
    sys.exit(main())
