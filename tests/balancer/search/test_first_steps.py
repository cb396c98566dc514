"""The first step at a new size may take as long as a hundred others, while kernels are tuned."""

from __future__ import annotations

import pytest

from evener.balancer.search.search import Search
from evener.balancer.types import OutOfMemory, Probe, Problem, Stage, Timed

BUDGET = 100.0
FIXED, EACH = 0.005, 64e-6  # seconds per step, and per sample


def _seconds(batch: int) -> float:
    return FIXED + EACH * batch


def _seen(probe: Probe, tuning: float) -> Timed:
    batch = probe.layout.global_batch
    step, memory = _seconds(batch), (1 << 30) + (batch << 24)
    alone = tuple(memory if share else None for share in probe.layout.shares)
    own = tuple(step if share else None for share in probe.layout.shares)
    first = 0.25 + tuning * step
    return Timed(probe, step, step * 0.999, step * 1.001, 20, alone, own, first, 2.0)


def _third(tuning: float) -> tuple[Search, tuple[Probe, ...]]:
    """Return the third round of two devices with much memory, whose first step takes `tuning`
    steps.
    """
    search = Search(Problem(2, (128 << 30, 128 << 30), budget_seconds=BUDGET))
    for _ in range(2):
        for probe in search.ask():
            search.tell(_seen(probe, tuning))
    return search, search.ask()


@pytest.mark.parametrize("tuning", [20.0, 100.0])
def test_a_larger_batch_is_tried_only_if_its_first_step_fits_into_the_budget(tuning: float) -> None:
    """At most a fifth of the time left goes into one round, including the first step."""
    search, probes = _third(tuning)
    left = BUDGET - search._seen.spent_seconds()
    assert probes
    for probe in probes:
        step = _seconds(probe.layout.global_batch)
        assert probe.layout.global_batch > 64
        assert (tuning + 1) * step <= 0.2 * left


def test_without_tuning_larger_batches_are_tried() -> None:
    """A first step like any other takes no time away."""
    assert _largest_alone(0.0) > 2 * _largest_alone(200.0)


def _largest_alone(tuning: float) -> int:
    """Return the largest batch of the solo rounds."""
    search, probes = _third(tuning)
    largest = 0
    while probes and probes[0].stage == Stage.SOLO:
        largest = max(largest, *(probe.layout.global_batch for probe in probes))
        for probe in probes:
            search.tell(_seen(probe, tuning))
        probes = search.ask()
    return largest


def _step_on(probe: Probe, limits: tuple[int, ...]) -> Timed | OutOfMemory:
    """Return a step in which samples take 7 MiB each, besides 1100 MiB.

    The optimizer's own peak of 1573 MiB hides their memory at first.
    """
    used = tuple(
        (max(1573, 1100 + 7 * share) << 20) if share else None for share in probe.layout.shares
    )
    short = tuple(i for i, size in enumerate(used) if size is not None and size > limits[i])
    if short:
        return OutOfMemory(probe, short, "the cap", 2.0)
    step = max(_seconds(share) for share in probe.layout.shares if share)
    own = tuple(_seconds(share) if share else None for share in probe.layout.shares)
    return Timed(probe, step, step * 0.999, step * 1.001, 20, used, own, step, 2.0)


def test_memory_that_hardly_rises_costs_two_tries_at_most() -> None:
    """The devices have 8 GiB and 5 GiB, like capped GPUs.

    Each runs out of memory at most twice, and the plan nearly fills the smaller one.
    """
    limits = (8 << 30, 5 << 30)
    search = Search(Problem(2, limits, tolerance=0.0, budget_seconds=120.0, micro=False))
    full = [0, 0]
    while probes := search.ask():
        for probe in probes:
            seen = _step_on(probe, limits)
            search.tell(seen)
            for i in seen.devices if isinstance(seen, OutOfMemory) else ():
                full[i] += 1
    best = search.best()
    assert best is not None
    assert max(full) <= 2
    # both are equally fast, so the smaller memory limits both
    assert min(best.layout.shares) > 0.9 * 574


def test_a_device_that_holds_no_model_is_not_asked_for_fewer_rows() -> None:
    """A start of a large model takes 20 s, and each of these probes would need one."""
    search = Search(Problem(2, (8 << 30, 5 << 30), budget_seconds=120.0, max_global_batch=64))
    asked = [0, 0]
    while probes := search.ask():
        for probe in probes:
            asked[1] += bool(probe.layout.shares[1])
            if probe.layout.shares[1]:
                search.tell(OutOfMemory(probe, (1,), "full", 2.0, fits_no_rows=True))
            else:
                search.tell(_step_on(probe, (8 << 30, 5 << 30)))
    assert asked[1] == 1
    best = search.best()
    assert best is not None
    assert best.layout.shares[0] > 0
    assert best.layout.shares[1] == 0
