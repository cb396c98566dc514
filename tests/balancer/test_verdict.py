"""The verdict: what to do and why, its gains, ties called ties, and no contradictions in its
numbers.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from evener.balancer import verdict
from evener.balancer.families import pack_on, split_evenly
from evener.balancer.request import Request
from evener.balancer.result.judge import waiting_share
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
    VerdictText,
    write_end,
    write_next_steps,
    write_verdict,
)
from evener.balancer.search.layouts import Candidate
from evener.balancer.search.ranking import RankedLayout
from evener.balancer.types import (
    Doubt,
    Facts,
    Interval,
    Layout,
    MeasurementDoubt,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Result,
    Stage,
    Stop,
    layout_of,
    solo,
)
from evener.balancer.verdict import MeasuredRate, RateGap, Rival, Unfinished, Verdict
from evener.plan.file import Plan
from evener.plan.layout import Kind, Share
from tests.support.search_outcomes import draw_outcome
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
    write_text,
)


def advised(found: Verdict) -> str:
    """Return the recommended action."""
    assert found.recommendation is not None
    return found.recommendation.action


# ---------------------------------------------------------------------- the headline


def test_one_device_that_is_as_fast_as_several_is_recommended() -> None:
    """It is recommended, whether it is the plan or not. A gain over equal shares isn't the headline
    then.
    """
    ranking = [standing(EVEN, 300, -0.7), standing(SOLO, 995, -0.005, tie=True)]
    assert advised(judged(result(SPLIT, 1000), ranking)) == "one_device"
    assert "over equal shares" not in write_text(result(SPLIT, 1000), ranking).gains
    unclear = RankedLayout(SOLO, Interval(950, 900, 1000), Interval(-0.05, -0.1, 0.01), True, 2)
    assert advised(judged(result(SPLIT, 1000), [unclear])) == "plan"
    tied = judged(result(SOLO, 1000), [standing(SPLIT, 1001, 0.001, tie=True)])
    assert advised(tied) == "one_device"
    assert not write_text(result(SPLIT, 1000), [standing(SOLO, 500, -0.5)], request=FIXED).remarks


@pytest.mark.parametrize("count", [8, 16, 64])
def test_an_answer_for_many_devices_leaves_room_for_what_is_gained(count: int) -> None:
    """Each device's share is in the table beside it."""
    many = candidate("split", Layout("split", tuple(range(10, 10 + count))))
    answer = write_text(result(many, 5000)).description
    assert len(answer) < 120
    assert (f"{count} devices" in answer) == (count > 8)


# ---------------------------------------------------------------------- why


def test_a_start_that_the_end_of_the_budget_cut_off_is_named_only_if_it_took_unusually_long() -> (
    None
):
    """The longest start before it took 6 s. Without a plan, the error names every start."""
    began = msgspec.structs.replace(
        turn(SPLIT.layout, 0.256, (0.2, 0.2)), start_seconds=6.0, elapsed_seconds=9.0
    )
    full = OutOfMemory(Probe(SPLIT.layout, Stage.SPLIT, 1.0), (1,), "", 8.0)

    def named(seconds: float, *seen: Observation) -> bool:
        late = Unfinished("building", "q.py's build()", seconds, ("GPU:0", "GPU:1"))
        found = judged(result(SPLIT, 1000), seen=seen, stop=Stop.LATE, unfinished=(late,))
        return found.unfinished == (late,)

    assert not named(2.0, began)
    assert named(40.0, began)
    assert not named(15.0, began, full), "its start isn't known to have taken less than 8 s"


