"""A simulated NUMA host with VMs: try placements and policies, and read the results as tables.

>>> import homenode
>>> runs = homenode.simulate("churn", policies=["default", "homenode"])
>>> [run.policy for run in runs]
['default', 'homenode']
>>> runs["homenode"].vms["vm"]
['long', 'batch', 'cut']

Tables are read by polars, pandas and pyarrow without a copy (``polars.DataFrame(runs.vms)``); none of them is needed. Sizes
and durations are written as on the command line: ``"8GiB"``, ``"30ms"``. Names of figures end in the unit.

Errors are raised as :class:`BadInput` or :class:`Failed`, both :class:`Error`, with the message that the command
``homenode`` would print.
"""

from homenode._native import (
    BadInput,
    Error,
    Failed,
    Machine,
    PageLog,
    Recording,
    Scenario,
    Table,
    Workload,
    __commit__,
    __version__,
)
from homenode._policy import Policy
from homenode._simulate import Run, Runs, simulate
from homenode._studies import (
    Experiment,
    Reproduction,
    Search,
    WhatIf,
    experiment,
    published,
    reproduce,
    search,
    whatif,
)
from homenode._sweep import Sweep, sweep

__all__ = [
    "BadInput",
    "Error",
    "Experiment",
    "Failed",
    "Machine",
    "PageLog",
    "Policy",
    "Recording",
    "Reproduction",
    "Run",
    "Runs",
    "Scenario",
    "Search",
    "Sweep",
    "Table",
    "WhatIf",
    "Workload",
    "__commit__",
    "__version__",
    "experiment",
    "published",
    "reproduce",
    "search",
    "simulate",
    "sweep",
    "whatif",
]
