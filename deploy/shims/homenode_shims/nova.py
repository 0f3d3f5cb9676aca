"""A weigher for Nova's scheduler: hosts where the VM would run better, according to their agents, weigh more.

All hosts are asked at once, and the scheduler waits for at most `[homenode] budget_ms`. A host without an answer gets the average
weight.
"""

import nova.conf
from nova.scheduler import utils, weights
from oslo_config import cfg
from oslo_log import log as logging

from homenode_shims.ask import Agents, neutral

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF

# Memory bandwidth that a flavor's VMs need, in bytes per second, if known.
BANDWIDTH = "homenode:bandwidth_bytes_per_s"

GROUP = cfg.OptGroup("homenode", title="Homenode", help="What agents of the hosts say of where a VM would run.")
OPTS = [
    cfg.FloatOpt(
        "weight_multiplier",
        default=2.0,
        help="How much this weigher counts beside the others; `homenode_weight_multiplier` of an aggregate's metadata goes before it.",
    ),
    cfg.StrOpt("address", default="https://{host}:9464", help="Where agents listen; {host} is the name of the compute service's host."),
    cfg.DictOpt("addresses", default={}, help="Addresses of hosts whose agents listen elsewhere: HOST:ADDRESS,..."),
    cfg.IntOpt("budget_ms", default=300, min=10, max=10000, help="How long the scheduler waits for all of them together."),
    cfg.StrOpt("ca_file", help="Certificates of the authority that signed the agents', if the system does not know it."),
    cfg.StrOpt("user", help="A user of the agents' web.yml; a viewer is enough."),
    cfg.StrOpt("password", secret=True, help="Their password."),
]

CONF.register_group(GROUP)
CONF.register_opts(OPTS, GROUP)


def list_opts():
    """For oslo-config-generator."""
    return [(GROUP, OPTS)]


class HomenodeWeigher(weights.BaseHostWeigher):
    # Scores are shares of a fixed range: two nearly equal hosts must not be stretched to best and worst.
    minval = 0.0
    maxval = 1.0

    def __init__(self):
        conf = CONF.homenode
        self.agents = Agents(conf.address, conf.addresses, conf.ca_file, conf.user, conf.password)
        self.troubles = {}

    def weight_multiplier(self, host_state):
        return utils.get_weight_multiplier(host_state, "homenode_weight_multiplier", CONF.homenode.weight_multiplier)

    def _weigh_object(self, host_state, weight_properties):
        raise NotImplementedError("hosts are weighed together")

    def weigh_objects(self, weighed_obj_list, weight_properties):
        hosts = [weighed.obj.host for weighed in weighed_obj_list]
        scores, troubles = self.agents.scores(dict.fromkeys(hosts), wanted(weight_properties), CONF.homenode.budget_ms / 1000)
        for host, trouble in troubles.items():
            # Logged once per error: a host that is gone is queried for each VM.
            if self.troubles.get(host) != trouble:
                LOG.warning("The agent on %s gives no score, its host is taken for an average one: %s", host, trouble)
        self.troubles = troubles
        scores = neutral(scores)
        return [scores[host] for host in hosts]


def wanted(spec):
    """Converts a RequestSpec to a request to agents."""
    asked = {"vcpus": spec.vcpus, "memory_bytes": spec.memory_mb << 20}
    extra = spec.flavor.extra_specs if "extra_specs" in spec.flavor else {}
    bandwidth = extra.get(BANDWIDTH, "")
    if bandwidth.isdecimal():
        asked["bandwidth_bytes_per_s"] = int(bandwidth)
    return asked
