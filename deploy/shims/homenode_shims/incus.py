"""Writes into an Incus cluster member's configuration what its nodes have left, where the placement scriptlet reads it.

Scriptlets cannot send requests. If the agent does not answer, the key is removed, and the scriptlet gives the member the average score.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time

KEY = "user.homenode.nodes"
# How long the agent may take.
PATIENCE_S = 5


def written(nodes):
    """Returns the value that `placement.star` reads: CPUs and bytes of each node that VMs can use."""
    rooms = [node["headroom"] for node in nodes if node.get("headroom")]
    return " ".join(f"{room['cpus']:.1f}/{int(room['memory_bytes'])}" for room in rooms)


def nodes_of(path):
    """Returns the nodes that this host's agent reports."""
    connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(PATIENCE_S)
    try:
        connection.sock.connect(path)
        connection.request("GET", "/v1/nodes")
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise ValueError(f"the agent answers {response.status}: {text[:200].decode(errors='replace')}")
        return json.loads(text)["nodes"]
    finally:
        connection.close()


def feed(incus, member, path):
    """Sets the key, or removes it; returns whether the agent answered."""
    try:
        value, trouble = written(nodes_of(path)), None
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        value, trouble = "", error
    command = ["cluster", "set", member, f"{KEY}={value}"] if value else ["cluster", "unset", member, KEY]
    subprocess.run([incus, *command], check=True, stdin=subprocess.DEVNULL, timeout=60)
    if trouble:
        print(f"the agent at {path} says nothing of its nodes, {KEY} is removed: {trouble}", file=sys.stderr)
    return trouble is None


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="homenode-incus-feed", description=__doc__.splitlines()[0])
    parser.add_argument("--member", default=socket.gethostname(), help="this host's name in the cluster")
    parser.add_argument("--socket", default="/run/homenode/http.sock", help="the agent's socket")
    parser.add_argument("--incus", default="incus", help="Incus' command")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="again and again; once without it")
    given = parser.parse_args(arguments)
    while True:
        try:
            is_fed = feed(given.incus, given.member, given.socket)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"the member's configuration cannot be set: {error}", file=sys.stderr)
            is_fed = False
        if not given.every:
            return 0 if is_fed else 1
        time.sleep(given.every)


if __name__ == "__main__":
    sys.exit(main())
