"""The layouts of a race, and how each is built."""

from __future__ import annotations

from typing import Any

import pytest

from evener.balancer.families import (
    FAMILIES,
    Placement,
    device_counts,
    family_of,
    find_family,
    is_even,
    pack_on,
    place_on,
    split_evenly,
)
from evener.balancer.search.layouts import Candidate, LayoutOptions, shrink
from evener.balancer.search.rows import PARTS
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, OutOfMemory, Probe, Problem, Stage, solo
from tests.support.recording_prober import run_search
from tests.support.search_machines import Bench


def candidate(family: str, layout: Layout) -> Candidate:
    """Return a candidate of the family with this name."""
    return Candidate(find_family(family), layout)


FOUR = Bench(
    ((10.0, 0.1, 0, 3000), (12.0, 0.12, 0, 3000), (15.0, 0.15, 0, 3000), (20.0, 0.2, 0, 3000)),
    0.001,
)


def raced(bench: Bench, options: LayoutOptions, **problem: Any) -> dict[str, list[Layout]]:
    """Return the layouts of a whole race, by family."""
    search = run_search(Search(bench.problem(**problem), options), bench.measure)
    found: dict[str, list[Layout]] = {}
    for one in search.evaluation.offers.candidates:
        found.setdefault(one.family.name, []).append(one.layout)
    return found


def test_one_device_is_no_even_split() -> None:
    found = raced(Bench(FOUR.devices[:1]), LayoutOptions(("solo", "even"), scaling=False))
    assert set(found) == {"solo"}


