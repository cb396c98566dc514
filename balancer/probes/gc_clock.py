"""Measures how long Python's garbage collector runs."""

from __future__ import annotations

import gc
import time


class GcClock:
    """Adds up the time that Python's garbage collector takes in this process.

    Some trainings create so many Python objects in each step that it takes several percent of their
    time, such as those of adapters with activation checkpointing. A full collection visits every
    object of the process.
    """

    def __init__(self) -> None:
        self._seconds = self._longest = self._began = 0.0
        gc.callbacks.append(self._note)

    def read(self) -> tuple[float, float]:
        """Return the seconds of all collections since the last call, and of the longest one."""
        found = self._seconds, self._longest
        self._seconds = self._longest = 0.0
        return found

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            seconds = time.perf_counter() - self._began
            self._seconds += seconds
            self._longest = max(self._longest, seconds)
