"""Asks the agents of many hosts at once where a VM would fit, within a time limit.

A host that is silent, slow, or answers with anything but the API's format has no score. The caller decides what that means: the
shims give such a host the average score (`neutral`), so that a dead agent neither attracts VMs to its host nor keeps them off.
"""

import base64
import concurrent.futures
import http.client
import json
import math
import ssl
import time
import urllib.parse

# Number of threads, each waiting for one host. A silent host blocks its thread for the whole time, and further hosts wait.
THREADS = 256
# Most bytes of an answer: one has some kilobytes, or more for a host with many nodes.
ANSWER_BYTES_MAX = 1 << 20


class Wrong(Exception):
    """An invalid answer."""


def score_of(answer):
    """Returns the score in an answer to `POST /v1/placements/evaluate`."""
    if not isinstance(answer, dict) or not isinstance(answer.get("fits"), bool):
        raise Wrong("it does not say whether the VM fits")
    score = answer.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score) or not 0 <= score <= 1:
        raise Wrong(f"its score is no number from 0 to 1: {score!r}")
    return float(score) if answer["fits"] else 0.0


def neutral(scores):
    """Returns scores by host, with the average for hosts that have none; zero for all if no host has one."""
    known = [score for score in scores.values() if score is not None]
    mean = sum(known) / len(known) if known else 0.0
    return {host: mean if score is None else score for host, score in scores.items()}


class Agents:
    """The addresses of agents, and the credentials to use."""

    def __init__(self, template, addresses=None, ca_file=None, user=None, password=None):
        """`template` is an address with `{host}` in it; `addresses` has the hosts that are elsewhere."""
        self.template = template
        self.addresses = dict(addresses or {})
        self.context = ssl.create_default_context(cafile=ca_file)
        self.headers = {"Content-Type": "application/json", "Connection": "close"}
        if user is not None:
            pair = base64.b64encode(f"{user}:{password}".encode()).decode()
            self.headers["Authorization"] = f"Basic {pair}"
        self.threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="homenode")

    def address(self, host):
        return self.addresses.get(host) or self.template.replace("{host}", host)

    def scores(self, hosts, wanted, seconds):
        """Returns the score of each host for a VM, `None` if there is none, and the errors of those hosts."""
        until = time.monotonic() + seconds
        body = json.dumps(wanted).encode()
        asked = {host: self.threads.submit(self.score, host, body, until) for host in hosts}
        concurrent.futures.wait(asked.values(), timeout=seconds)
        scores, troubles = {}, {}
        for host, future in asked.items():
            try:
                scores[host] = future.result(timeout=0)
            except (OSError, http.client.HTTPException, ValueError, Wrong) as error:
                # Includes a thread's timeout.
                future.cancel()
                scores[host], troubles[host] = None, str(error) or f"it is silent for {seconds} s"
        return scores, troubles

    def score(self, host, body, until):
        """Returns the score of one host, by the deadline `until`."""
        answer = self.ask(self.address(host), "/v1/placements/evaluate", body, until)
        return score_of(answer)

    def ask(self, address, path, body, until):
        """Returns a JSON answer, by the deadline `until`; with `body` the request is a POST. No step may take longer than the time left."""
        url = urllib.parse.urlsplit(address)
        left = _left(until)
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=left, context=self.context)
        elif url.scheme == "http":
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=left)
        else:
            raise Wrong(f"{address} is no address: write https://HOST:PORT")
        try:
            connection.connect()
            wire = connection.sock
            wire.settimeout(_left(until))
            connection.request("GET" if body is None else "POST", url.path.rstrip("/") + path, body, self.headers)
            wire.settimeout(_left(until))
            response = connection.getresponse()
            text = b""
            while True:
                wire.settimeout(_left(until))
                part = response.read1(1 << 16)
                if not part:
                    break
                text += part
                if len(text) > ANSWER_BYTES_MAX:
                    raise Wrong("its answer does not end")
            if response.status != 200:
                raise Wrong(f"it answers {response.status}: {text[:200].decode(errors='replace')}")
            return json.loads(text)
        finally:
            connection.close()


def _left(until):
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it is too slow")
    return left
