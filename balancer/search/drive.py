"""The whole driver in a few lines: the reference for tests, benchmarks and debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evener.balancer.search.search import Search
from evener.balancer.types import Observation, Probe

Measure = Callable[[tuple[Probe, ...]], Iterable[Observation]]


def simple(search: Search, measure: Measure) -> Search:
    """Ask, measure, tell, until the search has no more questions."""
    while probes := search.ask():
        for seen in measure(probes):
            search.tell(seen)
    return search
