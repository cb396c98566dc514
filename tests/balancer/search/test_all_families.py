"""Searches with all families on simulated machines with known best layouts, and the laws of ask and
tell.
"""

from __future__ import annotations

import random
import threading

import msgspec
import pytest

from evener.balancer.families import Placement
from evener.balancer.objectives import mean_power
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.types import (
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Stop,
    Timed,
)
from evener.devices.machine import Machine, SimulatedDevice, SimulatedPlacement, Sync
from tests.support import comparison_cases

ALL = LayoutOptions(placements=(Placement("towers"),))


def device(name: str, step_ms: float, **changes: object) -> SimulatedDevice:
    """Return a device whose step time is a fixed tenth at 256 samples plus a part proportional to
    the samples.
    """
    keys: dict[str, object] = {
        "name": name,
        "memory_mib": 8000.0,
        "memory_base_mib": 500.0,
        "memory_per_sample_mib": 2.0,
        "curve": ((16, step_ms * 0.15), (256, step_ms)),
        "noise": 0.003,
    }
    return SimulatedDevice(**(keys | changes))  # type: ignore[arg-type]


def machine(*devices: SimulatedDevice, sync_ms: float = 1.0, towers_ms: float = 100.0) -> Machine:
    """Return devices that train together, and a placement with its own step time at 256 samples."""
    curve = ((16, towers_ms * 0.15), (256, towers_ms))
    placements = (SimulatedPlacement(name="towers", curve=curve),) if len(devices) > 1 else ()
    return Machine(devices, Sync(sync_ms), placements=placements)


def problem(of: Machine, batch: int | None = 256, budget: float | None = None) -> Problem:
    """Return the problem that a search gets."""
    sizes = tuple(of.usable_memory_bytes(i) for i in range(len(of.devices)))
    return Problem(len(of.devices), sizes, global_batch=batch, budget_seconds=budget)


def run(
    of: Machine, options: LayoutOptions = ALL, batch: int | None = 256, budget: float | None = None
) -> Search:
    """Return a search that has run to its end."""
    search, prober = Search(problem(of, batch, budget), options), SimulatedProber(of, seed=1)
    for _ in range(500):
        asked = search.ask()
        if not asked:
            return search
        for seen in prober.measure(asked, lambda _: None, threading.Event()):
            search.tell(seen)
    raise AssertionError("a search ends")


def test_the_verdict_names_the_true_winner_on_seeded_machines() -> None:
    """A smaller run of `python -m benchmarks.compare`: 24 machines, at most one of them wrong."""
    scores = [comparison_cases.score(comparison_cases.make_case(seed)) for seed in range(24)]
    wrong = [f"{one.case.seed}: {one.truth}, named {one.named}" for one in scores if not one.right]
    assert len(wrong) <= 1, wrong


def test_an_even_split_of_a_free_batch_is_what_the_slower_grower_does_best() -> None:
    """No other split is requested.

    One device is fastest at about 256 samples, the other at the largest batch that fits.
    """
    early = device("B", 40.0, curve=((16, 6.0), (256, 40.0), (512, 400.0), (1024, 3000.0)))
    search = run(
        machine(device("A", 40.0), early), LayoutOptions(("even",), scaling=False), batch=None
    )
    (even,) = search.evaluation.offers.candidates
    assert 100 <= even.layout.shares[0] == even.layout.shares[1] <= 600


@pytest.mark.parametrize("devices", [2, 3])
def test_one_device_that_may_win_is_measured_while_the_others_rest(devices: int) -> None:
    """It is measured again at a batch that ran beside the others, because they may slow
    each other.
    """
    search = run(
        machine(*(device(name, 40.0) for name in "ABC"[:devices]), sync_ms=200.0), BALANCE, batch=64
    )
    assert search._seen.in_stage(Stage.REST)
    best = search.best()
    assert best is not None
    assert best.layout.kind == "solo"


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (machine(device("A", 40.0), device("B", 40.0), sync_ms=60.0), "solo"),
        (machine(device("A", 40.0), device("B", 20.0)), "split"),
        (
            machine(
                device("A", 40.0, pack_gain=((1, 1.0), (3, 2.0))), device("B", 40.0), sync_ms=60.0
            ),
            "pack",
        ),
        (machine(device("A", 40.0), device("B", 40.0), sync_ms=60.0, towers_ms=25.0), "place"),
    ],
)
def test_each_way_wins_where_it_is_truly_best(of: Machine, kind: str) -> None:
    search = run(of)
    best = search.best()
    assert best is not None
    assert best.layout.kind == kind
    assert search.why_stopped() == Stop.SETTLED.value


def test_equal_devices_without_a_cost_are_split_evenly() -> None:
    search = run(machine(device("A", 40.0), device("B", 40.0), sync_ms=0.0))
    best = search.best()
    assert best is not None
    assert best.layout.shares == (128, 128)
    assert search.evaluation.ranking()[0].candidate.family.name == "even"


def test_packing_is_measured_against_memory_and_out_of_memory_ends_it() -> None:
    """Each training holds 1012 MiB at 256 samples: seven fit."""
    gain = ((1, 1.0), (7, 5.0))
    search = run(machine(device("A", 40.0, pack_gain=gain)), LayoutOptions(("solo", "pack")))
    best = search.best()
    assert best is not None
    assert best.layout.processes == 7


def test_a_free_batch_makes_room_for_more_trainings() -> None:
    """The single device fills its memory. In a pack, each training has a batch that fits
    N times.
    """
    gain = ((1, 1.0), (4, 3.5))
    of = machine(device("A", 40.0, memory_mib=1500.0, memory_base_mib=100.0, pack_gain=gain))
    best = run(of, LayoutOptions(("solo", "pack")), batch=None).best()
    assert best is not None
    assert best.layout.kind == "pack"
    assert best.layout.processes >= 3


