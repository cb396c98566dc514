"""Time a fixed loop, which shows how fast a CPU core computes at the moment.

A core is slower while its clock is low, or while its other hardware thread is busy. A step may then
take up to 1.5 times as long, for seconds, although no thread waits for a core.
"""

from __future__ import annotations

import platform
import time

LOOP = range(500)  # takes about 7 us
TRIES = 2
SAMPLE_SECONDS = 0.1  # minimum time between two samples
LOW_PART = 0.1  # fraction of the samples that are shorter than the one that counts
PYTHON = ".".join(platform.python_version_tuple()[:2])  # other versions take another time


def time_loop() -> float:
    """Time a fixed loop on this core; return the shortest of a few tries.

    The result is in seconds.
    """
    least_s = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        for _ in LOOP:
            pass
        least_s = min(least_s, time.perf_counter() - began)
    return least_s


class CoreSpeed:
    """Samples the speed of the CPU core on which a thread runs."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self.due_at = 0.0  # when the next sample is due, in monotonic seconds

    def sample(self, now: float) -> None:
        """Time the loop once, unless that was done shortly before `now` (monotonic seconds)."""
        if now >= self.due_at:
            self.due_at = now + SAMPLE_SECONDS
            self._samples.append(time_loop())

    def take(self) -> float:
        """Return a low percentile of the loop's times since the last call; 0 without samples.

        It can be compared with a low percentile of step times: both show the core's fastest
        moments.
        """
        samples = sorted(self._samples)
        self._samples = []
        return samples[int(LOW_PART * len(samples))] if samples else 0.0
