"""What exploration measures for rows of unequal length, and what it concludes."""

from __future__ import annotations

import msgspec
import pytest

from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.observations import Observations
from evener.balancer.search.search import Search
from evener.balancer.search.text_model import TextModel
from evener.balancer.search.time_left import TimeLeft
from evener.balancer.types import (
    Facts,
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
    solo,
)
from evener.shares.curves import Cost, Work
from tests.support.text_machines import TextMachine, lognormal

FAST = Cost(0.001, 2e-5, 1e-8)
SLOW = Cost(0.002, 4e-5, 2e-8)


class Launched(Cost, frozen=True):
    """The cost on a GPU that waits for its host: a pass takes 10 ms, whatever it contains."""

    def seconds_for(self, work: Work) -> float:
        """Return the seconds of the passes of a step."""
        return 0.01 * work.passes


def model(problem: Problem, seen: Observations) -> TextModel:
    return TextModel(problem, seen, TimeLeft(problem, BALANCE, seen))


def passes_of(
    cost: Cost, lengths: tuple[int, ...] = lognormal(), budget: float | None = None
) -> list[tuple[int, int, int]]:
    """Return (rows of a pass, passes, tokens of a row) of each probe of passes of one length, in
    order.
    """
    machine, found = TextMachine((cost,), step_s=0.0, lengths=lengths), []
    search = Search(machine.problem(global_batch=4096, budget_seconds=budget))
    search.learn_data(Facts(lengths=machine.lengths))
    while (probes := search.ask()) and (layout := probes[0].layout).length:
        found.append((layout.pass_rows[0], layout.passes(0), layout.length))
        for one in machine.measure(probes):
            search.tell(one)
    return found


def test_passes_grow_until_tokens_show_and_then_differ_in_length() -> None:
    """Eight rows of medium length, longer ones until they take three times as long, then every
    length.

    Short rows run in four passes, which show the part of a step's cost that belongs to a pass.
    """
    assert passes_of(FAST) == [(8, 1, 64), (4, 1, 512), (15, 4, 33), (32, 1, 64), (11, 1, 176)]


def test_until_there_is_a_cost_passes_may_take_all_of_the_budget() -> None:
    """If packs follow, exploration has 0.4 of the budget. Without costs, no row can be assigned."""
    search, seen = TextMachine((FAST, SLOW)).searched(
        LayoutOptions(), budget_seconds=6.0, global_batch=64
    )
    assert sum(one.elapsed_seconds for one in seen if one.probe.layout.shares[0]) > 0.4 * 6.0 + 2.0
    assert isinstance(search.evaluation.machine, TextModel)
    assert all(search.evaluation.machine.costs_alone)


@pytest.mark.parametrize("median", [20, 64, 200])
def test_the_first_pass_has_eight_middling_rows_or_what_the_longest_row_takes(median: int) -> None:
    """A pass with the longest row has to fit in any case."""
    lengths = lognormal(median, longest=512)
    rows, passes, length = passes_of(FAST, lengths)[0]
    assert length == pytest.approx(median, abs=1)
    assert (rows, passes) == (max(8, lengths[-1] // length), 1)


def test_passes_that_would_not_end_in_time_are_not_begun() -> None:
    """512 tokens take 1.5 s; four passes of them, twice, would take all of 12 s."""
    slow = Cost(0.5, 2e-3, 0)
    assert 4 in [passes for _, passes, _ in passes_of(slow)]
    assert 4 not in [passes for _, passes, _ in passes_of(slow, budget=12.0)]


def test_passes_that_never_take_longer_grow_to_the_global_batch() -> None:
    first, *larger = passes_of(Launched(0, 0, 0))
    assert first == (8, 1, 64)
    assert larger[:6] == [(4**n, 1, 512) for n in range(1, 7)]
    assert larger[6][1] == 4, "then what a pass costs"


class Contended(TextMachine):
    """The first device's own part of splits takes 1.5 times as long; splits cost nothing else."""

    def _one(self, probe: Probe) -> Observation:
        costs = self.costs
        if probe.layout.kind == "split":
            slowed = (1.5 * part for part in msgspec.structs.astuple(costs[0]))
            self.costs = (Cost(*slowed), *costs[1:])
        seen = super()._one(probe)
        self.costs = costs
        return seen


def test_rows_are_assigned_by_the_devices_speed_in_splits() -> None:
    """A device that others slow down there gets as many rows as one that is as slow alone."""
    alone, _ = TextMachine((Cost(0.0015, 3e-5, 1.5e-8), SLOW), step_s=0.0).searched(global_batch=64)
    found, _ = Contended((FAST, SLOW), step_s=0.0).searched(global_batch=64)
    best, expected = found.best(), alone.best()
    assert best is not None
    assert expected is not None
    assert best.layout.shares == pytest.approx(expected.layout.shares, abs=1)


def test_splits_of_which_no_device_says_its_own_part_still_show_what_exchange_takes() -> None:
    """The predicted time of the rows alone is subtracted."""
    machine = TextMachine((FAST, SLOW), sync_s=0.05, noise=0.0)
    search, seen = machine.searched(global_batch=64)
    assert search.evaluation.machine.sync_seconds == pytest.approx(0.05, rel=0.1)
    for knows_work in (True, False):
        stored = Observations(search.problem)
        for one in seen:
            if isinstance(one, Timed) and one.probe.stage == Stage.SPLIT:
                work = one.work if knows_work else (None, None)
                one = msgspec.structs.replace(one, device_seconds=(None, None), work=work)
            stored.add(one)
        exchange = model(search.problem, stored).sync_seconds or 0.0
        assert exchange == pytest.approx(0.05, rel=0.1) if knows_work else exchange >= 0


def test_what_ran_fits_below_the_smallest_pass_that_ran_out_of_memory() -> None:
    """The smallest of several such passes counts, as others' memory may or may not be
    free again.
    """
    machine = TextMachine((FAST,))
    problem = msgspec.structs.replace(machine.problem(), lengths=machine.lengths)
    stored = Observations(problem)
    for turn, (rows, fits) in enumerate(((2, True), (20, True), (10, False), (40, False))):
        layout = msgspec.structs.replace(solo(1, 0, rows), length=100)
        probe = Probe(layout, Stage.SOLO, 1.0, turn)
        (seen,) = machine.measure([probe])
        stored.add(seen if fits else OutOfMemory(probe, (0,), "full", 1.0))
    memory = model(problem, stored).memory(0)
    assert (memory.largest_ran, memory.smallest_failed, memory.failure_count) == (200, 1000, 2)


def test_a_split_that_fails_is_not_tried_for_ever() -> None:
    machine, tried = TextMachine((FAST, SLOW)), set[Layout]()

    class Failing(TextMachine):
        def _one(self, probe: Probe) -> Observation:
            if probe.layout.kind != "split":
                return super()._one(probe)
            tried.add(probe.layout)
            return Failed(probe, "exit", "exit code 1", (), 1.0)

    search, _ = Failing(machine.costs).searched(global_batch=64)
    best = search.best()
    assert best is not None
    assert best.layout.kind == "solo"
    assert len([layout for layout in tried if layout.costs]) <= 3
