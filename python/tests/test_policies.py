"""Policies in Python: called once in each period, judged like others, and blamed for their own errors."""

import traceback

import homenode
import pytest


class Homes(homenode.Policy):
    """Assigns homes to VMs in turn."""

    def __init__(self, homes: dict[str, int]) -> None:
        self.homes, self.views = homes, []

    def plan(self, view):
        self.views.append(view)
        for vm in view["vms"]:
            node = self.homes.get(vm["name"])
            if node is not None and vm["home"] is None:
                yield {"vm": vm["id"], "action": "set-home", "nodes": [node], "why": f"{vm['name']} lives on {node}"}


def test_a_policy_decides_in_the_place_of_the_others(case):
    policy = Homes({"a": 0, "b": 1})
    runs = homenode.simulate(case, ["default", policy, "tavo"])
    assert [run.policy for run in runs] == ["default", "Homes", "tavo"]
    ours = runs["Homes"]
    assert list(zip(ours.decisions["vm"], ours.decisions["reason"], strict=True))[:2] == [
        ("a", "a lives on 0"),
        ("b", "b lives on 1"),
    ]
    assert set(ours.decisions["by"]) == {"external"} and ours.summary["decisions"][0] >= 2
    # Once in each period of a second, in order.
    times = [view["at_ns"] for view in policy.views]
    assert times == sorted(set(times)) and len(times) >= 7
    assert policy.views[0]["period_ns"] is None and policy.views[1]["machine"]["name"] == "r420"
    assert ours.vms["local_access_ratio"] != runs["default"].vms["local_access_ratio"]
    assert ours.vms == homenode.simulate(case, Homes({"a": 0, "b": 1})).vms


def test_an_impossible_plan_is_refused_whole_and_the_policy_reads_why(case):
    policy = Homes({"a": 0, "b": 77})
    runs = homenode.simulate(case, [policy])
    # b is stopped at 7 s: a plan for only a is possible.
    assert all(at_s >= 7 for at_s in runs.decisions["at_s"])
    refused = [view["last"]["result"] for view in policy.views if 2_000_000_000 <= view["at_ns"] <= 7_000_000_000]
    assert len(refused) >= 5 and set(refused) == {"refused"}
    assert any("refused" in text for text in runs.said["text"])


def test_what_a_policy_raises_ends_the_run_and_is_the_cause(case):
    class Broken(homenode.Policy):
        name = "mine"

        def plan(self, view):
            if view["at_ns"] >= 2_000_000_000:
                raise ZeroDivisionError("no nodes left")

    with pytest.raises(homenode.Failed, match="^policy mine: no nodes left$") as raised:
        homenode.simulate(case, ["default", Broken()])
    cause = raised.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert "raise ZeroDivisionError" in "".join(traceback.format_exception(cause))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([{"vm": "x"}], "the planner's answer is not a plan"),
        ([{"vm": 1, "action": "fly", "why": ""}], "the planner's answer is not a plan"),
        ([object()], "JSON"),
        (7, "not iterable"),
    ],
)
def test_what_is_no_plan_fails(case, answer, said):
    class Odd(homenode.Policy):
        def plan(self, view):
            return answer

    with pytest.raises(homenode.Failed, match=f"policy Odd: .*{said}"):
        homenode.simulate(case, Odd())


def test_a_policy_has_a_plan():
    with pytest.raises(TypeError, match="abstract"):
        homenode.Policy()