def test_packs_grow_on_when_a_run_gets_more_time() -> None:
    """They also grow if the earlier time was too short and was spent on more turns."""
    of = machine(device("A", 40.0, pack_gain=((1, 1.0), (13, 8.0)), memory_mib=80000.0))
    prober, seen, best = SimulatedProber(of, seed=1), list[Observation](), list[int]()
    for budget in (6.0, 7.0, 100.0):
        again = msgspec.structs.replace(problem(of, budget=budget), spend_all=bool(seen))
        search = Search(again, LayoutOptions(("solo", "pack")))
        for one in seen:
            search.tell(one)
        while asked := search.ask():
            for one in prober.measure(asked, lambda _: None, threading.Event()):
                search.tell(one)
                seen.append(one)
        chosen = search.best()
        best.append(chosen.layout.processes if chosen else 0)
    assert best == [5, 5, 13]
    assert any(one.probe.stage == Stage.RACE and one.probe.turn > 0 for one in seen)


def test_asking_changes_nothing_and_the_order_of_telling_does_not_matter() -> None:
    of = machine(device("A", 40.0), device("B", 30.0, pack_gain=((1, 1.0), (2, 1.4))))
    search, prober = Search(problem(of), ALL), SimulatedProber(of, seed=3)
    seen: list[Observation] = []
    while asked := search.ask():
        assert search.ask() == asked
        for one in prober.measure(asked, lambda _: None, threading.Event()):
            search.tell(one)
            seen.append(one)
    for seed in range(3):
        other = Search(problem(of), ALL)
        for one in random.Random(seed).sample([*seen, *seen[:5]], len(seen) + 5):
            other.tell(one)
        assert other.evaluation.ranking() == search.evaluation.ranking()
        assert other.ask() == ()


def test_a_journal_in_the_middle_asks_the_same_next() -> None:
    of = machine(device("A", 40.0), device("B", 30.0))
    search, prober = Search(problem(of), ALL), SimulatedProber(of, seed=3)
    so_far: list[Observation] = []
    while asked := search.ask():
        again = Search(problem(of), ALL)
        for one in so_far:
            again.tell(one)
        assert again.ask() == asked
        for one in prober.measure(asked, lambda _: None, threading.Event()):
            search.tell(one)
            so_far.append(one)


def test_a_layout_that_fails_is_named_and_the_others_still_run() -> None:
    of = machine(device("A", 40.0), device("B", 30.0))
    search = run(of, LayoutOptions(placements=(Placement("towers"), Placement("unknown"))))
    assert [
        (c.layout.placement, type(seen).__name__)
        for c, seen in search.evaluation.offers.list_failed()
    ] == [("unknown", "Failed")]
    assert {one.candidate.family.name for one in search.evaluation.ranking()} >= {
        "solo",
        "even",
        "place",
    }


def test_one_device_has_nothing_to_split_or_place() -> None:
    search = run(machine(device("A", 40.0)))
    assert {one.candidate.family.name for one in search.evaluation.ranking()} <= {"solo", "pack"}


def test_the_budget_holds() -> None:
    """The virtual time of all probes exceeds the budget by one probe at most."""
    of = machine(device("A", 40.0), device("B", 30.0))
    search, prober = Search(problem(of, budget=20.0), ALL), SimulatedProber(of, seed=1)
    while asked := search.ask():
        for one in prober.measure(asked, lambda _: None, threading.Event()):
            search.tell(one)
    assert prober.now() <= 22.0
    assert search.best() is not None


def test_a_winner_with_knobs_is_measured_in_turns_of_its_own() -> None:
    """The prober makes XLA 20 % faster and mixed precision impossible.

    XLA wins, and mixed precision is named as left out.
    """
    of = machine(device("A", 40.0))
    search = Search(problem(of), LayoutOptions(("solo",), knobs=("xla", "mixed")))
    prober = SimulatedProber(of, seed=1)

    def measure(probe: Probe) -> Observation:
        plain = msgspec.structs.replace(
            probe, layout=msgspec.structs.replace(probe.layout, knobs=())
        )
        (seen,) = prober.measure((plain,), lambda _: None, threading.Event())
        if probe.layout.knobs == ("mixed",):
            return OutOfMemory(probe, (0,), "too large", 1.0)
        assert isinstance(seen, Timed)
        factor = 1 / 1.2 if probe.layout.knobs else 1.0
        return msgspec.structs.replace(
            seen,
            probe=probe,
            step_seconds=seen.step_seconds * factor,
            low_seconds=seen.low_seconds * factor,
            high_seconds=seen.high_seconds * factor,
            watts=(200.0,) if probe.layout.knobs else (100.0,),
        )

    while asked := search.ask():
        for probe in asked:
            search.tell(measure(probe))
    first, second = search.evaluation.ranking()
    assert first.candidate.layout.knobs == ("xla",)
    power = mean_power(search.evaluation.turns(first.candidate.layout))
    assert power is not None
    assert power.watts == 200.0
    assert second.against is not None
    assert second.against.value == pytest.approx(1 / 1.2 - 1, abs=0.01)


def test_a_layout_of_another_request_is_ignored() -> None:
    search = Search(problem(machine(device("A", 40.0))), ALL)
    before = search.ask()
    probe = Probe(Layout("split", (1, 1)), Stage.RACE, 1.0)
    search.tell(OutOfMemory(probe, (0,), "", 1.0))
    assert search.ask() == before
