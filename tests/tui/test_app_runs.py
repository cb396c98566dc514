"""The list of runs: continued, annotated, sorted, filtered and marked; tracebacks and reports by a
key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

import evener
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.errors import DeviceError, NoLayoutError
from evener.live.files import LiveRecord
from evener.live.journal import TrainingJournal
from evener.tui.screens.dialogs import DetailsDialog
from evener.tui.screens.run_dialogs import ContinueDialog, SaveDialog
from tests.support.pilots import open_runs, text, until

PAIR = "sim:gtx1080ti,gtx1080"
BOOM = """
def build():
    raise ValueError("the width 63 does not fit")
"""


def _search(**asked: Any) -> None:
    session = Session(open_run(Request(**asked)))
    try:
        list(session.events())
    except NoLayoutError:
        pass
    finally:
        session.close()


async def _dialog(pilot: Pilot[Any], kind: type[Any]) -> None:
    await until(
        pilot,
        lambda: isinstance(pilot.app.screen, kind) and pilot.app.screen.query("Text"),
        "the dialog",
    )


async def test_a_run_that_ended_is_continued_for_as_long_as_is_asked(app_of: Any) -> None:
    """Its measurements are kept, and the Balance screen shows the new ones."""
    await asyncio.to_thread(_search, devices=PAIR, budget_seconds=30.0)
    before = runs.list_runs()[0]
    app = app_of()
    async with app.run_test(size=(120, 36)) as pilot:
        await open_runs(pilot, 1)
        await pilot.press("c")
        await _dialog(pilot, ContinueDialog)
        field = app.screen.query_one("#line", Input)
        assert field.value == "300s"
        field.value = "soon"
        await pilot.press("enter")
        await until(pilot, lambda: "is not a time" in text(app, "#hint"), "what is wrong")
        field.value = "10s"
        await pilot.press("enter")
        await until(pilot, lambda: app.current_mode == "balance", "the search")
        await until(pilot, lambda: app.balance.probes >= before.probes, "what is kept is counted")
        await until(
            pilot, lambda: app.balance.finished is not None and app.balance.ended, "its end"
        )
        assert (app.balance.run, app.balance.fault) == (before.run, "")
        assert app.balance.probes > before.probes
        await until(
            pilot, lambda: app.screen.check_action("go_on", ()), "and it can be continued again"
        )


async def test_a_run_that_cannot_go_on_says_so_and_loses_nothing(
    app_of: Any, events: Any, session_of: Any
) -> None:
    """The Balance screen keeps its content."""
    await asyncio.to_thread(_search, devices=PAIR)
    faults: list[str] = []

    def make(_request: Any, **resumed: Any) -> Any:
        if resumed:
            raise DeviceError("GPU:0 is gone.", "Look for it.")
        return session_of(events)

    app = app_of(session_maker=make)
    app.notify = lambda text, **_: faults.append(text)
    async with app.run_test(size=(120, 36)) as pilot:
        app.start_session(Request(), app.trainable)
        await until(pilot, lambda: app.balance.ended, "the search before")
        await open_runs(pilot, 1)
        await pilot.press("c")
        await _dialog(pilot, ContinueDialog)
        await pilot.press("enter")
        await until(pilot, lambda: "GPU:0 is gone. Look for it." in faults, "the reason")
        assert app.balance.finished is not None


async def test_the_list_is_sorted_filtered_and_marked(app_of: Any) -> None:
    """The heading counts the hidden rows, with or without a frame."""
    await asyncio.to_thread(_search, devices=PAIR)
    await asyncio.to_thread(_search, devices="sim:gtx1080", workload="keras_gru")
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await open_runs(pilot, 2)
        newest, oldest = [row.run for row in panel.rows]
        await pilot.press("S")
        assert [row.run for row in panel.rows] == [oldest, newest]
        assert [row.run for row in panel.chosen_rows] == [newest], "the cursor stays on its run"
        await pilot.press("slash", *"gru", "enter")
        assert [row.run for row in panel.rows] == [newest]
        assert " 1 of 2: gru" in text(app, "#runs").splitlines()[0]
        await pilot.press("escape", "home", "space", "space", "d")
        await pilot.pause()
        assert "Delete 2 runs" in text(app, "#question")
        await pilot.press("y")
        await until(pilot, lambda: not runs.list_runs(), "both are gone")


async def test_a_failed_run_says_why_and_shows_its_traceback_whole(
    app_of: Any, tmp_path: Path
) -> None:
    """A key shows the file. The state is a word that a filter finds."""
    run = "29991231-120000-aaaa"  # the newest
    await asyncio.to_thread(_search, devices="sim:gtx1080")
    kept = runs.list_runs()[0].run
    folder = runs.run_folder(kept).with_name(run)
    folder.mkdir(mode=0o700)
    (folder / "journal.jsonl").write_text("not a journal\n")
    (folder / "errors.txt").write_text(
        "Traceback:\n" + BOOM + "word " * 60 + "\nValueError: the last line\n"
    )
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await open_runs(pilot, 2)
        assert [row.run for row in panel.chosen_rows] == [run]
        await pilot.press("t")
        await _dialog(pilot, DetailsDialog)
        shown = app.screen.query_one("Text").text
        assert "ValueError: the last line" in shown
        assert shown.replace("\n", "").count("word ") == 60, "long lines are broken, not cut"
        await pilot.press("escape", "slash", *"finished")
        await until(
            pilot, lambda: [row.run for row in panel.rows] == [kept], "without the failed one"
        )
        assert not app.screen.check_action("traceback", ())


@pytest.mark.usefixtures("quick_replays")
async def test_a_failed_run_is_replayed_as_one_that_failed(app_of: Any) -> None:
    """A key shows its traceback there too, beginning with the user's own code."""
    await asyncio.to_thread(_search, devices="sim:gtx1080")
    journal = runs.journal_path(runs.list_runs()[0].run)
    *entries, _ended = journal.read_text().splitlines()
    failed = '{"entry":"failed","message":"Nothing could be measured.","at_seconds":9.0}'
    journal.write_text("\n".join([*entries, failed, ""]))
    frames = (
        (evener.__file__, "import_module"),
        ("/home/ada/train.py", "build"),
        (asyncio.__file__, "run"),
    )
    text_of_all = "".join(
        f'  File "{file}", line 7, in {name}\n    {name}()\n' for file, name in frames
    )
    journal.with_name("errors.txt").write_text(f"Traceback:\n{text_of_all}KeyError: 3\n")
    app = app_of()
    async with app.run_test(size=(120, 36)) as pilot:
        await open_runs(pilot, 1)
        await pilot.press("r")
        await until(
            pilot, lambda: app.screen.query("#search-devices") and app.balance.ended, "its end"
        )
        await until(pilot, lambda: "✗ failed" in text(app, "#search-devices"), "how it ended")
        assert "Nothing could be measured." in text(app, "#story")
        await pilot.press("t")
        await _dialog(pilot, DetailsDialog)
        own = '  File "/home/ada/train.py", line 7, in build\n    build()\n'
        shown = "\n".join(map(str.rstrip, app.screen.query_one("Text").text.splitlines()))
        assert f"Your own code:\n{own}\nTraceback:" in shown


