"""Which waits within a pass a rank's timer leaves out of its own work."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
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
    monkeypatch.setattr(waits, "_timers", [weakref.ref(timer)])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    for name in ("wait_event", "wait_stream"):
        waits._time_waits_in(Stream, name, waits._is_current)
    communicating.wait_stream(computing)
    assert communicating.waited
    assert not timer.seen
    computing.wait_event(communicating)
    assert timer.seen == ["begins", "ends"]


def count_calls(function: Callable[[], Any]) -> int:
    """Return the number of Python functions that a call of `function` runs, without it."""
    calls = -1

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def test_a_library_s_collective_and_its_wait_cost_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeRO-3 has hundreds of them in a step, whose time is its host's."""
    from evener.program.program import PROGRAM

    library = types.ModuleType("deepspeed.comm")
    exec("def reduce(run): return run(sum, None, ([1],), {})", vars(library))
    library.reduce(PROGRAM.run_collective)  # what is looked up once is kept
    assert count_calls(lambda: library.reduce(PROGRAM.run_collective)) <= 10

    timer = Timer()
    monkeypatch.setattr(waits, "_timers", [weakref.ref(timer)])
    own = type("Work", (), {"wait": lambda _: None})
    waits._time_waits_in(own, "wait")
    assert count_calls(own().wait) <= 4
    assert timer.seen == ["begins", "ends"]