def test_every_figure_above_the_plan_s_is_explained() -> None:
    """Except for another batch, if the batch was given."""
    faster = standing(EVEN, 1100, -0.1)
    simpler = standing(SPLIT, 1003, 0.003, tie=True)
    later = standing(EVEN, 1003, 0.003, tie=True)
    stray = result(candidate("split", Layout("split", (200, 56))), 1200)
    for found in (
        judged(result(SPLIT, 1000), [faster], request=FIXED),
        judged(result(EVEN, 1000), [simpler], request=FIXED),
        judged(result(SPLIT, 1000), [later], request=FIXED),
        judged(result(SPLIT, 1000), request=FIXED, results=(stray, result(SPLIT, 1000))),
    ):
        above = [one for one in found.rivals if one.rate.samples_per_second > 1000]
        assert above
        assert all(one.why_not for one in above)
    other_batch = result(candidate("solo", solo(2, 0, 64)), 6011)
    given = judged(result(SPLIT, 1000), request=FIXED, results=(other_batch,))
    assert not any(one.why_not for one in given.rivals)


def test_equal_devices_have_a_verdict_of_their_own() -> None:
    """The user doesn't need evener to train this way."""
    assert judged(result(EVEN, 1810), [standing(SOLO, 1345, -0.257)]).equal_shares
    passes = candidate("even", layout_of((128, 128), (64, 64)))
    some = candidate("even", cast(Layout, split_evenly(3, (0, 1), 256)))
    for one in (SPLIT, passes, some, PLACE, PACK):
        assert not judged(result(one, 1810)).equal_shares


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
    """It counts if it was requested or if the model computes in it.

    There is no note if all cards are equal, or if it is unknown.
    """
    found = judged(
        result(SPLIT, 1000),
        request=Request(framework="torch", precision=precision),
        facts=Facts(bfloat16=known),
        hardware=hardware,
    )
    assert found.slow_bfloat16 == slow
    assert bool(slow) == any("bfloat16" in line for line in write_verdict(found).warnings)


@pytest.mark.parametrize("starts", [(30.0, 25.0), (30.0, 0.0), (30.0, 12.0)])
def test_a_model_that_each_process_builds_again_is_reported(starts: tuple[float, ...]) -> None:
    """Only if at least two of the processes took as long as a build, and there is a reason."""
    seen = [
        msgspec.structs.replace(
            disturbed_turn(1.0, 0.4), elapsed_seconds=40.0, start_seconds=start, import_seconds=5.0
        )
        for start in starts
    ]
    facts = Facts(builds_again="it leaves a thread running", build_seconds=20.0)
    found = judged(result(SPLIT, 1000), seen=seen, facts=facts)
    several = min(starts) - 5 >= 20
    assert (found.repeated_build is not None) == several
    lines = write_verdict(found).warnings
    assert several == any("20 s" in line and "leaves a thread running" in line for line in lines)
    assert judged(result(SPLIT, 1000), seen=seen).repeated_build is None


def test_a_short_epoch_is_reported_if_the_batch_was_evener_s_choice() -> None:
    free = write_text(result(SPLIT, 1000), rows=20_000)
    assert any("--max-global-batch 200" in line for line in free.remarks)
    given = Request(framework="torch", global_batch=256)
    assert not write_text(result(SPLIT, 1000), rows=20_000, request=given).remarks


# ---------------------------------------------------------------------- what to do


def test_where_other_work_disturbed_everything_the_answer_is_to_measure_again() -> None:
    """Gains get their ±, nothing else is recommended, and the search isn't called finished."""
    seen = [disturbed_turn(1.0, 0.4)]
    found = judged(result(SPLIT, 1000), [standing(EVEN, 800, -0.2)], seen=seen, request=FIXED)
    assert advised(found) == "measure_again"
    assert "±" in write_verdict(found).gains
    assert write_end(found, Stop.SETTLED.value) == ""
    calm = judged(result(SPLIT, 1000), [standing(EVEN, 800, -0.2)], seen=[disturbed_turn(0.2)])
    assert advised(calm) == "plan"
    assert "expected to gain more than 2 %" in write_end(calm, Stop.SETTLED.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [(0.3, "at least 25 % over"), (0.7, "isn't certain"), (0.002, "+100 % over equal shares")],
)
def test_a_gain_that_is_less_certain_than_large_is_given_by_its_least(
    error: float, words: str
) -> None:
    """The even split's samples/s have this relative error; the plan's are precise."""
    even = Rival(
        "equal_shares",
        "equal shares",
        ("GPU:0", "GPU:1"),
        (128, 128),
        256,
        rate=MeasuredRate(500.0, 500 * (1 - error), 500 * (1 + error)),
        gain=1.0,
        difference=RateGap(1.0, 0.25 if error == 0.3 else -0.2, 1.0 + 4 * error),
    )
    found = judged(result(SPLIT, 1000))
    written = write_verdict(msgspec.structs.replace(found, rivals=(even,)))
    assert words in written.gains


