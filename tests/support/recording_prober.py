"""A simulated prober that keeps its observations."""

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
    """Run a search with a function that measures, until it asks for no more probes."""
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
        """Measure all probes at once."""
        for observation in self._prober.measure(probes, lambda _: None, threading.Event()):
            self.seen.append(observation)
            yield observation

    @property
    def seconds(self) -> float:
        """Return the time on its virtual clock."""
        return self._prober.now()
