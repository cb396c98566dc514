"""The store of observations: which of several counts for one probe, and how devices and layouts are
read.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from evener.balancer.search.model.evidence import LUCKY, read_device, relative_error, with_drift
from evener.balancer.search.observations import TRIES, Observations
from evener.balancer.types import (
    Cause,
    Failed,
    Layout,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
    solo,
)

PAIR = Problem(2, (10_000, 10_000))
SPLIT = Layout("split", (60, 40))


def probe(layout: Layout, stage: Stage = Stage.SOLO, turn: int = 0, seconds: float = 1.0) -> Probe:
    """Return a measurement to run."""
    return Probe(layout, stage, seconds, turn)


def timed(at: Probe, step: float = 0.1, **changes: Any) -> Timed:
    """Return an observation of a layout that ran, precise to 1 %, with 10 bytes per sample."""
    layout = at.layout
    memory = tuple(10 * share if share else None for share in layout.shares)
    own = tuple(step if share else None for share in layout.shares)
    half = 0.01 * step
    return msgspec.structs.replace(
        Timed(at, step, step - half, step + half, 20, memory, own, step, 2.0), **changes
    )


def full(at: Probe, *devices: int) -> OutOfMemory:
    """Return an observation of a layout that ran out of memory."""
    return OutOfMemory(at, devices, "full", 1.0)


def failed(at: Probe, *devices: int, cause: Cause = "exit") -> Failed:
    """Return an observation of a layout that failed."""
    return Failed(at, cause, "it ended", devices, 1.0)


def store(*seen: Timed | OutOfMemory | Failed, problem: Problem = PAIR) -> Observations:
    """Return a store with these observations."""
    found = Observations(problem)
    for one in seen:
        found.add(one)
    return found


def alone(batch: int, position: int = 0, turn: int = 0, stage: Stage = Stage.SOLO) -> Probe:
    """Return a probe of one of the two devices."""
    return probe(solo(2, position, batch), stage, turn)


def test_packs_and_placements_are_not_one_training_of_the_race() -> None:
    layouts = (
        solo(2, 0, 8),
        SPLIT,
        Layout("pack", (8, 0), 2),
        Layout("place", (8, 8), placement="towers"),
    )
    found = store(*(timed(probe(layout, Stage.RACE)) for layout in layouts))
    assert {one.probe.layout.kind for one in found.timed_race()} == {"solo", "split"}


# ---------------------------------------------------------------------- one probe


def test_of_two_on_one_probe_the_worse_news_counts() -> None:
    at = alone(8)
    ran, quicker, longer = timed(at), timed(at, 0.09), timed(at, steps=30)
    for order in (
        (ran, longer, full(at, 0), failed(at, 0)),
        (full(at, 0), failed(at, 0), longer, ran),
    ):
        assert store(*order).in_stage(Stage.SOLO) == [full(at, 0)]
    assert (
        store(ran, longer).in_stage(Stage.SOLO)
        == store(longer, ran).in_stage(Stage.SOLO)
        == [longer]
    )
    assert (
        store(ran, quicker).in_stage(Stage.SOLO)
        == store(quicker, ran).in_stage(Stage.SOLO)
        == [quicker]
    )
    assert store(failed(at, 0), ran).in_stage(Stage.SOLO) == [ran]


def test_what_says_nothing_new_changes_nothing() -> None:
    """A duplicate, less than is known, a layout of another request, a layout without devices."""
    found = store(timed(alone(8)))
    for one in (timed(alone(8)), timed(alone(8), steps=5), timed(probe(solo(3, 0, 8)))):
        found.add(one)
    found.add(full(probe(Layout("solo", (0, 0)))))
    assert found.in_stage(Stage.SOLO) == [timed(alone(8))]
    found.add(timed(alone(64)))
    assert len(found.timed()) == 2


def test_the_order_of_telling_decides_no_order_of_probes() -> None:
    """This is also true of two probes that differ only by placement."""
    packs = [
        timed(probe(Layout("pack", (8, 0), 2, placement), Stage.PACK))
        for placement in ("", "logical", "mps")
    ]
    assert store(*packs).in_stage(Stage.PACK) == store(*reversed(packs)).in_stage(Stage.PACK)


def test_a_failure_is_open_until_it_had_its_tries() -> None:
    at = alone(8)
    found = store(failed(at, 0))
    assert found.in_stage(Stage.SOLO) == []
    assert found.failures_to_retry() == [at]
    found.add(failed(at, 0))
    assert TRIES == 2
    assert found.in_stage(Stage.SOLO) == [failed(at, 0)]
    assert found.failures_to_retry() == []
    unsupported = store(failed(at, 0, cause="unsupported"))
    assert unsupported.failures_to_retry() == []


# ---------------------------------------------------------------------- costs


def test_solo_probes_of_one_turn_cost_the_longest_and_all_others_their_sum() -> None:
    """A failure with two attempts costs twice."""
    seen: list[Timed | Failed] = [
        timed(alone(8, 0), elapsed_seconds=2.0),
        timed(alone(8, 1), elapsed_seconds=3.0),
        timed(alone(64, 0, 1), elapsed_seconds=4.0),
        timed(alone(64, 1, 0, Stage.REST), elapsed_seconds=5.0),
        timed(probe(SPLIT, Stage.SPLIT), elapsed_seconds=6.0),
        timed(probe(SPLIT, Stage.RACE, 1), elapsed_seconds=7.0),
        timed(probe(SPLIT, Stage.RACE, 2), elapsed_seconds=8.0),
        *[failed(probe(SPLIT, Stage.SPLIT, 1), 0)] * 2,
    ]
    found = store(*seen)
    assert found.spent_seconds() == 3 + 4 + 5 + 6 + 7 + 8 + 2
    assert found.spent_seconds(until_turn=1) == 3 + 4 + 5 + 6 + 7 + 2
    assert found.spent_seconds(Stage.SOLO) == 7
    assert found.spent_seconds(Stage.REST, Stage.SPLIT) == 13


# ---------------------------------------------------------------------- turns


def test_what_exploration_measured_at_rest_is_the_first_turn() -> None:
    """One device among several counts only if the others were idle. The race's own first turn
    precedes it.
    """
    others_idle, crowd = timed(alone(64, 0, 0, Stage.REST)), timed(alone(8))
    split, raced = timed(probe(SPLIT, Stage.SPLIT)), timed(probe(SPLIT, Stage.RACE), 0.2)
    later = timed(probe(SPLIT, Stage.RACE, 2))
    found = store(others_idle, crowd, split, later)
    assert found.turns(solo(2, 0, 64)) == {0: others_idle}
    assert found.turns(solo(2, 0, 8)) == {}
    assert found.turns(SPLIT) == {0: split, 2: later}
    assert list(found.turns(SPLIT)) == [0, 2]
    assert store(raced, split, later).turns(SPLIT) == {0: raced, 2: later}
    assert found.turns(SPLIT, Stage.KNOBS) == {}


def test_one_device_is_always_at_rest() -> None:
    """Its solo probes are therefore turns."""
    at = probe(solo(1, 0, 64))
    assert store(timed(at), problem=Problem(1, (None,))).turns(solo(1, 0, 64)) == {0: timed(at)}


def test_a_layout_is_broken_by_the_first_turn_that_did_not_run() -> None:
    """Only the race counts: a split that failed earlier belongs to exploration."""
    first, second = full(probe(SPLIT, Stage.RACE, 1), 0), full(probe(SPLIT, Stage.RACE, 2), 1)
    assert store(second, first, timed(probe(SPLIT, Stage.RACE))).first_failure(SPLIT) == first
    assert store(full(probe(SPLIT, Stage.SPLIT), 0)).first_failure(SPLIT) is None
    assert store(failed(probe(SPLIT, Stage.RACE), 0)).first_failure(SPLIT) is None


# ---------------------------------------------------------------------- what may still run


@pytest.mark.parametrize(
    ("refuting", "stands"),
    [
        (full(probe(Layout("split", (60, 40)), Stage.RACE, 3), 0), False),
        (full(probe(Layout("split", (50, 40)), Stage.RACE), 0), False),
        (full(probe(Layout("split", (61, 39)), Stage.RACE), 0), True),
        (full(probe(solo(2, 0, 10)), 0), True),
        (full(probe(msgspec.structs.replace(SPLIT, knobs=("xla",)), Stage.KNOBS), 0), True),
        (timed(probe(solo(2, 1, 8)), short_bytes=(0, 9_600)), True),
        (timed(probe(solo(2, 1, 8)), short_bytes=(0, 9_601)), False),
        (failed(probe(SPLIT, Stage.RACE), 1, cause="exit"), True),
    ],
)
def test_a_layout_is_refuted_by_less_on_its_devices_and_by_memory_that_others_hold(
    refuting: Timed | OutOfMemory | Failed, stands: bool
) -> None:
    ran = timed(probe(SPLIT, Stage.SPLIT))
    found = store(ran, refuting)
    assert found.still_fit([ran]) == [ran] * stands


def test_a_device_that_has_gone_twice_takes_its_layouts_with_it() -> None:
    ran = timed(probe(SPLIT, Stage.SPLIT))
    found = store(ran, failed(alone(8, 1), 1, cause="device"))
    assert found.still_fit([ran]) == [ran]
    found.add(failed(alone(8, 1), 1, cause="device"))
    assert found.still_fit([ran]) == []


def test_once_raced_a_device_has_what_others_left_in_its_last_turn() -> None:
    """What ran out of memory while others held more doesn't count."""
    before = full(probe(Layout("split", (50, 40)), Stage.SPLIT), 0)
    before = msgspec.structs.replace(before, short_bytes=(4000, 0))
    split = timed(probe(SPLIT, Stage.SPLIT))
    held = store(before, split)
    assert held.memory_limit(0) == 6000
    assert held.still_fit([split]) == []
    assert store(timed(probe(SPLIT, Stage.CHECK, 1)), before, split).memory_limit(0) == 6000
    left = store(timed(probe(SPLIT, Stage.CHECK, 1), short_bytes=(0, 0)), before, split)
    assert left.memory_limit(0) == 10_000
    assert left.still_fit([split]) == [split]


