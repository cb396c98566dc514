"""Growing the number of trainings follows the gain, ends where it should, and finds the best."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.packing import MOST_PROCESSES, best_size, next_size
from evener.balancer.search.search import Search
from evener.balancer.types import Problem
from tests.support.search_machines import Bench

ONE = Bench(((10.0, 0.1, 0, 3000),))


def grow(rate: Callable[[int], float], most: int = MOST_PROCESSES) -> dict[int, float]:
    """Follow the advice to its end, and return the sizes in the order in which they were tried."""
    tried: dict[int, float] = {}
    while (size := next_size(tried, most)) is not None:
        assert size not in tried, "nothing is tried twice"
        assert 1 <= size <= most
        tried[size] = rate(size)
    return tried


def test_sizes_grow_as_one_two_three_five_eight_while_they_gain() -> None:
    assert list(grow(float, most=21))[:7] == [1, 2, 3, 5, 8, 13, 21]


def test_a_device_that_gains_nothing_is_left_after_two_sizes() -> None:
    assert list(grow(lambda _: 100.0)) == [1, 2, 3]


def test_one_dip_does_not_end_the_growth() -> None:
    """Two trainings may collide where three overlap."""
    rates = {1: 100.0, 2: 90.0, 3: 150.0, 5: 170.0, 8: 160.0, 13: 150.0}
    assert best_size(grow(lambda n: rates.get(n, 165.0))) == 5


def test_running_out_of_memory_ends_the_growth_and_the_gap_below_is_searched() -> None:
    tried = grow(lambda n: 0.0 if n > 6 else 100.0 * n)
    assert list(tried)[:5] == [1, 2, 3, 5, 8]
    assert best_size(tried) == 6


def test_the_peak_between_two_sizes_is_found() -> None:
    """With a peak at 10, between 8 and 13, refinement comes within a percent of it."""
    tried = grow(lambda n: 100.0 - (n - 10) ** 2 * 0.3)
    best = best_size(tried)
    assert best is not None
    assert tried[best] >= 99.0


def test_of_equals_the_fewest_trainings_are_chosen() -> None:
    assert best_size({1: 100.0, 2: 150.0, 3: 150.9, 5: 151.0}) == 2


def test_nothing_that_ran_is_no_best() -> None:
    assert best_size({1: 0.0}) is None
    assert next_size({1: 0.0}) is None


@given(
    peak=st.integers(1, 40),
    rise=st.floats(0.02, 0.5),
    fall=st.floats(0.0, 0.05),
    most=st.integers(1, MOST_PROCESSES),
)
def test_growth_ends_soon_and_near_the_peak(peak: int, rise: float, fall: float, most: int) -> None:
    """On any curve with one peak, at most 15 sizes are tried.

    The best is within 7 % of the best that `most` allows.
    """

    def rate(n: int) -> float:
        return 100.0 * (1 + rise * (min(n, peak) - 1)) * (1 - fall) ** max(0, n - peak)

    tried = grow(rate, most)
    assert len(tried) <= 15
    best = best_size(tried)
    assert best is not None
    top = max(rate(n) for n in range(1, most + 1))
    assert tried[best] >= top * 0.93


def test_more_trainings_must_gain_more_than_a_twentieth() -> None:
    """34 trainings side by side reached 4.6 % more than 8, and each took 4.2 times as long."""
    search, size = Search(Problem(1, (None,), global_batch=256), LayoutOptions(("solo", "pack"))), 0
    while probes := search.ask():
        for probe in probes:
            size = max(size, probe.layout.processes)
            gain = min(probe.layout.processes, 8) * (1.046 if probe.layout.processes > 8 else 1.0)
            (seen,) = ONE.measure([probe], probe.layout.processes / gain)
            search.tell(seen)
    best = search.best()
    assert best is not None
    assert best.layout.processes == 8
    assert size > 8
