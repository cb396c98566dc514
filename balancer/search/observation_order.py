"""Which of two observations of a probe is kept, and the order of probes."""

from __future__ import annotations

from typing import Any, get_args

from evener.balancer.types import Observation, OutOfMemory, Probe, Stage, Timed

STAGES: tuple[Stage, ...] = get_args(Stage)


def rank_observation(seen: Observation) -> tuple[int, int, float]:
    """Of two observations of one probe, the larger is kept."""
    if isinstance(seen, OutOfMemory):
        return (2, 0, seen.elapsed_seconds)
    if isinstance(seen, Timed):
        return (1, seen.steps, -seen.step_seconds)
    return (0, 0, seen.elapsed_seconds)


def order_probe(probe: Probe) -> tuple[Any, ...]:
    """The same order for any set of observations."""
    layout = probe.layout
    way = (layout.kind, layout.placement, layout.knobs, layout.length, layout.tokens, repr(layout.costs))
    place = (STAGES.index(probe.stage), probe.turn)
    return (*place, layout.shares, layout.pass_rows, layout.processes, probe.seconds, *way)