@pytest.mark.parametrize(
    ("devices", "counts"),
    [(0, ()), (1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (5, (2, 4, 5)), (8, (2, 4, 8))],
)
def test_an_even_split_is_tried_on_powers_of_two_and_on_all(
    devices: int, counts: tuple[int, ...]
) -> None:
    assert device_counts(devices) == counts


def test_a_batch_is_spread_in_whole_quanta() -> None:
    one = split_evenly(3, (0, 2), 40, 8)
    assert one == Layout("split", (24, 0, 16))
    assert split_evenly(2, (0, 1), 8, 8) is None
    assert split_evenly(2, (0, 1), 20, 8) is None
    assert split_evenly(2, (0, 1), 2) is not None


def test_a_placement_takes_its_devices_and_no_more() -> None:
    assert place_on(4, Placement("towers"), 10) == Layout("place", (5, 5, 0, 0), placement="towers")
    three = place_on(4, Placement("towers", 3), 10)
    assert three is not None
    assert three.active == (0, 1, 2)
    assert place_on(1, Placement("towers"), 10) is None
    assert place_on(2, Placement("towers"), 1) is None
    assert place_on(2, Placement("towers"), 2) is not None


def test_a_pack_has_its_single_device_and_batch() -> None:
    assert pack_on(solo(2, 1, 64), 3, "mps") == Layout("pack", (0, 64), 3, "mps")
    assert pack_on(solo(2, 1, 64), 3, batch=8).shares == (0, 8)


def test_what_ran_out_of_memory_comes_back_with_seven_tenths() -> None:
    assert shrink(Layout("split", (100, 10))) == Layout("split", (70, 7))
    assert shrink(Layout("split", (1, 8))) is None
    assert shrink(Layout("split", (10, 8)), 4) == Layout("split", (4, 4))
    assert shrink(Layout("solo", (0, 3)), 4) is None


def test_families_and_what_is_simple() -> None:
    """One device is simpler than several, few are simpler than many, and no knobs are simpler than
    any.
    """
    assert family_of(solo(2, 0, 8)).name == "solo"
    assert family_of(Layout("split", (4, 4))).name == "split"
    even, split = (
        candidate("even", Layout("split", (4, 4))),
        candidate("split", Layout("split", (5, 3))),
    )
    single = candidate("solo", solo(2, 0, 8))
    pack, more = (candidate("pack", pack_on(single.layout, size)) for size in (2, 3))
    knob = candidate("solo", Layout("solo", (8, 0), knobs=("xla",)))
    order = [single, even, split, candidate("split", Layout("split", (5, 2, 1))), pack, more, knob]
    assert sorted(set(order), key=lambda one: one.simplicity) == order
    assert [one.synchronous for one in order] == [True, True, True, True, False, False, False]


def test_even_is_the_same_share_up_to_a_quantum() -> None:
    assert is_even(Layout("split", (5, 5, 4)))
    assert not is_even(Layout("split", (5, 3)))
    assert is_even(Layout("split", (16, 8)), 8)
    assert not is_even(solo(2, 0, 8))


def test_a_plan_needs_the_best_single_the_even_split_and_the_best_split() -> None:
    """A plan has only equal shares over all devices.

    A comparison also has even splits over two and four of the fastest devices.
    """
    plan = raced(FOUR, LayoutOptions(("solo", "even", "split"), scaling=False), global_batch=800)
    assert plan["solo"] == [solo(4, 0, 800)]
    assert plan["even"] == [Layout("split", (200, 200, 200, 200))]
    assert len(plan["split"]) >= 1
    compared = raced(FOUR, LayoutOptions(("solo", "even", "split")))
    assert [layout.active for layout in compared["even"]] == [(0, 1), (0, 1, 2, 3)]
    assert {layout.global_batch for layouts in plan.values() for layout in layouts} == {800}


def test_a_family_s_further_candidates_are_extra() -> None:
    """The preferred split and the best single device precede candidates that may be slightly
    better.
    """
    three = Bench(((3.0, 0.1, 0, 400), (12.0, 0.3, 0, 2000), (30.0, 0.8, 0, 1000)), 0.003)
    search = run_search(Search(three.problem(), LayoutOptions(("solo", "split"))), three.measure)
    for family, most in (("split", 2 + len(PARTS)), ("solo", 1)):
        extra = [
            one.extra for one in search.evaluation.offers.candidates if one.family.name == family
        ]
        assert extra == [i > 0 for i in range(len(extra))]
        assert len(extra) <= most
    assert (
        len([one for one in search.evaluation.offers.candidates if one.family.name == "split"]) > 1
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_only_requested_layouts_race(family: str) -> None:
    options = LayoutOptions((family,), placements=(Placement("towers"),))
    assert set(raced(FOUR, options, global_batch=800)) <= {family}


def test_an_even_split_keeps_to_quanta_and_to_the_smallest_memory() -> None:
    """With a free batch, its shares fit on each device, and aren't larger than those of the best
    split.
    """
    small = Bench(((10.0, 0.1, 0, 3000), (10.0, 0.1, 0, 300)), 0.001)
    (even,) = raced(small, LayoutOptions(("solo", "even", "split"), scaling=False), multiple_of=8)[
        "even"
    ]
    assert len(set(even.shares)) == 1
    assert even.shares[0] % 8 == 0
    assert 200 <= even.shares[0] <= 300
    (alone,) = raced(small, LayoutOptions(("even",), scaling=False))["even"]
    assert 100 <= alone.shares[0] == alone.shares[1] <= 300


def test_devices_that_fail_in_an_even_split_leave_the_others() -> None:
    """The best single device is one of those that didn't fail."""
    search = Search(FOUR.problem(global_batch=800), LayoutOptions(("solo",)))
    run_search(search, FOUR.measure)
    assert search.evaluation.best_single() is not None
    assert [one.candidate.layout for one in search.evaluation.ranking()] == [solo(4, 0, 800)]


def test_results_are_listed_from_the_fastest() -> None:
    """Every layout that ran has the samples/s over its turns; each device has its best result
    alone.
    """
    search = run_search(Search(FOUR.problem()), FOUR.measure)
    rates = [one.throughput.value for one in search.evaluation.results()]
    assert len(rates) > 8
    assert rates == sorted(rates, reverse=True)
    for position, alone in enumerate(search.evaluation.solos()):
        assert alone is not None
        assert alone.layout.active == (position,)
        own = [one for one in search.evaluation.results() if one.layout.active == (position,)]
        assert alone == own[0]


def test_the_fastest_measured_split_of_a_fixed_batch_races() -> None:
    """It takes part whatever else was measured, in any order."""
    search = run_search(
        Search(FOUR.problem(global_batch=800), LayoutOptions(("split",), scaling=False)),
        FOUR.measure,
    )
    (fastest,) = [
        one.layout for one in search.evaluation.offers.candidates if one.family.name == "split"
    ]
    slow = Probe(Layout("split", (200, 200, 200, 200)), Stage.SPLIT, 1.0, 9)
    for seen in FOUR.measure([slow]):
        search.tell(seen)
    assert [
        one.layout for one in search.evaluation.offers.candidates if one.family.name == "split"
    ] == [fastest]
    assert fastest.shares[0] > fastest.shares[3]


def test_a_model_that_no_device_holds_is_placed_at_the_smallest_batch_that_was_tried() -> None:
    search = Search(
        Problem(2, (1000, 1000)),
        LayoutOptions(("solo", "place"), placements=(Placement("towers"),)),
    )
    for batch in (4, 8):
        for position in (0, 1):
            search.tell(
                OutOfMemory(
                    Probe(solo(2, position, batch), Stage.SOLO, 1.0, batch),
                    (position,),
                    "full",
                    1.0,
                )
            )
    assert search.evaluation.offers.view.common_batch == 4
