"""Whole verdicts as a person reads them: each outcome of a search with its text.

A change of wording changes __snapshots__/test_verdict_texts.ambr, which `--snapshot-update` writes.
What follows from numbers is in test_verdict.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from evener.balancer.families import PackMode, pack_on
from evener.balancer.result.sentences import write_end, write_verdict
from evener.balancer.search.layouts import Candidate
from evener.balancer.search.ranking import RankedLayout
from evener.balancer.types import (
    Facts,
    Failed,
    Interval,
    Layout,
    MeasurementDoubt,
    Probe,
    Problem,
    Stage,
    Stop,
    layout_of,
    solo,
)
from evener.balancer.verdict import Verdict
from tests.support.verdicts import (
    EVEN,
    FIXED,
    LARGER,
    OTHER,
    PACK,
    PLACE,
    SOLO,
    SPLIT,
    candidate,
    disturbed_turn,
    judged,
    result,
    standing,
    turn,
)

pytest.importorskip("syrupy")
VERDICTS: dict[str, Callable[[], Verdict]] = {}
TIE = Interval(-0.014, -0.032, 0.004)
UNCLEAR = Interval(-0.05, -0.1, 0.01)


def verdict(make: Callable[[], Verdict]) -> Callable[[], Verdict]:
    """Add a verdict by the name of the function that makes it."""
    VERDICTS[make.__name__.replace("_", " ")] = make
    return make


def with_knob(knob: str) -> Candidate:
    return candidate("solo", msgspec.structs.replace(SOLO.layout, knobs=(knob,)))


def uneven(*ranking: RankedLayout, **known: Any) -> Verdict:
    """Return a verdict for 150 + 106 rows at 1 000 samples/s."""
    return judged(result(SPLIT, 1000), ranking, **known)


def one_device(*ranking: RankedLayout, **known: Any) -> Verdict:
    """Return a verdict for 256 rows on GPU:0 at 1 345 samples/s."""
    return judged(result(SOLO, 1345), ranking, **known)


# ---------------------------------------------------------------------- gains


@verdict
def a_split_of_a_given_batch() -> Verdict:
    return judged(
        result(SPLIT, 2123),
        [standing(EVEN, 1810, -0.147), standing(SOLO, 1345, -0.366)],
        request=FIXED,
    )


@verdict
def a_tie_measured_in_turn() -> Verdict:
    """Its gap isn't that of the two rates beside it, which differ more."""
    known = Interval(2000, 1999, 2001)
    return judged(result(SPLIT, 2123), [RankedLayout(EVEN, known, TIE, True, 3)])


@verdict
def less_than_a_percent_counts_as_equal() -> Verdict:
    return judged(result(SPLIT, 2123), [standing(EVEN, 2110, -0.006, tie=True)])


@verdict
def a_tie_by_two_figures() -> Verdict:
    return judged(result(SPLIT, 2123), single=result(SOLO, 2110))


@verdict
def a_loss() -> Verdict:
    return judged(result(SPLIT, 900), [standing(SOLO, 1000, 0.111)])


@verdict
def the_plans_figure_is_too_uncertain() -> Verdict:
    ranking = [standing(SOLO, 2500, 0.2), standing(EVEN, 900, -0.5)]
    return judged(result(SPLIT, 2123, 0.3), ranking, request=FIXED)


@verdict
def a_rivals_figure_is_too_uncertain() -> Verdict:
    return judged(result(SOLO, 2123), [standing(EVEN, 2000, -0.06, error=0.4)])


@verdict
def one_device_ties_with_a_split() -> Verdict:
    return uneven(standing(EVEN, 300, -0.7), standing(SOLO, 995, -0.005, tie=True))


@verdict
def a_machine_of_one_device() -> Verdict:
    return judged(result(candidate("solo", solo(1, 0, 64)), 90.5, 0.0), request=FIXED)


@verdict
def a_simulated_machine() -> Verdict:
    return judged(result(SPLIT, 2123), kind="sim")


@verdict
def passes_in_a_split() -> Verdict:
    return judged(result(candidate("split", layout_of((820, 568), (300, 568))), 2123))


