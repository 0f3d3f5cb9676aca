"""A scheduler extender for Kubernetes: `prioritize` for pods that need CPUs and memory, from what the nodes' agents say.

The scheduler posts a pod and names of nodes (`nodeCacheCapable: true`), and gets a priority from 0 to 10 for each.
"""

import argparse
import http.server
import json
import math
import pathlib
import re
import signal
import ssl
import sys

from homenode_shims.ask import Agents, neutral

# `MaxExtenderPriority` of the extender's API.
PRIORITY_MAX = 10
# A pod with its managed fields has some ten kilobytes, and a node's name less than 300 bytes.
REQUEST_BYTES_MAX = 16 << 20

SUFFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
SUFFIXES |= {f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGTPE", 1)}
QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)")


def quantity(text):
    """Parses a quantity as Kubernetes writes it: `500m`, `1Gi`, `1e3`."""
    found = QUANTITY.fullmatch(str(text))
    if not found:
        raise ValueError(f"{text!r} is no quantity")
    number, exponent, suffix = found.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else SUFFIXES[suffix or ""])


def needs(pod):
    """Returns the vCPUs and bytes that a pod requests, or `None` if it requests nothing: no prediction is possible then."""
    spec = pod.get("spec") or {}

    def of(holder, resource):
        resources = holder.get("resources") or {}
        # A limit without a request counts as the request.
        both = (resources.get("limits") or {}) | (resources.get("requests") or {})
        return quantity(both.get(resource, 0))

    def total(resource):
        if any(resource in (part or {}) for part in (spec.get("resources") or {}).values()):
            running = of(spec, resource)
        else:
            # Init containers run one after another, before the others; those that always restart keep running next to them.
            begun = most = 0.0
            for container in spec.get("initContainers") or []:
                own = of(container, resource)
                most = max(most, begun + own)
                begun += own if container.get("restartPolicy") == "Always" else 0.0
            running = max(most, begun + sum(of(container, resource) for container in spec.get("containers") or []))
        return running + quantity((spec.get("overhead") or {}).get(resource, 0))

    cpus, memory = total("cpu"), total("memory")
    if cpus <= 0 and memory <= 0:
        return None
    return {"vcpus": min(max(math.ceil(cpus), 1), 65536), "memory_bytes": math.ceil(max(memory, 0))}


def prioritize(agents, seconds, args):
    """`HostPriorityList` for `ExtenderArgs`, and what is wrong with nodes."""
    names = args.get("NodeNames")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("there are no NodeNames: set nodeCacheCapable to true")
    asked = needs(args.get("Pod") or {})
    scores, troubles = agents.scores(names, asked, seconds) if asked else (dict.fromkeys(names), {})
    priorities = [{"Host": name, "Score": round(PRIORITY_MAX * score)} for name, score in neutral(scores).items()]
    return priorities, troubles


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > REQUEST_BYTES_MAX:
            self.close_connection = True
            return self.answer(413, {"error": "the request is too long, or does not say how long it is"})
        text = self.rfile.read(int(length))
        if self.path.rstrip("/") != "/prioritize":
            return self.answer(404, {"error": "there is /prioritize alone"})
        try:
            priorities, troubles = prioritize(self.server.agents, self.server.seconds, json.loads(text))
        except (ValueError, AttributeError, TypeError) as error:
            return self.answer(400, {"error": str(error)})
        for node, trouble in troubles.items():
            if self.server.troubles.get(node) != trouble:
                print(f"the agent on {node} gives no score, its node is taken for an average one: {trouble}", file=sys.stderr)
        self.server.troubles = troubles
        self.answer(200, priorities)

    def do_GET(self):
        if self.path == "/healthz":
            return self.answer(200, {})
        self.answer(404, {"error": "there is POST /prioritize"})

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def options(arguments):
    parser = argparse.ArgumentParser(prog="homenode-extender", description=__doc__.splitlines()[0])
    parser.add_argument("--listen", default="127.0.0.1:8888", metavar="HOST:PORT", help="where the scheduler asks")
    parser.add_argument("--address", default="https://{host}:9464", help="where agents listen; {host} is the node's name")
    parser.add_argument("--addresses", type=pathlib.Path, metavar="FILE", help="JSON: addresses of nodes whose agents listen elsewhere")
    parser.add_argument("--budget-ms", type=int, default=300, help="how long all agents together may take")
    parser.add_argument("--ca-file", help="who signed the agents' certificates")
    parser.add_argument("--user", help="a user of the agents' web.yml")
    parser.add_argument("--password-file", type=pathlib.Path, help="their password")
    parser.add_argument("--tls-cert", help="certificate for the scheduler, where it asks over TLS")
    parser.add_argument("--tls-key", help="and its key")
    return parser.parse_args(arguments)


def main(arguments=None):
    given = options(arguments)
    addresses = json.loads(given.addresses.read_text()) if given.addresses else {}
    password = given.password_file.read_text().strip() if given.password_file else None
    host, _, port = given.listen.rpartition(":")
    server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
    server.agents = Agents(given.address, addresses, given.ca_file, given.user, password)
    server.seconds, server.troubles = given.budget_ms / 1000, {}
    if given.tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(given.tls_cert, given.tls_key)
        # The TLS handshake runs in the client's own thread: a slow client delays no other.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(f"listening on {host}:{server.server_address[1]}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
