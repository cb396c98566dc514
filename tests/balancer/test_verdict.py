"""The verdict: what to do and why, what it gains over what, ties called ties, and nothing that its
own figures contradict.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from evener.balancer import verdict
from evener.balancer.families import Placement, find_family, pack_on, place_on, split_evenly
from evener.balancer.journal import FactsEntry, Header, ObservationEntry, Record
from evener.balancer.request import Request
from evener.balancer.result.judge import RunEnd, judge, waiting_share
from evener.balancer.result.rivals import (
    ComparedLayout,
    compare_all,
    find_larger,
    name_all,
    name_layout,
)
from evener.balancer.result.sentences import (
    REMARKS,
    WARNINGS,
    Written,
    write_end,
    write_next_steps,
    write_verdict,
)
from evener.balancer.search.layouts import Candidate, LayoutOptions
from evener.balancer.search.ranking import Standing
from evener.balancer.search.report import SearchReport
from evener.balancer.types import (
    Doubt,
    End,
    Facts,
    Failed,
    Interval,
    Layout,
    Observation,
    Probe,
    Problem,
    Result,
    Stop,
    Timed,
    Warned,
    layout_of,
    solo,
)
from evener.balancer.verdict import Figure, RateGap, Rival, Verdict
from evener.devices.types import Device
from evener.plan.file import Plan
from evener.plan.layout import Share
from tests.support.search_outcomes import draw_outcome


def candidate(family: str, layout: Layout) -> Candidate:
    """Of a family of this name."""
    return Candidate(find_family(family), layout)


SOLO = candidate("solo", solo(2, 0, 256))
OTHER = candidate("solo", solo(2, 1, 256))
EVEN = candidate("even", cast(Layout, split_evenly(2, (0, 1), 256)))
SPLIT = candidate("split", Layout("split", (150, 106)))
LARGER = candidate("split", Layout("split", (400, 300)))
FIXED = Request(framework="torch", global_batch=256)
PACK = candidate("pack", pack_on(SOLO.layout, 5))
PLACE = candidate("place", cast(Layout, place_on(2, Placement("towers"), 256)))


def result(one: Candidate, rate: float, error: float = 0.005) -> Result:
    """A layout's throughput with its relative error."""
    return Result(one.layout, Interval(rate, rate * (1 - error), rate * (1 + error)), 2)


def standing(
    one: Candidate,
    rate: float,
    against: float | None = None,
    tie: bool = False,
    error: float = 0.0,
) -> Standing:
    """A place in the ranking; `against`, the difference from the winner, is known to 0.1 %."""
    difference = None if against is None else Interval(against, against - 0.001, against + 0.001)
    figure = Interval(rate, rate * (1 - error), rate * (1 + error))
    return Standing(one, figure, difference, tie, 3)


def judged(
    chosen: Result,
    ranking: Sequence[Standing] = (),
    *,
    seen: Sequence[Observation] = (),
    kind: str = "gpu",
    request: Request | None = None,
    rows: int = 0,
    facts: Facts | None = None,
    hardware: Sequence[bool | None] = (),
    stop: Stop = Stop.SETTLED,
    **known: Any,
) -> Verdict:
    """The verdict of a search that has come to this."""
    count = len(chosen.layout.shares)
    devices = tuple(
        Device(f"{kind}-{i}", i, "NVIDIA A", kind, None, bfloat16=has)
        for i, has in enumerate(hardware or (None,) * count)
    )
    request = request or Request(framework="torch")
    header = Header("run", "2026-01-01T00:00:00Z", request, devices, "train.py:build", "torch", "0")
    observed = [ObservationEntry(one, 1.0) for one in seen]
    known.setdefault("problem", Problem(count, (None,) * count, request.global_batch))
    known.setdefault("results", (chosen, *(one.result for one in ranking)))
    known.setdefault("solos", (None,) * count)
    own = Candidate(find_family("split"), chosen.layout)
    first = standing(own, chosen.throughput.value)
    report = SearchReport(
        chosen=chosen, ranking=(first, *ranking), options=LayoutOptions(), **known
    )
    return judge(
        Record(header, (FactsEntry(facts or Facts(rows=rows)), *observed), 0),
        report,
        RunEnd(End(stop), 60.0),
    )


def said(*args: Any, **known: Any) -> Written:
    """The same in words."""
    return write_verdict(judged(*args, **known))


# ---------------------------------------------------------------------- the headline


def test_a_split_says_its_shares_its_figure_and_what_it_gains() -> None:
    """Over the even split and the best single device; nothing else where nothing is to be said."""
    ranking = [standing(EVEN, 1810, -0.147), standing(SOLO, 1345, -0.366)]
    words = said(result(SPLIT, 2123), ranking, request=FIXED)
    assert words.text == (
        "Use uneven shares by the plan: 150 + 106 on GPU:0 + GPU:1.\n"
        "150 + 106 on GPU:0 + GPU:1   2 123 samples/s ± 0.5 %   +17 % over even, +58 % over GPU:0 "
        "alone"
    )
    assert words.warnings == ()


