"""Properties of the noise scale's estimate, on gradients with known noise and signal."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import product
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.training.noise_scale import (
    BLOCK,
    ENDLESS,
    NoiseWindow,
    Sample,
    describe,
    efficiency,
    extra_rows,
    separate_noise,
)

SHARES = ((1, 1), (6, 2), (5, 2, 1), (820, 568, 64, 8))
sizes = st.lists(st.integers(0, 4), min_size=2, max_size=3).filter(
    lambda each: sum(size > 0 for size in each) > 1 and sum(each) <= 8
)


@given(sizes, st.lists(st.integers(-3, 3), min_size=2, max_size=2, unique=True), st.integers(-3, 3))
def test_noise_and_signal_are_unbiased_for_any_shares(
    shares: list[int], rows: list[int], shift: int
) -> None:
    """The mean over all possible batches is exact, for rows with one of two gradients."""
    values = [Fraction(each + shift) for each in rows]
    center = sum(values) / 2
    variance = sum((each - center) ** 2 for each in values) / 2
    samples = []
    for batch in product(values, repeat=sum(shares)):
        parts, start = [], 0
        for size in shares:
            parts.append(sum(batch[start : start + size], Fraction(0)))
            start += size
        weighted = sum(part * part / size for part, size in zip(parts, shares, strict=True) if size)
        samples.append(separate_noise(shares, weighted, (sum(batch) / len(batch)) ** 2))  # type: ignore[arg-type]
    assert sum(each.noise for each in samples) / len(samples) == variance
    assert sum(each.signal for each in samples) / len(samples) == center**2


@given(sizes)
def test_a_part_without_rows_changes_nothing(shares: list[int]) -> None:
    assert separate_noise([*shares, 0], 7.0, 0.25) == separate_noise(shares, 7.0, 0.25)


def test_one_part_alone_shows_no_noise() -> None:
    with pytest.raises(ValueError, match="two parts"):
        separate_noise((8, 0), 1.0, 1.0)


def draw(
    chance: random.Random, shares: tuple[int, ...], noise: float, dimensions: int = 20
) -> Sample:
    """Return a step's sample of normal gradients with |G|^2 = 1 and this tr(S)."""
    spread = math.sqrt(noise / dimensions)
    parts = [
        [chance.gauss(i == 0, spread / math.sqrt(n)) for i in range(dimensions)] for n in shares
    ]
    total = sum(shares)
    whole = [
        sum(n * part[i] for n, part in zip(shares, parts, strict=True)) / total
        for i in range(dimensions)
    ]
    weighted = sum(n * sum(x * x for x in part) for n, part in zip(shares, parts, strict=True))
    return separate_noise(shares, weighted, sum(x * x for x in whole))


@pytest.mark.parametrize("shares", SHARES)
def test_the_interval_holds_the_truth_in_90_to_99_of_100_windows(shares: tuple[int, ...]) -> None:
    chance, held, middles = random.Random(3), 0, []
    truth = 2.0 * sum(shares)
    trials = 150
    for _ in range(trials):
        window = NoiseWindow()
        for _ in range(25 * BLOCK):
            window.add(draw(chance, shares, truth, 4))
        found = window.scale()
        assert found is not None
        held += found.low <= truth <= found.high
        middles.append(found.rows)
    assert 0.88 <= held / trials <= 1.0  # of 150 windows
    assert mean(middles) == pytest.approx(truth, rel=0.1)


def test_a_batch_far_below_the_noise_scale_gives_a_lower_end_alone() -> None:
    window, chance = NoiseWindow(), random.Random(5)
    for _ in range(8 * BLOCK):
        window.add(draw(chance, (3, 1), 4000.0))
    found = window.scale()
    assert found is not None
    assert found.high == ENDLESS
    assert 1 < found.low < 4000
    assert "at least" in describe(found, 4, 512)


def test_the_window_forgets_what_is_long_ago() -> None:
    window = NoiseWindow()
    for noise in (10.0, 1000.0):
        for _ in range(300 * BLOCK):
            window.add(Sample(noise, 1.0))
    found = window.scale()
    assert found is not None
    assert found.rows == pytest.approx(1000, rel=0.01)


def test_the_first_blocks_count_in_full() -> None:
    window = NoiseWindow()
    for _ in range(6 * BLOCK):
        assert window.scale() is None
        window.add(Sample(12.0, 3.0))
    found = window.scale()
    assert found is not None
    assert found.rows == pytest.approx(4.0)
    assert found.samples == 6 * BLOCK


def test_a_step_that_overflowed_is_left_out() -> None:
    window = NoiseWindow()
    for _ in range(6 * BLOCK):
        window.add(Sample(12.0, 3.0))
        window.add(Sample(math.inf, math.nan))
    found = window.scale()
    assert found is not None
    assert found.rows == pytest.approx(4.0)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1e-3, 1e9))
def test_rows_to_the_same_loss_follow_the_worth_of_a_batch(
    batch: int, larger: int, scale: float
) -> None:
    assert 0 < efficiency(batch, scale) <= 1
    assert extra_rows(batch, larger, scale) == pytest.approx((larger + scale) / (batch + scale))


def test_gradients_without_noise_are_reported_as_such() -> None:
    window = NoiseWindow()
    for i in range(6 * BLOCK):
        window.add(Sample(-1e-9 * (1 + i % 3), 1.0))
    found = window.scale()
    assert found is not None
    assert found.rows == 0
    assert "hardly differ" in describe(found, 8, 400)


def test_the_message_has_two_digits() -> None:
    window = NoiseWindow()
    for i in range(6 * BLOCK):
        window.add(Sample(3900.0 + 10 * (i // BLOCK % 2), 1.0))
    found = window.scale()
    assert found is not None
    said = describe(found, 2048, 1200)
    assert said == (
        "noise scale 3,900 rows (3,900 - 3,900) after 1,200 steps; 2,048 rows: 66 % of the "
        "samples' worth"
    )
