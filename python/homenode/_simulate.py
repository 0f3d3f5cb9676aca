"""Runs of a scenario, and their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from homenode._native import BadInput, Machine, Scenario, Simulated, Table
from homenode._native import simulate as _simulate
from homenode._native import toml_of as _toml_of
from homenode._policy import Policy
from homenode._progress import told


def duration(value: str | float | None) -> str | None:
    """``"30ms"`` unchanged, a number as seconds."""
    if value is None or isinstance(value, str):
        return value
    return f"{round(value * 1e9)}ns"


def scenario_of(what: Scenario | str | os.PathLike[str]) -> Scenario:
    """A scenario, or the one with this name or in this file."""
    return what if isinstance(what, Scenario) else Scenario(os.fspath(what))


def machine_of(what: Machine | str | os.PathLike[str] | None) -> Machine | None:
    """A machine, or the one with this name or in this file."""
    return what if what is None or isinstance(what, Machine) else Machine(os.fspath(what))


def config_of(what: Mapping[str, Any] | str | os.PathLike[str] | None) -> tuple[str, str] | None:
    """Path and text of settings."""
    if what is None:
        return None
    if isinstance(what, Mapping):
        return ("config", _toml_of(dict(what)))
    path = os.fspath(what)
    try:
        return (path, Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error


def options_of(**given: Any) -> dict[str, Any]:
    """Options in the native side's format, including those not given."""
    names = ["machine", "seed", "epoch", "disturb", "numa_balancing", "config", "every", "progress"]
    return {name: given.get(name) for name in names}


class _Tables:
    """Tables of one or several runs. All have a column ``policy``; times are simulated, in seconds from the run's start."""

    _inner: Simulated
    _at: int | None

    def _table(self, name: str) -> Table:
        return self._inner.table(name, self._at)

    @property
    def vms(self) -> Table:
        """A row for each VM, in the scenario's order: runtimes, misses, where its accesses went.

        Figures count from the end of the warm-up on; runtimes are whole.
        """
        return self._table("vms")

    @property
    def accesses(self) -> Table:
        """A row for each VM and node: memory accesses that the node answered."""
        return self._table("accesses")

    @property
    def nodes(self) -> Table:
        """A row for each node."""
        return self._table("nodes")

    @property
    def links(self) -> Table:
        """A row for each direction of each link."""
        return self._table("links")

    @property
    def events(self) -> Table:
        """A row for each event of the scenario that happened, with its result."""
        return self._table("events")

    @property
    def starts(self) -> Table:
        """A row for each program of each start of each VM."""
        return self._table("starts")

    @property
    def decisions(self) -> Table:
        """A row for each decision, with its result."""
        return self._table("decisions")

    @property
    def said(self) -> Table:
        """A row for each message of the agent: decisions, findings, refusals, arrivals and departures of VMs."""
        return self._table("said")

    @property
    def summary(self) -> Table:
        """A row for each run: how it compares with the first."""
        return self._table("summary")

    @property
    def vms_over_time(self) -> Table:
        """A row for each VM and interval, if ``simulate`` was given ``every``: rates as the agent sees them."""
        return self._table("vms_over_time")

    @property
    def memory_over_time(self) -> Table:
        """A row for each VM, node and moment, if ``simulate`` was given ``every``: where its memory is, in bytes."""
        return self._table("memory_over_time")

    @property
    def nodes_over_time(self) -> Table:
        """A row for each node and interval, if ``simulate`` was given ``every``."""
        return self._table("nodes_over_time")

    @property
    def links_over_time(self) -> Table:
        """A row for each direction of each link and interval, if ``simulate`` was given ``every``."""
        return self._table("links_over_time")


