"""Asks the agents of many hosts at once where a VM would fit, and waits no longer than it is told to.

A host that is silent, slow, or answers with something else than the API says has no score. What that means is for who asked: the
shims take such a host for an average one (`neutral`), so that a dead agent neither draws VMs to its host nor keeps them off.
"""

import base64
import concurrent.futures
import http.client
import json
import math
import ssl
import time
import urllib.parse

# A thread waits for one host. Silent ones keep theirs for the whole time, and others wait behind them where there are more.
THREADS = 256
# What an answer has at most: one is some kilobytes, more of a host with many nodes.
ANSWER_BYTES_MAX = 1 << 20


class Wrong(Exception):
    """An answer that is none."""


def score_of(answer):
    """The score in what `POST /v1/placements/evaluate` answers."""
    if not isinstance(answer, dict) or not isinstance(answer.get("fits"), bool):
        raise Wrong("it does not say whether the VM fits")
    score = answer.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score) or not 0 <= score <= 1:
        raise Wrong(f"its score is no number from 0 to 1: {score!r}")
    return float(score) if answer["fits"] else 0.0


def neutral(scores):
    """Scores by host, with those who have none as good as the others are on average; all alike where nobody has one."""
    known = [score for score in scores.values() if score is not None]
    mean = sum(known) / len(known) if known else 0.0
    return {host: mean if score is None else score for host, score in scores.items()}


class Agents:
    """How agents are reached, and as whom."""

    def __init__(self, template, addresses=None, ca_file=None, user=None, password=None):
        """`template` is an address with `{host}` in it, `addresses` has those of hosts that are elsewhere."""
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
        """The score of each host for a VM, `None` where there is none, and what is wrong with those."""
        until = time.monotonic() + seconds
        body = json.dumps(wanted).encode()
        asked = {host: self.threads.submit(self.score, host, body, until) for host in hosts}
        concurrent.futures.wait(asked.values(), timeout=seconds)
        scores, troubles = {}, {}
        for host, future in asked.items():
            try:
                scores[host] = future.result(timeout=0)
            except (OSError, http.client.HTTPException, ValueError, Wrong) as error:
                # A thread's time-out is one of these too.
                future.cancel()
                scores[host], troubles[host] = None, str(error) or f"it is silent for {seconds} s"
        return scores, troubles

    def score(self, host, body, until):
        """What one host answers, by then."""
        answer = self.ask(self.address(host), "/v1/placements/evaluate", body, until)
        return score_of(answer)

    def ask(self, address, path, body, until):
        """An answer in JSON, by then: with `body` it is posted. No step may take longer than what is left, whoever dawdles."""
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