def test_no_step_leads_to_a_plan_that_is_advised_against() -> None:
    """A plan for simulated devices has no next step either. A requested file is always named."""
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
        steps = write_next_steps("run", finished, "", has_measured=True)
        assert any("evener export" in step for step in steps) == pushed
        (written, *_) = write_next_steps("run", finished, "a.toml", has_measured=True)
        assert written == "plan written to a.toml"


def test_the_advice_of_one_device_has_its_command() -> None:
    """The unchanged script on that GPU alone, also if the plan is a split.

    Other recommendations have no such command.
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
        return write_next_steps("run", finished, "", has_measured=True)

    for_one = judged(result(SPLIT, 1000), [tied])
    assert for_one.recommendation is not None
    assert for_one.recommendation.action == "one_device"
    number = for_one.recommendation.devices[0].partition(":")[2]
    command = f"CUDA_VISIBLE_DEVICES=GPU-{number}ab python 'my train.py'"
    assert steps(for_one) == (f"to train on it: {command}",)
    assert not any("python" in step for step in steps(uneven))
    built_in = msgspec.structs.replace(plan, workload="keras_maxer")
    assert not any("python" in step for step in steps(for_one, built_in))


def test_a_loss_that_is_not_finite_is_mended_before_anything_else() -> None:
    one = msgspec.structs.replace(
        disturbed_turn(1.0), warnings=(MeasurementDoubt("not_finite", 3.0),)
    )
    assert write_text(result(SPLIT, 1000), seen=[one]).recommendation.startswith(
        "Fix your code or data first"
    )


def test_one_device_of_a_larger_batch_is_no_simpler_way() -> None:
    """A device with another batch than the user's isn't a simpler way either."""
    larger = candidate("solo", solo(2, 0, 1024))
    smaller = candidate("solo", solo(2, 0, 128))
    chosen = result(SPLIT, 1000)
    for one, request, action in (
        (larger, None, "plan"),
        (smaller, None, "one_device"),
        (smaller, FIXED, "plan"),
    ):
        found = judged(chosen, [standing(one, 998, -0.002, tie=True)], request=request)
        assert found.recommendation is not None
        assert found.recommendation.action == action


def test_devices_of_one_product_that_differ_much_are_suspected() -> None:
    """They are compared at the largest batch that both had, by the rates of the table."""

    def alone(position: int, batch: int, rate: float, error: float = 0.01) -> Result:
        return result(candidate("solo", solo(2, position, batch)), rate, error)

    def suspicions(*results: Result) -> list[str]:
        words = write_text(result(SPLIT, 1000), results=results)
        return [line for line in words.doubts if "same kind of device" in line]

    fast, slow = alone(0, 64, 640), alone(1, 64, 337)
    (line,) = suspicions(fast, slow)
    assert "GPU:0 was 1.9 times as fast alone at 64 samples a step" in line
    assert "GPU:0 was 1.9 times" in suspicions(fast, slow, alone(0, 8, 30), alone(1, 8, 90))[0]
    assert not suspicions(fast, alone(1, 64, 580))
    assert not suspicions(fast, alone(1, 32, 337))
    assert not suspicions(fast, alone(1, 64, 337, error=0.3))  # too uncertain to compare
    assert not suspicions(alone(0, 64, 640, error=0.2), alone(1, 64, 460, error=0.2))


def test_devices_of_one_product_are_compared_by_the_final_comparison() -> None:
    """An earlier measurement of a device that raced doesn't count, nor one of the plan itself."""
    earlier = result(SOLO, 1000), result(OTHER, 500)
    words = write_text(result(SPLIT, 2000), [standing(OTHER, 990, -0.5)], results=earlier)
    assert not [line for line in words.doubts if "same kind of device" in line]
    words = write_text(result(OTHER, 990), results=earlier)
    assert not [line for line in words.doubts if "same kind of device" in line]