def test_a_tie_has_the_comparison_s_own_figure_and_a_loss_is_not_hidden() -> None:
    """Not those of the two rates beside it, which may be further apart than their ± allows."""
    far = Interval(-0.014, -0.032, 0.004)
    tie = said(result(SPLIT, 2123), [Standing(EVEN, Interval(2000, 1999, 2001), far, True, 3)])
    assert tie.gains == "1.4 % faster than even ± 1.9 % (measured alternately: too close to call)"
    close = said(result(SPLIT, 2123), [standing(EVEN, 2110, -0.006, tie=True)])
    assert close.gains == (
        "0.6 % faster than even ± 0.1 % (measured alternately: under 1 %, which counts as equal)"
    )
    figures = said(result(SPLIT, 2123), single=result(SOLO, 2110))
    assert figures.gains == "0.6 % faster than GPU:0 alone ± 1.0 % (too close to call)"
    slow = said(result(SPLIT, 900), [standing(SOLO, 1000, 0.111)])
    assert slow.gains == "10 % slower than GPU:0 alone"


def test_one_device_that_is_as_fast_as_several_is_said_to_do() -> None:
    """It is what is recommended, whether it is the plan or not; a gain over even shares isn't the
    headline then.
    """
    ranking = [standing(EVEN, 300, -0.7), standing(SOLO, 995, -0.005, tie=True)]
    several = said(result(SPLIT, 1000), ranking)
    assert several.advice == "Use one device, without a plan: 256 on GPU:0 alone."
    assert "over even" not in several.gains
    assert several.remarks[0].startswith("One device is the simpler way: GPU:0 alone reached 995.0")
    unclear = Standing(SOLO, Interval(950, 900, 1000), Interval(-0.05, -0.1, 0.01), True, 2)
    assert said(result(SPLIT, 1000), [unclear]).advice.startswith("Use uneven shares")
    one = said(result(SOLO, 1000), [standing(SPLIT, 1001, 0.001, tie=True)])
    assert any("simpler of the two" in line for line in one.remarks)
    assert not said(result(SPLIT, 1000), [standing(SOLO, 500, -0.5)], request=FIXED).remarks


def test_passes_are_a_part_of_the_share() -> None:
    """In a split and alone."""
    split = candidate("split", layout_of((820, 568), (300, 568)))
    assert said(result(split, 2123)).answer == "(820 = 2 × 273 + 274) + 568 on GPU:0 + GPU:1"
    alone = candidate("solo", layout_of((820, 0), (410, 0)))
    assert said(result(alone, 1000)).answer == "820 = 2 × 410 on GPU:0 alone"


@pytest.mark.parametrize("count", [8, 16, 64])
def test_an_answer_for_many_devices_leaves_room_for_what_is_gained(count: int) -> None:
    """Each device's share is in the table beside it."""
    many = candidate("split", Layout("split", tuple(range(10, 10 + count))))
    answer = said(result(many, 5000)).answer
    assert len(answer) < 120
    assert (f"{count} devices" in answer) == (count > 8)


def test_a_figure_that_is_too_uncertain_is_shown_with_its_error_and_compared_with_nothing() -> None:
    ranking = [standing(SOLO, 2500, 0.2), standing(EVEN, 900, -0.5)]
    words = said(result(SPLIT, 2123, 0.3), ranking, request=FIXED)
    assert words.figure == "2 123 samples/s ± 30.0 %, too uncertain to compare"
    assert words.gains == ""
    assert words.advice.startswith("Measure again before you decide: the samples/s are only known")
    assert words.remarks == (
        "GPU:0 alone reached 2 500 samples/s ± < 0.05 %, which is better known.",
    )
    rough = said(result(SOLO, 2123), [standing(EVEN, 2000, -0.06, error=0.4)])
    assert "too uncertain to compare (± 40.0 %)" in rough.gains


def test_simulated_results_begin_with_a_mark() -> None:
    """So that no width drops it."""
    assert said(result(SPLIT, 2123), kind="sim").headline.startswith("simulated: 150 + 106")
    assert "simulated" not in said(result(SPLIT, 2123)).headline


def test_one_device_alone_has_no_rivals() -> None:
    words = said(result(candidate("solo", solo(1, 0, 64)), 90.5, 0.0), request=FIXED)
    assert words.headline == "64 on GPU:0   90.50 samples/s"
    assert words.remarks == ()


