"""Runs tests in Go, which scripts/integrations-setup.sh compiles."""

import os
import pathlib
import subprocess

FOLDER = pathlib.Path(__file__).parent / "go"
PROGRAM = os.environ.get("GO_TESTS", "")


def passes(case, name, **environment):
    """Runs a Go test by name; a skipped one counts as failed."""
    case.assertTrue(PROGRAM, "GO_TESTS names no program: run scripts/integrations-setup.sh")
    command = [PROGRAM, "-test.v", "-test.run", f"^{name}$"]
    ran = subprocess.run(command, cwd=FOLDER, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    case.assertIn(f"--- PASS: {name}", ran.stdout, ran.stdout + ran.stderr)