def test_a_tie_that_ends_the_search_names_its_layouts() -> None:
    found = judged(result(SPLIT, 1000), [standing(EVEN, 998, -0.002, tie=True)], stop=Stop.TIED)
    words = write_end(found, Stop.TIED.value)
    assert words.startswith("Equal shares (128 + 128 on GPU:0 + GPU:1) tie with the plan")
    alone = judged(result(SPLIT, 1000), [standing(EVEN, 500, -0.5)], stop=Stop.TIED)
    assert "tie" not in write_end(alone, Stop.TIED.value)


def test_a_split_with_a_device_that_is_left_out_has_its_devices() -> None:
    """Their rows alone don't say which of the devices computes how many."""
    chosen = result(candidate("solo", solo(3, 0, 256)), 1000)
    wider = result(candidate("split", Layout("split", (1, 0, 255))), 900)
    alone = tuple(result(candidate("solo", solo(3, i, 256)), 1000 - i) for i in range(3))
    found = judged(chosen, results=(chosen, wider), solos=alone)
    (third,) = [one for one in found.left_out if one.reason == "not_faster"]
    assert (third.name, third.devices) == ("GPU:2", ("GPU:0", "GPU:2"))
    assert any("1 + 255 on GPU:0 + GPU:2" in line for line in write_verdict(found).remarks)
    older = msgspec.structs.replace(third, devices=())
    of_older = msgspec.structs.replace(found, left_out=(older,))
    assert any("(1 + 255)" in line for line in write_verdict(of_older).remarks)


# ---------------------------------------------------------------------- rivals


def test_another_batch_is_not_compared_where_it_is_far_off() -> None:
    """A split of 256 samples says nothing about a plan of 4096."""
    alone = result(candidate("solo", solo(2, 0, 4096)), 1000)
    far = write_text(alone, results=(alone, result(SPLIT, 30)))
    assert far.gains == ""
    assert any("near 4096 samples" in line for line in far.remarks)
    near = result(candidate("split", Layout("split", (2000, 1000))), 800)
    assert write_text(alone, results=(alone, near)).gains == (
        "+25 % over the best split (2000 + 1000 = 3000 samples)"
    )


def test_a_device_that_is_faster_in_the_split_than_alone_is_no_rival() -> None:
    """It made 400 samples/s alone and makes 890 in the split, so it wasn't at its best
    batch alone.
    """
    assert write_text(result(SPLIT, 2123), [standing(SOLO, 400, -0.81)]).gains == ""
    good = write_text(result(SPLIT, 2123), [standing(SOLO, 1257, -0.408)])
    assert good.gains == "+69 % over GPU:0 alone"


def test_the_best_single_device_is_compared_whether_raced_or_not() -> None:
    words = write_text(result(SPLIT, 2123), single=result(SOLO, 1257))
    assert words.gains == "+69 % over GPU:0 alone"
    other = write_text(
        result(SOLO, 1257), single=result(SOLO, 1257), solos=(None, result(OTHER, 900))
    )
    assert "+40 % over GPU:1 alone" in other.gains, "a plan of one device has the other one"


def alone_now_and_before(plan: float) -> VerdictText:
    """Return a verdict in which GPU:1 was raced alone.

    GPU:0 had 2 271 samples/s at the same batch before.
    """
    return write_text(
        result(SPLIT, plan),
        [standing(OTHER, 1801, 1801 / plan - 1)],
        solos=(result(SOLO, 2271), result(OTHER, 1801)),
        results=(result(SPLIT, plan), result(SOLO, 2271), result(OTHER, 1801)),
    )


