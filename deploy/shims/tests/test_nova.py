"""The weigher in the real Nova, with its own API, scheduler, placement and database; the computes are fakes, and their hosts are twins.

A program runs faster where the weigher puts its VM than where Nova's own weighers do: both outcomes are simulated.
"""

import unittest

from nova.tests.functional import integrated_helpers
from nova.virt import fake

import homenode_shims.nova
from fleet import Agent, runtimes, scenario, vm

OURS = "homenode_shims.nova.HomenodeWeigher"
OWN = "nova.scheduler.weights.all_weighers"



def workload(name, gib, misses):
    """Returns a program with this memory size and this number of cache misses per thousand instructions."""
    return f"""
[[workload]]
name = "{name}"
about = "Uses {gib} GiB"
[workload.program]
threads = "one-per-vcpu"
instructions_g_per_thread = 10.0
cpi_core = 0.6
llc_accesses_per_kilo_instruction = {misses}
misses_in_flight = 2.0
hits_in_flight = 4.0
write_share = 0.2
[workload.program.miss_ratio]
m_inf = 0.9
c0 = "4MiB"
k = 0.6
[[workload.program.regions]]
kind = "initialised-by-one"
size = "{gib}GiB"
access_share = 1.0
"""


class Session(integrated_helpers.ProviderUsageBaseTestCase):
    """A Nova with two computes: VMs that already run, then some that the scheduler places."""

    compute_driver = "fake.MediumFakeDriver"

    def __init__(self, weighers, hosts, new, placed):
        super().__init__("place")
        self.weighers, self.hosts, self.new, self.placed = weighers, hosts, new, placed

    def setUp(self):
        # An r910, as Nova sees it.
        for key, value in {"vcpus": 32, "memory_mb": 64 << 10}.items():
            self.addCleanup(setattr, fake.MediumFakeDriver, key, getattr(fake.MediumFakeDriver, key))
            setattr(fake.MediumFakeDriver, key, value)
        self.flags(addresses={host.name: host.agent.address for host in self.hosts}, group="homenode")
        self.flags(reserved_host_memory_mb=0, initial_cpu_allocation_ratio=1.0, initial_ram_allocation_ratio=1.0)
        self.flags(cores=-1, ram=-1, group="quota")
        # The scheduler starts in the next line and does not read it later.
        self.flags(weight_classes=self.weighers, group="filter_scheduler")
        super().setUp()

    def place(self):
        for host in self.hosts:
            self._start_compute(host.name)
        for host in self.hosts:
            for vcpus, gib in host.residents:
                self.boot(vcpus, gib, host.name)
        for name, vcpus, gib, workload, more in self.new:
            chosen = self.boot(vcpus, gib)
            self.placed[name] = chosen
            host = next(host for host in self.hosts if host.name == chosen)
            host.add(vm(name, vcpus, gib, workload, more))

    def boot(self, vcpus, gib, host=None):
        flavor = self._create_flavor(memory_mb=gib << 10, vcpu=vcpus, disk=1, ephemeral=0)
        server = self._create_server(flavor_id=flavor, networks="none", host=host)
        # Computes report every minute: until then the host seems to be busy building.
        self._run_periodics()
        return server["OS-EXT-SRV-ATTR:host"]


class Host:
    """A host with VMs: their sizes in Nova, and their programs."""

    def __init__(self, name, residents, workloads):
        self.name, self.workloads = name, workloads
        self.residents = [(vcpus, gib) for _, vcpus, gib, _, _ in residents]
        self.vms = [vm(*resident) for resident in residents]
        self.agent = Agent()

    def text(self):
        return scenario(self.name, "r910", self.vms, self.workloads)

    def add(self, text):
        self.vms.append(text)
        if self.agent.process:
            self.agent.start(self.text()).settle()


class Outcome(unittest.TestCase):
    def outcome(self, weighers, residents, new, workloads, with_agents):
        """Returns where VMs were placed, and how long their programs took."""
        hosts = [Host(name, vms, workloads) for name, vms in residents.items()]
        for host in hosts:
            self.addCleanup(host.agent.close)
            if with_agents:
                host.agent.start(host.text())
        for host in hosts:
            if with_agents:
                host.agent.settle()
        placed, result = {}, unittest.TestResult()
        Session(weighers, hosts, new, placed).run(result)
        self.assertTrue(result.wasSuccessful(), [text[-2000:] for _, text in result.failures + result.errors])
        for host in hosts:
            host.agent.stop()
        took = {}
        for host in hosts:
            took |= runtimes(host.text(), [name for name, at in placed.items() if at == host.name])
        return placed, took

    def faster(self, residents, new, workloads=""):
        """Returns how much less time programs take where the weigher puts their VMs, on average."""
        own, took = self.outcome([OWN], residents, new, workloads, with_agents=False)
        ours, took_ours = self.outcome([OWN, OURS], residents, new, workloads, with_agents=True)
        self.assertEqual(set(took), set(took_ours))
        ratio = sum(took_ours[name] / took[name] for name in took) / len(took)
        print(f"\nNova: {own} {took}\nwith agents: {ours} {took_ours}\nruntime, relative: {ratio:.2f}", flush=True)
        return own, ours, ratio

    def test_a_vm_goes_where_one_node_holds_it(self):
        # One host has 6 GiB left on each node, 24 GiB in total: more than the other, which has one empty node. Four minutes:
        # in the first one, the agent leaves the new VM to the kernel.
        workloads = workload("holds-9", 9, 0.05) + workload("holds-14", 14, 0.05) + workload("walks", 9, 240.0)

        def pinned(node):
            return f'work_share = 100000.0\ncpus = "{4 * node}-{4 * node + 3},{16 + 4 * node}-{19 + 4 * node}"\nmemory_nodes = "{node}"'

        residents = {
            "scattered": [(f"s{node}", 1, 10, "holds-9", pinned(node)) for node in range(4)],
            "whole": [(f"w{node}", 1, 15, "holds-14", pinned(node)) for node in range(3)],
        }
        own, ours, ratio = self.faster(residents, [("new", 4, 10, "walks", "")], workloads)
        self.assertEqual((own, ours), ({"new": "scattered"}, {"new": "whole"}))
        self.assertLess(ratio, 0.9)


if __name__ == "__main__":
    unittest.main()