@verdict
def passes_on_one_device() -> Verdict:
    return judged(result(candidate("solo", layout_of((820, 0), (410, 0))), 1000))


@verdict
def equal_shares_that_evener_chose() -> Verdict:
    return judged(result(EVEN, 1810), [standing(SOLO, 1345, -0.257)])


@verdict
def equal_shares_of_a_given_batch() -> Verdict:
    return judged(result(EVEN, 1810), [standing(SOLO, 1345, -0.257)], request=FIXED)


# ---------------------------------------------------------------------- packs, placements, knobs


@verdict
def a_pack_of_five() -> Verdict:
    ranking = [standing(SOLO, 800, -0.6), standing(SPLIT, 1000, -0.5), standing(PLACE, 500, -0.75)]
    return judged(result(PACK, 2000), ranking)


@verdict
def a_placement() -> Verdict:
    return judged(result(PLACE, 2000), [standing(PACK, 1000, -0.5)])


@verdict
def packs_and_placements_that_tie() -> Verdict:
    unclear = RankedLayout(PLACE, Interval(950, 900, 1000), UNCLEAR, True, 2)
    return judged(result(SOLO, 1000), [standing(PACK, 997, -0.003, tie=True), unclear])


@verdict
def a_knob_that_gains_and_one_that_loses() -> Verdict:
    ranking = [standing(SOLO, 1000, -1 / 6), standing(with_knob("mixed"), 1165, -0.029)]
    return judged(result(with_knob("xla"), 1200), ranking)


@verdict
def a_knob_that_makes_no_difference() -> Verdict:
    return judged(result(SOLO, 1000), [standing(with_knob("xla"), 999, -0.001, tie=True)])


@verdict
def a_knob_that_gains_more_than_loader_workers() -> Verdict:
    ranking = [standing(with_knob("workers2"), 1100, -1 / 12), standing(SOLO, 1000, -1 / 6)]
    return judged(result(with_knob("mixed"), 1200), ranking)


@verdict
def loader_workers_that_gain_more_than_a_knob() -> Verdict:
    ranking = [standing(with_knob("mixed"), 1100, -1 / 12), standing(SOLO, 1000, -1 / 6)]
    return judged(result(with_knob("workers2"), 1200), ranking)


@verdict
def packs_that_were_still_getting_faster() -> Verdict:
    modes: tuple[PackMode, ...] = ("", "mps")
    packs = tuple(candidate("pack", pack_on(SOLO.layout, 6, mode)) for mode in modes)
    limited = Problem(2, (None,) * 2, budget_seconds=60.0)
    return judged(result(PACK, 2000), ungrown=packs, problem=limited, enough_seconds=90.0)


# ---------------------------------------------------------------------- why


@verdict
def a_split_that_waits_for_its_exchange() -> Verdict:
    return one_device(standing(SPLIT, 1223, -0.0907), sync_seconds=0.034, request=FIXED)


@verdict
def a_split_that_ties_with_one_device() -> Verdict:
    return one_device(standing(SPLIT, 1341, -0.003, tie=True), sync_seconds=0.034, request=FIXED)


@verdict
def no_split_was_measured() -> Verdict:
    return one_device(request=FIXED)


@verdict
def a_split_whose_parts_take_as_long_as_the_whole() -> Verdict:
    """150 of 256 samples take nearly as long alone, so they gain nothing, however cheap the rest
    is.
    """
    return one_device(
        standing(SPLIT, 1223, -0.0907),
        sync_seconds=0.0004,
        seconds_alone={SPLIT.layout: 0.9 * 256 / 1345},
        request=FIXED,
    )


@verdict
def a_loss_that_nothing_measured_covers() -> Verdict:
    """A step of 2.8 ms became 7.2 ms, and synchronization takes 0.16 ms of it."""
    return judged(
        result(SOLO, 256 / 0.0028),
        [standing(SPLIT, 256 / 0.0072, 2.8 / 7.2 - 1)],
        sync_seconds=0.00016,
        seconds_alone={SPLIT.layout: 0.0017},
        request=FIXED,
    )


@verdict
def a_larger_batch_that_is_faster_within_the_tolerance() -> Verdict:
    """The reader of its row in a table must learn why it isn't the plan."""
    return uneven(standing(LARGER, 1015, 0.015))


