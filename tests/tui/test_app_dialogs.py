"""Unusual input: odd paths, a workload without a name, keys pressed in a hurry."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.events import MouseScrollDown
from textual.widgets import Input

from evener.balancer.session_state import SessionState
from evener.balancer.store import runs
from evener.plan.file import load_plan
from evener.tui.screens.balance_form import ANOTHER
from evener.tui.screens.run_dialogs import SaveDialog, plan_dialog
from evener.tui.screens.runs import RunPanel
from evener.tui.view.cells import cells
from evener.tui.widgets.lines import Lines
from evener.tui.widgets.lists import OneOf, Ticks
from tests.support.pilots import open_form, open_runs, text, until
from tests.support.whole_sessions import make_runs

NOBODY = "~nobody-of-that-name/plan.toml"


def _words(app: Any, selector: str) -> str:
    """Return the text without its line breaks."""
    return " ".join(text(app, selector).split())


def _says(app: Any, reason: str) -> bool:
    """Return True once the dialog shows this text."""
    return reason in _words(app, "#hint")


UNWRITABLE = {
    NOBODY: (
        "can't be written: No such file or directory. Name a file in a folder that you may "
        "write to."
    ),
    f"{'x' * 300}.toml": (
        "can't be written: File name too long. Name a file in a folder that you may write to."
    ),
    ".": "doesn't end in .toml or .json. The ending chooses the format.",
    "/proc/self/no/such/place/anywhere/on/this/machine/plan.json": (
        "Name a file in a folder that you may write to."
    ),
}


async def test_a_path_that_cannot_be_written_is_shown_in_full(app_of: Any, plan: Any) -> None:
    """The path has an unknown home, a long name, no name, or is long.

    Each error is in the dialog, which stays open.
    """
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(plan_dialog(app, plan, "20260101-000000-aaaa", None))
        for path, reason in UNWRITABLE.items():
            app.screen.query_one("#path", Input).value = path
            await pilot.press("enter")
            await until(pilot, partial(_says, app, reason), reason)
            assert max(map(len, text(app, "#hint").splitlines())) <= app.screen.text_width, (
                "nothing is cut off at the frame"
            )
            assert isinstance(app.screen, SaveDialog)


@pytest.mark.parametrize("key", ["question_mark", "enter"], ids=("help", "details"))
async def test_no_word_of_a_dialog_is_under_its_scroll_bar(app_of: Any, key: str) -> None:
    """This is checked at the size at which it opens, and at sizes to which the terminal
    is changed.
    """
    app = app_of()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "GPU:0" in text(app, "#devices"), "the first snapshot")
        await pilot.press(key)
        await until(pilot, lambda: app.screen.query("#scroll Lines"), "the dialog")
        for size in ((100, 30), (80, 24), (60, 12)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            shown = app.screen.query_one("#scroll Lines", Lines)
            assert max(map(cells, shown.text.splitlines())) <= shown.size.width, size
        page = app.screen.query_one("#scroll")
        assert page.max_scroll_y > 0, "one that has a scroll bar"
        shown.post_message(MouseScrollDown(shown, 1, 1, 0, 0, 0, False, False, False))
        await until(pilot, lambda: page.scroll_y > 0, "the wheel to scroll it")


async def test_a_run_s_plan_is_exported_however_soon_it_is_requested(
    app_of: Any, tmp_path: Path
) -> None:
    """Nothing needs to be drawn between the key that moves the cursor and the one that exports."""
    app = app_of()
    await asyncio.to_thread(make_runs, 2)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_runs(pilot, 2)
        panel = app.screen.query_one(RunPanel)
        panel.cursor = 1
        app.screen.action_export()
        await until(
            pilot,
            lambda: isinstance(app.screen, SaveDialog) and app.screen.query("#path"),
            "the dialog",
        )
        app.screen.query_one("#path", Input).value = str(tmp_path / "second.toml")
        await pilot.press("enter")
        assert load_plan(tmp_path / "second.toml").workload


@pytest.mark.usefixtures("quick_replays")
async def test_screens_can_be_opened_while_a_run_is_replayed(app_of: Any) -> None:
    app = app_of()
    await asyncio.to_thread(make_runs, 1)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_runs(pilot, 1)
        await pilot.press("r")
        await until(pilot, lambda: app.current_mode == "balance", "the replay")
        await pilot.press("1")
        assert app.current_mode == "monitor"
        await until(
            pilot, lambda: app.balance.finished is not None, "the end of what goes on behind it"
        )
        await pilot.press("2")
        await until(
            pilot,
            lambda: re.search(r"equal shares .* \+\d", _words(app, "#result")),
            "the verdict that came meanwhile",
        )
        await pilot.press("n")
        assert app.balance == SessionState()
        await pilot.press("3")
        assert app.screen.query(RunPanel)


async def test_a_replay_gives_way_to_the_form_and_not_to_a_search(app_of: Any) -> None:
    """The next run replaces a replay in progress; a search continues."""
    app = app_of()
    await asyncio.to_thread(make_runs, 2)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_runs(pilot, 2)
        first, second = (row.run for row in app.screen.query_one(RunPanel).rows)
        app.replay(runs.read_run(first), 0.1)
        assert not app.is_searching
        app.replay(runs.read_run(second), 0.1)
        assert app.balance.run == second
        await pilot.press("2", "n")
        assert app.balance == SessionState()
        app.balance = SessionState(run="20260101-000000-abcd")
        app.replay(runs.read_run(first))
        assert app.balance.run == "20260101-000000-abcd"


async def test_a_typed_workload_runs_in_its_framework(
    app_of: Any, searches: Any, own_folder: Path
) -> None:
    """Typing its name ticks it.

    The framework is the one that its file imports, or the one chosen in the form.
    """
    app = app_of(session_maker=searches)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_form(pilot)
        workloads = app.screen.query_one("#pick-workload", Ticks)
        await pilot.press("ctrl+o")
        for name, imported, presses in (("first.py", "torch", 0), ("second.py", "keras", 2)):
            (own_folder / name).write_text(f"import {imported}\ndef build(): ...\n")
            app.screen.query_one("#own", Input).value = f"{name}:build"
            await until(
                pilot, lambda: workloads.rows[min(workloads.ticked)][0] == ANOTHER, "the tick"
            )
            app.screen.query_one("#framework", OneOf).focus()
            await pilot.press(*["right"] * presses, "ctrl+s")
            await until(pilot, lambda: app.balance.ended, "the search's end")
            assert (searches.requests[-1].workload, searches.requests[-1].framework) == (
                f"{name}:build",
                "torch",
            )
            await pilot.press("n")
            await until(
                pilot, lambda: app.screen.query_one("#switch").current == "setup", "the form again"
            )
        assert len(searches.requests) == 2
