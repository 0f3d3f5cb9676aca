"""Records on disk by agents and the plugin."""

import csv
import io

import homenode
import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def history(tmp_path_factory, command):
    folder = tmp_path_factory.mktemp("history")
    file = folder / "history.sqlite"
    stored = ["--state", folder / "state", "--history", file]
    # TAVO assigns homes at once; the product may see no reason to in such a short time.
    done = command.run("run", "--host", "twin", "--policies", "tavo", *stored, "--duration", "20s", "--json")
    assert done.returncode == 0, done.stderr
    return file


def test_a_recording_is_what_the_command_exports(command, history):
    recording = homenode.Recording(str(history))
    printed = command.run("record", "export", "--history", history, "--csv")
    assert printed.returncode == 0, printed.stderr
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    vms = recording.vms()
    assert len(rows) == len(vms) > 20
    assert [row["vm"] for row in rows] == vms["vm"]
    assert [int(row["at_ns"]) for row in rows] == vms["at_ns"]
    assert [float(row["cpus_used"]) if row["cpus_used"] else None for row in rows] == vms["cpus_used"]
    one = vms["vm"][0]
    assert set(recording.vms(vm=one)["vm"]) == {one}
    assert max(recording.vms(to_ns=vms["wall_ns"][9])["wall_ns"]) <= vms["wall_ns"][9]
    assert len(recording.runs) == 1


def test_events_of_a_recording_are_selected(command, history):
    recording = homenode.Recording(str(history))
    events = recording.events()
    told = command.json("record", "show", "--history", history)
    assert events["id"] == [event["id"] for event in told["events"]] and len(events) > 3
    assert events["text"] == [event["text"] for event in told["events"]]
    decided = recording.events(kind="decided")
    assert 0 < len(decided) < len(events) and set(decided["kind"]) == {"decided"}


def test_a_file_that_is_no_recording_is_refused(tmp_path):
    (tmp_path / "no").write_text("nothing of the kind, and long enough to be read as a file of some kind")
    with pytest.raises(homenode.Error):
        homenode.Recording(str(tmp_path / "no"))


def test_logs_of_pages_are_read():
    whole = homenode.PageLog(str(ROOT / "fuzz/corpus/page_log/whole.log"))
    assert whole.missing is None and whole.frames > 0
    windows, pages = whole.windows, whole.pages()
    assert len(windows) > 0 and set(pages["window"]) <= set(windows["window"])
    assert all(frame < whole.frames for frame in pages["frame"])
    label = windows["label"][0]
    assert len(whole.pages(label)) <= len(pages) and len(whole.pages("no such label")) == 0
    torn = homenode.PageLog(str(ROOT / "fuzz/corpus/page_log/torn.log"))
    assert "missing" in torn.missing
    with pytest.raises(homenode.BadInput, match="not a log of pages"):
        homenode.PageLog(str(ROOT / "README.md"))
    with pytest.raises(homenode.Failed, match="nowhere.log"):
        homenode.PageLog("nowhere.log")
