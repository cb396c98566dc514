"""Searches over rows of unequal length learn costs, assign rows by cost and respect memory."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.families import Placement, is_even
from evener.balancer.result.judge import padding_share
from evener.balancer.search.layouts import LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.search.text_model import StepCost, WorkPoint, fit_rates, fit_step_cost
from evener.balancer.types import Facts, Layout, Observation, OutOfMemory, Probe, Stage, Timed
from evener.shares.curves import Cost, RankCost, Work
from tests.support.text_machines import TextMachine, lognormal

FAST = Cost(0.001, 2e-5, 1e-8)
SLOW = Cost(0.002, 4e-5, 2e-8)
ROWS = [(1.0, 1.0, 512.0, 32768.0), (1.0, 1.0, 512.0, 262144.0), (1.0, 4.0, 2048.0, 65536.0)]
ROWS += [(1.0, 1.0, 2048.0, 131072.0), (1.0, 7.0, 5000.0, 400000.0)]


@given(
    st.tuples(
        *[
            st.sampled_from([0.0, 1.0]),
            st.floats(0.01, 2),
            st.floats(1e-4, 0.1),
            st.floats(1e-7, 1e-3),
        ]
    )
)
@settings(max_examples=20)
def test_rates_are_those_that_the_values_were_made_of(rates: tuple[float, ...]) -> None:
    values = [sum(rate * amount for rate, amount in zip(rates, row, strict=True)) for row in ROWS]
    found, _ = fit_rates(ROWS, values, [0.01 * value for value in values])
    assert found == pytest.approx(rates, rel=1e-5, abs=1e-6)


@given(st.lists(st.floats(0.1, 10), min_size=len(ROWS), max_size=len(ROWS)))
@settings(max_examples=20)
def test_no_rates_above_zero_come_nearer(values: list[float]) -> None:
    """Whatever is measured, no rate is negative, and changing any rate a little is no better."""
    rates, least = fit_rates(ROWS, values, values)

    def missed(tried: list[float]) -> float:
        found = [
            sum(rate * amount for rate, amount in zip(tried, row, strict=True)) for row in ROWS
        ]
        return sum((a / b - 1) ** 2 for a, b in zip(found, values, strict=True))

    assert min(rates) >= 0
    assert least == pytest.approx(missed(list(rates)))
    for i, unit in enumerate((0.01, 0.01, 1e-5, 1e-8)):
        for change in (unit, -unit):
            moved = [max(0.0, rate + change) if j == i else rate for j, rate in enumerate(rates)]
            assert missed(moved) >= missed(list(rates)) - 1e-9


@pytest.mark.parametrize("costs", [(FAST, SLOW), (FAST, FAST), (FAST, FAST, SLOW)])
def test_the_plan_is_as_fast_as_rows_assigned_by_the_true_costs(costs: tuple[Cost, ...]) -> None:
    """It is within 3 % of them, and far above the even split by number of rows, which races too."""
    machine = TextMachine(costs)
    search, _ = machine.searched(global_batch=64)
    best = search.best()
    assert best is not None
    layout = best.layout
    assert layout.kind == "split"
    assert layout.global_batch == 64
    true = machine.step_seconds(layout, [RankCost(cost) for cost in costs], 60)
    own = machine.step_seconds(layout, [RankCost(cost) for cost in layout.costs if cost], 60)
    assert own <= 1.03 * true
    families = {one.candidate.family.name: one for one in search.evaluation.ranking()}
    assert set(families) == {"solo", "even", "split"}
    assert best.throughput.value > 1.3 * families["even"].throughput.value
    assert padding_share(search.evaluation.turns(layout)) < padding_share(
        search.evaluation.turns(families["even"].candidate.layout)
    )
    assert not is_even(layout)
    assert len(
        [one for one in search.evaluation.solos() if one and one.layout.global_batch == 64]
    ) == len(costs)


def test_a_free_batch_is_the_smallest_within_the_tolerance() -> None:
    """Larger batches have less padding. The plan's batch is no larger than that is worth."""
    machine = TextMachine((FAST, SLOW))
    plain, _ = machine.searched()
    generous, _ = machine.searched(tolerance=0.2)
    best, small = plain.best(), generous.best()
    assert best is not None
    assert small is not None
    assert small.layout.global_batch < best.layout.global_batch <= 1024


@pytest.mark.parametrize("batch", [8, 16])
def test_a_small_batch_of_rows_that_are_mostly_cut_to_one_length_has_a_plan(batch: int) -> None:
    """More than half of the rows have 512 tokens, so few passes differ, and two
    determine a cost.
    """
    search, _ = TextMachine((FAST, SLOW), lengths=lognormal(600, longest=512)).searched(
        global_batch=batch
    )
    best = search.best()
    assert best is not None
    assert best.layout.kind == "split"
    assert best.layout.costs
    assert best.layout.shares[0] > best.layout.shares[1]


