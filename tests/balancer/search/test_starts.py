"""The start times of a probe's children, and what a search risks if starts are slow."""

from __future__ import annotations

import msgspec
import pytest

from evener.balancer.search.observations import Observations
from evener.balancer.search.starts import StartTimes
from evener.balancer.types import (
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
    solo,
)
from tests.support import machine_families_hard as hard
from tests.support import search_trials as trials

LOAD_SECONDS = 20.0


def ran(batch: int, turn: int, start_seconds: float, position: int = 0) -> Timed:
    probe = Probe(solo(2, position, batch), Stage.SOLO, 1.0, turn)
    nothing = (None, None)
    elapsed = 2.0 + start_seconds
    return Timed(
        probe, 0.1, 0.1, 0.1, 10, nothing, nothing, 0.1, elapsed, start_seconds=start_seconds
    )


def full(batch: int, turn: int, position: int = 0) -> OutOfMemory:
    return OutOfMemory(Probe(solo(2, position, batch), Stage.SOLO, 1.0, turn), (position,), "", 1.0)


def starts(*seen: Observation) -> StartTimes:
    found = Observations(Problem(2, (None, None), budget_seconds=120.0))
    for one in seen:
        found.add(one)
    return StartTimes(found)


FIRST = (ran(8, 0, LOAD_SECONDS), ran(8, 0, LOAD_SECONDS, position=1))
NEXT = solo(2, 0, 16)


def test_a_child_that_ran_out_of_memory_is_taken_to_have_ended() -> None:
    """This changes when a child is seen to continue without a start."""
    assert starts(*FIRST).seconds(NEXT) == 0.0
    assert starts(*FIRST, full(64, 1)).seconds(NEXT) == LOAD_SECONDS
    assert starts(*FIRST, full(64, 1)).seconds(solo(2, 1, 64)) == 0.0, "the other's goes on"
    again = ran(4, 2, 18.0)
    assert starts(*FIRST, full(64, 1), again).seconds(NEXT) == 0.0, "it runs again"
    assert starts(*FIRST, full(64, 1), again, full(32, 3)).seconds(NEXT) == 18.0


def test_children_that_go_on_after_running_out_of_memory_cost_no_start() -> None:
    seen = (*FIRST, full(64, 1), ran(32, 2, 0.0))
    assert starts(*seen).out_of_memory_restart_seconds == 0.0
    assert starts(*seen, full(48, 3)).seconds(NEXT) == 0.0
    other = (full(64, 1, position=1),)
    assert starts(*seen, *other).seconds(solo(2, 1, 16)) == 0.0


def test_a_child_that_says_that_it_goes_on_costs_no_start_although_it_never_ran() -> None:
    """Otherwise a card that can't hold its first batch is left out, because smaller ones seem too
    expensive.
    """
    only = (FIRST[0],)
    ended, recovered = full(8, 0, position=1), full(8, 0, position=1)
    recovered = msgspec.structs.replace(recovered, goes_on=True)
    assert starts(*only, ended).seconds(solo(2, 1, 4)) == LOAD_SECONDS
    assert starts(*only, recovered).seconds(solo(2, 1, 4)) == 0.0
    assert starts(*FIRST, recovered).seconds(solo(2, 1, 4)) == 0.0


def test_children_that_end_cost_a_start_on_each_device() -> None:
    seen = (*FIRST, full(64, 1), ran(4, 2, LOAD_SECONDS), ran(16, 3, 0.0))
    assert starts(*seen).out_of_memory_restart_seconds == LOAD_SECONDS


def test_the_order_of_observations_does_not_matter() -> None:
    seen = (*FIRST, full(64, 1), ran(4, 2, LOAD_SECONDS), full(32, 3))
    split = Layout("split", (8, 8))
    for order in (seen, seen[::-1]):
        assert starts(*order).seconds(NEXT) == LOAD_SECONDS
        assert LOAD_SECONDS < starts(*order).seconds(split) < 1.3 * LOAD_SECONDS


@pytest.mark.parametrize("seed", range(12))
def test_a_search_seldom_runs_out_of_memory_where_that_costs_a_start_of_20_s(seed: int) -> None:
    """8 to 100 rows fit, and the second batch would be 64 rows."""
    for case in hard.cases("slow_loads", seed):
        found = trials.run(case.machine, case.ask, seed)
        again = [one for one in found.seen if isinstance(one, OutOfMemory)]
        assert len(again) <= 1, f"{case.mode}: {len(again)} times"
        assert found.regret <= 0.15, case.mode
