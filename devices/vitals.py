"""The vitals of one device, which can spoil a measurement: throttling, others' memory, a driver that goes silent.

A driver is asked between two timed blocks, on a thread of its own: one that hangs holds up that thread and nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec


class Vitals(msgspec.Struct, frozen=True):
    """One reading of a device; None for what it doesn't report. Seconds add up since the driver or the watch began."""

    at_seconds: float = 0.0  # monotonic
    held_seconds: float | None = None  # by heat, a power brake or a fault: the longest of these
    capped_seconds: float | None = None  # by its power limit
    used_bytes: int | None = None  # by everybody; read only in full readings, as are the next two
    processes: Mapping[int, int | None] = {}  # pid -> bytes, as far as the driver reports
    busy_percent: float | None = None  # of the last moments in which anybody's kernel ran
    joules: float | None = None  # by the driver's energy counter, else power summed up over the readings
    trouble: str = ""  # why the device can't be used now, as a sentence


class VitalsReader(Protocol):
    """A maker's own calls behind the vitals of one device; one thread at a time calls it."""

    def read(self, full: bool) -> Vitals:
        """One reading, with memory and processes if it is full; what the driver does wrong is its `trouble`."""

    def close(self) -> None:
        """Let go of the driver; it may be called twice."""


class VitalsWatch:
    """The watch over one device. A driver that was never there is no trouble: nothing is reported then."""

    def __init__(self, reader: VitalsReader) -> None:
        self._reader = reader
        self._ever = False  # it has answered before: from then on silence is trouble
        self._last = Vitals()
        self._began: float | None = None  # when the thread came to ask the driver
        self._thread: threading.Thread | None = None  # one for each question
        self._closed = False

    def ask(self, full: bool = False) -> bool:
        """Ask the driver once more; False if it has not answered the question before."""
        if self.pending or self._closed:
            return False
        self._start(self._answer, full)
        return True

    def answer(self, until: float = 0.0) -> Vitals:
        """The driver's last answer, or the one before it if that takes longer than `until`, in monotonic seconds."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._last

    @property
    def pending(self) -> bool:
        """True while the driver has not answered."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def silent_seconds(self) -> float:
        """The time that the driver has had for its answer; a thread that waits for a busy CPU is not silence."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End the watch; a thread that the driver holds ends when it lets go. It may be called twice."""
        if not self._closed:
            self._closed = True
            self._start(self._finish, self._thread)

    def _start(self, target: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(target=target, args=(argument,), name="evener-vitals", daemon=True)
        thread.start()  # before others see it: they may join it at once
        self._thread = thread

    def _answer(self, full: bool) -> None:
        self._began = time.monotonic()
        found = self._reader.read(full)
        self._ever = self._ever or not found.trouble
        self._last = found if self._ever else Vitals(found.at_seconds)
        self._began = None

    def _finish(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._reader.close()
