"""The package itself: types, examples, and that it has no undeclared requirements."""

import doctest
import importlib
import inspect
import subprocess
import sys

import homenode
import pytest


def test_types_hold(tmp_path):
    """The package passes mypy's strict rules, and the stub matches the extension."""
    folder = str(inspect.getfile(homenode)).removesuffix("__init__.py")
    strict = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), folder], capture_output=True, text=True
    )
    assert strict.returncode == 0, strict.stdout
    # The extension's own internals are not part of its interface.
    allowed = tmp_path / "allowed"
    allowed.write_text(r"homenode\._native\.__all__" + "\n")
    stub = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "homenode._native", "--allowlist", str(allowed)], capture_output=True, text=True
    )
    assert stub.returncode == 0, stub.stdout


@pytest.mark.parametrize("name", ["homenode", "homenode._policy", "homenode._simulate", "homenode._studies"])
def test_examples_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted > 0


def test_everything_says_what_it_is():
    for name in homenode.__all__:
        thing = getattr(homenode, name)
        if not name.startswith("__"):
            assert inspect.getdoc(thing), name
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for own, member in vars(thing).items():
                if not own.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{own}"


def test_nothing_but_python_is_needed():
    code = "import sys, homenode; homenode.simulate('churn', 'default').vms['vm']; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pandas", "polars", "pyarrow"} & set(loaded)


def test_progress_is_quiet_where_nobody_watches(capfd):
    homenode.simulate("churn", "default", progress=True)
    assert capfd.readouterr() == ("", "")
