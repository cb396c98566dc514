"""The seam between a session and whatever measures: probes in, observations out.

Real children (`child_pool`) and simulated devices (`simulated`) stand behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from evener.balancer.events import ProbeProgress
from evener.balancer.types import Observation, Probe

Report = Callable[[ProbeProgress], None]


class Facts(msgspec.Struct, frozen=True):
    """What the figures were measured with, for the plan's fingerprint; grows as probes run."""

    versions: dict[str, str] = {}  # framework -> version
    driver: str = ""
    engine: str = ""  # how split layouts were kept in step: towers | mirrored | multiworker | ddp | simulated
    workload_digest: str = ""


class Prober(Protocol):
    """Measures probes. Trouble with a probe is an observation, never an exception."""

    def measure(
        self, probes: tuple[Probe, ...], report: Report, stop: threading.Event, beside: tuple[Probe, ...] = ()
    ) -> Iterator[Observation]:
        """Run all of `probes` at the same time and give each one's observation as it ends.

        `report` is called from any thread. Once `stop` is set it ends early, without inventing observations. `beside`
        are probes of the same asking whose observations are known already: where devices share something, they count
        as running.
        """
        ...

    def now(self) -> float:
        """Seconds of the session's clock: wall time, or virtual time on simulated devices."""
        ...

    def facts(self) -> Facts:
        """What is known so far of the versions behind the figures."""
        ...

    def close(self) -> None:
        """End every child. May be called twice, from any thread, and while `measure` runs."""
        ...
