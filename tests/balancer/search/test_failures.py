"""A failure doesn't exclude a device: kernels that fail above a size, pairs that can't step
together.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evener.balancer.search.search import Search
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Probe, Problem, Stage
from tests.support.search_machines import Bench

PAIR = Bench(((10.0, 0.05, 0, 20_000), (10.0, 0.1, 0, 20_000)), 0.002)


def searched(breaks: Callable[[Layout], tuple[int, ...]]) -> Search:
    """Return a whole search over the pair. `breaks` returns the devices that fail in a layout."""
    search = Search(Problem(devices=2, memory_bytes=(None, None)))
    while probes := search.ask():
        for probe in probes:
            search.tell(_seen(probe, breaks(probe.layout)))
    return search


def _seen(probe: Probe, broken: tuple[int, ...]) -> Observation:
    if broken:
        return Failed(probe, "raised", "UnknownError", broken, 1.0)
    (seen,) = PAIR.measure([probe])
    return seen


@pytest.mark.parametrize("largest", [100, 900, 5000])
def test_a_kernel_that_ends_at_a_size_is_a_ceiling_and_no_loss(largest: int) -> None:
    """Above `largest` samples, the first device always fails. It still has a share in the plan."""
    search = searched(lambda layout: (0,) if layout.shares[0] > largest else ())
    best = search.best()
    assert best is not None
    assert 0 < best.layout.shares[0] <= largest
    assert best.layout.shares[1] > 0


def test_a_pair_that_can_not_step_together_still_has_its_devices() -> None:
    """Whichever device the failure of a split names, the result is the faster device alone."""
    for named in (0, 1):
        best = searched(
            lambda layout, named=named: (
                (named,)  # type: ignore[misc]
                if layout.kind == "split"
                else ()
            )
        ).best()
        assert best is not None
        assert best.layout.active == (0,)


def test_a_device_that_fails_at_its_first_batch_is_left_out() -> None:
    """Nothing ran on it, so there is no smaller size to use."""
    search = searched(lambda layout: (1,) if layout.shares[1] else ())
    best = search.best()
    assert best is not None
    assert best.layout.active == (0,)


def test_a_device_that_ran_one_row_alone_is_not_lost_when_more_fail() -> None:
    """Eight rows run out of memory, and then a kernel fails with four rows."""
    search = Search(Problem(devices=2, memory_bytes=(None, None)))
    while (probes := search.ask()) and probes[0].stage == Stage.SOLO:
        for probe in probes:
            rows = probe.layout.shares[0]
            if rows >= 8:
                search.tell(OutOfMemory(probe, (0,), "full", 1.0))
            else:
                search.tell(_seen(probe, (0,) if rows > 1 else ()))
    assert search.evaluation.model.live == (0, 1)
    assert search.evaluation.model.devices[0].memory.smallest_failed is not None


def test_a_device_that_is_lost_at_the_second_try_is_left_out() -> None:
    """Its child had exited for no known reason before, which took longer."""
    search = Search(PAIR.problem())
    first, second = search.ask()
    search.tell(PAIR.measure([first])[0])
    search.tell(Failed(second, "exit", "exit code 1", (1,), 2.0))
    search.tell(Failed(second, "device", "GPU:1 is lost", (1,), 1.0))
    assert search.evaluation.model.devices[1].lost == "GPU:1 is lost"
    assert all(probe.layout.active == (0,) for probe in search.ask())


@pytest.mark.parametrize("stage", ["race", "check"])
def test_a_device_that_goes_late_is_left_out_of_the_plan_and_of_its_rivals(stage: str) -> None:
    """In every stage, the other devices share the batch."""
    bench = Bench(((10.0, 1.0, 0, 300), (10.0, 1.1, 0, 300), (12.0, 1.3, 0, 150)), 0.001)
    search, gone = Search(bench.problem()), False
    while probes := search.ask():
        gone = gone or any(probe.stage == stage and probe.layout.shares[2] for probe in probes)
        for probe in probes:
            lost = gone and probe.layout.shares[2]
            (seen,) = (
                [Failed(probe, "device", "it has gone", (2,), 1.0)]
                if lost
                else bench.measure([probe])
            )
            search.tell(seen)
    best = search.best()
    assert gone
    assert best is not None
    assert best.layout.active == (0, 1)
    assert not any(one.candidate.layout.shares[2] for one in search.evaluation.ranking())
