"""Lines that a search draws in place on a terminal are removed when it ends, however it ends."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from evener.balancer.events import Event
from evener.errors import NoLayoutError
from evener.tui.cli import session_runner

_CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?25[lh]")


class _Terminal(io.StringIO):
    """Records what is written to it."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        """Return what is left on the screen.

        It interprets text, new lines, carriage returns, cursor up and erased lines.
        """
        rows, row, column, place = [""], 0, 0, 0
        text = self.getvalue()
        while place < len(text):
            control, sign = _CONTROL.match(text, place), text[place]
            place = control.end() if control else place + 1
            if control and control[2] == "A":
                row -= int(control[1] or 1)
            elif control and control[2] == "K":
                rows[row] = ""
            elif sign == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif sign == "\r":
                column = 0
            elif not control:
                rows[row] = f"{rows[row][:column]:<{column}}{sign}{rows[row][column + 1 :]}"
                column += 1
        return [each.rstrip() for each in rows if each.strip()]


class _Interrupted:
    """A session that is interrupted while its first probes run. It has no plan."""

    run_id = "20260922-101320-ab12"

    def __init__(self, events: list[Event], terminal: _Terminal) -> None:
        self._events, self._terminal = events, terminal

    def events(self) -> Iterator[Event]:
        yield from self._events[:3]
        self._terminal.write("^C")  # the terminal's own echo
        signal.raise_signal(signal.SIGINT)
        yield self._events[2]
        raise NoLayoutError("The search was stopped before anything was measured.", "Go on.")

    def stop(self) -> None:
        """Handle the signal."""

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""


def test_after_an_interrupt_nothing_of_the_live_view_is_left(
    events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only messages remain: what ran, that it stops, and why there is no plan."""
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(
        "evener.tui.cli.session_runner.os.write", lambda _, text: terminal.write(text.decode())
    )
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    session: Any = _Interrupted(events, terminal)
    assert session_runner.run_session(session, lambda *_: None, None, False) == 130
    rows = terminal.rows()
    assert rows[0].startswith("run 20260922-101320-ab12: keras_maxer on SIM:0, SIM:1")
    assert rows[1] == "evener: stopping; the best result so far is kept"
    assert rows[2].startswith("evener: The search was stopped")
    assert " doing " in terminal.getvalue()
    assert not any(" doing " in row or "^C" in row for row in rows)
