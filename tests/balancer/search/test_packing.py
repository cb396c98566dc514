"""Packs in the race: which logical pack takes part, and whose failure is named."""

from __future__ import annotations

import msgspec
import pytest

from evener.balancer.search.layouts import LayoutOptions, PackMode, pack_on
from evener.balancer.search.search import Search
from evener.balancer.types import Failed, Layout, Probe, Problem, Timed, solo
from tests.support.search_machines import Bench

ONE = Bench(((10.0, 0.1, 0, 3000),))
MODES: tuple[PackMode, ...] = ("", "logical")


def searched(runs: int, budget: float | None = None) -> Search:
    """The end of a search at 256 rows in which up to so many trainings side by side take as long as one."""
    options = LayoutOptions(("solo", "pack"), pack_modes=MODES)
    search = Search(Problem(1, (31000,), global_batch=256, budget_seconds=budget), options)
    while probes := search.ask():
        for probe, seen in zip(probes, ONE.measure(probes), strict=True):
            few = probe.layout.processes <= runs
            search.tell(seen if few else Failed(probe, "raised", "no context left", (0,), 1.0))
    return search


def logical(search: Search) -> list[int]:
    """How many trainings the logical packs of the race have."""
    return [one.layout.processes for one in search._candidates.all if one.layout.placement == "logical"]


def test_a_logical_pack_is_as_large_as_the_best_of_plain_processes() -> None:
    assert logical(searched(runs=5)) == [5]


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 5), (1000.0, 3)])
def test_the_largest_logical_pack_that_ran_stays_once_there_is_no_time_for_another(seconds: float, kept: int) -> None:
    """The best number of plain processes may be another than it was, when the budget is over."""
    search = searched(runs=5, budget=1000.0)
    again = Search(search.problem, search.options)
    plain = [one for one in search._seen.all_timed() if one.probe.layout.placement != "logical"]
    tried = [Probe(pack_on(solo(1, 0, 256), size, "logical"), "race", 1.0) for size in (2, 3)]
    for seen in [*plain, *ONE.measure(tried)]:
        assert isinstance(seen, Timed)
        again.tell(msgspec.structs.replace(seen, elapsed_seconds=1.0 + seconds * (seen.probe == tried[0])))
    assert logical(again) == [kept]


@pytest.mark.parametrize(("runs", "named"), [(1, [2]), (2, []), (5, [])])
def test_a_device_that_can_not_be_packed_is_named_by_the_smallest_pack(runs: int, named: list[int]) -> None:
    """Not one on which a larger pack failed: there, that is how the largest was found."""
    layouts: list[Layout] = [one.layout for one, _ in searched(runs).broken() if one.layout.placement == ""]
    assert [layout.processes for layout in layouts] == named
