"""Which waits within a pass a rank's timer leaves out of its own work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frameworks import skip_without

skip_without("torch")

import torch  # noqa: E402

from evener.torch.ranks import waits  # noqa: E402


class Stream:
    """A stream of a GPU that isn't here."""

    device = 0

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other)

    def wait_event(self, _: Any) -> None:
        self.waited = True


class Timer:
    """Records the beginnings and ends of waits."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_wait(self) -> bool:
        self.seen.append("begins")
        return True

    def end_wait(self) -> None:
        self.seen.append("ends")


def test_only_the_stream_that_computes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams that communicate wait for it, too, which takes no time of its own work."""
    computing, communicating, timer = Stream(), Stream(), Timer()
    monkeypatch.setattr(waits, "_timers", [timer])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    for name in ("wait_event", "wait_stream"):
        waits._time_waits_in(Stream, name, waits._is_current)
    communicating.wait_stream(computing)
    assert communicating.waited
    assert not timer.seen
    computing.wait_event(communicating)
    assert timer.seen == ["begins", "ends"]
