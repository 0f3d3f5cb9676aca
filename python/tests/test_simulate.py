"""Runs yield the command's numbers, and every option reaches the twin."""

import homenode
import pytest


def without_build(document: dict) -> dict:
    """Both are built from the same sources, but maybe not at the same time. A line of the command also has a type."""
    return {key: value for key, value in document.items() if key not in ("type", "version", "commit")}


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], {}),
        (["--seed", "7"], {"seed": 7}),
        (["--machine", "r910"], {"machine": "r910"}),
        (["--epoch", "2ms"], {"epoch": 0.002}),
        (["--disturb", "noise"], {"disturb": "noise"}),
        (["--numa-balancing", "on"], {"numa_balancing": True}),
        (["--policy", "tavo", "--policy", "autonuma"], {"policies": ["tavo", "autonuma"]}),
    ],
)
def test_numbers_are_those_of_the_command(command, case, options, given):
    told = command.json("sim", case, *options)
    ours = homenode.simulate(case, **given).to_dict()
    assert without_build(ours) == without_build(told)


def test_settings_are_taken_from_files_and_dictionaries(command, case, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('period = "2s"\n')
    told = command.json("sim", case, "--config", file)
    for config in (file, {"period": "2s"}):
        assert without_build(homenode.simulate(case, config=config).to_dict()) == without_build(told)
    assert told["period_ns"] == 2_000_000_000


def test_tables_say_what_the_document_says(case):
    runs = homenode.simulate(case)
    documents = runs.to_dict()["policies"]
    assert [run.policy for run in runs] == ["default", "tavo"] == [of["policy"] for of in documents]
    for run, document in zip(runs, documents, strict=True):
        for column in ("runtime_s", "llc_miss_rate", "local_access_ratio", "instructions_g", "node_changes", "waiting_s"):
            assert run.vms[column] == [vm[column] for vm in document["vms"]], column
        assert run.nodes["accesses"] == [node["accesses"] for node in document["node_loads"]]
        assert run.links["bytes"] == [link["bytes"] for link in document["links"]]
        assert run.events["result"] == [event["result"] for event in document["events"]] == ["done"]
        by_node = [of["accesses"] for vm in document["vms"] for of in vm["node_accesses"]]
        assert run.accesses["accesses"] == by_node and sum(by_node) > 0
        assert run.summary["decisions"] == [document["decisions"]]
        assert run.to_dict() == document
    assert runs.vms["vm"] == ["a", "b", "a", "b"]
    assert runs["tavo"].vms == runs[1].vms == runs[-1].vms
    assert [run.policy for run in runs[:1]] == ["default"]
    assert len(runs["tavo"].decisions) >= documents[1]["decisions"] > 0
    with pytest.raises(KeyError, match="there are: default, tavo"):
        runs["autonuma"]
    with pytest.raises(IndexError):
        runs[2]


def test_over_time_it_adds_up(case):
    runs = homenode.simulate(case, ["default"], every="2s")
    vms = runs.vms_over_time
    assert vms["at_s"] == sorted(vms["at_s"]) and set(vms["at_s"]) == {2.0, 4.0, 6.0}
    # The first interval has no data: it begins before the VM does. The last ends before the run.
    made = sum(rate * 2 for rate, vm in zip(vms["instructions_per_s"], vms["vm"], strict=True) if vm == "a" and rate)
    whole = runs.vms["instructions_g"][0] * 1e9
    assert made == pytest.approx(whole, rel=0.5) and made <= whole * 1.0001
    assert sum(runs.memory_over_time["memory_bytes"]) == sum(vms["memory_touched_bytes"]) > 0
    assert len(runs.nodes_over_time) == 3 * 2 and len(runs.links_over_time) == 3 * 2
    with pytest.raises(homenode.BadInput, match='every="1s"'):
        homenode.simulate(case, ["default"]).vms_over_time


def test_the_same_seed_gives_the_same_and_another_does_not(case):
    text = case.read_text().replace('duration = "8s"', 'duration = "8s"\narrival_jitter = "2s"')
    scenario = homenode.Scenario.from_toml(text)
    first, again, other = (homenode.simulate(scenario, "tavo", seed=seed) for seed in (1, 1, 2))
    assert first.vms == again.vms and first.said == again.said
    assert first.vms != other.vms


def test_progress_is_told(case):
    text = case.read_text().replace('duration = "8s"', 'duration = "2000s"').replace('at = "7s"', 'at = "1999s"')
    told = []
    homenode.simulate(homenode.Scenario.from_toml(text), "default", progress=lambda *told_now: told.append(told_now))
    assert told and all(policy == "default" and 0 <= at <= most == 2000 for policy, at, most in told)

    def stop(*_):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        homenode.simulate(homenode.Scenario.from_toml(text), "default", progress=stop)
