"""What Textual keeps of closed widgets is let go of, and another Textual that keeps nothing is fine too."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from textual.color import Color

from tui.widgets.keys import forget_drawn


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
    monkeypatch.setitem(sys.modules, "textual._styles_cache", None if left == "no module" else other)  # type: ignore[arg-type]
    forget_drawn()
