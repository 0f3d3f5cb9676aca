"""The extender: how it reads pods, and its answers to Kubernetes' own client (`go/`) about twins with agents on them."""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest

import go
from fleet import Agent, scenario, vm
from homenode_shims.kubernetes import needs, quantity


def container(cpu=None, memory=None, **more):
    requests = {key: value for key, value in (("cpu", cpu), ("memory", memory)) if value is not None}
    return {"name": "c", "resources": {"requests": requests}} | more


class Pods(unittest.TestCase):
    def test_quantities_are_read_as_kubernetes_writes_them(self):
        for text, number in [("500m", 0.5), ("2", 2), ("1Gi", 1 << 30), ("1G", 1e9), ("1e3", 1000), ("1.5Ki", 1536), ("100n", 1e-7), (".5", 0.5), ("1E", 1e18)]:
            self.assertAlmostEqual(quantity(text), number)
        for text in ["", "1 Gi", "Gi", "1gi", "one", "1e", None]:
            with self.assertRaises(ValueError):
                quantity(text)

    def test_containers_are_added_up_and_init_containers_run_before_them(self):
        pod = {"spec": {"containers": [container("1500m", "1Gi"), container("1", "1Gi")]}}
        self.assertEqual(needs(pod), {"vcpus": 3, "memory_bytes": 2 << 30})
        pod["spec"]["initContainers"] = [container("1", "5Gi")]
        self.assertEqual(needs(pod), {"vcpus": 3, "memory_bytes": 5 << 30})
        # The first init container keeps running: the next one starts next to it, and so do the others.
        pod["spec"]["initContainers"] = [container("1", "1Gi", restartPolicy="Always"), container("1", "5Gi")]
        self.assertEqual(needs(pod), {"vcpus": 4, "memory_bytes": 6 << 30})
        pod["spec"]["overhead"] = {"memory": "1Gi"}
        self.assertEqual(needs(pod)["memory_bytes"], 7 << 30)

    def test_the_pods_own_requests_and_limits_count(self):
        self.assertEqual(needs({"spec": {"containers": [{"resources": {"limits": {"cpu": "2", "memory": "4Gi"}}}]}}), {"vcpus": 2, "memory_bytes": 4 << 30})
        whole = {"spec": {"containers": [container("1", "1Gi")], "resources": {"requests": {"cpu": "8"}}}}
        self.assertEqual(needs(whole), {"vcpus": 8, "memory_bytes": 1 << 30})

    def test_a_pod_that_asks_for_nothing_needs_nothing(self):
        self.assertIsNone(needs({"spec": {"containers": [{"name": "c"}]}}))


@contextlib.contextmanager
def extender(addresses, *more):
    """Runs an extender for these nodes; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "addresses.json"
        file.write_text(json.dumps(addresses))
        command = [sys.executable, "-m", "homenode_shims.kubernetes", "--listen", "127.0.0.1:0", "--addresses", file, *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield f"http://{process.stdout.readline().split()[-1]}"
        finally:
            process.terminate()
            status = process.wait(10)
            process.stdout.close()
    assert status == 0, status


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.addClassCleanup(cls.stack.close)
        hosts = {"empty": [vm("e", 1, 1, "povray", "work_share = 1000.0")], "full": [vm(f"f{n}", 6, 4, "ep.D", "work_share = 1000.0") for n in range(3)]}
        agents = {name: Agent() for name in hosts}
        for name, agent in agents.items():
            cls.stack.callback(agent.close)
            agent.start(scenario(name, "r420", hosts[name]))
        addresses = {name: agent.settle().address for name, agent in agents.items()}
        # A host that accepts connections and stays silent.
        silent = cls.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        addresses["silent"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cls.address = cls.stack.enter_context(extender(addresses))

    def test_the_node_with_room_is_preferred_and_a_silent_one_is_average(self):
        go.passes(self, "TestExtenderPrefersTheNodeWithRoomAndTakesASilentOneForAverage", EXTENDER=self.address)

    def test_a_pod_that_asks_for_nothing_has_no_preference(self):
        go.passes(self, "TestExtenderHasNoPreferenceForAPodThatAsksForNothing", EXTENDER=self.address)

    def test_whole_nodes_are_refused(self):
        go.passes(self, "TestExtenderSaysThatItWantsNames", EXTENDER=self.address)


if __name__ == "__main__":
    unittest.main()