def test_the_plan_is_compared_with_the_fastest_device_of_its_table() -> None:
    """Though another one was raced."""
    assert alone_now_and_before(2664).gains == "+17 % over GPU:0 alone"


def test_the_fastest_of_one_device_s_batches_in_the_final_comparison_is_compared() -> None:
    fewer = standing(candidate("solo", solo(2, 0, 128)), 1000, -1 / 3)
    added = standing(msgspec.structs.replace(SOLO, extra=True), 1200, -0.2)
    words = write_text(result(SPLIT, 1500), [fewer, added], solos=(result(SOLO, 1200), None))
    assert words.gains == "+25 % over GPU:0 alone"


def test_a_device_that_was_faster_than_the_plan_before_is_reported() -> None:
    """The machine was faster then, so the gain is over what was raced beside the plan."""
    words = alone_now_and_before(2100)
    assert words.gains == "+17 % over GPU:1 alone"
    assert any(
        line.startswith("GPU:0 alone reached 2 271 samples/s, 8.1 % more, before the plan was")
        for line in words.remarks
    )
    assert not any("earlier" in line for line in words.remarks), "it is another device's"


def test_a_tie_is_claimed_only_for_layouts_whose_speed_is_known() -> None:
    """If the samples/s are too rough to compare, the text says that, and not that they tie."""
    ends = set()
    for seed in range(60):
        found = draw_outcome(random.Random(seed))[0].found
        assert found is not None
        ends.add(found.stopped)
        figures = [found.rate, *(one.rate for one in found.rivals)]
        figures.sort(key=lambda one: -one.samples_per_second)
        assert found.stopped != "tied" or any(one.known for one in figures[:2]), seed
    assert {"tied", "uncertain"} <= ends


def test_rivals_are_compared_turn_by_turn_with_the_winner() -> None:
    """The rates alone would give 25 %, the common turns give 20 %, and the verdict says which it
    is.
    """
    ranking = [standing(SOLO, 1000.0), standing(EVEN, 800.0, -1 / 6)]
    (found,) = compare_all(result(SOLO, 1000), ranking)
    assert found.candidate == EVEN
    assert found.gain == pytest.approx(0.2)
    assert (
        "+20 % over equal shares (128 + 128) (measured alternately)"
        in write_text(result(SOLO, 1000), ranking[1:]).gains
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
        (EVEN, "equal shares"),
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
    assert name_layout(candidate("even", some), 4) == "equal shares over 2"
    three = candidate("split", Layout("split", (100, 80, 60)))
    two = candidate("even", cast(Layout, split_evenly(3, (0, 1), 240)))
    assert (
        "over equal shares" not in write_text(result(three, 1000), [standing(two, 800, -0.2)]).gains
    )


def test_no_two_layouts_have_one_name() -> None:
    """The slower of two of a kind is another one; the third is named with its samples."""
    found = [SPLIT, *(candidate("split", Layout("split", (n, 10))) for n in (20, 30)), SOLO]
    assert name_all(found, 2) == (
        "best split",
        "another split",
        "another split, 30 + 10",
        "best single device",
    )


# ---------------------------------------------------------------------- out of memory


def ran_out(kind: Kind, position: int, *shares: int) -> OutOfMemory:
    """Return a step over several devices in which one ran out of memory after 9 s."""
    return OutOfMemory(Probe(Layout(kind, shares), Stage.SHARD, 1.0), (position,), "", 9.1)


IN_SHARDS = (ran_out("shard", 1, 1, 10), ran_out("shard", 1, 1, 9), ran_out("shard", 0, 1, 8))


def written_of(*seen: Observation, devices: int = 2, **known: Any) -> str:
    """Return what a verdict for one device says of steps that ran out of memory."""
    alone = candidate("solo", solo(devices, 0, 256))
    return " ".join(
        line
        for line in write_text(result(alone, 3), seen=seen, **known).remarks
        if "memory ran out" in line or line.startswith("Give ")
    )


def test_shards_that_always_ran_out_of_memory_are_named_with_what_to_do() -> None:
    tried = (
        "Shards of the model were tried with 1 + 10, 1 + 9 and 1 + 8 samples, and memory ran out "
        "each time on GPU:0 or GPU:1, so the plan is GPU:0 alone."
    )
    limited = Problem(2, (None, None), budget_seconds=120.0)
    assert written_of(*IN_SHARDS, stop=Stop.LATE, problem=limited) == (
        f"{tried} Give a longer --budget (another try takes about 9 s) or a smaller batch "
        f"(--max-global-batch 8)."
    )
    ended = f"{tried} Give a smaller batch (--max-global-batch 8)."
    assert written_of(*IN_SHARDS, problem=limited) == ended, "the search had no more to try"
    assert written_of(*IN_SHARDS, request=FIXED) == f"{tried} Give a smaller --global-batch."


def test_splits_that_always_ran_out_of_memory_are_named_too() -> None:
    assert written_of(ran_out("split", 1, 1, 1)) == (
        "Splits were tried with 1 + 1 samples, and memory ran out on GPU:1, so the plan is GPU:0 "
        "alone."
    ), "each device has at least one"
    many = [ran_out("split", 0, *([rows] * 2)) for rows in range(40, 10, -5)]
    assert "tried with 40 + 40 to 15 + 15 samples" in written_of(*many)
    wide = ran_out("split", 3, *([8] * 16))
    assert "tried with 128 samples" in written_of(wide, devices=16)


def test_a_step_over_several_devices_that_ran_leaves_nothing_to_say_of_memory() -> None:
    timed = turn(Layout("shard", (1, 4)), 0.256, (0.2, 0.2))
    assert not written_of(*IN_SHARDS, timed)
    assert "memory ran out" not in " ".join(
        write_text(result(SPLIT, 1000), seen=IN_SHARDS).remarks
    ), "the plan trains on several"


# ---------------------------------------------------------------------- as a value


def test_a_verdict_survives_json() -> None:
    one = judged(result(SPLIT, 2123), [standing(EVEN, 1810, -0.147)], rows=20_000)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Verdict) == one
    assert one.limits == ()


