"""What the feeder writes of twins with agents on them, and where the scriptlet (`go/`) puts an instance by it."""

import contextlib
import json
import pathlib
import stat
import tempfile
import unittest

import go
from fleet import Agent, scenario, vm
from homenode_shims import incus


class Incus(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = pathlib.Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        # Incus' command, which is not here: what it is told.
        self.command = self.folder / "incus"
        self.command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {self.folder}/told\n')
        self.command.chmod(self.command.stat().st_mode | stat.S_IXUSR)

    def feed(self, member, path):
        is_fed = incus.main(["--member", member, "--socket", str(path), "--incus", str(self.command)]) == 0
        return is_fed, (self.folder / "told").read_text().splitlines()

    def test_the_scriptlet_follows_what_agents_say(self):
        hosts = {"empty": [vm("e", 1, 1, "povray", "work_share = 1000.0")], "full": [vm(f"f{n}", 6, 4, "ep.D", "work_share = 1000.0") for n in range(3)]}
        agents = {name: Agent().start(scenario(name, "r420", hosts[name])) for name in hosts}
        members = {}
        for name, agent in agents.items():
            self.stack.callback(agent.close)
            agent.settle()
            is_fed, told = self.feed(name, agent.folder / "state/http.sock")
            self.assertTrue(is_fed)
            self.assertEqual(told[:3], ["cluster", "set", name])
            key, _, members[name] = told[3].partition("=")
            self.assertEqual(key, incus.KEY)
            nodes = agent.get("/v1/nodes")["nodes"]
            self.assertEqual(len(members[name].split()), len(nodes))
        go.passes(self, "TestPlacementOfWhatAgentsSay", MEMBERS=json.dumps(members))

    def test_where_no_agent_answers_the_key_is_removed(self):
        is_fed, told = self.feed("gone", self.folder / "http.sock")
        self.assertEqual((is_fed, told), (False, ["cluster", "unset", "gone", incus.KEY]))

    def test_the_scriptlet_weighs_as_the_agent_does(self):
        go.passes(self, "TestPlacementChoosesTheMemberWithMostLeft")


if __name__ == "__main__":
    unittest.main()
