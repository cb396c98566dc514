"""Where a batch is cut for the devices, for any batch and any shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.shares.divisions import Cut

shares = st.lists(st.integers(1, 5000), min_size=1, max_size=8)


@given(shares, st.integers(0, 20_000), st.booleans())
def test_every_row_goes_to_one_device(weights: list[int], rows: int, floors: bool) -> None:
    """The boundaries rise from 0 to the number of rows, for any batch."""
    edges = Cut(weights, floors).bounds(rows)
    assert edges[0] == 0
    assert edges[-1] == rows
    assert edges == sorted(edges)
    assert len(edges) == len(weights) + 1


@given(shares)
def test_the_plans_own_batch_is_cut_by_its_shares(weights: list[int]) -> None:
    """At the global batch, each device gets exactly its share."""
    assert Cut(weights).sizes(sum(weights)) == tuple(weights)


@given(shares, st.integers(0, 20_000))
def test_a_short_batch_is_cut_in_proportion(weights: list[int], rows: int) -> None:
    """No device is more than one row off its quota."""
    for size, weight in zip(Cut(weights).sizes(rows), weights, strict=True):
        assert abs(size - rows * weight / sum(weights)) <= 1


@given(shares, st.integers(1, 20_000))
def test_floors_are_those_of_multi_gpu_model(weights: list[int], rows: int) -> None:
    """Each part is rounded down and the last gets the rest, as in the original multi_gpu_model."""
    floors = [rows * weight // sum(weights) for weight in weights[:-1]]
    assert Cut(weights, rounds_down=True).sizes(rows) == (*floors, rows - sum(floors))


@pytest.mark.parametrize(
    ("rows", "ratios", "sizes"),
    [
        (100, [768, 560], (57, 43)),
        (1388, [820, 568], (820, 568)),
        (128, [50, 50], (64, 64)),
        (100, [0.6, 0.4], (60, 40)),
        (9, [4, 3, 2], (4, 3, 2)),
        (1, [1, 1], (0, 1)),
    ],
)
def test_ratios_mean_what_the_seed_meant(
    rows: int, ratios: list[float], sizes: tuple[int, ...]
) -> None:
    """Ratios split like multi_gpu_model(..., ratios=...) of jinkos/multi-gpus."""
    assert Cut(ratios, rounds_down=True).sizes(rows) == sizes


def test_ratios_may_be_fractions() -> None:
    """Ratios 0.6 and 0.4 split 10 rows into 6 and 4."""
    assert Cut([0.6, 0.4]).sizes(10) == (6, 4)
    assert Cut([1 / 3, 2 / 3]).sizes(9) == (3, 6)
