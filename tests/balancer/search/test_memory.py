"""How many samples fit: from few points of a device's memory, and from what ran out of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.model.memory import Memory


def test_a_straight_memory_line_is_predicted_to_the_sample_or_nearly() -> None:
    """Two small batches tell the largest one."""
    memory = Memory(1_000_000, ((8, 1000 + 8 * 300), (64, 1000 + 64 * 300)), ran=64)
    assert memory.largest_to_try(10**9) == pytest.approx((1_000_000 - 1000) / 300, rel=0.005)
    assert memory.largest_to_try(10**9) <= (1_000_000 - 1000) / 300
    assert memory.largest_to_try(500) == 500


@settings(max_examples=60, deadline=None)
@given(st.integers(70, 4000), st.floats(1.0, 1.9), st.floats(0.2, 0.9), st.booleans())
def test_the_retreat_from_out_of_memory_ends_near_the_edge(most: int, bend: float, at: float, known: bool) -> None:
    """Whatever the memory's shape, few probes end near the largest batch that fits, and few of them run out."""

    def used(batch: int) -> int:
        knee = int(at * most)
        return round(10_000 + 100 * min(batch, knee) + 100 * bend * max(0, batch - knee))

    limit = used(most) if known else None
    ran, failed, short = 64, None, 0
    points = [(8, used(8)), (64, used(64))] if known else []
    for _ in range(14):
        guess = Memory(limit, tuple(points), ran, failed, short).largest_to_try(10**6)
        if guess <= ran:
            break
        if guess <= most:
            ran = guess
            points = [*points, (guess, used(guess))] if known else points
        else:
            failed, short = guess, short + 1
    assert ran >= 0.9 * most
    if known and bend == 1.0:
        assert short == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(64, 4000), min_size=2, max_size=8, unique=True), st.integers(0, 200), st.randoms())
def test_what_an_allocator_rounds_is_not_taken_for_what_samples_take(
    batches: list[int], rounded: int, chance: random.Random
) -> None:
    """However near the batches that ran lie, the line is off by what their bytes are, and not by many times that."""
    points = tuple((batch, 10_000 + 100 * batch + chance.randint(0, rounded)) for batch in [8, *sorted(batches)])
    line = Memory(10**9, points, ran=max(batches)).line
    assert line is not None
    assert line[1] == pytest.approx(100, abs=rounded / (0.05 * max(batches)) + 1e-6)
    assert line[0] + line[1] * max(batches) == pytest.approx(dict(points)[max(batches)], abs=1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 50_000), st.integers(100, 500), st.integers(61_000, 300_000))
def test_what_a_split_holds_besides_the_samples_leaves_less_for_them(exchanged: int, share: int, limit: int) -> None:
    """Gradients that are exchanged take their bytes in splits, and none from what a device can do alone."""

    def used(batch: int) -> int:
        return 10_000 + 100 * batch

    points = tuple((batch, used(batch)) for batch in (8, 64, 500))
    memory = Memory(limit, points, ran=500, in_splits=((share, used(share) + exchanged),))
    assert memory.exchanged_bytes == exchanged
    assert used(memory.largest_to_try(10**6)) == pytest.approx(limit, rel=0.01)
    most = memory.largest_in_split(10**6)
    assert most <= memory.largest_to_try(10**6)
    assert used(most) + exchanged <= limit or most == share
    assert most == share or used(most) + exchanged == pytest.approx(limit, rel=0.01)


@settings(max_examples=100, deadline=None)
@given(st.floats(1.1, 3.0), st.lists(st.integers(600, 3000), min_size=1, max_size=4))
def test_a_bend_of_memory_is_not_taken_for_what_a_split_holds(bend: float, shares: list[int]) -> None:
    """Splits of more samples than ran alone tell where the line goes on, and take no room from anybody."""

    def used(batch: int) -> int:
        return round(10_000 + 100 * min(batch, 500) + 100 * bend * max(0, batch - 500))

    points = tuple((batch, used(batch)) for batch in (8, 64, 500))
    memory = Memory(
        10**6, points, ran=max(shares), in_splits=tuple((share, used(share)) for share in sorted(set(shares)))
    )
    assert memory.exchanged_bytes == 0
    assert memory.line is not None
    assert memory.line[0] + memory.line[1] * max(shares) == pytest.approx(used(max(shares)), abs=2)
    assert memory.largest_in_split(10**6) == memory.largest_to_try(10**6)


def test_safe_is_what_ran_or_little_more() -> None:
    """A batch is safe if it ran, or is a quarter larger at most, far below the limit, and nothing failed."""
    points = ((8, 1800), (64, 7400), (200, 21_000))
    assert Memory(1_000_000, points, 200).largest_safe(10**6) == 250
    assert Memory(22_000, points, 200).largest_safe(10**6) == 200
    assert Memory(1_000_000, points, 200, failed=300, failures=1).largest_safe(10**6) == 200
