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
    """Wait until a condition holds, for up to two minutes, since the machine may be very busy."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"it never came: {what}"
        await pilot.pause(0.02)


async def open_form(pilot: Pilot[Any]) -> None:
    """Open the Balance screen and its form, with the devices listed."""
    await pilot.press("2")
    await until(pilot, lambda: "[x] GPU:1" in text(pilot.app, "#pick-devices"), "the form")


async def open_runs(pilot: Pilot[Any], count: int) -> RunPanel:
    """Open the screen of runs and wait until it lists `count` of them."""
    await pilot.press("3")
    await until(
        pilot,
        lambda: [each.count for each in pilot.app.screen.query(RunPanel)] == [count],
        "the list",
    )
    return pilot.app.screen.query_one(RunPanel)


def text(app: Any, selector: str) -> str:
    """Return the lines that a widget shows; empty if the widget doesn't exist yet."""
    return "\n".join(each.text for each in app.screen.query(selector).results(Lines))


def asks(app: Any, key: str) -> bool:
    """Return whether a dialog is open that takes this key as an answer."""
    return isinstance(app.screen, ChoiceDialog) and key in app.screen.answers
