"""Experiments, claims, searches, questions: the command's numbers."""

import csv
import io

import homenode
import pytest
from conftest import ROOT

EXAMPLE = ROOT / "data/experiments/example.toml"


def test_an_experiment_is_that_of_the_command(command):
    told = command.json("experiment", EXAMPLE, "--vary", "machine.controllers=0.5", "--fresh")
    made = homenode.experiment(EXAMPLE, vary={"machine.controllers": 0.5})
    ours = made.to_dict()
    assert {key: told[key] for key in ours} == ours
    printed = command.run("experiment", EXAMPLE, "--vary", "machine.controllers=0.5", "--csv")
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    assert len(rows) == len(made.rows) and list(rows[0]) == made.rows.columns
    for name in made.rows.columns:
        cells = made.rows[name]
        read = [row[name] if isinstance(cell, str) else float(row[name] or "nan") for row, cell in zip(rows, cells, strict=True)]
        assert all(cell is None or one == cell for one, cell in zip(read, cells, strict=True)), name
    assert set(made.results["vary"]) == {None, "machine.controllers x0.5"} or len(set(made.results["vary"])) == 2
    assert homenode.experiment(EXAMPLE.read_text(), vary="machine.controllers=0.5", jobs=1).rows == made.rows


def test_bad_experiments_are_refused(command):
    for vary in ({"machine.contrllers": 2}, "machine.controllers", "machine.controllers=x"):
        with pytest.raises(homenode.BadInput):
            homenode.experiment(EXAMPLE, vary=vary)
    with pytest.raises(homenode.BadInput, match="^experiment.toml:"):
        homenode.experiment('title = "none"\nnone = 1\n')


def test_claims_are_those_of_the_command(command):
    published = homenode.published("TAVO")
    told = command.json("reproduce", "tavo.four-sources", "--fresh")
    made = homenode.reproduce("tavo.four-sources")
    ours = made.to_dict()
    assert {key: told[key] for key in ours} == ours
    claim = ours["claims"][0]
    assert made.parts["part"] == [part["name"] for part in claim["parts"]] and made.claims["verdict"] == [claim["verdict"]]
    assert set(made.claims["claim"]) < set(published["claim"])
    assert set(published["kind"]) <= {"value", "at_least", "at_most", "order", "shape"}
    values = dict(zip(zip(published["claim"], published["name"], strict=True), published["published"], strict=True))
    assert any(value for value in values.values())


def test_what_if_is_that_of_the_command(command):
    told = command.json("whatif", "--scenario", "tavo-mixed", "--at", "20s", "cg=0", "ep=none")
    asked = homenode.whatif("tavo-mixed", {"cg": 0, "ep": None}, at=20)
    ours = asked.to_dict()
    assert {key: told[key] for key in ours} == ours
    assert asked.vms["slow_down_then"] == [vm["slow_down_then"] for vm in ours["vms"]]
    for homes, said in (({"absent": 0}, "no VM `absent`"), ({"cg": 99}, "99"), ({"cg": []}, "at least one node")):
        with pytest.raises(homenode.BadInput, match=said):
            homenode.whatif("tavo-mixed", homes, at=20)


def test_a_search_is_that_of_the_command(command):
    scenario = "churn"
    told = command.json("search", scenario, "--evaluations", "20", "--jobs", "1")
    found = homenode.search(scenario, evaluations=20, jobs=2)
    ours = found.to_dict()
    same = [key for key in ours if key not in ("version", "commit")]
    assert {key: told[key] for key in same} == {key: ours[key] for key in same}
    assert found.policies["policy"][-1] == "best known" and min(found.policies["gap"]) == 0.0
    assert found.decisions == ours["best"]["decisions"] and len(found.vms) == 3 * len(found.policies)
    with pytest.raises(homenode.BadInput, match="evaluations or more"):
        homenode.search(scenario, evaluations=1)


def test_experiments_draw_their_figures():
    made = homenode.experiment(EXAMPLE)
    assert all(svg.startswith("<svg") or "<svg" in svg for svg in made.figures.values())
    assert made.title in made._repr_html_()
