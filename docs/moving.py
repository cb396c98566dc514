"""Makes README's moving picture, docs/pictures/evener.svg: the app of `evener demo`, first the
result, then the search that found it, then a training whose shares change.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from textual.pilot import Pilot

from docs.animation import animate
from evener.balancer.events import Event, EventThread, Finished
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.devices.sampler import History, Sampler, Subscriber
from evener.devices.types import HostSample, Snapshot
from evener.tui.app import EvenerApp
from evener.tui.simulated_training import PAIR, TrainingSource

SIZE = (110, 36)
SEARCH_SECONDS = (1, 2, 3, 4, 6, 8, 9, 11, 13, 15, 17, 19, 21, 24, 27, 30, 33, 36, 39, 42, 45, 48)
TRAINING_SECONDS = (3, 6, 9, 11, 12, 13, 15, 17, 20, 23, 26, 30, 35, 40, 44, 46, 47, 50, 54, 58)
FRAME_SECONDS, MONITOR_SECONDS, VERDICT_SECONDS, LAST_SECONDS = 0.45, 1.5, 5.0, 3.0
FIRST_SECONDS = 4.0  # the result, before the story of how it was found
LONGER = {
    9: 2.0,
    11: 2.0,
    13: 2.0,
    44: 1.5,
    50: 1.5,
}  # frames of the training that are worth a look


class _Publisher(Sampler):
    """Publishes a reading whenever the picture's clock moves on; no thread polls."""

    def __init__(self, at_seconds: float, host: HostSample) -> None:
        self.clock = 0.0
        self.training = TrainingSource(lambda: self.clock)
        super().__init__(self.training)
        self._at, self._host, self._history = at_seconds, host, History(600)
        self._tell: Subscriber = print

    def start(self, subscriber: Subscriber | None = None) -> None:
        """Publish the first reading."""
        self._tell = subscriber or self._tell
        self.move(1)

    def move(self, seconds: float) -> None:
        """Publish a reading for each second."""
        for _ in range(round(seconds)):
            self.clock += 1.0
            self._tell(self._read())

    def _read(self) -> Snapshot:
        read = self.source.sample()
        moved = self._at + self.clock - read.at_seconds
        reports = tuple(
            msgspec.structs.replace(
                each,
                updated_at=each.updated_at + moved,
                changes=tuple(
                    msgspec.structs.replace(one, at=one.at + moved) for one in each.changes
                ),
            )
            for each in read.reports
        )
        last = msgspec.structs.replace(
            read,
            at_seconds=self._at + self.clock,
            host=self._host,
            reports=reports,
            sampling_seconds=0.001,
        )
        self._history.add(last)
        return last

    def history(self, key: str, metric: str, newest: int = 600) -> tuple[float | None, ...]:
        """A metric's newest values."""
        return self._history.values(key, metric, newest)

    def close(self, wait_seconds: float = 0.0) -> bool:
        """Nothing to stop."""
        return True


class _Gated(EventThread):
    """A search that was made before, and reports as far as it may."""

    def __init__(self, events: Sequence[Event]) -> None:
        super().__init__()
        self._recorded, self._until, self._more = events, 0.0, threading.Condition()

    def allow(self, seconds: float) -> None:
        """Report what came until then."""
        with self._more:
            self._until = seconds
            self._more.notify()

    def _work(self) -> None:
        for event in self._recorded:
            with self._more:
                self._more.wait_for(partial(self._may_report, _at(event)))
            self._emit(event)

    def _may_report(self, at_seconds: float) -> bool:
        return at_seconds <= self._until or self._halt.is_set()


def _at(event: Event) -> float:
    return float(getattr(event, "at_seconds", 0.0))


def _search() -> tuple[Event, ...]:
    session = Session(open_run(Request(devices=PAIR, pace=0.001)))
    try:
        events = tuple(session.events())
    finally:
        session.close()
    return tuple(
        msgspec.structs.replace(e, run="20261126-093000-a1b2") if hasattr(e, "run") else e
        for e in events
    )


async def _wait(pilot: Pilot[int], condition: Any) -> None:
    for _ in range(600):
        if condition():
            return
        await pilot.pause(0.02)
    raise RuntimeError("the picture did not appear")


async def draw(at_seconds: float, host: HostSample, font: str) -> str:
    """The moving picture."""
    random.seed(0)
    events = await asyncio.to_thread(_search)
    publisher, gate = _Publisher(at_seconds, host), _Gated(events)
    app = EvenerApp(
        publisher,
        devices=PAIR,
        trainable=publisher.training.devices(),
        session_maker=lambda _request: gate,
    )
    frames: list[tuple[str, float]] = []

    async def keep(seconds: float) -> None:
        await pilot.pause(0.15)
        frames.append((app.export_screenshot(title="evener"), seconds))

    async with app.run_test(size=SIZE) as pilot:
        await keep(MONITOR_SECONDS)
        app.start_session(Request(devices=PAIR), app.trainable)
        await pilot.press("2")
        for seconds in (*SEARCH_SECONDS, 1e9):
            newest = max(_at(event) for event in events if _at(event) <= seconds)
            gate.allow(seconds)
            await _wait(pilot, lambda newest=newest: app.balance.at_seconds >= newest)
            if seconds == 1e9:
                await _wait(pilot, lambda: app.balance.ended)
            publisher.move(1)
            await keep(VERDICT_SECONDS if seconds == 1e9 else FRAME_SECONDS)
        frames.insert(0, (frames[-1][0], FIRST_SECONDS))
        (plan,) = (event.plan for event in events if isinstance(event, Finished))
        publisher.training.train(plan)
        begun = publisher.clock
        await pilot.press("4")
        for second in TRAINING_SECONDS:
            publisher.move(begun + second - publisher.clock)
            last = second == TRAINING_SECONDS[-1]
            await keep(LAST_SECONDS if last else LONGER.get(second, FRAME_SECONDS))
    return animate([svg for svg, _ in frames], [seconds for _, seconds in frames], font)
