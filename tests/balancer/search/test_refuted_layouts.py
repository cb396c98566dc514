"""Memory that others take later, and devices that are lost, are no longer part of any plan."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.observations import Observations
from evener.balancer.search.search import Search
from evener.balancer.types import Failed, Observation, OutOfMemory, Probe, Stage, Timed, layout_of
from tests.support import machine_families_hard as hard
from tests.support import search_trials as trials
from tests.support.search_machines import Bench, benches

MOST_ASKS = 80


def shrunk(bench: Bench, room: tuple[int, ...]) -> Bench:
    """Return the same devices with memory for this many samples."""
    devices = tuple((*device[:3], most) for device, most in zip(bench.devices, room, strict=True))
    return Bench(devices, bench.sync_seconds)


def course(bench: Bench, room: tuple[int, ...], after: int) -> tuple[Search, list[Observation]]:
    """Return a whole search in which others take memory after some observations.

    Every later probe reports it.
    """
    search, seen, less = Search(bench.problem()), list[Observation](), shrunk(bench, room)
    short = tuple(10 * (had[3] - has) for had, has in zip(bench.devices, room, strict=True))
    for _ in range(MOST_ASKS):
        probes = search.ask()
        if not probes:
            return search, seen
        taken = len(seen) >= after
        for one in (less if taken else bench).measure(probes):
            seen.append(msgspec.structs.replace(one, short_bytes=short) if taken else one)
            search.tell(seen[-1])
    raise AssertionError("the search does not end")


@settings(max_examples=20, deadline=None)
@given(benches(fewest=2, most=3), st.data())
def test_a_plan_fits_what_others_leave(bench: Bench, data: st.DataObject) -> None:
    """Whenever the memory is taken, and whatever was measured before.

    The order of observations doesn't change the plan.
    """
    room = tuple(data.draw(st.integers(max(1, most // 3), most)) for *_, most in bench.devices)
    search, seen = course(bench, room, data.draw(st.integers(1, 12)))
    best = search.best()
    assert best is not None
    if any(one.short_bytes for one in seen if not isinstance(one, Failed)):
        ran_since = {one.probe.layout for one in seen if isinstance(one, Timed) and one.short_bytes}
        fits = all(share <= most for share, most in zip(best.layout.pass_rows, room, strict=True))
        assert fits or not ran_since
    shuffled = random.Random(0).sample(seen, len(seen))
    other = Search(bench.problem())
    for one in shuffled:
        other.tell(one)
    assert other.best() == best
    assert other.ask() == search.ask() == ()


def test_a_layout_that_ran_and_no_longer_fits_is_not_the_best() -> None:
    """The same or a smaller layout ran out of memory on the same devices.

    Another layout counts, though it was slower.
    """
    bench = Bench(((1.0, 1.0, 0, 500), (1.0, 1.0, 0, 500)), 0.002)
    search = Search(bench.problem())
    seen: list[Observation] = []
    while probes := search.ask():
        for one in bench.measure(probes):
            search.tell(one)
            seen.append(one)
    best = search.best()
    assert best is not None
    probe = Probe(best.layout, Stage.RACE, 1.0, 7)
    search.tell(OutOfMemory(probe, (0,), "full", 1.0))
    after = search.best()
    assert after is not None
    assert after.layout != best.layout


def test_added_time_is_not_spent_on_what_ran_out_of_memory() -> None:
    """Others took the memory after exploration.

    Nothing fits any more, and no probe is requested again.
    """
    bench, asked = Bench(((1.0, 1.0, 0, 500),), 0.0), list[Probe]()
    search = Search(msgspec.structs.replace(bench.problem(budget_seconds=60.0), spend_all=True))
    while probes := search.ask():
        asked += probes
        for one in bench.measure(probes):
            full = one.probe.stage in (Stage.RACE, Stage.CHECK)
            search.tell(OutOfMemory(one.probe, (0,), "full", 1.0) if full else one)
    assert any(probe.stage in (Stage.RACE, Stage.CHECK) for probe in asked)
    assert len(asked) == len(set(asked))


def test_a_device_that_has_gone_takes_its_layouts_with_it() -> None:
    """It fails twice, because one failure may be temporary. The speed of its splits
    doesn't matter.
    """
    bench = Bench(((1.0, 1.0, 0, 500), (1.0, 1.0, 0, 500)), 0.002)
    search = Search(bench.problem())
    while probes := search.ask():
        for one in bench.measure(probes):
            search.tell(one)
    best = search.best()
    assert best is not None
    assert len(best.layout.active) == 2
    for seconds in (1.0, 2.0):
        search.tell(
            Failed(Probe(best.layout, Stage.RACE, 1.0, 7), "device", "GPU:1 is lost", (1,), seconds)
        )
    after = search.best()
    assert after is not None
    assert after.layout.active == (0,)


@pytest.mark.parametrize(
    ("family", "seed", "mode", "stage"),
    [("memory_held", 905_007, "fixed", "split"), ("memory_held_gone", 905_032, "free", "race")],
)
def test_memory_that_others_take_after_a_check_refutes_the_plan(
    family: str, seed: int, mode: str, stage: Stage
) -> None:
    """What runs after a check is newer than the turns before it, even if it is its layout's first
    turn.

    All memory was free in the earlier turns.
    """
    (case,) = [one for one in hard.cases(family, seed) if one.mode == mode]
    found = trials.run(case.machine, case.ask, case.seed)
    full = [one.probe for one in found.seen if isinstance(one, OutOfMemory)]
    assert any(probe.stage == stage and probe.turn < probe.after for probe in full)
    assert found.rate > 0, "the plan doesn't fit"
    assert found.regret <= 0.02


def test_memory_that_was_taken_before_the_race_refutes_nothing_later() -> None:
    """It was free in the check; later observations count again."""
    bench = Bench(((1.0, 1.0, 0, 500), (1.0, 1.0, 0, 500)), 0.002)
    seen = Observations(bench.problem())
    split = layout_of((100, 100))
    full = OutOfMemory(Probe(split, Stage.SPLIT, 1.0), (0,), "full", 1.0, (4_000, 0))
    (ran,) = bench.measure((Probe(split, Stage.CHECK, 1.0, 1),))
    assert isinstance(ran, Timed)
    ran = msgspec.structs.replace(ran, short_bytes=(0, 0))
    seen.add(full)
    seen.add(ran)
    assert seen.memory_limit(0) == bench.problem().memory_bytes[0]
    later = msgspec.structs.replace(full, probe=msgspec.structs.replace(full.probe, after=1))
    seen.add(later)
    limit = bench.problem().memory_bytes[0]
    assert limit is not None
    assert seen.memory_limit(0) == limit - 4_000