def test_a_pack_says_that_each_training_takes_longer() -> None:
    """Five with 2.5 times the samples/s: each step takes twice as long."""
    ranking = [standing(SOLO, 800, -0.6), standing(SPLIT, 1000, -0.5), standing(PLACE, 500, -0.75)]
    words = said(result(PACK, 2000), ranking)
    assert words.answer == "5 trainings of 256 side by side on GPU:0"
    assert "+100 % over the best split (150 + 106)" in words.gains
    assert words.gains.endswith("+150 % over GPU:0 alone, each training takes 2.0 times as long")
    assert "Place towers loses 75 %." in words.remarks


def test_a_placement_names_itself() -> None:
    words = said(result(PLACE, 2000), [standing(PACK, 1000, -0.5)])
    assert words.answer == "256 on GPU:0 + GPU:1, the model's parts placed as towers"
    assert "Pack of 5 loses 50 %." in words.remarks


def test_packs_that_tie_and_those_that_may_are_named() -> None:
    """They are no loss, and no gain that anybody could show."""
    unclear = Standing(PLACE, Interval(950, 900, 1000), Interval(-0.05, -0.1, 0.01), True, 2)
    words = said(result(SOLO, 1000), [standing(PACK, 997, -0.003, tie=True), unclear])
    assert "pack of 5 ties with it." in words.remarks
    assert "place towers can't be told apart from it yet." in words.remarks


def test_a_knob_is_named_whichever_way_it_went() -> None:
    xla, mixed = (
        candidate("solo", msgspec.structs.replace(SOLO.layout, knobs=(knob,)))
        for knob in ("xla", "mixed")
    )
    words = said(result(xla, 1200), [standing(SOLO, 1000, -1 / 6), standing(mixed, 1165, -0.029)])
    assert words.answer == "256 on GPU:0 alone, with XLA"
    assert "XLA gives 20 %." in words.remarks
    assert "Mixed precision loses 3 %." in words.remarks
    same = said(result(SOLO, 1000), [standing(xla, 999, -0.001, tie=True)])
    assert "XLA makes no difference." in same.remarks


# ---------------------------------------------------------------------- why


def test_one_device_says_why_several_are_slower() -> None:
    """With the cost of keeping in step, where it is known."""
    chosen, ranking = result(SOLO, 1345), [standing(SPLIT, 1223, -0.0907)]
    words = said(chosen, ranking, sync_seconds=0.034, request=FIXED)
    assert words.gains == "+10 % over the best split (150 + 106)"
    because = "The split is slower because synchronizing the devices costs 34 ms a step."
    assert words.remarks == (because,)
    tie = said(chosen, [standing(SPLIT, 1341, -0.003, tie=True)])
    assert tie.gains.startswith("0.3 % faster than the best split (150 + 106) ± 0.1 %")
    (missing,) = said(chosen, request=FIXED).remarks
    assert missing == "No split over several devices was measured near 256 samples."


def test_what_does_not_shrink_with_the_share_is_named_where_it_costs_more_than_sync() -> None:
    """150 of 256 samples that take nearly as long alone gain nothing, however cheap the rest is."""
    whole = 256 / 1345
    (because,) = said(
        result(SOLO, 1345),
        [standing(SPLIT, 1223, -0.0907)],
        sync_seconds=0.0004,
        apart_seconds={SPLIT.layout: 0.9 * whole},
        request=FIXED,
    ).remarks
    assert because == (
        f"The split is slower because its longest part alone still takes {900 * whole:.0f} ms, "
        f"against {1000 * whole:.0f} ms for all 256 samples."
    )


def test_a_cause_that_does_not_cover_the_loss_is_not_named() -> None:
    """A step of 2.8 ms became 7.2, and keeping in step takes 0.16 of them."""
    (because,) = said(
        result(SOLO, 256 / 0.0028),
        [standing(SPLIT, 256 / 0.0072, 2.8 / 7.2 - 1)],
        sync_seconds=0.00016,
        apart_seconds={SPLIT.layout: 0.0017},
        request=FIXED,
    ).remarks
    assert because == (
        "The split is slower: its step takes 7.2 ms, its longest part alone 1.7 ms; the rest is "
        "unexplained."
    )


def test_a_larger_batch_that_is_faster_is_named_with_the_tolerance() -> None:
    """A reader who sees its row in a table must not ask why it isn't the plan; also where the two
    tie.
    """
    words = said(result(SPLIT, 1000), [standing(LARGER, 1015, 0.015)])
    (why,) = [line for line in words.remarks if "--tolerance" in line]
    assert (
        "700 samples a step (400 + 300 on GPU:0 + GPU:1) reach 1 015 samples/s, 1.5 % more" in why
    )
    assert "within --tolerance 2 %" in why
    more = said(result(SPLIT, 1000), [standing(LARGER, 1040, 0.04)])
    assert any("when it was chosen, the plan was" in line for line in more.remarks)
    rate, gap = Interval(1015, 1010, 1020), Interval(0.013, -0.005, 0.031)
    tie = said(result(SPLIT, 1000), [Standing(LARGER, rate, gap, True, 3)])
    (why,) = [line for line in tie.remarks if "--tolerance" in line]
    assert "1.5 % more (measured alternately 1.3 % more ± 1.8 %: too close to call)" in why
    assert not said(result(SPLIT, 1000), [standing(LARGER, 990, -0.01)], request=FIXED).remarks