def test_no_pass_is_larger_than_memory() -> None:
    """Devices with little memory have small passes; their share still depends on speed."""
    machine = TextMachine((FAST, FAST, FAST), most_tokens=(2000, 100_000, 1000))
    search, seen = machine.searched(global_batch=96)
    best = search.best()
    assert best is not None
    assert len(best.layout.active) == 3
    assert 512 <= best.layout.tokens[0] <= 2000
    assert 512 <= best.layout.tokens[2] <= 1000
    assigned = [one for one in seen if one.probe.layout.costs]
    assert assigned
    assert not any(isinstance(one, OutOfMemory) for one in assigned)
    assert best.throughput.value > 2.6 * max(
        one.throughput.value for one in search.evaluation.solos() if one
    )


def test_rows_assigned_by_cost_that_run_out_of_memory_are_tried_in_smaller_passes() -> None:
    """The devices' memory is unknown, so the limit shows when a pass is too large."""

    class Surprising(TextMachine):
        def _one(self, probe: Probe) -> Observation:
            tokens = [most for most in probe.layout.tokens if most]
            if (
                probe.stage in (Stage.RACE, Stage.CHECK)
                and probe.layout.kind == "split"
                and tokens
                and max(tokens) > 900
            ):
                return OutOfMemory(probe, (0, 1), "full", 1.0)
            return super()._one(probe)

    machine = Surprising((FAST, SLOW), most_tokens=(1500, 1500))
    search, seen = machine.searched(global_batch=64)
    best = search.best()
    assert best is not None
    assert any(isinstance(one, OutOfMemory) for one in seen)
    assert max(best.layout.tokens) <= 900


def test_a_row_that_no_device_can_hold_ends_the_search() -> None:
    machine = TextMachine((FAST, FAST), most_tokens=(400, 450))
    search, _ = machine.searched(global_batch=64)
    assert "longer than any device can hold: it has 512 tokens" in (search.why_stopped() or "")
    search.learn_data(Facts(lengths=machine.lengths, longest_row=17))
    assert "row 17 has 512 tokens" in (search.why_stopped() or "")


def test_a_device_that_can_not_hold_the_longest_row_leaves_the_others_to_train() -> None:
    """It runs out of memory before its cost is known. The others continue."""
    search, seen = TextMachine((SLOW, FAST), most_tokens=(100_000, 400)).searched(
        global_batch=64, budget_seconds=120.0
    )
    best = search.best()
    assert any(isinstance(one, OutOfMemory) for one in seen)
    assert best is not None
    assert best.layout.active == (0,)


def test_a_placement_trains_by_rows_and_has_no_batch_where_they_go_by_cost() -> None:
    options = LayoutOptions(placements=(Placement("towers"),))
    search, _ = TextMachine((FAST, SLOW)).searched(options, global_batch=64)
    assert "place" not in {one.layout.kind for one in search.evaluation.offers.candidates}
    assert search.evaluation.offers.view.common_batch is None


def test_one_device_trains_by_cost_too() -> None:
    """Its batch is divided into passes of similar length."""
    search, _ = TextMachine((FAST,)).searched(global_batch=32)
    best = search.best()
    assert best is not None
    assert best.layout.kind == "solo"
    assert best.layout.costs[0] is not None
    assert padding_share(search.evaluation.turns(best.layout)) < 0.15


def test_the_answer_does_not_depend_on_the_order_of_what_was_seen() -> None:
    """Therefore a journal gives the same plan again."""
    machine = TextMachine((FAST, SLOW))
    search, seen = machine.searched(global_batch=64)
    again = Search(machine.problem(global_batch=64))
    again.learn_data(Facts(lengths=machine.lengths))
    for one in reversed(msgspec.json.decode(msgspec.json.encode(seen), type=list[Observation])):
        again.tell(one)
    assert again.best() == search.best()
    assert again.why_stopped() == search.why_stopped()
    assert [one.layout for one in again.evaluation.offers.candidates] == [
        one.layout for one in search.evaluation.offers.candidates
    ]


def test_a_comparison_leaves_out_what_trains_by_rows() -> None:
    """Packs of random rows aren't comparable with rows assigned by length."""
    search, seen = TextMachine((FAST, FAST)).searched(LayoutOptions(scaling=False), global_batch=64)
    assert {one.candidate.family.name for one in search.evaluation.ranking()} == {
        "solo",
        "even",
        "split",
    }
    assert not any(one.probe.layout.kind == "pack" for one in seen)


def test_devices_alone_run_at_the_same_time_and_each_split_differs() -> None:
    """Every round has a probe of each device, and no layout is explored twice."""
    _, seen = TextMachine((FAST, SLOW), noise=0.02).searched(global_batch=64)
    rounds = [one.probe.turn for one in seen if one.probe.stage == Stage.SOLO]
    assert all(rounds.count(turn) == 2 for turn in rounds)
    explored = [one.probe.layout for one in seen if one.probe.stage in (Stage.SOLO, Stage.SPLIT)]
    assert len(set(explored)) == len(explored)
    splits = [layout for layout in explored if layout.kind == "split"]
    assert all(_ratio(a) != _ratio(b) for a, b in pairwise(splits))


