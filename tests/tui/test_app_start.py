"""The app starts in the same way on every Python, though from 3.12 on Textual runs new tasks at
once.
"""

from __future__ import annotations

from typing import Any

from textual.screen import Screen

from evener.tui.screens.balance import BalanceScreen
from evener.tui.screens.monitor import MonitorScreen


async def test_a_screen_is_made_only_when_another_is_on_the_stack(app_of: Any) -> None:
    """Widgets of a new screen may need the app's screen while they are mounted, before theirs is on
    the stack.
    """
    app = app_of()
    there: list[int] = []

    def counted(kind: type[Screen[None]]) -> Any:
        def make() -> Screen[None]:
            there.append(len(app.screen_stack))
            return kind()

        return make

    app._modes = {"monitor": counted(MonitorScreen), "balance": counted(BalanceScreen)}
    async with app.run_test(size=(120, 40)) as pilot:
        assert app.current_mode == "monitor"
        await pilot.press("2")
        await pilot.pause()
        assert app.current_mode == "balance"
    assert there == [1, 1]
