"""Fixtures of all tests. They run on the installed package, and compare with the command in $HOMENODE."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CASE = """
name = "case"
machine = "r420"
duration = "8s"
policies = ["default", "tavo"]
[[vm]]
name = "a"
vcpus = 2
memory = "2GiB"
workload = "povray"
work_share = 0.03
[[vm]]
name = "b"
vcpus = 2
memory = "2GiB"
workload = "soplex"
[[event]]
at = "7s"
vm = "b"
action = "stop"
"""


class Command:
    """The command ``homenode``."""

    def __init__(self) -> None:
        self.path = os.environ.get("HOMENODE") or str(ROOT / "target/debug/homenode")

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.path, *map(str, args)], capture_output=True, text=True, timeout=60)

    def json(self, *args: object) -> dict:
        done = self.run(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def complaint(self, *args: object) -> tuple[int, str]:
        """Exit status, and output."""
        done = self.run(*args)
        return done.returncode, done.stderr.removeprefix("homenode: ").strip()


@pytest.fixture(scope="session")
def command() -> Command:
    return Command()


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """A scenario file of two VMs, one of which is stopped."""
    path = tmp_path / "case.toml"
    path.write_text(CASE)
    return path
