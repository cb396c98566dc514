"""What Textual keeps of closed widgets is let go of, and another Textual that keeps nothing is fine too."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from textual.color import Color
from textual.dom import DOMNode

from evener.tui.screens.base import forget_drawn, forget_found


def test_the_cache_holds_nothing_afterwards() -> None:
    """As long as Textual has it; the measured leak was this cache's."""
    cache = pytest.importorskip("textual._styles_cache").StylesCache
    if not hasattr(cache.get_inner_outer, "cache_info"):
        pytest.skip("this Textual keeps nothing there")
    black = Color.parse("black")
    cache().get_inner_outer(black, black)
    assert cache.get_inner_outer.cache_info().currsize > 0
    forget_drawn()
    assert cache.get_inner_outer.cache_info().currsize == 0


@pytest.mark.parametrize("left", ["no module", "no class", "no method", "no cache"])
def test_another_textual_has_nothing_to_forget(monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """The module, its class, the method or its cache may go with any release."""
    other = ModuleType("textual._styles_cache")
    if left in ("no method", "no cache"):
        other.StylesCache = type("StylesCache", (), {"get_inner_outer": print} if left == "no cache" else {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "textual._styles_cache", None if left == "no module" else other)
    forget_drawn()


async def test_screens_keep_no_answers_of_before(app_of: Any, script: Any) -> None:
    """Snapshots and keys in turns: what Textual keeps of a screen's queries goes with the line of keys."""
    app = app_of()
    async with app.run_test(size=(120, 40)) as pilot:
        if not hasattr(app.screen, "_query_one_cache"):
            pytest.skip("this Textual keeps nothing there")
        for key, mode in (("1", "monitor"), ("2", "balance"), ("3", "runs")):
            await pilot.press(key)
            assert app.current_mode == mode
            app.publisher.push(script.snapshot())
            await pilot.press("tab", "question_mark", "escape")
            await pilot.pause()
            assert len(app.screen._query_one_cache) < 15, mode


def test_a_textual_that_keeps_no_answers_is_fine() -> None:
    """The private cache may go with any release."""
    node = DOMNode()
    del node._query_one_cache
    forget_found(node)
