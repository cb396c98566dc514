"""What tests of the app do with a pilot: wait for what a thread or a message brings about, and read a widget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from evener.tui.widgets.lines import Lines


async def until(pilot: Pilot[Any], condition: Callable[[], object], what: str) -> None:
    """Wait until it holds, a few seconds at most."""
    for _ in range(400):
        if condition():
            return
        await pilot.pause(0.02)
    pytest.fail(f"it never came: {what}")


def text(app: Any, selector: str) -> str:
    """The lines that a widget shows."""
    shown: str = app.screen.query_one(selector, Lines).text
    return shown
