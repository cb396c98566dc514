"""A simulated prober that keeps what it observed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.search.search import Search
from evener.balancer.types import Observation, Probe
from evener.devices.machine import Machine


def run_search(
    search: Search, measure: Callable[[tuple[Probe, ...]], Iterable[Observation]]
) -> Search:
    """Ask, measure, tell, until the search has no more questions."""
    while probes := search.ask():
        for seen in measure(probes):
            search.tell(seen)
    return search


class RecordingProber:
    """Measures on a simulated machine; `seen` has every observation in order."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._prober = SimulatedProber(machine, seed)
        self.seen: list[Observation] = []

    def measure(self, probes: tuple[Probe, ...]) -> Iterable[Observation]:
        """All probes at once."""
        for observation in self._prober.measure(probes, lambda _: None, threading.Event()):
            self.seen.append(observation)
            yield observation

    @property
    def seconds(self) -> float:
        """Of its virtual clock."""
        return self._prober.now()
