"""Sweeps: the command's bytes, by threads, by a store and by a Dask cluster that loses a worker."""

import os
import signal
import time

import homenode
import pyarrow.parquet
import pytest

SET = {"vm.b.memory": "2GiB..4GiB/5"}


@pytest.fixture
def told(command, case, tmp_path):
    """The command's output."""
    file = tmp_path / "told.parquet"
    done = command.run("sweep", case, "--set", "vm.b.memory=2GiB..4GiB/5", "--seeds", "1..4", "--jobs", "2", "--parquet", file)
    assert done.returncode == 0, done.stderr
    return file


def same_bytes(swept, told) -> bool:
    """Whether a sweep writes the command's output. Builds of different times differ by the commit that they name."""
    ours = told.with_name("ours.parquet")
    swept.to_parquet(ours)
    of_command = pyarrow.parquet.read_metadata(told).metadata[b"homenode.commit"].decode()
    if of_command == homenode.__commit__:
        return ours.read_bytes() == told.read_bytes()
    return pyarrow.parquet.read_table(ours).equals(pyarrow.parquet.read_table(told))


def test_threads_and_stores_give_the_commands_bytes(command, case, told, tmp_path):
    store = tmp_path / "store"
    swept = homenode.sweep(case, SET, seeds="1..4", jobs=1, store=store)
    assert same_bytes(swept, told)
    kept = {file.name for file in store.iterdir()}
    again = homenode.sweep(homenode.Scenario(str(case)), {"vm.b.memory": SET["vm.b.memory"]}, seeds=[1, 2, 3, 4], store=store)
    assert same_bytes(again, told) and {file.name for file in store.iterdir()} >= kept
    means, runs = swept.means, swept.runs
    assert len(runs) == 4 * len(means) and set(means["count"]) <= {0, 4} and set(runs["seed"]) == {1, 2, 3, 4}
    assert means.columns[:2] == ["vm.b.memory", "policy"] and all(means.about.values())
    printed = command.run("sweep", case, "--set", "vm.b.memory=2GiB..4GiB/5", "--seeds", "1..4", "--csv")
    assert printed.stdout == swept.to_csv()
    plan = tmp_path / "plan.toml"
    plan.write_text(swept.to_plan())
    assert homenode.sweep(plan).means == means


def test_bad_keys_are_refused_with_the_commands_sentence(command, case):
    for key, values in (("vm.c.memory", "1GiB,2GiB"), ("vm.b.memry", "1GiB"), ("vm.b.memory", "1..x")):
        status, said = command.complaint("sweep", case, "--set", f"{key}={values}")
        with pytest.raises(homenode.BadInput) as raised:
            homenode.sweep(case, {key: values})
        assert (status, said) == (2, str(raised.value))
    with pytest.raises(homenode.BadInput, match="a store or a client"):
        homenode.sweep(case, SET, client=object(), store="x")


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=str(tmp_path)) as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_a_cluster_gives_the_same_bytes_though_a_worker_is_killed(client, case, told):
    victim = next(iter(client.run(os.getpid).values()))
    seen = []

    def kill(what, done, count):
        seen.append((what, done, count))
        if done == 3:
            os.kill(victim, signal.SIGKILL)

    swept = homenode.sweep(case, SET, seeds="1..4", runs_per_task=2, client=client, progress=kill)
    assert same_bytes(swept, told)
    assert seen[0] == ("tasks", 1, 20) and seen[-1] == ("tasks", 20, 20)
    deadline = time.monotonic() + 30
    while victim in (alive := client.run(os.getpid).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert victim not in alive, "the worker was not killed, so nothing was shown"


def test_what_fails_on_a_worker_fails_here(client, case):
    worker_fails = homenode.Scenario(str(case)).replace(policies=None)
    with pytest.raises(homenode.Error):
        homenode.sweep(worker_fails, SET, policies=["exec:/nowhere/at-all"], client=client)
