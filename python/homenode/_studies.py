"""Experiments, published claims, questions about scenarios."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from homenode import _native
from homenode._native import BadInput, Machine, Scenario, Table
from homenode._progress import told
from homenode._simulate import duration, machine_of, options_of, scenario_of

Progress = bool | Callable[[str, float, float], Any]
Vary = Mapping[str, float | Sequence[float]] | str | Iterable[str]


def _changes(vary: Vary | None) -> list[tuple[str, float]]:
    """Inputs and factors, from a dictionary or from texts as on the command line."""
    if vary is None:
        return []
    if isinstance(vary, Mapping):
        each = {name: [of] if isinstance(of, int | float) else list(of) for name, of in vary.items()}
        return [(name, float(factor)) for name, factors in each.items() for factor in factors]
    changes: list[tuple[str, float]] = []
    for text in [vary] if isinstance(vary, str) else vary:
        name, equals, factors = text.partition("=")
        if not equals:
            raise BadInput("write the input, `=` and factors: `machine.controllers=0.5,2`")
        for factor in factors.split(","):
            try:
                changes.append((name.strip(), float(factor)))
            except ValueError:
                raise BadInput(f"`{factor}` is no number") from None
    return changes


class Experiment:
    """Results of an experiment. Rows have a column ``vary``: the changed input, ``None`` for the unchanged file."""

    def __init__(self, inner: _native.MadeExperiment) -> None:
        self._inner = inner

    @property
    def title(self) -> str:
        """Its subject."""
        return self._inner.title()

    @property
    def rows(self) -> Table:
        """A row for each VM of each run, with its labels and all metrics: the output of ``--csv``."""
        return self._inner.rows()

    @property
    def results(self) -> Table:
        """A row for each result of each variation."""
        return self._inner.results()

    @property
    def tests(self) -> Table:
        """A row for each test of each variation: its outcome, and whether it passed."""
        return self._inner.tests()

    @property
    def figures(self) -> dict[str, str]:
        """Its figures as SVG, by name."""
        return dict(self._inner.figures())

    def to_dict(self) -> dict[str, Any]:
        """The output of ``homenode experiment --json``."""
        return self._inner.to_dict()

    def _repr_html_(self) -> str:
        return f"<p><b>{self.title}</b></p>{self.results._repr_html_()}"

    def __repr__(self) -> str:
        return f"<homenode.Experiment: {self.title}>"


def experiment(
    what: str | os.PathLike[str],
    *,
    vary: Vary | None = None,
    jobs: int | None = None,
    progress: Progress = False,
) -> Experiment:
    """Executes an experiment (docs/EXPERIMENTS.md): the runs of a file, its results, tests and figures.

    :param what: a file, or the text of one (it has more than one line then)
    :param vary: repeat it for each factor of an input: ``{"machine.controllers": [0.5, 2]}``
    :param jobs: runs at a time; by default as many as there are CPUs. Results do not depend on it
    :param progress: as in :func:`homenode.simulate`; in runs
    :raises BadInput: a file that is not an experiment
    :raises Failed: a run that cannot be made

    Nothing is cached between calls.
    """
    path = os.fspath(what)
    text = path if "\n" in path else None
    with told(progress) as tell:
        made = _native.experiment(path if text is None else "experiment.toml", text, _changes(vary), jobs, tell)
    return Experiment(made)


def published(*claims: str) -> Table:
    """Published results on NUMA and VMs, as far as recorded here: a row for each value, bound, ranking and shape of a claim.

    :param claims: papers (``"TAVO"``), families (``"tavo"``) or claims (``"tavo.npb"``); by default all

    >>> set(published("TAVO")["source"])
    {'TAVO'}
    """
    return _native.published(list(claims))


class Reproduction:
    """Results of published claims on the twin."""

    def __init__(self, inner: _native.Decided) -> None:
        self._inner = inner

    @property
    def claims(self) -> Table:
        """A row for each claim: its verdict."""
        return self._inner.claims()

    @property
    def parts(self) -> Table:
        """A row for each value, bound, ranking and test of each claim: ours and the published one, with bands where known."""
        return self._inner.parts()

    def to_dict(self) -> dict[str, Any]:
        """The output of ``homenode reproduce --json``."""
        return self._inner.to_dict()

    def __repr__(self) -> str:
        return f"<homenode.Reproduction of {len(self.claims)} claims>"


def reproduce(*claims: str, jobs: int | None = None, progress: Progress = False) -> Reproduction:
    """Decides published claims on the twin; by default all, which takes some minutes.

    :param claims: as in :func:`published`
    :param jobs: as in :func:`experiment`
    :param progress: as in :func:`homenode.simulate`; in runs
    """
    with told(progress) as tell:
        return Reproduction(_native.reproduce(list(claims), jobs, tell))


class WhatIf:
    """How fast VMs would be with other homes, as the agent predicts it."""

    def __init__(self, vms: Table, answer: dict[str, Any]) -> None:
        self.vms: Table = vms
        """A row for each VM: its home and time, now and with the requested homes. 1 is the time without an agent."""
        self._answer = answer

    @property
    def error_median(self) -> float | None:
        """Median error of this run's predictions so far, as a ratio; ``None`` before the first trial."""
        found: float | None = self._answer["error_median"]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The output of ``homenode whatif --json``."""
        return self._answer

    def _repr_html_(self) -> str:
        return self.vms._repr_html_()

    def __repr__(self) -> str:
        return f"<homenode.WhatIf of {len(self.vms)} VMs>"


def whatif(
    scenario: Scenario | str | os.PathLike[str],
    homes: Mapping[str, int | Iterable[int] | None] | None = None,
    *,
    at: str | float,
    seed: int | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    progress: Progress = False,
) -> WhatIf:
    """Runs the agent on a scenario up to a time, and asks it how fast VMs would be elsewhere.

    :param scenario: as in :func:`homenode.simulate`, like ``seed`` and ``machine``
    :param homes: by VM: a node, several, or ``None`` for no home. Other VMs keep theirs
    :param at: time of the question; a number is seconds
    """
    nodes = {vm: home if home is None else [home] if isinstance(home, int) else list(home) for vm, home in (homes or {}).items()}
    with told(progress) as tell:
        options = options_of(seed=seed, machine=machine_of(machine), progress=tell)
        vms, answer = _native.whatif(scenario_of(scenario), str(duration(at)), nodes, options)
    return WhatIf(vms, answer)


class Search:
    """The best known decisions for a scenario, compared with those of policies."""

    def __init__(self, inner: _native.Searched) -> None:
        self._inner = inner

    @property
    def policies(self) -> Table:
        """A row for each policy, and one for the best known: runtimes over those under ``default``."""
        return self._inner.policies()

    @property
    def vms(self) -> Table:
        """A row for each VM under each of them."""
        return self._inner.vms()

    @property
    def decisions(self) -> list[str]:
        """The decisions of the best known result, one per line."""
        found: list[str] = self._inner.to_dict()["best"]["decisions"]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The output of ``homenode search --json``."""
        return self._inner.to_dict()

    def _repr_html_(self) -> str:
        return self.policies._repr_html_()

    def __repr__(self) -> str:
        return "<homenode.Search>"


def search(
    scenario: Scenario | str | os.PathLike[str],
    *,
    evaluations: int = 300,
    jobs: int | None = None,
    seed: int | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    progress: Progress = False,
) -> Search:
    """Searches for the best decisions in a scenario: tries schedules on copies of the twin, starting from the policies'.

    :param scenario: as in :func:`homenode.simulate`, like ``seed`` and ``machine``
    :param evaluations: runs of the twin, including those under policies
    :param jobs: runs at a time; results do not depend on it
    """
    with told(progress) as tell:
        options = options_of(seed=seed, machine=machine_of(machine), progress=tell)
        return Search(_native.search(scenario_of(scenario), evaluations, jobs, options))