def test_the_most_that_others_held_counts() -> None:
    """What was seen later in exploration doesn't matter.

    Less than the device's memory is left, but always something.
    """
    found = store(
        timed(alone(8), short_bytes=(4000, 0)), timed(alone(64, 0, 1), short_bytes=(1000, 0))
    )
    assert found.memory_limit(0) == 6000
    assert found.memory_limit(1) == 10_000
    assert store(timed(alone(8), short_bytes=(20_000, 0))).memory_limit(0) == 1
    assert store(problem=Problem(2, (None, None))).memory_limit(0) is None


# ---------------------------------------------------------------------- a device


def test_a_device_is_read_from_exploration_alone() -> None:
    """Its points are grouped by what its neighbours did: they were busy, idle, or part
    of a split.
    """
    seen = store(
        timed(alone(8)),
        timed(alone(64, 0, 1)),
        timed(alone(99, 0, 0, Stage.REST), 0.3),
        timed(probe(SPLIT, Stage.SPLIT), device_seconds=(0.07, None)),
        timed(probe(Layout("split", (1, 1)), Stage.RACE)),
    )
    found = read_device(seen, 0)
    assert [point.batch for point in found.alone] == [8, 64]
    assert [(point.batch, point.seconds) for point in found.others_idle] == [(99, 0.3)]
    assert [(point.batch, point.seconds) for point in found.in_splits] == [(60, 0.07)]
    assert found.rounds == 2
    assert found.memory.points == ((8, 80), (64, 640), (99, 990)), (
        "a split holds more; beyond what ran alone it tells"
    )
    assert found.memory.largest_ran == 99
    other = read_device(store(timed(probe(SPLIT, Stage.SPLIT))), 1)
    assert other.memory.points == ((40, 400),), (
        "with fewer than two solo points, splits tell the line"
    )