def test_every_figure_above_the_plan_s_is_explained() -> None:
    """Measured alternately the plan was faster; or too close; or measured at another time."""
    fixed = Request(framework="torch", global_batch=256)
    in_turn = said(result(SPLIT, 1000), [standing(EVEN, 1100, -0.1)], request=fixed)
    assert any("measured alternately, the plan is 11.1 % faster" in x for x in in_turn.remarks)
    tie = said(result(EVEN, 1000), [standing(SPLIT, 1003, 0.003, tie=True)], request=fixed)
    assert any("0.3 % more" in one and "the plan is simpler" in one for one in tie.remarks)
    later = said(result(SPLIT, 1000), [standing(EVEN, 1003, 0.003, tie=True)], request=fixed)
    assert any("figures of different times differ" in one for one in later.remarks)
    stray = result(candidate("split", Layout("split", (200, 56))), 1200)
    other = said(result(SPLIT, 1000), request=fixed, results=(stray, result(SPLIT, 1000)))
    assert any("figures of different times differ" in one for one in other.remarks)
    other_batch = result(candidate("solo", solo(2, 0, 64)), 6011)
    given = judged(result(SPLIT, 1000), request=fixed, results=(other_batch,))
    assert not any(one.why_not for one in given.rivals), "the batch was given"


def test_equal_devices_have_a_verdict_of_their_own() -> None:
    """The user needs nothing of evener's to train so."""
    words = said(result(EVEN, 1810), [standing(SOLO, 1345, -0.257)])
    equal = (
        "Equal shares are right: plain DDP trains this as fast; evener adds nothing here but the "
        "batch, 256 samples a step."
    )
    assert words.remarks[0] == equal
    assert (
        words.advice == "Use plain DDP, without a plan: 128 + 128 on GPU:0 + GPU:1, split evenly."
    )
    assert words.remarks[1] == "You gave no --global-batch: evener chose 256 samples a step."
    given = Request(framework="torch", global_batch=256)
    (other,) = said(result(EVEN, 1810), [standing(SOLO, 1345, -0.257)], request=given).remarks
    assert "plain DDP trains this as fast" in other
    assert "samples a step" not in other
    passes = candidate("even", layout_of((128, 128), (64, 64)))
    some = candidate("even", cast(Layout, split_evenly(3, (0, 1), 256)))
    for one in (SPLIT, passes, some):
        assert not judged(result(one, 1810)).equal_shares


def test_a_limit_of_the_user_s_code_is_explained() -> None:
    """Its message, and about where it is."""
    ran = Timed(
        Probe(solo(2, 0, 197), "solo", 1.0), 1.0, 1.0, 1.0, 5, (None, None), (None, None), 1.0, 5.0
    )
    detail = "GPU:0, warming up: limit.py:9: ValueError: this table holds 200 rows"
    raised = Failed(Probe(solo(2, 0, 212), "solo", 1.0), "raised", detail, (0,), 1.0)
    (line,) = [
        one for one in said(result(SPLIT, 1000), seen=[ran, raised]).remarks if "code" in one
    ]
    assert "197 ran, 212 failed" in line
    assert line.endswith("ValueError: this table holds 200 rows.")


@pytest.mark.parametrize(
    ("precision", "known", "hardware", "slow"),
    [
        ("mixed_bfloat16", False, (True, False), ("GPU:1",)),
        ("float32", True, (True, False), ("GPU:1",)),
        ("float32", False, (True, False), ()),
        ("mixed_float16", False, (True, False), ()),
        ("mixed_bfloat16", False, (False, False), ()),
        ("mixed_bfloat16", False, (True, None), ()),
    ],
)
def test_bfloat16_on_a_card_without_hardware_for_it_is_noted_beside_one_with_it(
    precision: str, known: bool, hardware: tuple[bool | None, ...], slow: tuple[str, ...]
) -> None:
    """Asked for, or because the model computes in it; not where all cards are alike, or unknown."""
    found = judged(
        result(SPLIT, 1000),
        request=Request(framework="torch", precision=precision),
        facts=Facts(bfloat16=known),
        hardware=hardware,
    )
    assert found.slow_bfloat16 == slow
    warnings = write_verdict(found).warnings
    assert bool(slow) == any("GPU:1 has no hardware for bfloat16" in line for line in warnings)


