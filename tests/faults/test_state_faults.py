"""The state folder with a group-writable umask, on a full disk, or without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer.store import runs
from evener.balancer.store.locks import lock_devices, lock_run
from evener.balancer.store.runs import run_folder
from evener.devices.discover import discover
from evener.errors import RequestError
from evener.live.files import LiveRecord, live_folders, prepare_folder
from evener.live.journal import TRAINING_JOURNAL, SpeedEntry, StartEntry, TrainingJournal
from evener.system.files import runs_folder, state_folder
from evener.tui.base_app import write_crash_log
from evener.tui.cli.main import run
from tests.support.small_disk import fill


@pytest.fixture
def group_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A umask of 002, as with one group per user, and no folder for runtime files."""
    earlier = os.umask(0o002)
    monkeypatch.delenv("EVENER_LIVE_DIR", raising=False)
    monkeypatch.setattr("evener.live.files._is_private", lambda _: False)
    yield
    os.umask(earlier)


@pytest.mark.usefixtures("group_writes")
@pytest.mark.parametrize("first", ["a training", "a crash", "a search"])
def test_the_state_folder_is_private_whichever_command_makes_it(
    own_state: Path, first: str
) -> None:
    if first == "a training":
        prepare_folder(live_folders()[0])
    elif first == "a crash":
        assert write_crash_log(ValueError("a defect"))
    assert runs_folder() == own_state / "evener" / "runs"
    made = [own_state, *(path for path in own_state.rglob("*") if path.is_dir())]
    assert len(made) >= (3 if first == "a search" else 4)
    assert {oct(path.stat().st_mode & 0o777) for path in made} == {"0o700"}


def test_an_own_folder_that_others_may_write_is_reported_with_the_remedy(
    own_state: Path,
) -> None:
    state_folder().chmod(0o775)
    with pytest.raises(RequestError, match="may be written by others") as fault:
        runs_folder()
    assert f"chmod 700 {own_state / 'evener'}" in fault.value.remedy


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_disk_without_room_for_a_lock_is_a_one_line_error(
    small_disk: Path,
    more: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The lock file can be created but not written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk))
    words = ["balance", "--devices", "cpu", "--workload", "synthetic", *more]
    runs_folder()
    fill(small_disk, 0)
    assert run(words) == 2
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    if more:
        assert "No space left" in json.loads(said.out)["error"]["message"]
    else:
        (line,) = said.err.strip().splitlines()
        assert "No space left" in line


def test_a_trainings_journal_goes_on_when_a_full_disk_has_room_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal stays readable meanwhile, also after the run restarted on the full disk."""
    monkeypatch.setenv("XDG_STATE_HOME", str(small_disk))
    monkeypatch.setenv("EVENER_RUN", "20261128-000000-0001")
    record = LiveRecord("torch", "train.py", 100.0, 0, 1e9, ())
    reports = [
        msgspec.structs.replace(record, step=step, updated_at=1e9 + 40 * step)
        for step in range(200)
    ]
    journal = TrainingJournal(["a", "b"], [6, 2])
    journal.note_record(reports[0])
    fill(small_disk, 0)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for report in reports[1:150]:
            journal.note_record(report)
    assert ["No space left" in str(each.message) for each in warned] == [True]
    assert 2 < len(speeds()) < 149
    (small_disk / "filler").unlink()
    for report in reports[150:]:
        journal.note_record(report)
    assert [speed.step for speed in speeds()] == list(range(1, 200))
    os.close(journal._descriptor)  # like a kill
    fill(small_disk, 0)
    again = TrainingJournal(["a", "b"], [6, 2])
    for report in reports[:150]:
        with warnings.catch_warnings(action="ignore"):
            again.note_record(report)
    assert len(speeds()) >= 199
    (small_disk / "filler").unlink()
    again.close()
    found = runs.load_training("20261128-000000-0001")
    assert found is not None
    assert sum(isinstance(entry, StartEntry) for entry in found.entries) == 2
    assert found.state == "finished"


def speeds() -> list[SpeedEntry]:
    """Return the speed entries in the training run's journal."""
    found = runs.load_training("20261128-000000-0001")
    assert found is not None
    return [entry for entry in found.entries if isinstance(entry, SpeedEntry)]


@pytest.mark.parametrize("left", [1, 20, 100_000])
def test_a_line_that_a_kill_left_incomplete_is_cut_off_when_the_training_starts_again(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_RUN", "20261128-000000-0001")
    record = LiveRecord("torch", "train.py", 100.0, 0, 1e9, ())
    journal = TrainingJournal(["a"], [8])
    journal.note_record(record)
    journal.note_record(msgspec.structs.replace(record, step=9, updated_at=1e9 + 40))
    with (run_folder("20261128-000000-0001") / TRAINING_JOURNAL).open("ab") as stream:
        stream.write(b'{"entry":"speed","at":' + b"1" * left)
    again = TrainingJournal(["a"], [8])
    again.note_record(record)
    found = runs.load_training("20261128-000000-0001")
    assert found is not None
    assert [type(entry) for entry in found.entries] == [StartEntry, SpeedEntry, StartEntry]
    journal.close()
    again.close()


def test_a_pipe_in_place_of_a_trainings_journal_is_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVENER_RUN", "20261128-000000-0001")
    folder = run_folder("20261128-000000-0001")
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / TRAINING_JOURNAL)
    journal = TrainingJournal(["a"], [8])
    with pytest.warns(UserWarning, match="is not a plain file"):
        journal.note_record(LiveRecord("torch", "train.py", 100.0, 0, 1e9, ()))
    journal.close()


def test_a_file_system_without_locks_is_not_a_run_that_is_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (runs_folder() / "one").mkdir(mode=0o700)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    for take in (
        lambda: lock_run(run_folder("one")),
        lambda: lock_devices("one", discover("cpu").devices),
    ):
        with pytest.raises(RequestError, match="No locks available") as fault:
            take()
        assert "XDG_STATE_HOME" in fault.value.remedy
