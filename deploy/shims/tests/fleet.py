"""Hosts of a small fleet: twins with agents that answer over HTTP, and the outcomes of placements, simulated by `homenode sim`."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request

# The program, and how long an agent may take to start.
HOMENODE = os.environ.get("HOMENODE", "homenode")
PATIENCE_S = 120
# Simulated time before an agent is queried: until then caches and memory fill.
SETTLED_S = 6


def vm(name, vcpus, gib, workload, more=""):
    return f'[[vm]]\nname = "{name}"\nvcpus = {vcpus}\nmemory = "{gib}GiB"\nworkload = "{workload}"\n{more}\n'


def scenario(name, machine, vms, workloads="", seconds=36000):
    head = f'name = "{name}"\nmachine = "{machine}"\nduration = "{seconds}s"\n'
    return head + "".join(vms) + workloads


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Agent:
    """An agent on a twin. It can be restarted with more VMs, at the same address."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="homenode-"))
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self, text):
        self.stop()
        file = self.folder / "scenario.toml"
        file.write_text(text)
        said = (self.folder / "said").open("w")
        command = [HOMENODE, "run", "--json", "--host", f"twin:{file}", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--state", self.folder / "state", "--history", self.folder / "history.sqlite"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        said.close()
        return self

    def settle(self):
        """Waits until it has observed its host for long enough."""
        for _ in range(10 * PATIENCE_S):
            try:
                if self.get("/v1/status")["at_ns"] >= SETTLED_S * 1_000_000_000:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"no agent: {(self.folder / 'said').read_text()[-2000:]}")

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:
            return json.load(answer)

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self):
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def runtimes(text, names, seconds=600):
    """Returns how long these VMs' programs take in a scenario under the agent's own policies, by name; `seconds` if they do not finish."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "outcome.toml"
        file.write_text(text.replace('duration = "36000s"', f'duration = "{seconds}s"'))
        ran = subprocess.run([HOMENODE, "sim", file, "--policy", "homenode", "--json"], capture_output=True, text=True, check=True)
    vms = json.loads(ran.stdout)["policies"][0]["vms"]
    return {vm["name"]: vm["runtime_s"] or seconds for vm in vms if vm["name"] in names}