async def test_a_report_is_written_from_the_list(app_of: Any, tmp_path: Path) -> None:
    await asyncio.to_thread(_search, devices="sim:gtx1080")
    app = app_of()
    async with app.run_test(size=(120, 36)) as pilot:
        await open_runs(pilot, 1)
        await pilot.press("w")
        await _dialog(pilot, SaveDialog)
        app.screen.query_one("#path", Input).value = str(tmp_path / "run.html")
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, SaveDialog), "the file")
        assert "<html" in (tmp_path / "run.html").read_text()


@pytest.mark.usefixtures("quick_replays")
async def test_a_read_only_app_starts_no_search_and_changes_no_run(app_of: Any) -> None:
    """Runs can be read and replayed."""
    await asyncio.to_thread(_search, devices=PAIR)
    app = app_of(readonly=True)
    async with app.run_test(size=(120, 36)) as pilot:
        await open_runs(pilot, 1)
        for key in ("c", "e", "w", "d", "n"):
            await pilot.press(key)
            assert app.screen.NAME == "runs", key
        app.start_session(Request(devices=PAIR), ())
        assert not app.balance.active
        await pilot.press("r")
        await until(pilot, lambda: app.balance.finished, "the replay")
        assert not app.screen.check_action("export", ())
    assert len(runs.list_runs()) == 1


async def test_a_training_shows_what_its_journal_has_and_can_only_be_deleted(
    app_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_RUN", "20261122-120000-abc1")
    monkeypatch.setenv("EVENER_RESTART", "rank 1 was ended by SIGKILL")
    journal = TrainingJournal(["GPU:0"], [8])
    journal.note_record(LiveRecord("torch", "mine.py", 0.0, 1, 1_000.0, ()))
    journal.close()
    app = app_of()
    async with app.run_test(size=(120, 36)) as pilot:
        await open_runs(pilot, 1)
        await until(
            pilot, lambda: "started again: 8 rows on GPU:0" in text(app, "#left"), "the journal"
        )
        assert app.screen.check_action("delete", ())
        assert not any(
            app.screen.check_action(name, ()) for name in ("go_on", "export", "report", "replay")
        )