def test_the_smallest_batch_that_failed_bounds_what_ran() -> None:
    """A larger batch that ran earlier no longer counts as one that runs."""
    found = read_device(
        store(
            timed(alone(64)),
            timed(alone(8, 0, 1)),
            full(alone(64, 0, 2), 0),
            full(alone(70, 0, 3), 0),
        ),
        0,
    )
    assert (found.memory.largest_ran, found.memory.smallest_failed, found.memory.failure_count) == (
        8,
        64,
        2,
    )


def test_an_unnamed_device_that_ran_out_is_the_one_nearest_to_its_largest_batch() -> None:
    """50 of at most 64 is nearer than 50 of 500. If equal, the first device counts."""
    seen = [timed(alone(64)), timed(alone(500, 1))]
    found = store(*seen, full(probe(Layout("split", (50, 50)), Stage.SPLIT)))
    assert tuple(read_device(found, i).memory.smallest_failed for i in (0, 1)) == (50, None)
    named = store(*seen, full(probe(Layout("split", (50, 50)), Stage.SPLIT), 1))
    assert tuple(read_device(named, i).memory.smallest_failed for i in (0, 1)) == (None, 50)


def test_a_device_that_failed_where_nothing_smaller_ran_is_lost() -> None:
    """A permanent failure above what ran is a size at which its kernels fail.

    In a pair, the other device may be the cause.
    """
    at = alone(8)
    assert read_device(store(*[failed(at, 0)] * 2), 0).lost == "it ended"
    assert read_device(store(failed(at, 0)), 0).lost == ""
    above = read_device(store(timed(at), *[failed(alone(64, 0, 1), 0)] * 2), 0)
    assert (above.lost, above.memory.smallest_failed) == ("", 64)
    below = read_device(store(timed(alone(64)), *[failed(alone(8, 0, 1), 0)] * 2), 0)
    assert below.lost == "it ended"
    mates = read_device(store(timed(at), *[failed(probe(SPLIT, Stage.SPLIT), 0)] * 2), 0)
    assert mates.lost == ""
    gone = read_device(
        store(timed(at), *[failed(probe(SPLIT, Stage.SPLIT), 0, cause="device")] * 2), 0
    )
    assert gone.lost == "it ended"


