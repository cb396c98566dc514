"""The journals of trainings: written by the first rank, listed and shown among the runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from evener.balancer.store import runs
from evener.errors import RequestError
from evener.live.files import LiveDevice, LiveRecord, ShareChange
from evener.live.journal import (
    TRAINING_JOURNAL,
    ChangeEntry,
    EndEntry,
    SpeedEntry,
    StartEntry,
    TrainingJournal,
)
from evener.system.files import runs_folder
from evener.tui.cli.main import run as evener

RECORD = LiveRecord(
    "torch",
    "mine.py",
    500.0,
    1,
    1_000.0,
    (LiveDevice("a", 0, 5, 500.0),),
    plan_samples_per_second=900,
)
RETREAT = "b ran out of memory at step 6,600: passes of 3 -> 1 rows, 0.1 s"
CHANGE = ShareChange(40, 1_070.0, (5, 3), (6, 2), "b slower by 40 % since step 31")


def at(seconds: float, step: int, *changes: ShareChange) -> LiveRecord:
    return msgspec.structs.replace(RECORD, updated_at=1_000 + seconds, step=step, changes=changes)


def write(name: str, monkeypatch: pytest.MonkeyPatch, reason: str = "") -> TrainingJournal:
    """Write a training of 100 s with a change of shares.

    It has 100 steps/s in its first 60 s and 50 after that.
    """
    monkeypatch.setenv("EVENER_RUN", name)
    monkeypatch.setenv("EVENER_RESTART", reason)
    monkeypatch.delattr(sys, "last_value", raising=False)  # pytest's, of an earlier test
    journal = TrainingJournal(["a", "b"], [5, 3])
    for record in (
        at(0, 1),
        at(10, 1001),
        at(30, 3001),
        at(60, 6001),
        at(70, 6501, CHANGE),
        at(95, 7751, CHANGE),
    ):
        journal.note_record(record)
        if record.step == 6501:
            journal.note_retreat(RETREAT)
    return journal


def test_a_journal_has_speeds_changes_and_the_end(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("20261122-120000-abc1", monkeypatch).close()
    training = runs.load_training("20261122-120000-abc1")
    assert training is not None
    start, *entries, end = training.entries
    assert isinstance(start, StartEntry)
    assert (start.devices, start.shares, start.plan_samples_per_second) == (("a", "b"), (5, 3), 900)
    assert isinstance(end, EndEntry)
    assert [
        (entry.step, entry.steps_per_second, entry.samples_per_second)
        for entry in entries
        if isinstance(entry, SpeedEntry)
    ] == [(3001, 100, 800), (6001, 100, 800), (7751, 50, 400)]
    assert [entry.change for entry in entries if isinstance(entry, ChangeEntry)] == [CHANGE]
    assert (training.state, training.failure, training.samples_per_second) == ("finished", "", 400)


def test_a_change_after_the_last_report_is_in_the_journal(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training may end less than half a second after its last change of shares."""
    journal = write("20261122-120000-abc3", monkeypatch)
    last = msgspec.structs.replace(CHANGE, step=9000, before=(6, 2), after=(5, 3))
    journal.note_change(last)
    journal.close()
    training = runs.load_training("20261122-120000-abc3")
    assert training is not None
    changes = [each.change for each in training.entries if isinstance(each, ChangeEntry)]
    assert changes == [CHANGE, last]


