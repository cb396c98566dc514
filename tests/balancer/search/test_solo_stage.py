"""The batches that each device is measured with alone, one round after another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.balancer.search.search import Search
from evener.balancer.types import Failed, Layout, Observation, Probe, Problem, Timed
from tests.support.search_machines import Bench

PAIR = Bench(((10.0, 0.1, 0, 4000), (12.0, 0.16, 0, 4000)), 0.002)


def rounds(bench: Bench, most: int = 20, known: bool = True, **options: Any) -> list[tuple[int, ...]]:
    """The batches of each solo round; 0 for a device that sits it out."""
    search, found = Search(bench.problem(known, **options)), list[tuple[int, ...]]()
    while (probes := search.ask()) and probes[0].stage == "solo" and len(found) < most:
        found.append(tuple(max(column) for column in zip(*(probe.layout.shares for probe in probes), strict=True)))
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
        ({"global_batch": 100}, 6, 50),  # an even share
        ({"global_batch": 10}, 1, 5),
        ({"global_batch": 2}, 1, 2),
        ({"global_batch": 48, "multiple_of": 8}, 8, 24),
        ({"max_global_batch": 100}, 6, 50),
        ({"largest_share": 20}, 8, 20),
        ({"largest_share": 5}, 5, 5),
    ],
)
def test_the_first_two_batches_are_small(options: dict[str, Any], first: int, second: int) -> None:
    """Around an even share of a batch that is given or capped, in whole quanta, and never above a share's limit."""
    found = rounds(PAIR, 2, **options)
    assert found[0] == (first, first)
    assert found[1:] == ([(second, second)] if second > first else [])


def test_a_first_batch_that_does_not_fit_is_divided_by_eight() -> None:
    """And the second lies half way between what ran and what didn't."""
    tight = Bench(((10.0, 0.1, 0, 3), (10.0, 0.1, 0, 40)))
    first, second, *_ = rounds(tight)
    assert first == (8, 8)
    assert second == (1, 64)
    third = rounds(tight)[2]
    assert third[1] == 36


def test_the_third_batch_is_the_largest_that_matters_or_on_the_way_to_it() -> None:
    """32 times the last one where the largest is more than 40 times as far."""
    assert rounds(PAIR)[2] == (2048, 2048)
    near = Bench(((10.0, 0.1, 0, 2000), (10.0, 0.1, 0, 2000)))
    assert rounds(near)[2] == (pytest.approx(1994, abs=3),) * 2


def test_a_slow_device_is_not_measured_far_beyond_what_a_split_gives_it() -> None:
    """Its third batch is four times the second; a split would end before 110 rows, so no larger one follows."""
    slow = Bench(((10.0, 0.1, 0, 1000), (100.0, 2.0, 0, 4000)))
    assert [second for _, second in rounds(slow)] == [8, 64, 256]


def test_a_fixed_batch_is_measured_at_the_predicted_shares() -> None:
    """And at no less than an even one."""
    third = rounds(PAIR, global_batch=1000)[2]
    assert third == (pytest.approx(623, abs=5), 500)


def test_a_cap_is_kept() -> None:
    assert max(map(max, rounds(PAIR, max_global_batch=700))) <= 700
    assert max(map(max, rounds(PAIR, largest_share=333))) == 333


def test_straight_lines_need_few_rounds() -> None:
    """Three for a fixed batch; a fourth where the largest batch was too far for one stride."""
    assert len(rounds(PAIR, global_batch=1000)) == 3
    assert len(rounds(PAIR, micro=False)) == 4


class Hiding(Bench, frozen=True):
    """Devices whose optimizer takes as much memory as 300 samples, which it hides."""

    def _one(self, probe: Probe, scale: float) -> Observation:
        seen = super()._one(probe, scale)
        if not isinstance(seen, Timed):
            return seen
        memory = tuple(most and max(most, 4000) for most in seen.memory_bytes)
        return msgspec.structs.replace(seen, memory_bytes=memory)


def test_a_batch_that_was_kept_small_as_memory_said_nothing_is_followed_by_a_large_one() -> None:
    """Eight times the second, then the largest; where memory says so, the third is the largest."""
    devices = ((10.0, 0.1, 0, 2000),) * 2
    first, second, third, fourth, *_ = rounds(Hiding(devices), micro=False)
    assert (first, second, third) == ((8, 8), (64, 64), (512, 512))
    assert min(fourth) > 1000
    assert min(rounds(Bench(devices), micro=False)[2]) > 1900


