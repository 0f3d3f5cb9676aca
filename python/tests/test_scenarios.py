"""Scenarios, machines and workloads: read, made, changed, written, and refused with the command's messages."""

import pickle

import homenode
import pytest
from conftest import ROOT


def test_scenarios_are_changed_by_their_keys(case):
    scenario = homenode.Scenario(str(case))
    assert (scenario.name, scenario.machine, scenario.duration_s, scenario.seed) == ("case", "r420", 8.0, 1)
    changed = (
        scenario.with_vm(name="c", vcpus=1, memory="1GiB", workload="povray", cpus="0-3")
        .change_vm("a", vcpus=4, work_share=None)
        .with_event(at="2s", vm="c", action={"pin": {"cpus": "1"}})
        .replace(duration="7500ms", policies=["tavo"])
        .without_vm("b")
    )
    assert changed.vm_names == ["a", "c"] and scenario.vm_names == ["a", "b"]
    keys = changed.to_dict()
    assert keys["vm"][0] == {"name": "a", "vcpus": 4, "memory": "2GiB", "workload": "povray"}
    assert keys["event"] == [{"at": "2s", "vm": "c", "action": {"pin": {"cpus": "1"}}}]
    assert homenode.Scenario.from_toml(changed.to_toml()) == changed == homenode.Scenario.from_dict(keys)
    assert pickle.loads(pickle.dumps(changed)) == changed != scenario
    runs = homenode.simulate(changed)
    assert [run.policy for run in runs] == ["tavo"] and runs.events["event"] == ["pin"]


def test_a_file_stays_as_it_was_written_until_it_is_changed():
    text = (ROOT / "data/scenarios/churn.toml").read_text()
    assert homenode.Scenario("churn").to_toml() == text and text.startswith("#")
    assert all(homenode.Scenario(name).name == name for name in homenode.Scenario.names())


def test_workloads_beside_a_scenario_become_part_of_it(tmp_path, case, command):
    workload = homenode.Workload("povray")
    (tmp_path / "mine.toml").write_text(workload.to_toml().replace('name = "povray"', 'name = "mine"'))
    case.write_text(case.read_text().replace('workload = "povray"', 'workload = "mine.toml"'))
    scenario = homenode.Scenario(str(case))
    (tmp_path / "mine.toml").rename(tmp_path / "other.toml")
    moved = tmp_path / "moved.toml"
    moved.write_text(scenario.to_toml())
    assert homenode.simulate(moved, "default").vms["workload"] == ["mine", "soplex"]
    assert command.run("sim", moved).returncode == 0
    alone = homenode.Scenario(str(tmp_path / "other.toml"))
    assert alone.vm_names == ["vm1"] and alone == homenode.Scenario.alone(homenode.Workload(str(tmp_path / "other.toml")))


def test_machines_have_what_the_command_says(command):
    machine = homenode.Machine("r910")
    told = command.json("machine", "--preset", "r910")
    assert {key: told[key] for key in machine.to_dict()} == machine.to_dict()
    assert (machine.cpu_count, len(machine.nodes), sum(machine.nodes["memory_bytes"])) == (32, 4, machine.memory_bytes)
    assert machine.distances[0][0] == 10 and len(machine.links) == 12
    assert pickle.loads(pickle.dumps(machine)) == machine != homenode.Machine("r420")
    assert homenode.Machine.from_toml(machine.to_toml()).to_dict() == machine.to_dict()
    assert homenode.Machine.here().cpu_count > 0


def test_workloads_are_read_and_written():
    for name in homenode.Workload.names():
        workload = homenode.Workload(name)
        assert homenode.Workload.from_dict(workload.to_dict()) == workload == pickle.loads(pickle.dumps(workload))
    assert homenode.Workload("cg.B").footprint_bytes(4) > 1 << 20


BAD_FILES = {
    "an unknown key": ("vcpus = 2", "vcpu = 2"),
    "a size that is none": ('memory = "2GiB"', 'memory = "2GB/s"'),
    "an unknown workload": ('workload = "soplex"', 'workload = "soplx"'),
    "an unknown policy": ('"tavo"]', '"tavu"]'),
    "an unknown machine": ('machine = "r420"', 'machine = "r421"'),
    "no TOML": ('name = "case"', "name = "),
    "more vCPUs than CPUs": ("vcpus = 2", "vcpus = 200"),
    "an event of an unknown VM": ('vm = "b"', 'vm = "z"'),
}


@pytest.mark.parametrize("bad", BAD_FILES)
def test_bad_files_are_refused_with_the_commands_sentence(command, case, bad):
    case.write_text(case.read_text().replace(*BAD_FILES[bad], 1))
    status, said = command.complaint("sim", case)
    with pytest.raises(homenode.BadInput) as raised:
        homenode.simulate(case)
    assert (status, said) == (2, str(raised.value))
    assert isinstance(raised.value, homenode.Error)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["sim", "chrn"], lambda: homenode.simulate("chrn")),
        (["sim", "nowhere.toml"], lambda: homenode.Scenario("nowhere.toml")),
        (["sim", "churn", "--machine", "r91"], lambda: homenode.simulate("churn", machine="r91")),
        (["machine", "--preset", "r91"], lambda: homenode.Machine("r91")),
        (["experiment", "nowhere.toml"], lambda: homenode.experiment("nowhere.toml")),
        (["reproduce", "tavi"], lambda: homenode.reproduce("tavi")),
        (["record", "show", "--history", "/nowhere.sqlite"], lambda: homenode.Recording("/nowhere.sqlite")),
        (["whatif", "--scenario", "churn", "--at", "900s"], lambda: homenode.whatif("churn", at="900s")),
    ],
)
def test_bad_names_are_refused_with_the_commands_sentence(command, arguments, asked):
    status, said = command.complaint(*arguments)
    with pytest.raises(homenode.BadInput) as raised:
        asked()
    assert (status, said) == (2, str(raised.value))


def test_what_is_changed_is_checked_as_files_are():
    scenario = homenode.Scenario("churn")
    with pytest.raises(homenode.BadInput, match="unknown key `vcpu`; did you mean `vcpus`"):
        scenario.with_vm(name="x", vcpu=2, memory="1GiB", workload="povray")
    with pytest.raises(homenode.BadInput, match="no VM of the scenario is named `lng`; there are: long, batch, cut"):
        scenario.change_vm("lng", vcpus=2)
    with pytest.raises(homenode.BadInput, match="finite"):
        scenario.change_vm("long", work_share=float("nan"))
    with pytest.raises(TypeError, match="JSON"):
        scenario.change_vm("long", work_share=object())
    with pytest.raises(homenode.BadInput, match="no policies are named `homenod`"):
        homenode.simulate(scenario, ["homenod"])
    with pytest.raises(homenode.BadInput, match="every"):
        homenode.simulate(scenario, every="soon")
    with pytest.raises(homenode.BadInput, match="^config:1:1: unknown key `perod`; did you mean `period`"):
        homenode.simulate(scenario, config={"perod": "1s"})
