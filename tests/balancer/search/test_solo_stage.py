"""The batches that are measured on each device alone, one round after another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.balancer.search.search import Search
from evener.balancer.types import Failed, Layout, Observation, Probe, Problem, Stage, Timed
from tests.support.search_machines import Bench

PAIR = Bench(((10.0, 0.1, 0, 4000), (12.0, 0.16, 0, 4000)), 0.002)


def rounds(
    bench: Bench, most: int = 20, known: bool = True, **options: Any
) -> list[tuple[int, ...]]:
    """Return the batches of each solo round; 0 for a device that takes no part in it."""
    search, found = Search(bench.problem(known, **options)), list[tuple[int, ...]]()
    while (probes := search.ask()) and probes[0].stage == Stage.SOLO and len(found) < most:
        found.append(
            tuple(
                max(column)
                for column in zip(*(probe.layout.shares for probe in probes), strict=True)
            )
        )
        for one in bench.measure(probes):
            search.tell(one)
    return found


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({}, 8, 64),
        ({"multiple_of": 16}, 16, 64),
        ({"multiple_of": 100}, 100, 200),
        ({"global_batch": 1000}, 8, 64),
        ({"global_batch": 100}, 6, 50),  # an equal share
        ({"global_batch": 10}, 1, 5),
        ({"global_batch": 2}, 1, 2),
        ({"global_batch": 48, "multiple_of": 8}, 8, 24),
        ({"max_global_batch": 100}, 6, 50),
        ({"largest_share": 20}, 8, 20),
        ({"largest_share": 5}, 5, 5),
    ],
)
def test_the_first_two_batches_are_small(options: dict[str, Any], first: int, second: int) -> None:
    """They are around an equal share of a given or limited batch.

    They are whole quanta, and never above a share's limit.
    """
    found = rounds(PAIR, 2, **options)
    assert found[0] == (first, first)
    assert found[1:] == ([(second, second)] if second > first else [])


def test_a_cap_is_kept() -> None:
    assert max(map(max, rounds(PAIR, max_global_batch=700))) <= 700
    assert max(map(max, rounds(PAIR, largest_share=333))) == 333


def test_straight_lines_need_few_rounds() -> None:
    """There are four, the last in a gap between batches eight times apart, which may
    hide a peak.
    """
    assert len(rounds(PAIR, global_batch=1000)) == 4
    assert len(rounds(PAIR, micro=False)) == 5


class Hiding(Bench, frozen=True):
    """Devices whose optimizer takes as much memory as 300 samples, which hides their memory."""

    def _one(self, probe: Probe, scale: float) -> Observation:
        seen = super()._one(probe, scale)
        if not isinstance(seen, Timed):
            return seen
        memory = tuple(most and max(most, 4000) for most in seen.memory_bytes)
        return msgspec.structs.replace(seen, memory_bytes=memory)


def test_a_batch_kept_small_because_memory_is_unknown_is_followed_by_a_large_one() -> None:
    """The next is eight times the second, then the largest.

    If memory is known, the third is the largest.
    """
    devices = ((10.0, 0.1, 0, 2000),) * 2
    first, second, third, fourth, *_ = rounds(Hiding(devices), micro=False)
    assert (first, second, third) == ((8, 8), (64, 64), (512, 512))
    assert min(fourth) > 1000
    assert min(rounds(Bench(devices), micro=False)[2]) > 1900


def test_memory_that_runs_out_is_bracketed() -> None:
    """With unknown memory, batches grow by eight until one fails, then the bracket is halved."""
    found = [one for (one,) in rounds(Bench(((50.0, 0.01, 0, 1000),)), known=False)]
    assert found[:3] == [8, 64, 512]
    assert 1000 < found[3] <= 4096
    assert 512 < found[4] < found[3]
    ran = max(batch for batch in found if batch <= 1000)
    assert ran >= 700


def test_devices_that_can_not_be_used_sit_the_next_rounds_out() -> None:
    """The others continue alone."""
    gone = Bench(((10.0, 0.1, 0, 0), (10.0, 0.1, 0, 3000)))
    found = rounds(gone)
    assert found[0] == (8, 8)
    assert all(first <= 1 for first, _ in found[1:])
    assert found[-1][1] > 1000


def test_a_retried_round_asks_only_for_what_is_missing() -> None:
    """The devices of one round run at the same time. What already ran isn't requested again."""
    search = Search(Problem(2, (None, None)))
    first = search.ask()
    assert [probe.layout for probe in first] == [Layout("solo", (8, 0)), Layout("solo", (0, 8))]
    (seen, _) = PAIR.measure(first)
    search.tell(seen)
    (left,) = search.ask()
    assert left.layout == Layout("solo", (0, 8))
    assert left.turn == 0


def test_devices_that_failed_alone_are_tried_again_at_the_same_time() -> None:
    """They run together as before, since one device is faster while the other is idle."""
    search = Search(Problem(2, (None, None)))
    first = search.ask()
    for probe in first:
        search.tell(Failed(probe, "exit", "exit code 1", probe.layout.active, 1.0))
    assert set(search.ask()) == set(first)


def test_a_second_batch_is_measured_however_short_the_budget() -> None:
    """Without it there is no curve. A third batch keeps to the solo stage's half of the budget."""
    assert len(rounds(PAIR, budget_seconds=2.5)) == 2
    assert len(rounds(PAIR, budget_seconds=60.0)) == len(rounds(PAIR))


def test_devices_are_not_idle_in_the_round_of_a_device_that_was_left_out() -> None:
    """The slowest device is left out of the second round, and has a later round of 24 s.

    The other devices measure meanwhile how many rows they hold.
    """
    slow = Bench(((5000.0, 0.0, 0, 60), (7000.0, 0.0, 0, 60), (12000.0, 0.0, 0, 300)))
    second, third = rounds(slow, budget_seconds=300.0)[1:3]
    assert second[:2] == (16, 16)
    assert second[2] == 0
    assert third[:2] == (60, 60)
    assert third[2] > 8
