"""A short budget is fair: every requested layout is measured once before any is measured twice.

No batch is a guess.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.families import PackMode, Placement
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.result.judge import (
    SearchEnd,
    find_replaced,
    find_short_budget,
    find_unmeasured,
)
from evener.balancer.search.budget import Budget
from evener.balancer.search.layouts import LayoutOptions, shrink
from evener.balancer.search.observations import Observations
from evener.balancer.search.report import SearchReport
from evener.balancer.search.search import Search
from evener.balancer.types import (
    End,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Stop,
    Timed,
)
from evener.balancer.verdict import LeftOut, ShortBudget
from evener.devices.machine import Machine, SimulatedDevice, SimulatedPlacement, Sync

ALL = LayoutOptions(placements=(Placement("towers"), Placement("alternate")))
LABELS = ("SIM:0", "SIM:1")


class SlowStarts:
    """Simulated devices whose children take time to start, each once.

    `full` layouts run out of memory.
    """

    def __init__(self, machine: Machine, start_seconds: float) -> None:
        self._prober = SimulatedProber(machine, seed=1)
        self._start = start_seconds
        self._rank_layout: set[tuple[object, ...]] = set()
        self.full: set[Layout] = set()
        self.asked: list[Probe] = []
        self.seen: list[Observation] = []

    def run(self, search: Search) -> Search:
        """Run a search to its end."""
        for _ in range(300):
            probes = search.ask()
            if not probes:
                return search
            for probe, seen in zip(probes, self._measured(probes), strict=True):
                self.asked.append(probe)
                self.seen.append(self._late(msgspec.structs.replace(seen, probe=probe)))
                search.tell(self.seen[-1])
        raise AssertionError("a search ends")

    def _measured(self, probes: Sequence[Probe]) -> list[Observation]:
        """Measure logical packs like plain processes, because simulated devices have no
        other mode.
        """
        plain = tuple(_plain(probe) for probe in probes)
        seen = {
            one.probe: one for one in self._prober.measure(plain, lambda _: None, threading.Event())
        }
        return [seen[probe] for probe in plain]

    def _late(self, seen: Observation) -> Observation:
        layout = seen.probe.layout
        if layout in self.full:
            return OutOfMemory(seen.probe, layout.active[:1], "the test has it so", self._start)
        crew = (layout.kind, layout.active, layout.processes, layout.placement)
        start = (
            0.0
            if crew in self._rank_layout
            else self._start * len(layout.active) * layout.processes
        )
        self._rank_layout.add(crew)
        if not isinstance(seen, Timed):
            return seen
        return msgspec.structs.replace(
            seen, start_seconds=start, elapsed_seconds=seen.elapsed_seconds + start
        )


def _plain(probe: Probe) -> Probe:
    if probe.layout.kind != "pack":
        return probe
    return msgspec.structs.replace(
        probe, layout=msgspec.structs.replace(probe.layout, placement="")
    )


def machine(per_sample_ms: float = 0.8) -> Machine:
    """Return two equal devices with two placements; 8 GB of memory, and 2 MB per sample."""
    curve = ((8, 6.0), (1024, 6.0 + 1024 * per_sample_ms))
    device = SimulatedDevice(
        name="A",
        memory_mib=8000.0,
        memory_base_mib=200.0,
        memory_per_sample_mib=2.0,
        curve=curve,
        noise=0.003,
    )
    places = tuple(SimulatedPlacement(name=name, curve=curve) for name in ("towers", "alternate"))
    return Machine((device, device), Sync(1.0), placements=places)


def compared(
    budget: float | None, start: float, batch: int | None = None
) -> tuple[Search, SlowStarts]:
    """Return a finished search of all families."""
    of, prober = machine(), SlowStarts(machine(), start)
    sizes = tuple(of.usable_memory_bytes(i) for i in range(2))
    return prober.run(
        Search(Problem(2, sizes, global_batch=batch, budget_seconds=budget), ALL)
    ), prober


@pytest.mark.parametrize(
    ("budget", "start"), [(100.0, 6.0), (60.0, 3.0), (150.0, 9.0), (30.0, 0.5)]
)
def test_every_way_is_measured_within_the_budget(budget: float, start: float) -> None:
    """Children start slowly, as with a real framework.

    No family is left out, and no long step causes that.
    """
    search, _ = compared(budget, start)
    assert search.evaluation.race.unmeasured == ()
    found = search.evaluation.ranking()
    assert {one.candidate.family.name for one in found} >= {"solo", "even", "place", "pack"}, (
        "the best split may be even"
    )
    assert {one.candidate.layout.placement for one in found} >= {"towers", "alternate"}
    assert min(one.turns for one in found) >= 1
    assert search._seen.spent_seconds() <= budget


def test_nothing_is_measured_twice_before_everything_was_once() -> None:
    _, prober = compared(100.0, 6.0)
    race = [probe for probe in prober.asked if probe.stage in (Stage.RACE, Stage.PACK)]
    first = [probe.layout for probe in race if probe.turn == 0]
    assert len(first) == len(set(first))
    again = next((i for i, probe in enumerate(race) if probe.turn), len(race))
    placed = [
        i
        for i, probe in enumerate(race)
        if probe.layout.kind in ("place", "pack") and not probe.turn
    ]
    assert len(placed) >= 3
    assert max(placed) < again


def reported(search: Search) -> SearchReport:
    """Return the report of a search."""
    report = search.report()
    assert report is not None
    return report


def missing_in(search: Search, devices: int, stop: Stop = Stop.BUDGET) -> list[LeftOut]:
    """Return what the budget left out."""
    labels = [f"SIM:{i}" for i in range(devices)]
    return list(find_unmeasured(reported(search), labels, SearchEnd(End(stop), 20.0)))


def short_budget(search: Search, prober: SlowStarts, stop: Stop) -> ShortBudget | None:
    """Return what the verdict says about the budget."""
    return find_short_budget(reported(search), prober.seen, SearchEnd(End(stop), 20.0))


def test_a_budget_that_starting_took_before_any_split_was_tried_is_named_first() -> None:
    """The message has a budget that suffices for a split.

    There is no message if a split was measured, or after an interrupt.
    """
    search, prober = split_only(20.0)
    short = short_budget(search, prober, Stop.BUDGET)
    assert short is not None
    assert (short.budget_seconds, round(short.start_seconds)) == (20, 12)
    assert short_budget(search, prober, Stop.INTERRUPTED) is None
    search, prober = split_only(float(short.enough_seconds))
    assert short_budget(search, prober, Stop.BUDGET) is None


def split_only(budget: float) -> tuple[Search, SlowStarts]:
    """Return a finished search for the best split alone; each child takes 12 s to start."""
    prober = SlowStarts(machine(), 12.0)
    return prober.run(Search(Problem(2, (None, None), budget_seconds=budget))), prober


@pytest.mark.parametrize(("budget", "start"), [(70.0, 12.0), (60.0, 9.0), (50.0, 6.0)])
def test_a_budget_that_was_too_short_is_named_with_one_that_suffices(
    budget: float, start: float
) -> None:
    """Children start in 12 s, and the budget is 70 s.

    The verdict is based on what was measured, and the named budget suffices.
    """
    search, _ = compared(budget, start)
    missing = search.evaluation.race.unmeasured
    assert missing
    assert search.best() is not None
    assert search.why_stopped() == Stop.BUDGET.value
    assert missing_in(search, 2, Stop.INTERRUPTED) == []
    left_out = missing_in(search, 2)
    assert "pack of 2" in [one.name for one in left_out]
    assert {one.reason for one in left_out} == {"no_time"}
    enough = float(left_out[0].enough_seconds)
    assert budget < enough < 400
    assert compared(enough, start)[0].evaluation.race.unmeasured == ()


def packed(budget: float | None, start: float, *modes: PackMode) -> tuple[Search, SlowStarts]:
    """Return a finished search of one device on which packs gain up to six trainings."""
    device = msgspec.structs.replace(
        machine().devices[0], pack_gain=((1, 1.0), (6, 2.5), (40, 2.0))
    )
    of = Machine((device,), Sync(1.0))
    prober = SlowStarts(of, start)
    problem = Problem(1, (of.usable_memory_bytes(0),), global_batch=64, budget_seconds=budget)
    return prober.run(Search(problem, LayoutOptions(("solo", "pack"), pack_modes=modes))), prober


@pytest.mark.parametrize(
    ("budget", "start", "modes"), [(60.0, 3.0, ("",)), (30.0, 8.0, ("", "mps"))]
)
def test_packs_that_still_gained_are_named_with_a_budget_that_tries_another(
    budget: float, start: float, modes: tuple[PackMode, ...]
) -> None:
    """Packs leave time for a turn of every candidate, and so does the named budget."""
    search, _ = packed(budget, start, *modes)
    growing = [one for one in missing_in(search, 1) if one.reason == "packs_growing"]
    enough = float(growing[0].enough_seconds)
    assert budget < enough < 200
    again, _ = packed(enough, start, *modes)
    tried = [
        seen.probe.layout
        for _, packing in again.evaluation.offers.view.packings
        for seen in packing.seen
    ]
    larger = [one.layout for one in reported(search).ungrown]
    assert larger
    for layout in larger:
        assert layout in tried
    assert growing[0].name.startswith(f"pack of {larger[0].processes}")


def test_packs_that_were_grown_to_their_best_are_no_matter_of_budget() -> None:
    search, _ = packed(600.0, 3.0, "")
    assert missing_in(search, 1) == []
    assert search.evaluation.ranking()[0].candidate.layout.processes in (5, 6, 7)


def test_modes_of_packing_grow_in_step() -> None:
    """If the time ends early, it ends early for both modes."""
    search, prober = packed(90.0, 2.0, "", "mps")
    grown = [probe.layout for probe in prober.asked if probe.stage == Stage.PACK]
    assert len(grown) >= 4
    assert [layout.processes for layout in grown] == sorted(layout.processes for layout in grown)
    plain, mps = (sum(layout.placement == mode for layout in grown) for mode in ("", "mps"))
    assert abs(plain - mps) <= 1
    assert len(reported(search).ungrown) == 2


@pytest.mark.parametrize("budget", [120.0, 600.0, None])
def test_equal_parts_of_the_memory_wait_for_the_number_of_trainings(budget: float | None) -> None:
    """Their children start once, with the number of trainings that was best."""
    search, prober = packed(budget, 2.0, "", "logical")
    best = max(
        dict(search.evaluation.offers.view.packings)[""].seen,
        key=lambda seen: seen.samples_per_second if isinstance(seen, Timed) else 0.0,
    )
    sizes = {
        probe.layout.processes for probe in prober.asked if probe.layout.placement == "logical"
    }
    assert len(sizes) == 1
    assert abs(sizes.pop() - best.probe.layout.processes) <= 1, "of equals the fewest"
    assert search.evaluation.race.unmeasured == ()


@given(
    st.floats(0.1, 60), st.floats(0, 60), st.integers(2, 30), st.integers(1, 30), st.integers(1, 50)
)
def test_a_larger_pack_starts_no_slower_than_in_proportion(
    first: float, more: float, least: int, further: int, processes: int
) -> None:
    """It also starts no faster than the largest pack so far.

    Two sizes that took equally long predict the same time for larger ones.
    """
    problem = Problem(1, (None,))
    seen = Observations(problem)
    for size, seconds in ((least, first), (least + further, first + more)):
        probe = Probe(Layout("pack", (8,), size), Stage.PACK, 1.0)
        seen.add(
            Timed(
                probe, 0.1, 0.1, 0.1, 10, (None,), (None,), 0.1, seconds + 1, start_seconds=seconds
            )
        )
    most = least + further
    asked = Budget(problem, LayoutOptions(), seen).starts.seconds(
        Layout("pack", (8,), most + processes)
    )
    assert first + more <= asked * (1 + 1e-9)
    assert asked <= (first + more) / most * (most + processes) * (1 + 1e-9)
    if not more:
        assert asked == pytest.approx(first)


def test_without_a_budget_nothing_is_left_out() -> None:
    search, _ = compared(None, 12.0)
    assert search.evaluation.race.unmeasured == ()
    assert missing_in(search, 2) == []
    assert find_replaced(reported(search), 2) == ()


def test_a_layout_that_runs_out_of_memory_in_the_race_comes_back_smaller() -> None:
    """Its family isn't lost, and the plan mentions the smaller layout."""
    search, _ = compared(None, 0.0)
    even = next(
        one.candidate.layout
        for one in search.evaluation.ranking()
        if one.candidate.layout.placement == "towers"
    )
    again = SlowStarts(machine(), 0.0)
    again.full = {even, shrink(even) or even}
    sizes = tuple(machine().usable_memory_bytes(i) for i in range(2))
    found = again.run(Search(Problem(2, sizes), ALL))
    towers = [
        one.candidate.layout
        for one in found.evaluation.ranking()
        if one.candidate.layout.placement == "towers"
    ]
    assert [layout.global_batch < even.global_batch * 0.55 for layout in towers] == [True]
    assert found.evaluation.offers.list_failed() == []
    (retreat,) = find_replaced(reported(found), 2)
    assert retreat.name == "place towers"
    assert retreat.original != retreat.replacement