@verdict
def a_larger_batch_that_was_no_faster_when_the_plan_was_chosen() -> Verdict:
    return uneven(standing(LARGER, 1040, 0.04))


@verdict
def a_larger_batch_that_ties() -> Verdict:
    gap = Interval(0.013, -0.005, 0.031)
    return uneven(RankedLayout(LARGER, Interval(1015, 1010, 1020), gap, True, 3))


@verdict
def a_rival_that_was_faster_at_another_time() -> Verdict:
    return uneven(standing(EVEN, 1100, -0.1), request=FIXED)


@verdict
def a_rival_that_ties_and_was_faster_at_another_time() -> Verdict:
    return uneven(standing(EVEN, 1003, 0.003, tie=True), request=FIXED)


@verdict
def a_faster_rival_that_is_less_simple() -> Verdict:
    return judged(result(EVEN, 1000), [standing(SPLIT, 1003, 0.003, tie=True)], request=FIXED)


def summed(rate: float = 1000, **known: Any) -> Verdict:
    """Return a verdict for 256 samples at 2 000/s on two devices with 1 000 together, which lose
    128 ms a step.
    """
    solos = tuple(result(candidate("solo", solo(2, i, 256)), 1000) for i in range(2))
    chosen = result(SPLIT, rate)
    return judged(chosen, solos=solos, results=(chosen, *solos), **known)


@verdict
def what_is_missing_of_the_sum_is_the_exchange() -> Verdict:
    return summed(sync_seconds=0.12)


@verdict
def what_is_missing_of_the_sum_is_the_longest_share() -> Verdict:
    return summed(seconds_alone={SPLIT.layout: 0.25})


@verdict
def what_is_missing_of_the_sum_is_partly_the_exchange() -> Verdict:
    return summed(sync_seconds=0.01)


@verdict
def what_is_missing_of_the_sum_is_small_batches_and_the_exchange() -> Verdict:
    return summed(sync_seconds=0.06, seconds_alone={SPLIT.layout: 0.18})


@verdict
def what_is_missing_of_the_sum_is_not_known() -> Verdict:
    return summed()


@verdict
def nothing_is_missing_of_the_sum() -> Verdict:
    return summed(1900)


THREE = candidate("split", Layout("split", (150, 106, 0)))
THREE_ALONE = tuple(result(candidate("solo", solo(3, i, 256)), 500 - 100 * i) for i in range(3))


def without_the_third(*shares: int, error: float = 0.005) -> Verdict:
    """Three devices of which the third is left out; a split of these shares was measured too."""
    chosen = result(THREE, 1000)
    others = [result(candidate("split", Layout("split", shares)), 990, error)] if shares else []
    return judged(chosen, results=(chosen, *others), solos=THREE_ALONE)


@verdict
def a_device_is_left_out_as_a_split_with_it_was_slower() -> Verdict:
    return without_the_third(140, 96, 20)


@verdict
def a_device_is_left_out_as_a_larger_split_with_it_was_slower() -> Verdict:
    return without_the_third(140, 96, 40)


@verdict
def a_device_is_left_out_and_a_split_with_it_is_too_uncertain() -> Verdict:
    return without_the_third(140, 96, 20, error=0.5)


@verdict
def a_device_is_left_out_and_no_split_with_it_was_measured() -> Verdict:
    return without_the_third()


def without_the_last_two(stop: Stop) -> Verdict:
    """Four devices of which two are left out, and no split with them was measured."""
    chosen = result(candidate("split", Layout("split", (150, 106, 0, 0))), 1000)
    solos = tuple(result(candidate("solo", solo(4, i, 256)), 500 - 100 * i) for i in range(4))
    return judged(chosen, results=(chosen, *solos), solos=solos, stop=stop)


@verdict
def two_devices_are_left_out_and_no_split_with_them_was_measured() -> Verdict:
    return without_the_last_two(Stop.SETTLED)


@verdict
def a_search_was_stopped_before_a_split_with_some_devices() -> Verdict:
    """What wasn't measured yet isn't said to gain nothing."""
    return without_the_last_two(Stop.INTERRUPTED)


