"""The smallest global batch within the tolerance: what the race may say against it, and who stands in for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Probe
from tests.support.search_machines import Bench, benches

BENCH = Bench(((30.0, 0.2, 0, 4000), (40.0, 0.3, 0, 4000)), 0.004)


def raced(bench: Bench, slower: float) -> tuple[Search, list[Layout]]:
    """A search whose smallest contender runs slower in the race than it did before; and who raced."""
    search, least, layouts = Search(bench.problem(tolerance=0.02)), 0, list[Layout]()
    while probes := search.ask():
        if probes[0].stage == "race":
            splits = [layout for layout in search.contenders() if layout.kind == "split" and fast(bench, layout)]
            least = min((layout.global_batch for layout in splits), default=0)
            layouts.append(probes[0].layout)
        for one in bench.measure(probes, slower if unlucky(probes[0], least) else 1.0):
            search.tell(one)
    return search, layouts


def fast(bench: Bench, layout: Layout) -> bool:
    """Whether a layout is near the tolerance of the best, or better."""
    return bench.rate(layout.shares) > 0.97 * bench.best()[0]


def unlucky(probe: Probe, batch: int) -> bool:
    """Whether it is the smallest contender's turn."""
    return probe.stage == "race" and probe.layout.global_batch == batch


@pytest.mark.parametrize("slower", [1.0, 1.012])
def test_a_measurement_against_the_smallest_batch_does_not_end_at_the_fastest(slower: float) -> None:
    """A layout a little inside the tolerance races too, and is taken before the fastest, of a much larger batch."""
    search, layouts = raced(BENCH, slower)
    best = search.best()
    assert best is not None
    batches = sorted({layout.global_batch for layout in layouts if fast(BENCH, layout)})
    assert best.layout.global_batch == (batches[0] if slower == 1.0 else batches[1])
    assert best.layout.global_batch <= 1.2 * batches[0]
    assert BENCH.rate(best.layout.shares) >= 0.978 * BENCH.best()[0]
    assert batches[-1] > 1.3 * batches[0]


@settings(max_examples=20, deadline=None)
@given(benches(fewest=2, most=3))
def test_it_is_not_smaller_than_what_the_whole_tolerance_allows(bench: Bench) -> None:
    """The less that may be missed, the larger the batch."""
    search, _ = raced(bench, 1.0)
    view = search._known().view
    if view.tolerable and view.insured:
        assert view.insured.global_batch >= view.tolerable.global_batch
        assert view.insured.samples_per_second >= view.tolerable.samples_per_second * (1 - 1e-6)