class Run(_Tables):
    """Results of a scenario under one set of policies. Its tables only have this run."""

    def __init__(self, inner: Simulated, at: int) -> None:
        self._inner = inner
        self._at: int = at

    @property
    def policy(self) -> str:
        """Name of its policies."""
        return self._inner.policies()[self._at]

    def to_dict(self) -> dict[str, Any]:
        """Its part of ``homenode sim --json``."""
        found: dict[str, Any] = self._inner.to_dict()["policies"][self._at]
        return found

    def _repr_html_(self) -> str:
        return f"<p><b>{self.policy}</b></p>{self.vms._repr_html_()}"

    def __repr__(self) -> str:
        return f"<homenode.Run under {self.policy}>"


class Runs(_Tables, Sequence[Run]):
    """Results of a scenario under several sets of policies, in their order: a sequence of :class:`Run`, also by policy.

    Its tables have the rows of all runs.
    """

    def __init__(self, inner: Simulated) -> None:
        self._inner = inner
        self._at = None

    def __len__(self) -> int:
        return len(self._inner.policies())

    @overload
    def __getitem__(self, key: int | str) -> Run: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Run]: ...
    def __getitem__(self, key: int | str | slice) -> Run | Sequence[Run]:
        """The run at a position, or under the policies of a name."""
        names = self._inner.policies()
        if isinstance(key, slice):
            return [Run(self._inner, at) for at in range(*key.indices(len(names)))]
        if isinstance(key, str):
            if key not in names:
                raise KeyError(f"no run under `{key}`; there are: {', '.join(names)}")
            return Run(self._inner, names.index(key))
        return Run(self._inner, range(len(names))[key])

    def __iter__(self) -> Iterator[Run]:
        return (Run(self._inner, at) for at in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """The output of ``homenode sim --json``."""
        return self._inner.to_dict()

    def _repr_html_(self) -> str:
        return self.summary._repr_html_() + self.vms._repr_html_()

    def __repr__(self) -> str:
        return f"<homenode.Runs under {', '.join(self._inner.policies())}>"


def simulate(
    scenario: Scenario | str | os.PathLike[str],
    policies: Iterable[str | Policy] | str | Policy | None = None,
    *,
    seed: int | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    epoch: str | float | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    disturb: str | None = None,
    numa_balancing: bool | None = None,
    every: str | float | None = None,
    progress: bool | Callable[[str, float, float], Any] = False,
) -> Runs:
    """Runs a scenario under each of the policies: the same VMs, programs and events, and the same numbers as ``homenode sim``.

    :param scenario: a scenario, the name of one (``Scenario.names()``), or a file
    :param policies: names (``"default"`` is the kernel's scheduler only) or objects of :class:`Policy`; by default those that
        the scenario names
    :param seed: overrides the scenario's seed: same seed, same run
    :param machine: overrides the scenario's machine: a machine, the name of one (``Machine.names()``), or a file
    :param epoch: the simulation's resolution; a number is seconds
    :param config: the agent's settings: a file, or a dictionary with its keys
    :param disturb: how the host differs from the policies' information (``"noise,no-bandwidth"``)
    :param numa_balancing: whether the host's kernel balances NUMA memory (``kernel.numa_balancing``), overriding the scenario
    :param every: record states over time, at this interval; a number is seconds. The resolution is limited by the agent's
        samples (once a second, unless ``config`` says otherwise)
    :param progress: ``True`` for a line on a terminal or in a notebook; or a function that is called several times a second with
        the policies' name, the simulated seconds so far and their maximum
    :raises BadInput: an invalid argument
    :raises Failed: a run that could not continue

    Other Python threads keep running meanwhile. Ctrl-C ends it.

    >>> runs = simulate("churn", ["default"], seed=2, every="10s")
    >>> runs.vms_over_time["at_s"][:3]
    [10.0, 10.0, 10.0]
    """
    if isinstance(policies, str | Policy):
        policies = [policies]
    with told(progress) as tell:
        options = options_of(
            machine=machine_of(machine),
            seed=seed,
            epoch=duration(epoch),
            disturb=disturb,
            numa_balancing=numa_balancing,
            config=config_of(config),
            every=duration(every),
            progress=tell,
        )
        return Runs(_simulate(scenario_of(scenario), None if policies is None else list(policies), options))