@verdict
def a_run_was_cut_off_before_a_split_with_a_device() -> Verdict:
    chosen = result(THREE, 1000)
    return judged(chosen, results=(chosen,), solos=THREE_ALONE, stop=Stop.CUT_OFF)


@verdict
def no_time_was_left_for_the_even_split_over_all_devices() -> Verdict:
    """The plan is an even split too, over fewer of them."""
    chosen = result(candidate("even", Layout("split", (128, 128, 0))), 1000)
    return judged(
        chosen,
        results=(chosen, *THREE_ALONE),
        solos=THREE_ALONE,
        unmeasured=(candidate("even", Layout("split", (86, 86, 86))),),
        problem=Problem(3, (None,) * 3, budget_seconds=60.0),
        enough_seconds=90.0,
        stop=Stop.TIED,
    )


@verdict
def a_plan_of_simulated_devices() -> Verdict:
    """How it is used."""
    return uneven(standing(EVEN, 880, -0.12), kind="sim", request=FIXED)


# ---------------------------------------------------------------------- doubts and faults


@verdict
def a_limit_of_the_users_code() -> Verdict:
    ran = turn(solo(2, 0, 197), 1.0, (None, None))
    detail = "GPU:0, warming up: limit.py:9: ValueError: this table holds 200 rows"
    raised = Failed(Probe(solo(2, 0, 212), Stage.SOLO, 1.0), "raised", detail, (0,), 1.0)
    return uneven(seen=[ran, raised])


@verdict
def other_work_disturbed_everything() -> Verdict:
    return uneven(standing(EVEN, 800, -0.2), seen=[disturbed_turn(1.0, 0.4)], request=FIXED)


@verdict
def a_loss_that_is_not_finite() -> Verdict:
    one = msgspec.structs.replace(
        disturbed_turn(1.0), warnings=(MeasurementDoubt("not_finite", 3.0),)
    )
    return uneven(seen=[one])


@verdict
def one_of_two_like_devices_is_slower() -> Verdict:
    alone = [candidate("solo", solo(2, i, 64)) for i in range(2)]
    return uneven(results=(result(alone[0], 640), result(alone[1], 337)))


@verdict
def a_card_without_hardware_for_bfloat16() -> Verdict:
    return uneven(facts=Facts(bfloat16=True), hardware=(True, False))


@verdict
def an_epoch_of_few_steps() -> Verdict:
    return uneven(rows=20_000)


@verdict
def a_search_that_ended_in_a_tie() -> Verdict:
    return uneven(standing(EVEN, 998, -0.002, tie=True), stop=Stop.TIED)


@verdict
def a_search_that_ended_in_a_tie_with_shards() -> Verdict:
    shards = candidate("shard", Layout("shard", (150, 106)))
    return uneven(standing(shards, 998, -0.002, tie=True), stop=Stop.TIED)


@verdict
def another_device_that_was_faster_before() -> Verdict:
    """Return a verdict in which GPU:1 was raced alone.

    GPU:0 had 2 271 samples/s at the same batch before.
    """
    chosen = result(SPLIT, 2100)
    solos = (result(SOLO, 2271), result(OTHER, 1801))
    ranking = [standing(OTHER, 1801, 1801 / 2100 - 1)]
    return judged(chosen, ranking, solos=solos, results=(chosen, *solos))


@verdict
def one_device_that_was_faster_before() -> Verdict:
    """Return a verdict in which GPU:1 was raced alone in two passes, and in one before."""
    chosen, before = result(SPLIT, 2100), result(OTHER, 2271)
    ranking = [standing(candidate("solo", solo(2, 1, 256, 128)), 1801, 1801 / 2100 - 1)]
    return judged(chosen, ranking, solos=(None, before), results=(chosen, before))


def whole_text(found: Verdict) -> str:
    """Return the whole text of a verdict."""
    written = write_verdict(found)
    lines = [written.text, *(f"warning: {line}" for line in written.warnings)]
    stop = Stop[found.stopped.upper()]
    return "\n".join([*lines, f"end: {write_end(found, stop.value)}"])


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_reads_as_it_did(name: str, snapshot: Any) -> None:
    assert whole_text(VERDICTS[name]()) == snapshot
