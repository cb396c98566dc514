"""Rows of unequal length are assigned so that ranks finish together.

Each row is assigned once, in passes that fit.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import RequestError
from evener.shares.curves import Cost, RankCost
from evener.shares.whole_rows import apportion, split_passes
from evener.training.row_assignment import RowAssigner
from tests.support.row_assignment_oracle import least_seconds

SECONDS = st.floats(0, 10)
LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=40)


@st.composite
def assigners(draw: st.DrawFn, tokens: int = 300) -> RowAssigner:
    """Draw ranks with unrelated costs; the first can hold the longest row."""
    ranks = draw(st.integers(1, 5))
    costs = draw(
        st.lists(
            st.builds(Cost, SECONDS, SECONDS, SECONDS).filter(Cost.is_valid),
            min_size=ranks,
            max_size=ranks,
        )
    )
    limits = [
        draw(st.sampled_from([0, tokens, 2 * tokens])),
        *(draw(st.sampled_from([0, 50, 900])) for _ in costs[1:]),
    ]
    rows = [draw(st.sampled_from([0, 1, 3])) for _ in costs]
    ratios = tuple(draw(st.floats(0.1, 10)) for _ in costs)
    return RowAssigner(tuple(map(RankCost, costs, limits, rows)), ratios, draw(st.booleans()))


@given(LENGTHS, assigners())
def test_each_row_is_assigned_once_in_passes_that_fit(
    lengths: list[int], assigner: RowAssigner
) -> None:
    assigned = assigner.assign(lengths)
    rows = [row for own in assigned.passes for each in own for row in each]
    assert sorted(rows) == list(range(len(lengths)))
    assert all(each for own in assigned.passes for each in own)
    assert assigned == assigner.assign(lengths)
    if len(lengths) >= len(assigner.ranks):
        assert min(assigned.sizes) > 0
    if len(set(lengths)) == 1:
        return  # shares by rows don't depend on who can hold them
    for rank, own in zip(assigner.ranks, assigned.passes, strict=True):
        for each in own:
            longest = max(lengths[row] for row in each)
            assert len(each) == 1 or len(each) <= rank.most_rows(longest)


@given(st.integers(1, 40), st.integers(0, 50), assigners())
def test_rows_of_one_length_are_assigned_as_without_lengths(
    rows: int, length: int, assigner: RowAssigner
) -> None:
    assigned = assigner.assign([length] * rows)
    assert assigned.sizes == apportion(rows, assigner.ratios)
    assert [row for own in assigned.passes for each in own for row in each] == list(range(rows))
    for rank, own in zip(assigner.ranks, assigned.passes, strict=True):
        if rank.rows and not rank.tokens:
            assert tuple(map(len, own)) == split_passes(sum(map(len, own)), rank.rows)


@given(
    LENGTHS.filter(lambda lengths: len(set(lengths)) > 1),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_no_way_is_faster_than_the_bound(
    lengths: list[int], ranks: int, draws: random.Random
) -> None:
    """Even a random assignment is slower, for ranks that differ only in speed."""
    speeds = [draws.uniform(0.2, 1) for _ in range(ranks)]
    costs = [RankCost(Cost(3 / speed, 1 / speed, 0.01 / speed)) for speed in speeds]
    least = least_seconds(lengths, costs)
    finish = [0.0] * ranks
    rows = list(range(len(lengths)))
    draws.shuffle(rows)
    while rows:
        taken = [lengths[rows.pop()] for _ in range(min(len(rows), draws.randint(1, 6)))]
        rank = draws.randrange(ranks)
        finish[rank] += costs[rank].cost.seconds(len(taken), max(taken))
    assert max(finish) >= least * (1 - 1e-9)
    assert max(RowAssigner(tuple(costs), (1.0,) * ranks).assign(lengths).seconds) >= least * (
        1 - 1e-9
    )


@given(
    LENGTHS.filter(lambda lengths: len(set(lengths)) > 1),
    st.sampled_from([0.0, 30.0, 900.0]),
    st.booleans(),
)
def test_one_device_has_nearly_the_best_passes(
    lengths: list[int], fixed: float, bends: bool
) -> None:
    """The passes are compared with all divisions of the batch.

    A cut may be at rows that are 3 % longer, which is 6 % if the time is quadratic.
    """
    rank = RankCost(Cost(fixed, 1.0, 0.1 if bends else 0.0))
    (seconds,) = RowAssigner((rank,), (1.0,)).assign(lengths).seconds
    assert seconds <= 1.01 * least_seconds(lengths, [rank]) / 0.97**2


def lognormal(draws: random.Random, rows: int) -> list[int]:
    return [max(1, round(100 * math.exp(draws.gauss(0, 1)))) for _ in range(rows)]


@pytest.mark.parametrize(
    ("ranks", "rows", "median", "most"),
    [
        (2, 64, 0.02, 0.05),
        (3, 64, 0.02, 0.05),
        (4, 64, 0.02, 0.05),
        (8, 64, 0.03, 0.09),
        (4, 256, 0.03, 0.05),
    ],
)
def test_ranks_finish_together(ranks: int, rows: int, median: float, most: float) -> None:
    """A pass costs a hundredth of a rank's mean share."""
    draws = random.Random(ranks)
    gaps = []
    for _ in range(40 * 64 // rows):
        lengths = lognormal(draws, rows)
        speeds = [1.0, *(draws.uniform(0.25, 1) for _ in range(ranks - 1))]
        total = sum(length * (1 + 0.001 * length) for length in lengths)
        costs = tuple(
            RankCost(Cost(0.01 * total / ranks / each, 1 / each, 0.001 / each)) for each in speeds
        )
        assigned = RowAssigner(costs, tuple(speeds)).assign(lengths)
        gaps.append(max(assigned.seconds) / least_seconds(lengths, costs) - 1)
    gaps.sort()
    assert gaps[len(gaps) // 2] <= median
    assert gaps[-1 - len(gaps) // 20] <= most


def test_padding_is_saved_where_a_pass_costs_less() -> None:
    lengths = [1000, 10, 10, 10]
    cheap, dear = (RowAssigner((RankCost(Cost(fixed, 1, 0)),), (1.0,)) for fixed in (1, 100_000))
    assert cheap.assign(lengths).passes == (((0,), (1, 2, 3)),)
    assert dear.assign(lengths).passes == (((0, 1, 2, 3),),)
    assert (cheap.assign(lengths).padded, dear.assign(lengths).padded) == ((1030,), (4000,))
    assert dear.assign(lengths).tokens == (1030,)
    assert not RowAssigner(cheap.ranks, (1.0,), saves_padding=False).assign(lengths).in_passes


def test_long_rows_go_where_they_fit() -> None:
    small, large = RankCost(Cost(0, 1, 0), tokens=100), RankCost(Cost(0, 4, 0))
    assigned = RowAssigner((small, large), (4.0, 1.0)).assign([500, 90, 90, 90, 90, 500])
    assert {0, 5} <= {row for each in assigned.passes[1] for row in each}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([1, 2], "2 lengths for 3 rows"),
        ([1, -2, 3], "Row 1 has length -2"),
        ([1, 2, 101], "Row 2 has 101 tokens"),
    ],
)
def test_impossible_lengths_are_a_one_line_error(lengths: list[int], said: str) -> None:
    assigner = RowAssigner(
        (RankCost(Cost(0, 1, 0), tokens=100), RankCost(Cost(0, 1, 0), tokens=50)), (1.0, 1.0)
    )
    with pytest.raises(RequestError, match=said) as caught:
        assigner.check(lengths, 3)
    assert caught.value.remedy
