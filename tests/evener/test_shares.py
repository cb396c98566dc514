"""Properties of the arithmetic that divides a batch."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import RequestError
from evener.shares.whole_rows import apportion, bounds, check_ratios, even, gradient_weight

RATIO = st.one_of(
    st.integers(0, 5000),
    st.floats(0, 1e308, allow_nan=False, allow_subnormal=True),
    st.sampled_from([0.0, 5e-324, 1e-300, 0.1, 1 / 3, 1.0, 1e308]),
)
RATIOS = st.lists(RATIO, min_size=1, max_size=9).filter(any)
BATCH = st.one_of(st.integers(0, 300), st.integers(0, 10**30))


@given(BATCH, RATIOS)
def test_apportion_gives_every_sample_to_one_device(batch: int, ratios: list[float]) -> None:
    sizes = apportion(batch, ratios)
    assert sum(sizes) == batch
    assert len(sizes) == len(ratios)
    assert min(sizes) >= 0


@given(BATCH, RATIOS)
def test_a_device_gets_samples_exactly_if_its_ratio_and_the_batch_allow(
    batch: int, ratios: list[float]
) -> None:
    sizes = apportion(batch, ratios)
    active = [i for i, ratio in enumerate(ratios) if ratio > 0]
    for i, size in enumerate(sizes):
        if ratios[i] == 0:
            assert size == 0
        elif batch >= len(active):
            assert size >= 1
        else:
            assert size == (1 if i in active[:batch] else 0)


@given(st.integers(0, 10**9), st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
def test_apportion_stays_within_one_sample_of_the_quota(extra: int, ratios: list[int]) -> None:
    """Shares are within one sample of their quotas if each quota is at least one sample.

    Then none is rounded up to one.
    """
    total = sum(ratios)
    batch = total + extra
    quotas = [Fraction(batch * ratio, total) for ratio in ratios]
    assert all(
        abs(size - quota) < 1 for size, quota in zip(apportion(batch, ratios), quotas, strict=True)
    )


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=12).filter(any))
def test_ratios_of_whole_shares_give_those_shares_again(sizes: list[int]) -> None:
    """A plan's stored floats give the measured samples again."""
    total = sum(sizes)
    assert apportion(total, [size / total for size in sizes]) == tuple(sizes)


@given(BATCH, st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any), st.integers(1, 7))
def test_only_the_proportion_of_ratios_counts(batch: int, ratios: list[int], factor: int) -> None:
    assert apportion(batch, ratios) == apportion(batch, [ratio * factor for ratio in ratios])


@given(st.integers(0, 10**6), st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_a_larger_ratio_never_gets_less(batch: int, ratios: list[int]) -> None:
    ordered = sorted(ratios, reverse=True)
    assert list(apportion(batch, ordered)) == sorted(apportion(batch, ordered), reverse=True)


def test_the_samples_of_tiny_shares_come_from_the_device_furthest_above_its_quota() -> None:
    """Three devices get one sample each for a quota of 0.1.

    Of the quotas 3.88 and 3.83, the smaller one gives a sample.
    """
    assert apportion(8, [0.1, 0.1, 0.1, 4, 3.95]) == (1, 1, 1, 3, 2)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_even_shares_differ_by_at_most_one(batch: int, devices: int) -> None:
    sizes = even(batch, devices)
    assert sizes == apportion(batch, [1.0] * devices)
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.lists(st.integers(0, 1000), max_size=10))
def test_bounds_tile_the_batch(sizes: list[int]) -> None:
    rows = [row for start, stop in bounds(sizes) for row in range(start, stop)]
    assert rows == list(range(sum(sizes)))
    assert [stop - start for start, stop in bounds(sizes)] == sizes


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=10).filter(any))
def test_gradient_weights_sum_to_one(sizes: list[int]) -> None:
    weights = [gradient_weight(sizes, rank) for rank in range(len(sizes))]
    assert math.isclose(math.fsum(weights), 1.0, rel_tol=1e-15)
    assert all((weight == 0) == (size == 0) for weight, size in zip(weights, sizes, strict=True))


def test_a_batch_of_one_sample_has_one_whole_weight() -> None:
    assert [gradient_weight((0, 1), rank) for rank in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize(
    "ratios",
    [[], [0, 0], [-1, 2], [math.nan], [math.inf, 1], [True, 1], ["1"], [None], [10**400], [1 + 2j]],
)
def test_an_invalid_ratio_is_a_one_line_error(ratios: list[object]) -> None:
    with pytest.raises(RequestError) as caught:
        apportion(10, ratios)  # type: ignore[arg-type]
    assert caught.value.remedy
    with pytest.raises(RequestError):
        check_ratios(ratios)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [-1, True, 2.5, math.nan, "8", None])
def test_an_invalid_batch_is_a_one_line_error(batch: object) -> None:
    with pytest.raises(RequestError):
        apportion(batch, [1, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[], [0, 0], [-1, 2]])
def test_shares_of_nothing_have_no_weights(sizes: list[int]) -> None:
    with pytest.raises(RequestError):
        gradient_weight(sizes, 0)
