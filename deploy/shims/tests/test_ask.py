"""Queries to many hosts: those that are silent, slow or wrong take no longer than the time limit, and get no score."""

import contextlib
import json
import socket
import threading
import time
import unittest

from homenode_shims.ask import ANSWER_BYTES_MAX, Agents, Wrong, neutral, score_of

GOOD = {"fits": True, "score": 0.25, "nodes": [0], "reasons": [], "figures": {}}


@contextlib.contextmanager
def host(talk):
    """Runs a host that accepts connections and passes them to `talk`; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve():
        while not over.is_set():
            try:
                wire, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=lambda: quietly(talk, wire, over), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.close()


def quietly(talk, wire, over):
    with contextlib.suppress(OSError), wire:
        wire.recv(1 << 16)
        talk(wire, over)


def says(text, status="200 OK"):
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return lambda wire, _: wire.sendall(head.encode() + body)


def silent(_, over):
    over.wait(10)


def dawdles(wire, over):
    """Sends a header every now and then, so that no single wait is long."""
    wire.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(0.05):
        wire.sendall(b"X-Still: there\r\n")


def endless(wire, _):
    wire.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(ANSWER_BYTES_MAX // 4096 + 64):
        wire.sendall(b" " * 4096)


class Asking(unittest.TestCase):
    def scores(self, hosts, seconds=1.0):
        with contextlib.ExitStack() as stack:
            addresses = {name: stack.enter_context(host(talk)) for name, talk in hosts.items()}
            agents = Agents("", addresses)
            begun = time.monotonic()
            scores, troubles = agents.scores(list(hosts), {"vcpus": 1, "memory_bytes": 1}, seconds)
            return scores, troubles, time.monotonic() - begun

    def test_what_is_said_as_described_is_a_score_and_nothing_else_is(self):
        wrong = [
            says(json.dumps(GOOD), "503 Service Unavailable"),
            says(""),
            says("not json"),
            says("[]"),
            says(json.dumps(GOOD | {"score": 7})),
            says(json.dumps(GOOD | {"score": True})),
            says(json.dumps(GOOD | {"score": None})),
            says('{"fits": true, "score": NaN}'),
            says(json.dumps({"score": 0.5})),
            lambda wire, _: wire.sendall(b"SSH-2.0-something\r\n"),
            lambda wire, _: None,
            endless,
        ]
        hosts = {f"wrong{number}": talk for number, talk in enumerate(wrong)} | {"good": says(json.dumps(GOOD))}
        scores, troubles, _ = self.scores(hosts, 5.0)
        self.assertEqual(scores.pop("good"), 0.25)
        self.assertEqual(set(scores.values()), {None}, scores)
        self.assertEqual(set(troubles), set(scores))
        self.assertTrue(all(troubles.values()), troubles)

    def test_where_it_does_not_fit_the_score_is_0_whatever_is_said_of_it(self):
        self.assertEqual(score_of(GOOD | {"fits": False}), 0.0)
        with self.assertRaises(Wrong):
            score_of({"fits": "yes", "score": 0.5})

    def test_those_that_take_their_time_cost_no_more_than_there_is(self):
        hosts = {f"silent{number}": silent for number in range(50)} | {f"slow{number}": dawdles for number in range(10)}
        scores, troubles, took = self.scores(hosts | {"good": says(json.dumps(GOOD))}, 0.3)
        self.assertEqual(scores.pop("good"), 0.25)
        self.assertEqual(set(scores.values()), {None})
        self.assertEqual(len(troubles), 60)
        # Other threads of this process begin and end meanwhile.
        self.assertLess(took, 1.0)

    def test_nobody_listens_and_no_such_host_are_no_scores(self):
        free = socket.create_server(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        agents = Agents("ftp://{host}:9464", {"gone": address})
        scores, troubles = agents.scores(["gone", "else"], {}, 1.0)
        self.assertEqual(scores, {"gone": None, "else": None})
        self.assertIn("ftp://else:9464", troubles["else"])

    def test_who_has_no_score_is_as_good_as_the_others_on_average(self):
        self.assertEqual(neutral({"a": 0.2, "b": None, "c": 0.6}), {"a": 0.2, "b": 0.4, "c": 0.6})
        self.assertEqual(neutral({"a": None, "b": None}), {"a": 0.0, "b": 0.0})


if __name__ == "__main__":
    unittest.main()
