"""The smallest global batch within the tolerance: which measurements refute it, and what replaces
it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from evener.balancer.search.rows import PARTS
from evener.balancer.search.search import Search
from evener.balancer.types import Layout
from tests.support.recording_prober import run_search
from tests.support.search_machines import Bench, benches, searched

BENCH = Bench(((30.0, 0.2, 0, 4000), (40.0, 0.3, 0, 4000)), 0.004)


def searched_with(slow: Layout | None, factor: float) -> Search:
    """Return a search of BENCH in which the steps of one layout take longer than they should."""
    search = Search(BENCH.problem(tolerance=0.02))
    return run_search(
        search,
        lambda probes: BENCH.measure(
            probes, factor if any(probe.layout == slow for probe in probes) else 1.0
        ),
    )


def splits(search: Search) -> list[Layout]:
    """Return the uneven splits of the race, the smallest first."""
    found = [
        one.candidate.layout
        for one in search.evaluation.ranking()
        if one.candidate.family.name == "split"
    ]
    return sorted(found, key=lambda layout: layout.global_batch)


def test_the_smallest_batch_within_the_tolerance_is_taken() -> None:
    """It uses all of the tolerance, and the fastest layout has a much larger batch."""
    search = searched_with(None, 1.0)
    best, (rate, batch) = search.best(), BENCH.best()
    assert best is not None
    smallest, *others = splits(search)
    assert best.layout == smallest
    assert 0.978 <= BENCH.rate(smallest) / rate <= 0.985
    assert batch > 1.3 * smallest.global_batch
    # a similar layout isn't worth a race
    assert all(other.global_batch > 1.3 * smallest.global_batch for other in others)


@pytest.mark.parametrize("factor", [1.007, 1.012, 1.05])
def test_a_measurement_against_the_smallest_batch_does_not_end_at_the_fastest(
    factor: float,
) -> None:
    """A layout slightly within the tolerance also races.

    It is preferred to the fastest, which has a much larger batch.
    """
    smallest, *_ = splits(searched_with(None, 1.0))
    best = searched_with(smallest, factor).best()
    assert best is not None
    assert smallest.global_batch < best.layout.global_batch <= 1.25 * smallest.global_batch
    assert BENCH.rate(best.layout) >= 0.978 * BENCH.best()[0]


def test_a_miss_that_no_measurement_can_tell_is_forgiven() -> None:
    """0.3 % beyond the tolerance is less than the noise between two probes, so the smallest batch
    stays.
    """
    smallest, *_ = splits(searched_with(None, 1.0))
    best = searched_with(smallest, 1.003).best()
    assert best is not None
    assert best.layout == smallest


@settings(max_examples=20, deadline=None)
@given(benches(fewest=2, most=3))
def test_it_is_not_smaller_than_what_the_whole_tolerance_allows(bench: Bench) -> None:
    """The smaller the tolerance, the larger the batch, and none exceeds its tolerance."""
    search, _ = searched(bench, bench.problem(tolerance=0.02))
    found = search.evaluation.by_rows.predictions
    fastest = max(
        one.samples_per_second for one in (found.fastest_split, found.fastest_single) if one
    )
    smallest = [(part, one) for part in PARTS if (one := found.smallest_fast_enough(part))]
    assert [one.global_batch for _, one in smallest] == sorted(
        one.global_batch for _, one in smallest
    )
    for part, one in smallest:
        assert one.samples_per_second >= fastest * (1 - 0.02 * part - 1e-6)


def test_batches_are_not_doubled_for_a_gain_that_the_tolerance_leaves() -> None:
    """Sums take 4 ms, so beyond 7,000 rows each doubling gains less than 1 %.

    Without a tolerance, all of the gain is wanted.
    """
    far = Bench(((2.0, 0.12, 0, 16_000), (2.0, 0.12, 0, 16_000)), 0.004)
    plans = {}
    for tolerance in (0.0, 0.02):
        search, _ = searched(far, far.problem(tolerance=tolerance))
        best = search.best()
        assert best is not None
        plans[tolerance] = best.layout.global_batch
        assert far.rate(best.layout) >= (1 - tolerance - 0.005) * far.best()[0]
    assert plans[0.0] > 30_000
    assert plans[0.02] < 10_000
