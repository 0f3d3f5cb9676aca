"""Policies in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any


class Policy(ABC):
    """A user-defined policy, which decides on the twin in place of the built-in ones.

    >>> import homenode
    >>> class OnOneNode(homenode.Policy):
    ...     def plan(self, view):
    ...         for vm in view["vms"]:
    ...             if vm["home"] is None:
    ...                 yield {"vm": vm["id"], "action": "set-home", "nodes": [0], "why": "everybody lives on node 0"}
    >>> runs = homenode.simulate("churn", policies=["default", OnOneNode()])
    >>> set(runs["OnOneNode"].decisions["by"])
    {'external'}

    An object keeps its state from one period to the next, and serves one run; ``simulate`` runs it unchanged.
    """

    @property
    def name(self) -> str:
        """Name in tables; its class, unless this is overridden."""
        return type(self).__name__

    @abstractmethod
    def plan(self, view: dict[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        """Decides from the agent's view, once in each of its periods (1 s).

        ``view`` has ``version``, ``at_ns``, ``period_ns``, ``machine``, ``nodes``, ``links``, ``vms`` and ``last``, the
        result of the previous plan. Rates are over the last period, and ``None`` before there are two samples.
        docs/POLICIES.md has every key.

        Returns actions, in the order to carry them out, or ``None`` for nothing: each names a ``vm`` by its id, an ``action``
        (``set-home`` with ``nodes``, ``lift`` with ``lever``, ``move-pages`` with ``from``, ``to`` and ``pages_max``, …), and
        says ``why``. A plan is carried out or refused as a whole: if one action is not possible, or contradicts an
        operator's setting, nothing is done and ``view["last"]`` of the next period says so.

        An exception from this method ends the run: :class:`Failed` with that exception as its cause.
        """
