"""Runs the notebooks with the Python package, and writes each as a page with its pictures, for the site.

    notebooks.py FOLDER

It runs in the environment of the package's tests, with the package where Python finds it and `homenode` in PATH. Notebooks are
stored without output, so that no output can be outdated; here every cell must succeed, without warnings, and with a picture.
Figures look like the program's own: both styles are compared. The last line is the count, by results.py.
"""

import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CellExecutionError, CoalesceStreamsPreprocessor, ExecutePreprocessor
from results import told

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
DEADLINE_S = 120
# pandas' own style of tables, which pages replace.
FRAME = re.compile(r"<div>\n<style scoped>.*?</style>\n(<table[^>]*>.*?</table>)\n</div>", re.S)


def as_kept(path: Path) -> str | None:
    """Whether a notebook is stored without its output."""
    cells = nbformat.read(path, as_version=4).cells
    printed = [at for at, cell in enumerate(cells) if cell.get("outputs") or cell.get("execution_count")]
    if printed:
        return f"cells {printed} are kept with what they printed: nbconvert --clear-output --inplace {path}"
    return None


def warned(book: nbformat.NotebookNode) -> list[str]:
    """The cells' output on standard error."""
    outputs = (output for cell in book.cells for output in cell.get("outputs", []))
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


def run(path: Path, folder: Path) -> str | None:
    """Runs a notebook in its folder and writes its page; returns errors."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:
        # Not over TCP, which other users of this machine could listen to.
        kernel = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        try:
            ExecutePreprocessor(timeout=DEADLINE_S).preprocess(book, {"metadata": {"path": str(NOTEBOOKS)}}, km=kernel)
        except CellExecutionError as error:
            return str(error)
        finally:
            kernel.shutdown_kernel(now=True)
    # A command's output arrives in pieces.
    book, _ = CoalesceStreamsPreprocessor().preprocess(book, {})
    names = {"unique_key": path.stem, "output_files_dir": "."}
    page, resources = MarkdownExporter().from_notebook_node(book, resources=names)
    for name, content in resources["outputs"].items():
        (folder / name).write_bytes(content)
    page = FRAME.sub(lambda frame: re.sub(r"<table[^>]*>", "<table>", frame[1]), page)
    (folder / f"{path.stem}.md").write_text(page)
    said = warned(book)
    if said:
        return "it warns: " + said[0]
    return None if resources["outputs"] else "it has no picture"


def same_colours() -> str | None:
    """Whether the style of notebooks has the colours of the program's figures, in their order."""
    own = re.search(r"const COLOURS: .*?= \[(.*?)\];", (ROOT / "crates/reproduce/src/figure.rs").read_text(), re.S)
    here = re.search(r"^axes\.prop_cycle: .*", (NOTEBOOKS / "homenode.mplstyle").read_text(), re.M)
    colour = re.compile(r"['\"]#?([0-9a-f]{6})['\"]")
    if not own or not here or colour.findall(own[1]) != colour.findall(here[0]):
        return "notebooks/homenode.mplstyle has other colours than crates/reproduce/src/figure.rs"
    return None


def main() -> int:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results = [("notebooks have the program's colours", same_colours())]
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        began = time.monotonic()
        results.append((f"{path.name} is kept without what it prints", as_kept(path)))
        wrong = run(path, folder)
        results.append((f"{path.name} runs ({time.monotonic() - began:.0f} s)", wrong))
    return told(results)


if __name__ == "__main__":
    sys.exit(main())
