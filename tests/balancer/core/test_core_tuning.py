"""The first step at a new size may last as long as a hundred others, while kernels of that size are tried out."""

from __future__ import annotations

import pytest

from balancer.core.search import Search
from balancer.records import Probe, Problem, Timed

BUDGET = 100.0
FIXED, EACH = 0.005, 64e-6  # seconds a step, and a sample


def _seconds(batch: int) -> float:
    return FIXED + EACH * batch


def _seen(probe: Probe, tuning: float) -> Timed:
    batch = probe.layout.global_batch
    step, memory = _seconds(batch), (1 << 30) + (batch << 20)
    alone = tuple(memory if share else None for share in probe.layout.shares)
    own = tuple(step if share else None for share in probe.layout.shares)
    first = 0.25 + tuning * step
    return Timed(probe, step, step * 0.999, step * 1.001, 20, alone, own, first, 2.0)


def _third(tuning: float) -> tuple[Search, tuple[Probe, ...]]:
    """The third round of two devices with a lot of memory, whose first step takes so many steps."""
    search = Search(Problem(2, (128 << 30, 128 << 30), budget_seconds=BUDGET))
    for _ in range(2):
        for probe in search.ask():
            search.tell(_seen(probe, tuning))
    return search, search.ask()


@pytest.mark.parametrize("tuning", [20.0, 100.0])
def test_a_larger_batch_is_tried_only_if_its_first_step_fits_into_the_budget(tuning: float) -> None:
    """At most a fifth of what is left goes into one round, the first step counted."""
    search, probes = _third(tuning)
    left = BUDGET - search.spent_seconds()
    assert probes
    for probe in probes:
        step = _seconds(probe.layout.global_batch)
        assert probe.layout.global_batch > 64
        assert (tuning + 1) * step <= 0.2 * left


def test_without_tuning_the_largest_batch_that_matters_is_tried() -> None:
    """A first step that is like any other takes nothing away."""
    _, probes = _third(0.0)
    _, tuned = _third(100.0)
    assert probes[0].layout.global_batch > 4 * tuned[0].layout.global_batch
