"""How many samples fit: from few points of a device's memory, and from what ran out of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.model.memory import Memory


def test_a_straight_memory_line_is_predicted_to_the_sample_or_nearly() -> None:
    """Two small batches determine the largest one."""
    memory = Memory(1_000_000, ((8, 1000 + 8 * 300), (64, 1000 + 64 * 300)), largest_ran=64)
    assert memory.largest_to_try(10**9) == pytest.approx((1_000_000 - 1000) / 300, rel=0.005)
    assert memory.largest_to_try(10**9) <= (1_000_000 - 1000) / 300
    assert memory.largest_to_try(500) == 500


@settings(max_examples=30, deadline=None)
@given(st.integers(70, 4000), st.floats(1.0, 1.9), st.floats(0.2, 0.9), st.booleans())
def test_the_retreat_from_out_of_memory_ends_near_the_edge(
    most: int, bend: float, at: float, known: bool
) -> None:
    """For any shape of memory use, few probes suffice to come near the largest batch that fits.

    Few of them run out of memory.
    """

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


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(64, 4000), min_size=2, max_size=8, unique=True),
    st.integers(0, 200),
    st.randoms(),
)
def test_what_an_allocator_rounds_is_not_taken_for_what_samples_take(
    batches: list[int], rounded: int, chance: random.Random
) -> None:
    """Even if the batches that ran are close, the line's error is that of their bytes, not many
    times that.
    """
    points = tuple(
        (batch, 10_000 + 100 * batch + chance.randint(0, rounded))
        for batch in [8, *sorted(batches)]
    )
    line = Memory(10**9, points, largest_ran=max(batches)).line
    assert line is not None
    assert line[1] == pytest.approx(100, abs=rounded / (0.05 * max(batches)) + 1e-6)
    assert line[0] + line[1] * max(batches) == pytest.approx(dict(points)[max(batches)], abs=1)


def test_safe_is_what_ran_or_little_more() -> None:
    """A batch is safe if it ran.

    It is also safe if it is at most a quarter larger and far below the limit, and nothing failed.
    """
    points = ((8, 1800), (64, 7400), (200, 21_000))
    assert Memory(1_000_000, points, 200).largest_safe(10**6) == 250
    assert Memory(22_000, points, 200).largest_safe(10**6) == 200
    assert (
        Memory(1_000_000, points, 200, smallest_failed=300, failure_count=1).largest_safe(10**6)
        == 200
    )


LINE = ((8, 1800), (64, 7400), (200, 21_000))  # 1,000 bytes, and 100 per sample


@pytest.mark.parametrize(
    ("memory", "most"),
    [
        (Memory(31_000, LINE, 200), 300),  # minus a margin for the rounding of allocators
        # the line is refuted: a quarter of the way
        (Memory(1_000_000, LINE, 200, smallest_failed=240, failure_count=1), 210),
        (Memory(31_000, LINE, 200, smallest_failed=500, failure_count=1), 300),
        # settled: 2 % apart
        (Memory(1_000_000, LINE, 200, smallest_failed=204, failure_count=1), 200),
        (Memory(1_000_000, LINE, 200, smallest_failed=208, failure_count=1), 202),
        (Memory(1_000_000, LINE, 2, smallest_failed=3, failure_count=1), 2),  # one quantum apart
        (Memory(None, (), 64), 512),  # unknown: it grows by a factor,
        # is cut at the geometric mean if the gap is wide,
        (Memory(None, (), 64, smallest_failed=512, failure_count=1), 181),
        # and at a quarter if it is narrow
        (Memory(None, (), 64, smallest_failed=200, failure_count=1), 98),
        (Memory(None, (), 0), 1),
        (Memory(None, (), 0, smallest_failed=8, failure_count=1), 2),
        (Memory(20_000, LINE, 200), 200),  # what ran fits, whatever the line predicts
    ],
)
def test_the_next_batch_to_try(memory: Memory, most: int) -> None:
    assert memory.largest_to_try(10**6) == pytest.approx(most, abs=2 if most > 250 else 0)


def test_whole_quanta_and_the_cap_bound_what_is_tried() -> None:
    memory = Memory(31_000, LINE, 200)
    assert memory.largest_to_try(10**6, 64) == 256
    assert memory.largest_to_try(128, 64) == 128
    assert memory.largest_in_split(10**6, 64) == 256
    assert memory.largest_safe(10**6, 64) == 192
    assert (
        Memory(None, (), 128, smallest_failed=200, failure_count=1).largest_to_try(10**6, 64) == 128
    )
    assert (
        Memory(None, (), 64, smallest_failed=300, failure_count=1).largest_to_try(10**6, 64) == 128
    )


def test_in_a_split_only_what_ran_is_tried_where_bytes_are_unknown() -> None:
    """The same holds if memory ran out below the line's prediction.

    A batch that has to run somewhere is an exception.
    """
    unknown = Memory(None, (), 64)
    assert unknown.largest_in_split(10**6) == 64
    assert unknown.largest_in_split(60, 8) == 56
    assert unknown.largest_in_split(10**6, beyond_largest_ran=True) == 512
    assert (
        Memory(31_000, LINE, 200, smallest_failed=400, failure_count=2).largest_in_split(10**6)
        > 290
    )
    assert (
        Memory(31_000, LINE, 200, smallest_failed=250, failure_count=3).largest_in_split(
            10**6, beyond_largest_ran=True
        )
        == 200
    )


def test_a_bend_is_believed_to_go_on_for_a_part_of_the_way() -> None:
    """The slope grows from 100 to 200 bytes per sample, so 300 is assumed to be possible above.

    At least 200 is certain. 80 % of the memory that this leaves is used.
    """
    bent = Memory(100_000, ((8, 1800), (100, 11_000), (200, 31_000)), 200)
    most = bent.predict_largest()
    assert bent.line == pytest.approx((31_000 - 200 * 200, 200))
    slope = (11_000 - 1800) / 92
    assert most == pytest.approx((200 + 69_000 / (200 + 200 - slope) * 0.8) * 0.997, abs=2)
    assert Memory(100_000, LINE, 200).predict_largest() == pytest.approx(990 * 0.997, abs=2)


def test_a_line_that_is_unknown_flat_or_falling_predicts_nothing() -> None:
    assert Memory(None, LINE, 200).predict_largest() is None
    assert Memory(10**6, LINE[:1], 8).predict_largest() is None
    assert Memory(10**6, ((8, 2000), (64, 2000)), 64).predict_largest() is None
    assert Memory(10**6, ((8, 2000), (64, 1500)), 64).line == (1500, 0)


def test_batches_are_read_off_the_lines_between_points() -> None:
    """They are interpolated between points, extrapolated beyond them, and proportional for a single
    point.
    """
    bent = Memory(None, ((100, 2000), (200, 4000), (300, 9000)), 300)
    for batch, used in ((50, 1000), (150, 3000), (250, 6500), (400, 14_000)):
        assert bent.largest_within(used) == batch
    assert Memory(None, ((100, 2000),), 100).largest_within(3000) == 150
    level = Memory(None, ((100, 2000), (200, 2000)), 200)
    assert level.largest_within(1999) == 0
    assert level.largest_within(2000) > 10**6