def test_runs_lists_and_shows_trainings_and_last_means_the_last_search(
    own_state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first processes are killed, the next ones exit by themselves."""
    name = "20261122-120000-abc1"
    write(name, monkeypatch)
    os.truncate(
        runs_folder() / name / TRAINING_JOURNAL,
        (runs_folder() / name / TRAINING_JOURNAL).stat().st_size - 9,
    )
    assert [one.state for one in runs.list_runs()] == ["running"]
    with pytest.raises(RequestError, match="is going on"):
        runs.delete_run(name)
    write("20261122-120000-abc2", monkeypatch, "rank 1 was ended by SIGKILL").close()
    assert evener(["runs", "show", "20261122-120000-abc2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "training 20261122-120000-abc2: mine.py, torch, 1970-01-01 00:16:40 UTC"
    assert said[1].startswith("finished, ")
    assert said[2:-1] == [
        (
            "  00:16:40  started again: 5+3 rows on a, b; the plan says 900.0 samples/s (rank 1 "
            "was ended by SIGKILL)"
        ),
        "  00:17:10  step 3 001: 100 steps/s, 800.0 samples/s",
        "  00:17:40  step 6 001: 100 steps/s, 800.0 samples/s",
        "  00:17:50  b slower by 40 % since step 31: 5+3 → 6+2",
        f"  {said[-3].split()[0]}  {RETREAT}",
        "  00:18:15  step 7 751: 50 steps/s, 400.0 samples/s",
    ]
    assert evener(["runs", "show", "20261122-120000-abc2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["entry"] == "started"
    assert evener(["runs", "list"]) == 0
    assert "mine.py" in capsys.readouterr().out
    assert evener(["export", "last", "-o", "plan.toml"]) == 2
    assert "is a training, and measured nothing." in capsys.readouterr().err
    assert [one.kind for one in runs.list_runs()] == ["training", "training"]


PROGRAM = """
import os, time
from evener.live.reporter import Reporter
from evener.system.files import runs_folder
from evener.live.journal import TrainingJournal
reporter = Reporter(journal=TrainingJournal(["a"], [4]))
while not list(runs_folder().glob("*/training.jsonl")):
    reporter.report(4, devices=["a"], workload="mine", framework="torch")
    time.sleep(0.02)
if os.environ["END"] == "killed":
    os.kill(os.getpid(), 9)
if os.environ["END"] == "interrupted":
    raise KeyboardInterrupt
if os.environ["END"] == "failed":
    raise ValueError("wrong shape")
"""


@pytest.mark.parametrize(
    ("end", "state"),
    [("killed", "stopped"), ("interrupted", "stopped"), ("failed", "failed"), ("", "finished")],
)
def test_how_a_training_ended_is_what_its_journal_says(
    own_state: Path, tmp_path: Path, end: str, state: str
) -> None:
    variables = {
        "END": end,
        "EVENER_RUN": "20261122-120000-abc1",
        "EVENER_LIVE_DIR": str(tmp_path / "live"),
    }
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (end == "killed") == (done.returncode == -9), done.stderr
    (found,) = runs.list_runs()
    assert (found.state, found.kind, found.devices) == (state, "training", ("a",))
    assert found.trouble == ("ValueError: wrong shape" if end == "failed" else "")


def test_a_folder_that_cannot_be_written_is_one_warning(
    own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_RUN", "20261122-120000-abc1")
    (runs_folder() / "20261122-120000-abc1").write_text("in the way")
    journal = TrainingJournal(["a"], [4])
    with pytest.warns(UserWarning, match="journal can't be written"):
        journal.note_record(RECORD)
    journal.note_record(at(40, 9))
    journal.close()


@pytest.mark.parametrize(
    "line",
    [
        b'{"entry":"speed","at":1e300,"step":1,"steps_per_second":1,"samples_per_second":1}',
        b'{"entry":"speed","at":1,"step":-1,"steps_per_second":1,"samples_per_second":1}',
        b'{"entry":"header"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_line_that_no_training_writes_is_a_one_line_error(
    line: bytes,
    own_state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("20261122-120000-abc1", monkeypatch).close()
    path = runs_folder() / "20261122-120000-abc1" / TRAINING_JOURNAL
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert evener(["runs", "show", "20261122-120000-abc1"]) == 2
    assert "is broken" in capsys.readouterr().err


def test_odd_numbers_and_texts_are_shown_without_harm(
    own_state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENER_RUN", "20261122-120000-abc1")
    journal = TrainingJournal(["\x1b[2Ja"], [0])
    journal.note_record(at(0, 1, msgspec.structs.replace(CHANGE, at=1e18, reason="\x1b[31m")))
    journal.close()
    for command in ("show", "list"):
        assert evener(["runs", *([command, "last"] if command == "show" else [command])]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_broken_line_is_named(own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("20261122-120000-abc1", monkeypatch).close()
    path = runs_folder() / "20261122-120000-abc1" / TRAINING_JOURNAL
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{", *lines[1:], ""]))
    (found,) = runs.list_runs()
    assert found.state == "unreadable"
    assert "line 2 is broken" in found.trouble
    runs.delete_run(found.run)
    assert runs.list_runs() == ()


def test_an_entry_that_ctrl_c_has_interrupted_is_written_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first entry can be interrupted while its folder is created."""
    monkeypatch.setenv("EVENER_RUN", "20261122-120000-abc9")
    journal = TrainingJournal(["a"], [4])
    with monkeypatch.context() as patched:
        patched.setattr("evener.live.journal._open_journal", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            journal.note_record(RECORD)
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    journal.note_record(RECORD)
    journal.close()
    training = runs.load_training("20261122-120000-abc9")
    assert training is not None
    assert [type(entry) for entry in training.entries] == [StartEntry]


def _interrupt(_: str) -> int:
    raise KeyboardInterrupt
