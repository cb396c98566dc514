"""The interface between a session and what measures for it: probes in, observations out.

`child_prober` implements it with real children, `simulated` with simulated devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from ..events import ProbeProgress
from ..types import Observation, Probe

Report = Callable[[ProbeProgress], None]


class Facts(msgspec.Struct, frozen=True):
    """The software and data that probes ran with, for the plan's fingerprint; it grows as probes run."""

    versions: dict[str, str] = {}  # framework -> version
    driver: str = ""
    engine: str = ""  # how split layouts were kept in step: towers | mirrored | multiworker | ddp | simulated
    workload_digest: str = ""
    batch_statistics: str = ""  # a layer that takes statistics over the rows of a pass, as batch normalization does
    rows: int = 0  # of the training data; 0: unknown, or made for the measurement
    lengths: tuple[int, ...] = ()  # of rows, in tokens, rising: an even sample; empty: rows have none, or one for all
    longest_row: int = -1  # the number of the longest row in the data; -1: unknown


class Prober(Protocol):
    """Measures probes. A probe that fails is an observation, never an exception."""

    def measure(
        self, probes: tuple[Probe, ...], report: Report, stop: threading.Event, finished: tuple[Probe, ...] = ()
    ) -> Iterator[Observation]:
        """Run all of `probes` at the same time and yield each one's observation as it ends.

        `report` is called from any thread. Once `stop` is set it ends early, without inventing observations. A resumed
        run asks again for a part of what it had asked for: `finished` are the other probes, which count as running
        where devices share something.
        """

    def now(self) -> float:
        """Seconds of the session's clock: wall time, or virtual time on simulated devices."""

    def facts(self) -> Facts:
        """Versions and engine, as far as they are known."""

    def close(self) -> None:
        """End every child. May be called twice, from any thread, and while `measure` runs."""
