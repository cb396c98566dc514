"""The interface between a session and what measures for it: probes in, observations out.

`child_prober` implements it with real children, `simulated` with simulated devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Protocol

import msgspec

from evener.devices.registry import all_backends

from ..events import ProbeProgress
from ..request import Job, deals_by_cost
from ..types import ModelState, Observation, Probe

Report = Callable[[ProbeProgress], None]

_FRAMEWORKS = ("tensorflow", "keras", "torch")


class Facts(msgspec.Struct, frozen=True):
    """The software and data that probes ran with, for the plan's fingerprint; it grows as probes run."""

    versions: dict[str, str] = {}  # framework -> version
    driver: str = ""
    engine: str = ""  # how split layouts were kept in step: towers | multiworker | ddp | simulated
    workload_digest: str = ""
    batch_statistics: str = ""  # a layer that takes statistics over the rows of a pass, as batch normalization does
    rows: int = 0  # of the training data; 0: unknown, or made for the measurement
    lengths: tuple[int, ...] = ()  # of rows, in tokens, rising: an even sample; empty: rows have none, or one for all
    longest_row: int = -1  # the number of the longest row in the data; -1: unknown
    state: ModelState | None = None  # what a sharded training divides, once one was built


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


def add_facts(before: Facts, found: Mapping[str, str], engine: str, resolved: Job) -> Facts:
    """The facts with those of one more child; `engine` keeps its split in step, empty if it isn't a split.

    The digest is that of the first: the model's own, which a training script compares with its model, if it has one.
    """
    names = (*_FRAMEWORKS, *(name for backend in all_backends() for name in backend.device_words))
    parts = [resolved.workload, resolved.request.settings, found.get("parameters", "")]
    own = found.get("digest") or blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()
    by_cost = deals_by_cost(resolved.request, resolved.framework)
    return Facts(
        versions=before.versions | {name: found[name] for name in names if name in found},
        driver=before.driver,
        engine=engine or before.engine,
        workload_digest=before.workload_digest or own,
        batch_statistics=found.get("batch_statistics", ""),
        rows=int(found.get("rows", 0)),
        lengths=tuple(map(int, found.get("lengths", "").split())) if by_cost else (),
        longest_row=int(found.get("longest_row", -1)),
        state=ModelState(*map(int, found["state"].split())) if "state" in found else before.state,
    )