def test_the_check_of_a_layout_that_never_raced_is_its_turn() -> None:
    """It was measured only in the solo stage, before its device was throttled, so that value is
    outdated.
    """
    slow = timed(probe(solo(2, 0, 64), Stage.CHECK, 1), 0.2)
    assert list(store(timed(alone(64)), slow).turns(slow.probe.layout).values()) == [slow]


def errors(*splits: Timed) -> list[tuple[float, ...]]:
    """Return the errors of each device's points.

    They are 60 and 40 rows alone in 0.1 s, and these splits.
    """
    found = store(timed(alone(60)), timed(alone(40, 1)), *splits)
    devices = with_drift([read_device(found, i) for i in range(2)])
    return [tuple(point.error for point in (*one.alone, *one.in_splits)) for one in devices]


def test_two_probes_of_one_batch_show_by_how_much_speed_moves_between_probes() -> None:
    """All points are as uncertain as most of these pairs show, beyond the effect of rows and
    errors.
    """
    one = timed(probe(SPLIT, Stage.SPLIT), device_seconds=(0.12, 0.08))
    own = relative_error(one)
    (moved, *_), (other, *_) = errors(one)
    assert moved == other == pytest.approx(math.hypot(own, math.log(0.12 / 0.1)))
    steady = [timed(probe(Layout("split", (60 + i, 40 + i)), Stage.SPLIT, 0)) for i in range(3)]
    assert [error for each in errors(*steady) for error in each] == pytest.approx([own] * 8)


def test_a_lasting_neighbour_of_one_device_says_nothing_of_all() -> None:
    once = timed(probe(SPLIT, Stage.SPLIT), device_seconds=(0.12, 0.1))
    assert [error for each in errors(once) for error in each] == pytest.approx(
        [relative_error(once)] * 4
    )


def test_errors_are_at_least_what_the_noise_of_all_steps_says() -> None:
    """A narrow interval of few steps isn't much more precise than its steps.

    A burst has no effect on other probes.
    """
    wide, lucky = timed(alone(8)), timed(alone(64, 0, 1))
    lucky = msgspec.structs.replace(lucky, low_seconds=0.0999, high_seconds=0.1001, steps=5)
    first, second = read_device(store(wide, lucky), 0).alone
    noise = (relative_error(wide) * math.sqrt(20) + relative_error(lucky) * math.sqrt(5)) / 2
    assert first.error == pytest.approx(max(relative_error(wide), noise / math.sqrt(20)))
    assert second.error == pytest.approx(min(noise / math.sqrt(5), LUCKY * relative_error(lucky)))
    assert second.error > 3 * relative_error(lucky)
    burst = msgspec.structs.replace(timed(alone(128, 0, 2)), low_seconds=0.01, high_seconds=0.19)
    assert max(one.error for one in read_device(store(wide, lucky, burst), 0).alone[:2]) < 0.01
    # of probes with few rows
    jitter = msgspec.structs.replace(timed(alone(8)), low_seconds=0.09, high_seconds=0.11)
    assert read_device(store(jitter, lucky), 0).alone[1].error < 0.003
    assert relative_error(wide) == pytest.approx(0.01 / 2.3646)
    assert relative_error(timed(alone(8), 0.0)) == 1.0