def _ratio(layout: Layout) -> float:
    first, second = (cost.seconds(1, 64) for cost in layout.costs if cost)
    return round(first / second, 6)


def test_lengths_are_counted_without_padding() -> None:
    """Tokens/s are samples/s times the mean length."""
    machine = TextMachine((FAST, SLOW), lengths=lognormal(20, 0.5, 128))
    search, seen = machine.searched(global_batch=32)
    assert search.evaluation.mean_length == sum(machine.lengths) / len(machine.lengths)
    timed = [one for one in seen if isinstance(one, Timed) and one.probe.layout.costs]
    assert timed
    for one in timed:
        assert one.tokens == pytest.approx(32 * search.evaluation.mean_length, rel=0.2)
        assert 0 < one.padding < 0.3


def test_devices_of_one_speed_have_one_cost_in_spite_of_noise() -> None:
    """Other devices don't."""
    search, _ = TextMachine((FAST, SLOW, FAST), noise=0.01).searched(global_batch=64)
    alone = [one.layout for one in search.evaluation.solos() if one]
    costs = [cost for layout in alone for cost in layout.costs if cost]
    assert len(costs) == 3
    assert costs[0] == costs[2] != costs[1]


def test_passes_are_not_taken_to_be_free() -> None:
    """Time besides the tokens belongs to the pass, until steps of several passes show otherwise."""
    true = StepCost(0.004, Cost(0.002, 2e-5, 1e-8))
    works = [Work(row[2], *row[1:]) for row in ROWS]
    points = [WorkPoint(work, true.seconds(work), 0.01) for work in works]
    whole = fit_step_cost(points)
    unsure = fit_step_cost([point for point in points if point.work.passes == 1])
    assert whole is not None
    assert whole.step_s == pytest.approx(0.004, rel=0.01)
    assert whole.cost.fixed_s == pytest.approx(0.002, rel=0.01)
    assert unsure is not None
    assert unsure.step_s == 0
    assert unsure.cost.fixed_s == pytest.approx(0.006, rel=0.01)


@pytest.mark.parametrize(("across_s", "devices"), [(0.0, (0, 1, 2, 3)), (0.3, (2, 3))])
def test_a_slow_network_leaves_one_host_to_train(across_s: float, devices: tuple[int, ...]) -> None:
    """It is the host whose devices are faster together. Over a fast network, all hosts train."""
    machine = TextMachine((SLOW, SLOW, FAST, FAST), hosts=(0, 0, 1, 1), across_s=across_s)
    search, _ = machine.searched(global_batch=64)
    best = search.best()
    assert best is not None
    assert best.layout.active == devices
    one, two = (costs[-1] for costs in search.evaluation.machine.exchange[1:])
    assert two - one == pytest.approx(across_s, abs=0.003)


@pytest.mark.parametrize("budget", [20.0, 25.0, 40.0])
def test_a_short_budget_gives_a_split_first(budget: float) -> None:
    """Each probe takes 2 s here, like slow children. Costs may take more than
    exploration's part.
    """
    search, _ = TextMachine((FAST, SLOW)).searched(global_batch=64, budget_seconds=budget)
    best = search.best()
    assert best is not None
    assert best.layout.kind == "split"
    assert best.layout.costs


class Launched(Cost, frozen=True):
    """The cost on a fast GPU that waits for its host: no pass is shorter than its kernel
    launches.
    """

    launch_s: float = 0.01

    def seconds_for(self, work: Work) -> float:
        """Return the seconds of the passes of a step."""
        return max(self.launch_s * work.passes, super().seconds_for(work))


def test_a_fast_gpu_is_certain_by_passes_in_which_tokens_show() -> None:
    """On two H200s, passes of up to 16,000 tokens took 48 to 70 ms.

    With costs fitted to those alone, nothing was cut.
    """
    machine = TextMachine(
        (Launched(0.004, 3.7e-6, 0, 0.046), Launched(0.004, 6.2e-6, 0, 0.046)),
        step_s=0.008,
        lengths=lognormal(128, 0.8, 512),
    )
    search, _ = machine.searched(global_batch=256, budget_seconds=130.0)
    best = search.best()
    assert best is not None
    found = [one.per_token_s for one in best.layout.costs if one]
    assert found == pytest.approx([3.7e-6, 6.2e-6], rel=0.4)
    families = {
        one.candidate.family.name: one.throughput.value for one in search.evaluation.ranking()
    }
    assert families["split"] > 2.4 * families["even"], "random rows, padded to 512 in every pass"
