"""A cluster of the real Incus: two daemons in a Debian system of their own (scripts/integrations-setup.sh), with their own network.

They have their own mounts, processes and loopback, which are invisible outside, and end with this process. Instances are created but
never started, which suffices for placement.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
import time

# The root directory of the Debian system in which Incus is installed.
ROOT = pathlib.Path(os.environ.get("INCUS_ROOT", ""))
PATIENCE_S = 60
MEMBERS = {"one": "127.0.0.1:8443", "two": "127.0.0.2:8443"}

BEGIN = """
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t cgroup2 cgroup2 /sys/fs/cgroup && mount -t tmpfs tmpfs /run || exit
mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && ln -s urandom /dev/random || exit
ip link set lo up || exit
for member in "$@"; do
    INCUS_DIR=$member /usr/libexec/incus/incusd --verbose --logfile "$member.log" &
done
wait
"""


class Cluster:
    """Two members with a storage pool, and no instances."""

    def __init__(self):
        assert os.geteuid() == 0, "Incus runs as root: run these tests as root"
        assert (ROOT / "usr/libexec/incus/incusd").exists(), "INCUS_ROOT has no Incus: run scripts/integrations-setup.sh"
        # Left over from an earlier run that was killed.
        for folder in (ROOT / "srv").glob("cluster-*"):
            shutil.rmtree(folder, ignore_errors=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cluster-", dir=ROOT / "srv"))
        within = [f"/{(self.folder / member).relative_to(ROOT)}" for member in MEMBERS]
        for member in MEMBERS:
            (self.folder / member).mkdir()
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--net", "--cgroup", "--fork", "--kill-child"]
        command = [*alone, "chroot", ROOT, "/bin/sh", "-c", BEGIN, "sh", *within]
        with (self.folder / "said").open("w") as said:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            self._form()
        except BaseException:
            self.close()
            raise

    def _form(self):
        one, two = MEMBERS
        for member in MEMBERS:
            self._answers(member)
        self.tell("admin", "init", "--preseed", stdin=preseed(one, f"config:\n  core.https_address: {MEMBERS[one]}\n"))
        token = self.tell("cluster", "add", two, "--quiet").split()[-1]
        joins = f"  server_address: {MEMBERS[two]}\n  cluster_token: {token}\n"
        self.tell("admin", "init", "--preseed", stdin=preseed(two) + joins, member=two)
        for member in MEMBERS:
            self.tell("storage", "create", "pool", "dir", "--target", member)
        self.tell("storage", "create", "pool", "dir")

    def _answers(self, member):
        end = time.monotonic() + PATIENCE_S
        while not (self.folder / member / "unix.socket").exists() or self._run(member, ["info"]).returncode != 0:
            trouble = f"no Incus: {(self.folder / 'said').read_text()[-2000:]}"
            assert self.process.poll() is None and time.monotonic() < end, trouble
            time.sleep(0.1)

    def _incus(self, member):
        """Returns the Incus command, in the daemons' network: a joining member connects to the others itself."""
        within = (self.folder / member).relative_to(ROOT)
        network = ["nsenter", "--target", str(self.process.pid), "--net"]
        return [*network, "chroot", str(ROOT), "env", f"INCUS_DIR=/{within}", "HOME=/root", "incus"]

    def _run(self, member, arguments, stdin=""):
        command = [*self._incus(member), *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S)

    def tell(self, *arguments, stdin="", member=next(iter(MEMBERS))):
        """Runs the Incus command on a member; returns its output."""
        ran = self._run(member, arguments, stdin)
        assert ran.returncode == 0, f"incus {' '.join(arguments)}: {ran.stderr}"
        return ran.stdout

    def command(self):
        """Creates a program that runs the Incus command on the first member."""
        program = self.folder / "incus"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(self._incus(next(iter(MEMBERS))))} "$@"\n')
        program.chmod(0o755)
        return program

    def create(self, name, cpus, memory):
        """Creates an instance; returns the member it was placed on."""
        limits = ["-c", f"limits.cpu={cpus}", "-c", f"limits.memory={memory}"]
        self.tell("create", "--empty", name, "--storage", "pool", *limits)
        return self.tell("list", name, "--format", "csv", "--columns", "L").strip()

    def key(self, member, name):
        """Returns the value of a member's configuration key, or None if it is not set."""
        ran = self._run(next(iter(MEMBERS)), ["cluster", "get", member, name])
        return None if "does not exist" in ran.stderr else ran.stdout.strip()

    def log(self):
        """Returns the logs of the members' daemons."""
        return "".join((self.folder / f"{member}.log").read_text() for member in MEMBERS)

    def close(self):
        self.process.kill()
        self.process.wait()
        # The daemons may take a moment to end.
        end = time.monotonic() + PATIENCE_S
        while self.folder.exists() and time.monotonic() < end:
            shutil.rmtree(self.folder, ignore_errors=True)


def preseed(name, before=""):
    return f"{before}cluster:\n  enabled: true\n  server_name: {name}\n"