def test_every_message_is_a_function_of_the_verdict() -> None:
    """Each is in one of two lists, and works for any verdict."""
    one = judged(result(SPLIT, 2123))
    assert len(set(REMARKS + WARNINGS)) == len(REMARKS) + len(WARNINGS)
    for write in REMARKS + WARNINGS:
        assert all(isinstance(line, str) for line in write(one))


def test_waiting_is_what_the_busiest_device_does_not_compute() -> None:
    assert waiting_share([turn(EVEN.layout, 1.0, (0.7, 0.6))]) == pytest.approx(0.3)
    assert waiting_share(
        [turn(EVEN.layout, 1.0, (0.7, 0.6)), turn(EVEN.layout, 2.0, (1.8, 0.6))]
    ) == pytest.approx(0.2)
    assert waiting_share([turn(EVEN.layout, 1.0, (0.7, None))]) is None
    assert waiting_share([turn(layout_of((1, 1)), 0.0, (0.0, 0.0))]) is None
    assert waiting_share([]) is None


def test_every_field_is_in_the_docs() -> None:
    """Every value that a field may have is documented too."""
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    written = set(re.findall(r"`(\w+)`", page))
    structs = [one for one in vars(verdict).values() if _is_struct(one)]
    assert len(structs) > 12
    fields = {name for one in structs for name in one.__struct_fields__}
    assert fields - written == set()
    words = [verdict.StopCode, verdict.LayoutKind, verdict.WhyNotChosen, Doubt]
    assert {word for one in words for word in get_args(one)} - written == set()
    assert {stop.name.lower() for stop in Stop} == set(get_args(verdict.StopCode))


def _is_struct(one: Any) -> bool:
    mine = isinstance(one, type) and one.__module__ == verdict.__name__
    return mine and issubclass(one, msgspec.Struct)
