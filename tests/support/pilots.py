"""Helpers for tests of the app with a pilot: wait for a thread or a message, and read a widget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

from evener.tui.screens.dialogs import ChoiceDialog
from evener.tui.screens.runs import RunPanel
from evener.tui.widgets.lines import Lines


async def until(pilot: Pilot[Any], condition: Callable[[], object], what: str) -> None:
    """Wait until it holds; two minutes, as the machine may be at many things at once."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"it never came: {what}"
        await pilot.pause(0.02)


async def open_form(pilot: Pilot[Any]) -> None:
    """The Balance screen with its form, its devices listed."""
    await pilot.press("2")
    await until(pilot, lambda: "[x] GPU:1" in text(pilot.app, "#pick-devices"), "the form")


async def open_runs(pilot: Pilot[Any], count: int) -> RunPanel:
    """The screen of runs, with so many."""
    await pilot.press("3")
    await until(
        pilot,
        lambda: [each.count for each in pilot.app.screen.query(RunPanel)] == [count],
        "the list",
    )
    return pilot.app.screen.query_one(RunPanel)


def text(app: Any, selector: str) -> str:
    """The lines that a widget shows; none of one that isn't there yet."""
    return "\n".join(each.text for each in app.screen.query(selector).results(Lines))


def asks(app: Any, key: str) -> bool:
    """A dialog is in front that takes this key for an answer."""
    return isinstance(app.screen, ChoiceDialog) and key in app.screen.answers