def test_a_short_epoch_is_said_where_the_batch_was_evener_s_choice() -> None:
    free = said(result(SPLIT, 1000), rows=20_000)
    assert any("--max-global-batch 200" in line for line in free.remarks)
    given = Request(framework="torch", global_batch=256)
    assert not said(result(SPLIT, 1000), rows=20_000, request=given).remarks


# ---------------------------------------------------------------------- what to do


def disturbed_turn(part: float, taken: float = 0.0) -> Timed:
    """A turn of SPLIT of whose blocks other work disturbed a part."""
    one = turn(SPLIT.layout, 0.256, (0.2, 0.2))
    return msgspec.structs.replace(one, warnings=(Warned("disturbed", part, taken=taken),))


def test_where_other_work_disturbed_everything_the_answer_is_to_measure_again() -> None:
    """Gains get their ±, nothing is recommended beside it, and the search isn't said to be done."""
    seen = [disturbed_turn(1.0, 0.4)]
    found = judged(result(SPLIT, 1000), [standing(EVEN, 800, -0.2)], seen=seen, request=FIXED)
    words = write_verdict(found)
    assert words.advice.startswith("Measure again before you decide: other work took CPU time")
    assert words.gains == "+25 % ± 0.2 % over even"
    assert any("100 % of the blocks of steps (40 % of the cores' time" in x for x in words.doubts)
    assert write_end(found, Stop.SETTLED.value) == ""
    calm = judged(result(SPLIT, 1000), [standing(EVEN, 800, -0.2)], seen=[disturbed_turn(0.2)])
    assert calm.advice is not None
    assert calm.advice.action == "plan"
    assert write_end(calm, Stop.SETTLED.value) == Stop.SETTLED.value


@pytest.mark.parametrize(
    ("error", "words"),
    [(0.3, "at least 25 % over"), (0.7, "isn't certain"), (0.002, "+100 % over even")],
)
def test_a_gain_that_is_less_certain_than_large_is_given_by_its_least(
    error: float, words: str
) -> None:
    """Samples/s of the even split within this part; the plan's are known well."""
    even = Rival(
        "equal_shares",
        "even split",
        ("GPU:0", "GPU:1"),
        (128, 128),
        256,
        figure=Figure(500.0, 500 * (1 - error), 500 * (1 + error)),
        gain=1.0,
        difference=RateGap(1.0, 0.25 if error == 0.3 else -0.2, 1.0 + 4 * error),
    )
    found = judged(result(SPLIT, 1000))
    written = write_verdict(msgspec.structs.replace(found, rivals=(even,)))
    assert words in written.gains


def test_no_step_leads_to_a_plan_that_is_advised_against() -> None:
    """Nor to one for simulated devices; a file that was asked for is named all the same."""
    even, tied = standing(EVEN, 800, -0.2), standing(SOLO, 998, -0.002, tie=True)
    rather_one = judged(result(SPLIT, 1000), [tied])
    disturbed = judged(result(SPLIT, 1000), [even], seen=[disturbed_turn(1.0)])
    uneven = judged(result(SPLIT, 1000), [even])
    for found, pushed in (
        (uneven, True),
        (rather_one, False),
        (judged(result(EVEN, 1000)), False),
        (disturbed, False),
        (msgspec.structs.replace(uneven, simulated=True), False),
    ):
        ended = draw_outcome(random.Random(0))[0]
        finished = msgspec.structs.replace(ended, found=found, interrupted=False)
        steps = write_next_steps("run", finished, "", measured=True)
        assert any("evener export" in step for step in steps) == pushed
        (written, *_) = write_next_steps("run", finished, "a.toml", measured=True)
        assert written == "plan written to a.toml"


def test_the_advice_of_one_device_has_its_command() -> None:
    """The script as it is, on that GPU alone, also where the plan is a split; other advice has no
    such command.
    """
    tied = standing(SOLO, 998, -0.002, tie=True)
    uneven = judged(result(SPLIT, 1000), [standing(EVEN, 800, -0.2)])
    ended = draw_outcome(random.Random(0))[0]
    shares = tuple(
        Share(f"GPU-{index}ab", index, "NVIDIA T4", 64, 0.5, micro=64) for index in (0, 1)
    )
    layout = msgspec.structs.replace(ended.plan.layout, share=shares)
    plan = msgspec.structs.replace(ended.plan, workload="my train.py:build", layout=layout)

    def steps(found: Verdict, plan: Plan = plan) -> tuple[str, ...]:
        finished = msgspec.structs.replace(ended, found=found, plan=plan, interrupted=False)
        return write_next_steps("run", finished, "", measured=True)

    for_one = judged(result(SPLIT, 1000), [tied])
    assert for_one.advice is not None
    assert for_one.advice.action == "one_device"
    number = for_one.advice.devices[0].partition(":")[2]
    command = f"CUDA_VISIBLE_DEVICES=GPU-{number}ab python 'my train.py'"
    assert steps(for_one) == (f"to train on it: {command}",)
    assert not any("python" in step for step in steps(uneven))
    built_in = msgspec.structs.replace(plan, workload="keras_maxer")
    assert not any("python" in step for step in steps(for_one, built_in))


