"""Runs every test file in a process of its own, since Nova's changes the whole process. The last line has the number of tests."""

import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent


def main():
    passed = failed = 0
    for file in sorted(FOLDER.glob("test_*.py")):
        command = [sys.executable, "-W", "ignore", "-m", "unittest", "-v", file.stem]
        with subprocess.Popen(command, cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as ran:
            text = ""
            for line in ran.stdout:
                # Suppress Nova's own logs.
                if not re.match(r"\d{4}-\d\d-\d\d ", line):
                    sys.stdout.write(line)
                    sys.stdout.flush()
                    text += line
        count = sum(int(number) for number in re.findall(r"^Ran (\d+) tests?", text, re.M))
        bad = sum(int(number) for number in re.findall(r"(?:failures|errors|skipped|unexpected successes)=(\d+)", text))
        # A file without tests, or one that exits with an error without a failed test, counts as failed.
        bad = max(bad, 1) if ran.returncode != 0 or count == 0 else bad
        passed, failed = passed + max(count - bad, 0), failed + bad
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
