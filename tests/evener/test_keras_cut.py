"""Where a batch is cut for the devices, for any batch and any shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evener.keras_split.cut import Cut
from evener.shares import keras_split

shares = st.lists(st.integers(1, 5000), min_size=1, max_size=8)


@given(shares, st.integers(0, 20_000), st.booleans())
def test_every_row_goes_to_one_device(weights: list[int], rows: int, floors: bool) -> None:
    """The boundaries rise from 0 to the batch's rows, whatever the batch."""
    edges = Cut(weights, floors).bounds(rows)
    assert edges[0] == 0
    assert edges[-1] == rows
    assert edges == sorted(edges)
    assert len(edges) == len(weights) + 1


@given(shares)
def test_the_plans_own_batch_is_cut_by_its_shares(weights: list[int]) -> None:
    """At the global batch each device gets exactly its share."""
    assert Cut(weights).sizes(sum(weights)) == tuple(weights)


@given(shares, st.integers(0, 20_000))
def test_a_short_batch_is_cut_in_proportion(weights: list[int], rows: int) -> None:
    """No device is further than one row from its part."""
    for size, weight in zip(Cut(weights).sizes(rows), weights, strict=True):
        assert abs(size - rows * weight / sum(weights)) <= 1


@given(shares, st.integers(1, 20_000))
def test_floors_are_those_of_multi_gpu_model(weights: list[int], rows: int) -> None:
    """The seed's rule: the floor of each part, the rest to the last."""
    assert Cut(weights, floors=True).sizes(rows) == keras_split(rows, weights)


def test_ratios_may_be_fractions() -> None:
    """0.6 and 0.4 of 10 are 6 and 4."""
    assert Cut([0.6, 0.4]).sizes(10) == (6, 4)
    assert Cut([1 / 3, 2 / 3]).sizes(9) == (3, 6)