def test_a_loss_that_is_not_finite_is_mended_before_anything_else() -> None:
    one = msgspec.structs.replace(disturbed_turn(1.0), warnings=(Warned("not_finite", 3.0),))
    assert said(result(SPLIT, 1000), seen=[one]).advice.startswith("Fix your code or data first")


def test_one_device_of_a_larger_batch_is_no_simpler_way() -> None:
    """Nor one at another batch than the user gave."""
    larger = candidate("solo", solo(2, 0, 1024))
    smaller = candidate("solo", solo(2, 0, 128))
    chosen = result(SPLIT, 1000)
    for one, request, action in (
        (larger, None, "plan"),
        (smaller, None, "one_device"),
        (smaller, FIXED, "plan"),
    ):
        found = judged(chosen, [standing(one, 998, -0.002, tie=True)], request=request)
        assert found.advice is not None
        assert found.advice.action == action


def test_a_device_that_is_left_out_says_why() -> None:
    """By the fastest split that has it, or that there is none."""
    three = candidate("split", Layout("split", (150, 106, 0)))
    wider = result(candidate("split", Layout("split", (140, 96, 20))), 990)
    solos = tuple(result(candidate("solo", solo(3, i, 256)), 500 - 100 * i) for i in range(3))
    chosen = result(three, 1000)
    tried = said(chosen, results=(chosen, wider), solos=solos)
    (line,) = [one for one in tried.remarks if "left out" in one]
    assert line == (
        "GPU:2 is left out: the fastest split with it (140 + 96 + 20) reached 990.0 samples/s, "
        "1.0 % less than the plan."
    )
    larger = result(candidate("split", Layout("split", (140, 96, 40))), 990)
    other = said(chosen, results=(chosen, larger), solos=solos)
    assert any("(140 + 96 + 40 = 276 samples)" in line for line in other.remarks)
    rough = result(candidate("split", Layout("split", (140, 96, 20))), 990, 0.5)
    assert not any("left out" in x for x in said(chosen, results=(rough,), solos=solos).remarks)
    untried = said(chosen, results=(chosen,), solos=solos)
    assert any("no split with it was measured near 256 samples" in x for x in untried.remarks)


def test_what_is_missing_of_the_sum_is_explained_or_said_to_be_unknown() -> None:
    """Of 256 samples at 2 000/s, two devices that make 1 000 together lose 128 ms a step."""
    solos = tuple(result(candidate("solo", solo(2, i, 256)), 1000) for i in range(2))
    chosen = result(SPLIT, 1000)

    def why(**known: Any) -> list[str]:
        words = said(chosen, solos=solos, results=(chosen, *solos), **known)
        return [line for line in words.remarks if "of the sum" in line]

    assert why(sync_seconds=0.12)[0].endswith("synchronizing the devices costs 120 ms a step.")
    assert "its longest share alone takes 250 ms" in why(apart_seconds={SPLIT.layout: 0.25})[0]
    (rest,) = why(sync_seconds=0.01)
    assert rest.endswith("Synchronizing explains 10 ms of that; what takes the rest isn't known.")
    assert why()[0].endswith("Why isn't known.")
    fast = result(SPLIT, 1900)
    assert not any("of the sum" in x for x in said(fast, solos=solos, results=(fast,)).remarks)


def test_devices_of_one_product_that_differ_much_are_suspected() -> None:
    """Of the same name and at the same batch."""

    def alone(position: int, batch: int, seconds: float) -> Timed:
        return turn(solo(2, position, batch), seconds, (seconds, seconds))

    def suspicions(*seen: Timed) -> list[str]:
        words = said(result(SPLIT, 1000), seen=seen)
        return [line for line in words.doubts if "same kind of device" in line]

    (line,) = suspicions(alone(0, 64, 0.1), alone(1, 64, 0.19))
    assert "GPU:0 was 1.9 times as fast alone" in line
    assert not suspicions(alone(0, 64, 0.1), alone(1, 64, 0.11))
    assert not suspicions(alone(0, 64, 0.1), alone(1, 32, 0.19))


def test_a_tie_that_ends_the_search_names_its_layouts() -> None:
    found = judged(result(SPLIT, 1000), [standing(EVEN, 998, -0.002, tie=True)], stop=Stop.TIED)
    words = write_end(found, Stop.TIED.value)
    assert words.startswith("even split (128 + 128 on GPU:0 + GPU:1) ties with the plan")
    alone = judged(result(SPLIT, 1000), [standing(EVEN, 500, -0.5)], stop=Stop.TIED)
    assert "tie" not in write_end(alone, Stop.TIED.value)


