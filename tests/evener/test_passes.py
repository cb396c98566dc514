"""A share is divided into passes of nearly equal size that fit the device's memory.

Passes become smaller when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import DeviceError, RequestError
from evener.shares.whole_rows import count_passes, split_passes
from evener.training.passes import (
    LOOK_STEPS,
    MOST_FAILURES,
    Pass,
    PassLimit,
    PassQueue,
    count_equal_passes,
    divide_rows,
    weigh_passes,
)


@given(st.integers(0, 10**4), st.integers(1, 10**4))
def test_passes_are_as_few_as_can_be_and_of_one_size(batch: int, micro: int) -> None:
    passes = split_passes(batch, micro)
    assert sum(passes) == batch
    assert len(passes) == count_passes(batch, micro) == -(-batch // micro)
    assert max(passes, default=0) <= micro
    assert max(passes, default=0) - min(passes, default=0) <= 1
    assert list(passes) == sorted(passes)


def test_the_rest_is_spread_over_all_passes() -> None:
    assert split_passes(820, 410) == (410, 410)
    assert split_passes(820, 300) == (273, 273, 274)
    assert split_passes(820, 1000) == (820,)
    assert split_passes(0, 5) == ()


@pytest.mark.parametrize("micro", [0, -1, 2.5, "2", True, None])
def test_a_pass_has_a_whole_number_of_rows(micro: Any) -> None:
    with pytest.raises(RequestError, match="A pass can't have"):
        split_passes(8, micro)


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)
WORST = 3  # rows that memory always holds, so that every batch can be computed


@given(st.integers(0, 500), st.integers(1, 500), st.integers(0, 6))
def test_the_passes_of_a_rank_have_all_its_rows_and_weigh_one(
    rows: int, most: int, passes: int
) -> None:
    sizes = divide_rows(rows, most, passes)
    assert sum(sizes) == rows
    assert len(sizes) == (passes or max(1, -(-rows // most)))
    assert sum(weigh_passes(sizes)) == pytest.approx(1.0 if rows else len(sizes))
    if rows:
        assert weigh_passes(sizes, 2 * rows) == tuple(each / (2 * rows) for each in sizes)


@given(SIZES, st.lists(st.integers(1, 60), min_size=4, max_size=4))
def test_ranks_that_meet_in_each_pass_take_as_many_as_one_needs(
    rows: list[int], most: list[int]
) -> None:
    passes = count_equal_passes(rows, most[: len(rows)])
    for own, held in zip(rows, most, strict=False):
        assert max(divide_rows(own, held, passes)) <= held
    assert passes == max(-(-own // held) for own, held in zip(rows, most, strict=False))


def compute_batch(
    sizes: list[int], holds: Callable[[int], int], least: int
) -> tuple[list[Pass], list[bool], list[int]]:
    """Compute a batch whose n-th try runs out of memory above `holds(n)` rows.

    Returns the computed passes, the flag with which each was completed, and the rows of the failed
    ones.
    """
    limit = PassLimit(0)
    queue = PassQueue(sizes, limit)
    done: list[Pass] = []
    settled: list[bool] = []
    failed: list[int] = []
    turn = queue.take(lambda: least)
    while turn is not None:
        if turn.rows <= max(2 * least - 1, holds(len(done) + len(failed))):
            done.append(turn)
            settled.append(queue.complete())
        else:
            failed.append(turn.rows)
            queue.retry()
            limit.halve(turn.rows, least)
        turn = queue.take(lambda: least)
    return done, settled, failed


@given(SIZES, st.lists(st.integers(WORST, 60), min_size=1), st.integers(1, 2))
def test_each_row_is_computed_once_whatever_runs_out_of_memory(
    sizes: list[int], room: list[int], least: int
) -> None:
    """Rows are in order, and the weights of each planned pass add up to 1.

    The last piece of a pass and the last piece of the batch are marked.
    """
    done, settled, _ = compute_batch(sizes, lambda n: room[n % len(room)], least)
    rows = [(turn.number, row) for turn in done for row in range(turn.start, turn.stop)]
    assert rows == [(number, row) for number, size in enumerate(sizes) for row in range(size)]
    for number, size in enumerate(sizes):
        own = [turn for turn in done if turn.number == number]
        assert {turn.planned for turn in own} == {size}
        assert sum(turn.part for turn in own) == pytest.approx(1.0)
        assert [turn.ends for turn in own] == [False] * (len(own) - 1) + [True]
        assert min(turn.rows for turn in own) >= min(least, size)
    assert [turn.last for turn in done] == [False] * (len(done) - 1) + [True]
    assert settled[-1], "what failed is made good by the end"


@given(SIZES, st.integers(WORST, 60))
def test_a_size_that_ran_out_of_memory_is_not_tried_again_in_the_batch(
    sizes: list[int], room: int
) -> None:
    _, _, failed = compute_batch(sizes, lambda _: room, 1)
    assert all(after <= before // 2 for before, after in pairwise(failed))


def test_a_rank_without_rows_keeps_step() -> None:
    done, settled, _ = compute_batch([0, 0], lambda _: 8, 1)
    assert [(turn.rows, turn.stop, turn.part) for turn in done] == [(0, 0, 1.0)] * 2
    assert settled == [True, True]


def test_rows_of_a_failed_pass_are_made_good_before_it_is_settled() -> None:
    """What a failed pass has sent is kept until all its rows are computed."""
    limit = PassLimit(0)
    queue = PassQueue([8, 8], limit)
    assert queue.take() is not None
    queue.retry()
    limit.halve(8, 1)
    settled = []
    for _ in range(4):
        assert queue.take() is not None
        settled.append(queue.complete())
    assert settled == [False, True, True, True]


def test_memory_that_never_suffices_ends_in_an_error() -> None:
    limit = PassLimit(3)
    for _ in range(MOST_FAILURES - 1):
        limit.count_failure(1, 1, "all of it is full")
    with pytest.raises(DeviceError, match=r"Rank 3 ran out of memory 20 times.*all of it is full"):
        limit.count_failure(1, 1, "all of it is full")


def test_passes_are_the_plans_again_once_a_neighbour_has_gone() -> None:
    """Passes have the plan's size again once a neighbour that held 30 GiB has gone.

    A neighbour that still holds most of it, or was never seen, changes nothing.
    """
    for held, left, most in ((30 << 30, 20 << 30, 32), (30 << 30, 1 << 30, None), (0, 0, 32)):
        limit = PassLimit(0)
        limit.begin_batch()
        assert limit.halve(64, 1, held) == 32
        for _ in range(2 * LOOK_STEPS):
            limit.begin_batch(partial(int, left))
        assert limit.most == most