def test_a_batch_that_is_given_does_not_shrink() -> None:
    search, _ = compared(None, 0.0, batch=64)
    towers = next(
        one.candidate.layout
        for one in search.evaluation.ranking()
        if one.candidate.layout.placement == "towers"
    )
    prober = SlowStarts(machine(), 0.0)
    prober.full = {towers}
    sizes = tuple(machine().usable_memory_bytes(i) for i in range(2))
    found = prober.run(Search(Problem(2, sizes, global_batch=64), ALL))
    assert [candidate.layout for candidate, _ in found.evaluation.offers.list_failed()] == [towers]


@pytest.mark.parametrize("budget", [40.0, 100.0, None])
def test_no_split_is_raced_that_memory_is_not_known_to_hold(budget: float | None) -> None:
    """Each share ran before, alone or in the split stage, or is far below what the memory line
    allows.
    """
    _, prober = compared(budget, 2.0)
    limit = 8000 * 0.8 / 2.0  # samples: four fifths of the memory, less than what the base takes
    ran = {
        (i, share)
        for probe in prober.asked
        for i, share in enumerate(probe.layout.shares)
        if probe.stage != Stage.RACE
    }
    for probe in prober.asked:
        if probe.stage == Stage.RACE and probe.layout.kind == "split":
            proven = [max(share for j, share in ran if j == i) for i in probe.layout.active]
            for i, most in zip(probe.layout.active, proven, strict=True):
                assert probe.layout.shares[i] <= max(most, min(limit, 1.25 * most))


def test_no_layout_shrinks_to_nothing() -> None:
    assert shrink(Layout("split", (1, 8))) is None
    assert shrink(Layout("split", (10, 8)), 4) == Layout("split", (4, 4))
    assert shrink(Layout("solo", (0, 3)), 4) is None