# ---------------------------------------------------------------------- rivals


def test_another_batch_is_not_compared_where_it_is_far_off() -> None:
    """A split of 256 samples says nothing of a plan of 4096."""
    alone = result(candidate("solo", solo(2, 0, 4096)), 1000)
    far = said(alone, results=(alone, result(SPLIT, 30)))
    assert far.gains == ""
    assert any("near 4096 samples" in line for line in far.remarks)
    near = result(candidate("split", Layout("split", (2000, 1000))), 800)
    assert said(alone, results=(alone, near)).gains == (
        "+25 % over the best split (2000 + 1000 = 3000 samples)"
    )


def test_a_device_that_is_faster_in_the_split_than_alone_is_no_rival() -> None:
    """It made 400 samples/s alone and makes 890 of the split's, so alone it wasn't at its best
    batch.
    """
    assert said(result(SPLIT, 2123), [standing(SOLO, 400, -0.81)]).gains == ""
    good = said(result(SPLIT, 2123), [standing(SOLO, 1257, -0.408)])
    assert good.gains == "+69 % over GPU:0 alone"


def test_the_best_single_device_is_compared_whether_raced_or_not() -> None:
    words = said(result(SPLIT, 2123), single=result(SOLO, 1257))
    assert words.gains == "+69 % over GPU:0 alone"
    other = said(result(SOLO, 1257), single=result(SOLO, 1257), solos=(None, result(OTHER, 900)))
    assert "+40 % over GPU:1 alone" in other.gains, "a plan of one device has the other one"


def alone_now_and_before(plan: float) -> Written:
    """GPU:1 was raced alone; GPU:0 had 2 271 samples/s at the same batch before."""
    return said(
        result(SPLIT, plan),
        [standing(OTHER, 1801, 1801 / plan - 1)],
        solos=(result(SOLO, 2271), result(OTHER, 1801)),
        results=(result(SPLIT, plan), result(SOLO, 2271), result(OTHER, 1801)),
    )


def test_the_plan_is_compared_with_the_fastest_device_of_its_table() -> None:
    """Though another one was raced."""
    assert alone_now_and_before(2664).gains == "+17 % over GPU:0 alone"


def test_one_device_that_had_more_than_the_plan_before_is_said_to_have_had() -> None:
    """The machine was faster then: the gain is over what was raced beside the plan."""
    words = alone_now_and_before(2100)
    assert words.gains == "+17 % over GPU:1 alone"
    assert any("the plan: 1 801 samples/s now, 2 271 earlier." in line for line in words.remarks)


def test_a_tie_is_said_only_of_layouts_whose_speed_is_known() -> None:
    """A search that can't tell rough figures apart says that, and not that they tie."""
    ends = set()
    for seed in range(60):
        found = draw_outcome(random.Random(seed))[0].found
        assert found is not None
        ends.add(found.stopped)
        figures = [found.figure, *(one.figure for one in found.rivals)]
        figures.sort(key=lambda one: -one.samples_per_second)
        assert found.stopped != "tied" or any(one.known for one in figures[:2]), seed
    assert {"tied", "uncertain"} <= ends


def test_rivals_are_compared_turn_by_turn_with_the_winner() -> None:
    """The figures alone would say 25 %; the turns that both took say 20, and the verdict says which
    it is.
    """
    ranking = [standing(SOLO, 1000.0), standing(EVEN, 800.0, -1 / 6)]
    (found,) = compare_all(result(SOLO, 1000), ranking)
    assert found.candidate == EVEN
    assert found.gain == pytest.approx(0.2)
    assert (
        "+20 % over the even split (128 + 128) (measured alternately)"
        in said(result(SOLO, 1000), ranking[1:]).gains
    )
    (found,) = compare_all(result(SOLO, 1000), [ranking[0], standing(EVEN, 833.0, -1 / 6)])
    assert found.gain == 1000 / 833 - 1
    assert not found.paired


def test_rivals_of_a_layout_that_did_not_win_the_race_are_compared_by_throughput() -> None:
    """Intervals that overlap are a tie."""
    ranking = [standing(SOLO, 1000.0), standing(EVEN, 800.0, -0.2), standing(PACK, 905.0, -0.095)]
    found = {one.candidate: one for one in compare_all(result(SPLIT, 900, 0.01), ranking)}
    assert found[EVEN].gain == pytest.approx(0.125)
    assert found[SOLO].gain == pytest.approx(-0.1)
    assert [one.tie for one in found.values()] == [False, False, True]
    assert not any(one.unclear for one in found.values())