def test_memory_that_runs_out_is_bracketed() -> None:
    """Unknown memory: batches grow by eight until one fails, then the bracket is halved."""
    found = [one for (one,) in rounds(Bench(((50.0, 0.01, 0, 1000),)), known=False)]
    assert found[:3] == [8, 64, 512]
    assert 1000 < found[3] <= 4096
    assert 512 < found[4] < found[3]
    ran = max(batch for batch in found if batch <= 1000)
    assert ran >= 700


def test_a_knee_is_measured_on_its_slope() -> None:
    """Two small batches that took the same show none, so the fourth lies at 55 % of the largest."""
    flat = Bench(((1.0, 0.05, 600, 3000), (1.0, 0.05, 600, 3000)))
    first, second, third, fourth, *_ = rounds(flat, global_batch=4000)
    assert (first, second) == ((8, 8), (64, 64))
    assert third[0] > 1500
    assert fourth[0] == pytest.approx(0.55 * third[0], rel=0.01)


def test_a_lone_device_has_a_round_more() -> None:
    """No other device and no split adds points to a curve in doubt."""
    curve = ((0, 10), (64, 11), (500, 12), (1000, 60), (2000, 70), (4000, 300))
    lone, pair = (Bench(((0.0, 0.0, 0, 4000),) * count, curves=(curve,) * count) for count in (1, 2))
    assert len(rounds(lone)) > len(rounds(pair)) == 4


def test_a_device_that_no_split_needs_fills_the_gap_between_its_batches() -> None:
    """In a round that another one's bent curve asks for: a batch of 1 would say nothing."""
    bent = ((0, 10), (64, 11), (500, 12), (1000, 60), (2000, 70), (4000, 300))
    slow = ((0, 5000), (4000, 9000))
    found = rounds(Bench(((0.0, 0.0, 0, 4000),) * 3, 0.002, (bent, bent, slow)), global_batch=1500)
    assert len(found) == 4
    assert found[3][2] == 36, "half way between 8 and 64"


def test_devices_that_can_not_be_used_sit_the_next_rounds_out() -> None:
    """The others go on alone."""
    gone = Bench(((10.0, 0.1, 0, 0), (10.0, 0.1, 0, 3000)))
    found = rounds(gone)
    assert found[0] == (8, 8)
    assert all(first <= 1 for first, _ in found[1:])
    assert found[-1][1] > 1000


def test_a_budget_too_short_for_long_steps_asks_for_none() -> None:
    """A step of a fifth of the exploration's rest, in five steps, is the longest."""
    slow = Bench(((100.0, 10.0, 0, 4000), (100.0, 10.0, 0, 4000)))
    for budget in (20.0, 60.0):
        longest = max(map(max, rounds(slow, budget_seconds=budget)))
        assert slow.own(0, longest) <= max(slow.own(0, 64), 0.2 * budget / 5 * 1.05)


def test_a_probe_lasts_as_long_as_twelve_of_its_steps() -> None:
    """Or four seconds, if that is longer."""
    slow = Bench(((100.0, 10.0, 0, 4000), (10.0, 0.1, 0, 4000)))
    search = Search(slow.problem())
    for _ in range(2):
        for one in slow.measure(search.ask()):
            search.tell(one)
    seconds = {probe.layout.active[0]: probe for probe in search.ask()}
    assert seconds[1].seconds == 4.0
    step = slow.own(0, seconds[0].layout.shares[0])
    assert seconds[0].seconds == pytest.approx(min(60.0, 12 * step), rel=0.02)


def test_a_retried_round_is_asked_for_whole() -> None:
    """Devices of one round run at the same time; what ran is not asked for again."""
    search = Search(Problem(2, (None, None)))
    first = search.ask()
    assert [probe.layout for probe in first] == [Layout("solo", (8, 0)), Layout("solo", (0, 8))]
    (seen, _) = PAIR.measure(first)
    search.tell(seen)
    (left,) = search.ask()
    assert left.layout == Layout("solo", (0, 8))
    assert left.turn == 0


def test_devices_that_failed_alone_are_tried_again_at_the_same_time() -> None:
    """As they were at first: one with the other at rest would be faster."""
    search = Search(Problem(2, (None, None)))
    first = search.ask()
    for probe in first:
        search.tell(Failed(probe, "exit", "exit code 1", probe.layout.active, 1.0))
    assert set(search.ask()) == set(first)


def test_a_second_batch_is_measured_however_short_the_budget() -> None:
    """Without it there is no curve; a third one keeps to the solo stage's half of the budget."""
    assert len(rounds(PAIR, budget_seconds=2.5)) == 2
    assert len(rounds(PAIR, budget_seconds=60.0)) == len(rounds(PAIR))
