"""What the feeder writes about twins with agents on them, and where the scriptlet then puts instances: in its interpreter (`go/`), and in
a cluster of the real Incus."""

import contextlib
import json
import pathlib
import unittest

import go
from cluster import MEMBERS, Cluster
from fleet import Agent, scenario, vm
from homenode_shims import incus

SCRIPTLET = pathlib.Path(__file__).parents[2] / "incus/placement.star"
# The load of the members' hosts: the first one is full, but Incus, which counts instances, would put every other instance
# there.
HOSTS = {"one": [vm(f"f{n}", 6, 4, "ep.D", "work_share = 1000.0") for n in range(3)], "two": [vm("e", 1, 1, "povray", "work_share = 1000.0")]}


class Incus(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        cls.cluster = stack.enter_context(contextlib.closing(Cluster()))
        cls.agents = {}
        for name in MEMBERS:
            cls.agents[name] = stack.enter_context(contextlib.closing(Agent())).start(scenario(name, "r420", HOSTS[name]))
        for agent in cls.agents.values():
            agent.settle()

    def feed(self, member, path):
        return incus.main(["--member", member, "--socket", str(path), "--incus", str(self.cluster.command())]) == 0

    def feed_all(self):
        for name, agent in self.agents.items():
            self.assertTrue(self.feed(name, agent.folder / "state/http.sock"))
        return {name: self.cluster.key(name, incus.KEY) for name in self.agents}

    def create(self, count):
        members = []
        for number in range(count):
            members.append(self.cluster.create(f"i{number}", 2, "1GiB"))
            self.addCleanup(self.cluster.tell, "delete", f"i{number}")
        return members

    def test_the_scriptlet_in_its_interpreter_follows_what_agents_say(self):
        members = self.feed_all()
        for name, agent in self.agents.items():
            nodes = agent.get("/v1/nodes")["nodes"]
            self.assertEqual(len(members[name].split()), len(nodes))
        go.passes(self, "TestPlacementOfWhatAgentsSay", MEMBERS=json.dumps({"full": members["one"], "empty": members["two"]}))

    def test_a_real_cluster_puts_instances_where_agents_say_that_there_is_room(self):
        # Without the scriptlet, it alternates between members.
        self.assertEqual(set(self.create(2)), set(MEMBERS))
        self.doCleanups()
        self.feed_all()
        self.cluster.tell("config", "set", f"instances.placement.scriptlet={SCRIPTLET.read_text()}")
        self.addCleanup(self.cluster.tell, "config", "unset", "instances.placement.scriptlet")
        self.assertEqual(self.create(3), ["two"] * 3)
        self.assertIn("two has the highest score", self.cluster.log())

    def test_a_real_cluster_in_which_no_member_has_the_key_chooses_as_ever(self):
        for name in MEMBERS:
            self.cluster.tell("cluster", "unset", name, incus.KEY)
        self.cluster.tell("config", "set", f"instances.placement.scriptlet={SCRIPTLET.read_text()}")
        self.addCleanup(self.cluster.tell, "config", "unset", "instances.placement.scriptlet")
        self.assertEqual(set(self.create(2)), set(MEMBERS))
        self.assertIn("no member says what its nodes have left", self.cluster.log())

    def test_where_no_agent_answers_the_key_is_removed(self):
        self.assertTrue(self.feed_all()["two"])
        self.assertFalse(self.feed("two", self.cluster.folder / "http.sock"))
        self.assertIsNone(self.cluster.key("two", incus.KEY))

    def test_the_scriptlet_weighs_as_the_agent_does(self):
        go.passes(self, "TestPlacementChoosesTheMemberWithMostLeft")


if __name__ == "__main__":
    unittest.main()
