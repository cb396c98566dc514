"""Transfers between devices in a step: the copies and exchanges that a framework's profiler saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

import msgspec

from evener.errors import RequestError

from .protocol import BACKENDS


class Transfer(msgspec.Struct, frozen=True):
    """A kind of copy or exchange, over all profiled steps. `moved_bytes` is None where the profiler doesn't say."""

    name: str
    calls: int
    seconds: float
    shortest_seconds: float
    longest_seconds: float
    moved_bytes: int | None = None


Event = tuple[str, float, int | None]  # name, seconds, bytes


def profile(framework: str, run: Callable[[], None]) -> tuple[Transfer, ...]:
    """The copies between devices while `run` ran, the longest first; RequestError without a profiler for it."""
    if framework not in BACKENDS:
        raise RequestError(f"There is no profiler for framework {framework!r}.", "Profile tensorflow or torch.")
    events: Iterable[Event] = import_module(f"{BACKENDS[framework]}.profiler").transfers(run)
    return group_events(events)


def group_events(events: Iterable[Event]) -> tuple[Transfer, ...]:
    """Events of one name as one row."""
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event[0], []).append(event)
    rows = [_row(name, same) for name, same in by_name.items()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))


def _row(name: str, events: list[Event]) -> Transfer:
    times = [seconds for _, seconds, _ in events]
    sizes = [size for _, _, size in events if size is not None]
    moved = sum(sizes) if len(sizes) == len(events) else None
    return Transfer(name, len(events), sum(times), min(times), max(times), moved)
