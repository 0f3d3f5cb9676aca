"""Sweeps: how a figure depends on a setting, on threads of this machine or on a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from homenode import _native
from homenode._native import Failed, Scenario, Table
from homenode._progress import told

Progress = bool | Callable[[str, float, float], Any]


class Sweep:
    """Results of a sweep. Its bytes do not depend on threads, stores or the cluster."""

    def __init__(self, plan: _native.SweepPlan, rows: list[bytes]) -> None:
        self._plan = plan
        self._rows = rows

    @property
    def means(self) -> Table:
        """A row for each combination of values, policy, VM (or node, or the host) and metric: mean over seeds, its confidence
        interval of 95 percent, standard deviation. Columns of keys that are set come first."""
        return self._plan.table(self._rows, False).table()

    @property
    def runs(self) -> Table:
        """A row for each seed instead of a mean."""
        return self._plan.table(self._rows, True).table()

    def to_csv(self, *, all_runs: bool = False) -> str:
        """The output of ``homenode sweep --csv``."""
        return self._plan.table(self._rows, all_runs).csv()

    def to_parquet(self, path: str | os.PathLike[str], *, all_runs: bool = False) -> None:
        """Writes the file of ``homenode sweep --parquet``, with identical bytes."""
        Path(path).write_bytes(self._plan.table(self._rows, all_runs).parquet())

    def to_plan(self) -> str:
        """The self-contained plan as a file for ``homenode sweep``."""
        return self._plan.to_toml()

    def _repr_html_(self) -> str:
        return self.means._repr_html_()

    def __repr__(self) -> str:
        return f"<homenode.Sweep of {self._plan.runs()} runs>"


def _task(plan: str, task: int, commit: str) -> bytes:
    """A task on a cluster's worker, of which it uses one thread."""
    if commit != _native.__commit__:
        raise Failed(f"this worker has homenode of commit {_native.__commit__}, and the client {commit}: install the same")
    rows: list[bytes] = _native.SweepPlan.from_toml(plan).run([task], 1, None, _native.__file__, None)
    return rows[0]


def _on_cluster(plan: _native.SweepPlan, client: Any, tell: Callable[[str, float, float], Any] | None) -> list[bytes]:
    """Runs all tasks on a Dask cluster, which repeats those of lost workers; returns them in the plan's order."""
    from distributed import as_completed

    text, count = plan.to_toml(), plan.tasks()
    shared = client.scatter(text, broadcast=True, hash=False) if count > 1 else text
    futures = [
        client.submit(_task, shared, task, _native.__commit__, key=f"homenode-{plan.digest()[:16]}-{task}", pure=False)
        for task in range(count)
    ]
    try:
        for done, future in enumerate(as_completed(futures), start=1):  # type: ignore[no-untyped-call]
            if future.status == "error":
                future.result()
            if tell is not None:
                tell("tasks", done, count)
        rows: list[bytes] = client.gather(futures)
        return rows
    except BaseException:
        client.cancel(futures, force=True)
        raise


def sweep(
    what: Scenario | str | os.PathLike[str],
    set: Mapping[str, Any] | None = None,
    *,
    seeds: int | str | Iterable[int] | None = None,
    policies: str | Iterable[str] = (),
    machine: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    metrics: str | Iterable[str] = (),
    runs_per_task: int | None = None,
    jobs: int | None = None,
    store: str | os.PathLike[str] | None = None,
    client: Any = None,
    progress: Progress = False,
) -> Sweep:
    """Runs a scenario for each value, policy and seed, as ``homenode sweep`` does (docs/SWEEPS.md).

    :param what: a scenario, the name of one, its file, or a plan's file
    :param set: keys and their values: ``{"vm.fluid.permit": "50k..3M/20"}``, or a list of values
    :param seeds: ``"1..10"``, or some
    :param policies: names; by default those of the scenario
    :param machine: overrides the scenario's machine: a preset, or a file
    :param config: the agent's settings: a file, or a dictionary
    :param metrics: columns of the table; by default those by which ``homenode sim`` compares VMs
    :param runs_per_task: runs of a task, at most 64; by default a 64th of all
    :param jobs: runs at a time on this machine; by default as many as there are CPUs
    :param store: keep finished tasks in this directory, and reuse those in it; not with ``client``
    :param client: a ``distributed.Client``: its workers, which must have this package of the same commit, run the tasks. Tasks of
        a lost worker are repeated on another
    :param progress: as in :func:`homenode.simulate`; in runs, with ``client`` in tasks
    :raises BadInput: an invalid key or value, before anything runs
    :raises Failed: a run that could not be made

    >>> swept = sweep("churn", {"vm.long.vcpus": [2, 4]}, policies="default", metrics="runtime_s")
    >>> [(row["vm.long.vcpus"], row["vm"]) for row in swept.means.rows()][:2]
    [(2.0, 'long'), (2.0, 'batch')]
    """
    if client is not None and store is not None:
        raise _native.BadInput("a sweep has a store or a client: a cluster's workers need not see this machine's directories")
    given = {
        "set": list((set or {}).items()),
        "seeds": seeds if seeds is None or isinstance(seeds, int | str) else list(seeds),
        "policies": [policies] if isinstance(policies, str) else list(policies),
        "machine": None if machine is None else os.fspath(machine),
        "config": dict(config) if isinstance(config, Mapping) else config if config is None else os.fspath(config),
        "metrics": [metrics] if isinstance(metrics, str) else list(metrics),
        "runs_per_task": runs_per_task,
    }
    if isinstance(what, Scenario):
        plan = _native.SweepPlan.of_scenario(what, given)
    else:
        plan = _native.SweepPlan.of_name(os.fspath(what), given)
    with told(progress) as tell:
        if client is not None:
            return Sweep(plan, _on_cluster(plan, client, tell))
        at = None if store is None else os.fspath(store)
        return Sweep(plan, plan.run(None, jobs, at, _native.__file__, tell))
