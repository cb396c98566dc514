"""Panels reuse unchanged rows, and draw what Textual would draw for the whole widget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.geometry import Region
from textual.widget import Widget

from evener.tui.widgets.lines import Lines
from tests.support.pilots import text, until


def _kept_and_new(app: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every panel's rows, as kept and as Textual draws all of them."""
    shown = [each for each in app.screen.query(Lines) if each.display and each.outer_size]
    crops = {each: Region(0, 0, *each.outer_size) for each in shown}
    kept = {each.id: list(each.render_lines(crops[each])) for each in shown}
    for each in shown:
        each.refresh()
    return kept, {each.id: Widget.render_lines(each, crops[each]) for each in shown}


@pytest.mark.parametrize(("filters", "size"), [(True, (160, 48)), (False, (80, 24))])
async def test_kept_rows_are_those_that_would_be_drawn(
    app_of: Any, script: Any, monkeypatch: pytest.MonkeyPatch, filters: bool, size: tuple[int, int]
) -> None:
    """They are after ticks, another focus, a dialog, another size and other colours.

    This is checked with and without NO_COLOR.
    """
    monkeypatch.setenv("NO_COLOR", "1") if filters else monkeypatch.delenv(
        "NO_COLOR", raising=False
    )
    app = app_of(script.snapshot(2))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "GPU:1" in text(app, "#devices"), "the first snapshot")

        async def sample(count: int) -> None:
            app.publisher.push(script.snapshot(count))
            await pilot.pause()

        async def dialog(_: int) -> None:
            await pilot.press("question_mark")
            await pilot.press("escape")

        steps: tuple[Callable[[int], Any], ...] = (
            sample,
            lambda _: pilot.press("tab"),
            lambda _: pilot.press("down"),
            dialog,
            lambda count: pilot.resize_terminal(size[0] - 10 * (count % 2), size[1]),
            lambda _: pilot.press("T"),
            lambda _: pilot.press("p"),
        )
        for count, step in enumerate(steps, start=1):
            await sample(3 - count % 2)
            await step(3)
            await pilot.pause()
            kept, new = _kept_and_new(app)
            assert len(kept) >= 5
            assert kept == new, count
