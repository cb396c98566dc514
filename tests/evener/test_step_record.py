"""Step times with a run's first and last shares: which steps count, and the claimed gain."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from evener.training.step_record import Comparison, ShareTimes, StepRecord, compare

EVEN, MOVED = (64, 64), (80, 48)


def record(
    *stretches: tuple[tuple[int, int], int, float], disturbed: tuple[int, ...] = ()
) -> StepRecord:
    """Return one rank's record, from shares, number of steps and seconds per step."""
    made, step = StepRecord(), 0
    for shares, steps, step_s in stretches:
        for number in range(steps):
            slow = 5.0 if number < 3 else 1.0  # kernels are being chosen
            made.add(shares, step_s * slow, step_s * slow, step in disturbed)
            step += 1
    return made


def test_first_steps_and_disturbed_ones_do_not_count() -> None:
    made = record((EVEN, 20, 0.2), (MOVED, 20, 0.1), disturbed=tuple(range(5, 9)))
    assert (made.first, made.last) != (None, None)
    for figures, shares, step_s in ((made.first, EVEN, 0.2), (made.last, MOVED, 0.1)):
        assert figures is not None
        assert (figures.shares, figures.step_s) == (shares, step_s)
        assert figures.error_s > 0
    assert made.changes == 1


def test_shares_count_that_enough_steps_had() -> None:
    """Shares set three steps before the end don't count."""
    made = record((EVEN, 6, 0.3), (MOVED, 300, 0.2), ((96, 32), 300, 0.1), (EVEN, 6, 0.3))
    assert made.first is not None
    assert made.first.shares == MOVED
    assert made.last is not None
    assert made.last.shares == (96, 32)
    assert made.changes == 2  # since the first shares that had enough


def test_a_short_training_has_figures_of_what_it_had_and_claims_nothing() -> None:
    made = record((EVEN, 4, 0.2))
    assert made.first is not None
    assert made.first == made.last
    assert compare([made.first], [made.first]).outcome == "same shares"
    assert StepRecord().last is None


def test_the_first_steps_stay_the_first_while_shares_stay() -> None:
    made = StepRecord()
    for step in range(1000):
        made.add(EVEN, 0.1, 0.2 if step < 300 else 0.1, False)
    assert made.first is not None
    assert made.first.step_s == 0.2
    assert made.last is not None
    assert made.last.step_s == 0.1
    assert made.changes == 0


def seen(
    shares: tuple[int, int],
    rows_s: tuple[float, float],
    seed: int,
    noise: float,
    rest_s: float = 0.02,
) -> list[ShareTimes]:
    """Return the share times of ranks with these seconds per row over 60 steps."""
    numbers, made = random.Random(seed), [StepRecord(), StepRecord()]
    for _ in range(60):
        own = [
            a * b * math.exp(numbers.gauss(0, noise)) for a, b in zip(shares, rows_s, strict=True)
        ]
        for each, work in zip(made, own, strict=True):
            each.add(shares, work, max(own) + rest_s, False)
    return [each.last for each in made if each.last is not None]


SPEEDS = st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2))
SHARES = st.integers(8, 120).map(lambda rows: (rows, 128 - rows))


@given(SPEEDS, SHARES, SHARES, st.integers(0, 99))
def test_a_gain_is_what_shares_make_and_its_interval_holds_it(
    rows_s: tuple[float, float], first: tuple[int, int], last: tuple[int, int], seed: int
) -> None:
    found = compare(seen(first, rows_s, seed, 0.01), seen(last, rows_s, seed + 1, 0.01))
    before, after = (
        max(a * b for a, b in zip(some, rows_s, strict=True)) for some in (first, last)
    )
    gain = (before + 0.02) / (after + 0.02) - 1
    if first == last:
        assert found.outcome == "same shares"
    elif gain > 0.1:
        assert found.outcome == "faster"
        assert found.low - 0.05 * (1 + gain) <= gain <= found.high + 0.05 * (1 + gain)
    elif gain < -0.1:
        assert found.outcome == "slower"


@given(SPEEDS, SHARES, SHARES, st.sampled_from([0.5, 0.6, 1.7, 2.0]), st.integers(0, 99))
def test_devices_that_changed_their_speed_are_not_credited_to_shares(
    rows_s: tuple[float, float],
    first: tuple[int, int],
    last: tuple[int, int],
    faster: float,
    seed: int,
) -> None:
    now = (rows_s[0] / faster, rows_s[1] / faster)
    found = compare(
        seen(first, rows_s, seed, 0.01, rest_s=0.0), seen(last, now, seed + 1, 0.01, rest_s=0.0)
    )
    assert found == Comparison("not comparable")