def test_one_device_is_compared_with_the_fastest_split_that_was_measured_whether_raced_or_not() -> (
    None
):
    """The race had only the even split of a small batch."""
    ranking = [standing(SOLO, 1000.0), standing(EVEN, 360.0, -0.64)]
    results = [result(SOLO, 1000), result(SPLIT, 730), result(EVEN, 360)]
    found = compare_all(result(SOLO, 1000), ranking, results)
    assert [one.candidate for one in found] == [SPLIT, EVEN]
    raced = compare_all(result(SOLO, 1000), [*ranking, standing(SPLIT, 730.0, -0.27)], results)
    assert raced[0].candidate == EVEN
    assert compare_all(result(SPLIT, 1000), [standing(SPLIT, 1000.0)], results) == ()


def test_only_a_faster_layout_of_one_training_with_more_samples_is_a_larger_batch() -> None:
    def rival(one: Candidate, gain: float) -> ComparedLayout:
        rate = 1000 / (1 + gain)
        return ComparedLayout(one, Interval(rate, rate, rate), gain)

    most = candidate("split", Layout("split", (800, 600)))
    found = [rival(LARGER, -0.01), rival(most, -0.02), rival(PACK, -0.3), rival(SOLO, 0.5)]
    assert find_larger(result(SPLIT, 1000), found) == found[1]
    assert find_larger(result(most, 1000), found) is None
    assert find_larger(result(PACK, 1000), found) is None
    assert find_larger(result(SPLIT, 1000), [rival(LARGER, 0.0)]) is None


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (SOLO, "best single device"),
        (EVEN, "even split"),
        (SPLIT, "best split"),
        (PLACE, "place towers"),
        (PACK, "pack of 5"),
        (candidate("pack", pack_on(SOLO.layout, 2, "mps")), "pack of 2 under MPS"),
    ],
)
def test_names_for_tables_and_evidence(one: Candidate, expected: str) -> None:
    assert name_layout(one, 2) == expected


def test_an_even_split_over_some_of_the_devices_says_how_many() -> None:
    some = split_evenly(4, (0, 2), 64)
    assert some is not None
    assert name_layout(candidate("even", some), 4) == "even over 2"
    three = candidate("split", Layout("split", (100, 80, 60)))
    two = candidate("even", cast(Layout, split_evenly(3, (0, 1), 240)))
    assert "over even" not in said(result(three, 1000), [standing(two, 800, -0.2)]).gains


def test_no_two_layouts_have_one_name() -> None:
    """The slower of two of a kind is another one; the third says its samples."""
    found = [SPLIT, *(candidate("split", Layout("split", (n, 10))) for n in (20, 30)), SOLO]
    assert name_all(found, 2) == (
        "best split",
        "another split",
        "another split, 30 + 10",
        "best single device",
    )


# ---------------------------------------------------------------------- as a value


def test_a_verdict_survives_json() -> None:
    one = judged(result(SPLIT, 2123), [standing(EVEN, 1810, -0.147)], rows=20_000)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Verdict) == one
    assert one.limits == ()


def test_every_sentence_is_a_function_of_the_verdict() -> None:
    """Whoever adds one names it in one of two lists, and each writes for any verdict."""
    one = judged(result(SPLIT, 2123))
    assert len(set(REMARKS + WARNINGS)) == len(REMARKS) + len(WARNINGS)
    for write in REMARKS + WARNINGS:
        assert all(isinstance(line, str) for line in write(one))


def turn(layout: Layout, step: float, own: tuple[float | None, ...]) -> Timed:
    """One measured turn with each device's own part of the step."""
    return Timed(Probe(layout, "race", 1.0), step, step, step, 9, (None, None), own, step, 1.0)


def test_waiting_is_what_the_busiest_device_does_not_compute() -> None:
    assert waiting_share([turn(EVEN.layout, 1.0, (0.7, 0.6))]) == pytest.approx(0.3)
    assert waiting_share(
        [turn(EVEN.layout, 1.0, (0.7, 0.6)), turn(EVEN.layout, 2.0, (1.8, 0.6))]
    ) == pytest.approx(0.2)
    assert waiting_share([turn(EVEN.layout, 1.0, (0.7, None))]) is None
    assert waiting_share([turn(layout_of((1, 1)), 0.0, (0.0, 0.0))]) is None
    assert waiting_share([]) is None


def test_every_field_is_in_the_docs() -> None:
    """And every word that a field may have."""
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    written = set(re.findall(r"`(\w+)`", page))
    structs = [one for one in vars(verdict).values() if _is_struct(one)]
    assert len(structs) > 12
    fields = {name for one in structs for name in one.__struct_fields__}
    assert fields - written == set()
    words = [verdict.StopCode, verdict.LayoutKind, verdict.WhyNot, Doubt]
    assert {word for one in words for word in get_args(one)} - written == set()
    assert {stop.name.lower() for stop in Stop} == set(get_args(verdict.StopCode))


def _is_struct(one: Any) -> bool:
    mine = isinstance(one, type) and one.__module__ == verdict.__name__
    return mine and issubclass(one, msgspec.Struct)
