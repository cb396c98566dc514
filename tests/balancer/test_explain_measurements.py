"""What is said of the measurements behind a plan: doubts with what helps, memory that others hold,
devices left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pytest

from evener.balancer.result.measurements import (
    ORDER,
    describe_doubts,
    find_doubts,
    find_few_steps,
    find_left_out,
    find_pass_statistics,
    find_taken_memory,
    find_weakness,
)
from evener.balancer.result.words import say_all, write_verdict
from evener.balancer.types import (
    Failed,
    Finding,
    Layout,
    Probe,
    Stage,
    Timed,
    Warned,
    layout_of,
    solo,
)
from evener.devices.types import Device
from evener.tui.text.summaries import DOUBTS

DEVICES = (Device("a", 0, "GTX 1080 Ti", "gpu", None), Device("b", 1, "GTX 1080", "gpu", None))
EVERY = [msgspec.convert({"code": code, "value": 0.1}, Warned) for code in ORDER]
SPLIT, EVEN = layout_of((820, 568)), layout_of((694, 694))


def timed(
    *doubts: Warned,
    layout: Layout = SPLIT,
    stage: Stage = "race",
    short: tuple[int, ...] = (),
    step: float = 1.0,
) -> Timed:
    """A measurement with doubts, what others held, and seconds of a step ± 10 %."""
    probe, seconds = Probe(layout, stage, 1.0), (step, 0.9 * step, 1.1 * step)
    return Timed(probe, *seconds, 5, (1, 1), (1.0, 1.0), 1.0, 5.0, doubts, short_bytes=short)


def explain_doubts(
    doubts: Iterable[Warned], devices: Sequence[Device], *longer: str
) -> tuple[str, ...]:
    """Each doubt as a sentence."""
    return say_all(describe_doubts(doubts, devices, *longer))


def weakened(doubts: Iterable[Warned]) -> str:
    """What a verdict says of doubts."""
    return write_verdict([Finding("split.unknown"), *find_weakness(doubts)]).partition("; but ")[2]


def test_a_layer_that_sees_one_pass_is_a_warning() -> None:
    """Only where a share is taken in passes, and with the smallest of them."""
    (words,) = say_all(find_pass_statistics(layout_of((820, 568), (410, 568)), "BatchNorm2d"))
    assert "BatchNorm2d sees one pass of 410 rows" in words
    assert (
        find_pass_statistics(SPLIT, "BatchNorm2d")
        == find_pass_statistics(layout_of((820, 568), (410, 568)), "")
        == []
    )


def test_every_doubt_has_a_sentence_and_the_worst_of_a_kind_is_said_once() -> None:
    """In a fixed order, with the device and what helps."""
    seen = [
        *map(timed, EVERY),
        timed(Warned("drift", -0.3, 1)),
        timed(layout=EVEN, step=2.0),
        timed(layout=EVEN),
    ]
    doubts = find_doubts(seen, SPLIT)
    assert [doubt.code for doubt in doubts] == list(ORDER)
    assert set(DOUBTS) == set(ORDER), "a journal may have any of them behind a measurement"
    sentences = explain_doubts(doubts, DEVICES)
    assert len(set(sentences)) == len(ORDER)
    assert (
        "GPU:1: Steps got 30.0 % faster while they were timed; measure again with a longer "
        "--budget."
    ) in sentences
    (slower,) = explain_doubts([Warned("drift", 0.05)], DEVICES, "more steps")
    assert slower == "Steps got 5.0 % slower while they were timed; measure again with more steps."


def test_a_busy_cpu_is_not_to_be_cooled() -> None:
    """A GPU that is held back may be hot."""
    slices = [Device(f"cpu-{i}-of-2", i, "EPYC", "cpu", None) for i in range(2)]
    (busy,), (hot,) = (
        explain_doubts([Warned("throttled", 0.1, 0)], devices) for devices in (slices, DEVICES)
    )
    assert "perhaps by other work; look at" in busy
    assert "let it cool" in hot


def test_a_doubt_about_another_layout_is_none_about_this_one() -> None:
    """But other work that a rival saw in its turns, for most of its blocks, was there in this one's
    too.
    """
    assert not find_doubts([timed(Warned("drift", 0.1))], EVEN)
    assert find_doubts([timed(Warned("disturbed", 0.9))], EVEN)
    assert not find_doubts([timed(Warned("disturbed", 0.4))], EVEN)
    assert not find_doubts([timed(Warned("disturbed", 0.9), stage="solo")], EVEN)
    assert not find_doubts([timed(Warned("disturbed", 0.9))], solo(2, 0, 8)), (
        "one device sees other work itself"
    )


def test_a_figure_is_rough_only_where_the_search_would_have_measured_on() -> None:
    """Of all turns together, whatever one measurement alone said: a longer budget would change
    nothing.
    """
    noisy = [timed(Warned("noisy", 0.12))]
    assert find_doubts(noisy, SPLIT, 0.049) == ()
    assert find_doubts(noisy, SPLIT, 0.051) == (Warned("noisy", 0.051),)


def test_a_layout_that_ran_at_two_speeds_is_a_doubt_about_every_gain() -> None:
    """Whichever layout it was; not within the intervals, nor where all devices ran at once in one
    of the two.
    """
    twice = [timed(layout=EVEN, step=1.3), timed(layout=EVEN), timed(layout=EVEN, step=1.1)]
    (doubt,) = find_doubts(twice, SPLIT)
    assert (doubt.code, doubt.value) == ("changed", pytest.approx(0.3))
    assert (
        weakened([doubt])
        == "the machine's speed changed between measurements: measure again to be sure."
    )
    assert not find_doubts(twice[1:], SPLIT), "their intervals overlap"
    assert not find_doubts([timed(layout=SPLIT, step=1.3), timed(layout=EVEN)], SPLIT), (
        "two layouts"
    )
    alone = solo(2, 0, 8)
    assert not find_doubts(
        [timed(layout=alone, stage="solo", step=1.3), timed(layout=alone)], SPLIT
    )
    assert find_doubts([timed(layout=alone, stage="solo"), timed(layout=alone, step=1.3)], SPLIT)
    assert find_doubts([timed(layout=alone, stage="solo", step=each) for each in (1.0, 1.3)], SPLIT)


def test_the_verdict_says_what_weakens_it_most() -> None:
    """Noise is in its interval already."""
    doubts = find_doubts(
        [timed(doubt) for doubt in EVERY if doubt.code not in ("not_finite", "changed")], SPLIT
    )
    assert (
        weakened(doubts) == "steps were held back while it was measured: measure again to be sure."
    )
    assert weakened([Warned("noisy", 0.1)]) == ""


def test_a_loss_that_was_not_finite_anywhere_is_said_with_its_first_step() -> None:
    """Also of a layout that wasn't chosen: the model is the same."""
    seen = [
        timed(Warned("not_finite", 57.0, 1), layout=EVEN),
        timed(Warned("not_finite", 3.0, 0), layout=EVEN),
    ]
    doubts = find_doubts(seen, SPLIT)
    assert doubts == (Warned("not_finite", 3.0, 0),)
    assert weakened(doubts) == "its loss was not finite: look at it before you train."
    (sentence,) = explain_doubts(doubts, DEVICES)
    assert sentence.startswith("GPU:0: The loss was NaN or infinite at step 3, ")


def test_noise_is_that_of_the_figure_over_all_turns() -> None:
    """One figure has one error: a rough first turn is no doubt once the others have settled it."""
    seen = [timed(Warned("noisy", 0.8)), timed()]
    assert find_doubts(seen, SPLIT, error=0.02) == ()
    assert find_doubts(seen, SPLIT, error=0.09) == (Warned("noisy", 0.09),)


def test_memory_that_others_hold_is_said_with_the_most_that_was_seen() -> None:
    """Per device, in a sentence."""
    seen = [timed(short=(0, 1 << 30)), timed(short=(0, 3 << 30)), timed()]
    (sentence,) = say_all(find_taken_memory(seen, DEVICES))
    assert (
        sentence
        == "GPU:1: other processes hold 3 GiB of its memory; the plan's batches leave it to them."
    )
    assert find_taken_memory([timed()], DEVICES) == []


def failed(position: int, batch: int = 8, cause: str = "exit") -> Failed:
    """One device that failed alone."""
    probe = Probe(solo(2, position, batch), "solo", 1.0)
    return Failed(probe, cause, f"GPU:{position}, building: SIGABRT", (position,), 1.0)  # type: ignore[arg-type]


def test_a_device_on_which_nothing_ran_is_said_to_be_left_out() -> None:
    """One that ran somewhere is not, whatever else failed on it."""
    alone = timed(layout=solo(2, 0, 8), stage="solo")
    (sentence,) = say_all(find_left_out([alone, failed(1)], DEVICES, alone.probe.layout))
    assert sentence.startswith("GPU:1 was left out, as nothing ran on it: ")
    assert "SIGABRT" in sentence
    assert not find_left_out([timed(), failed(1)], DEVICES, SPLIT)


def test_a_device_that_ran_and_then_failed_to_the_last_is_said_to_be_left_out() -> None:
    """Unless something ran on it again, or it has a part all the same."""
    (sentence,) = say_all(find_left_out([timed(), failed(1)], DEVICES, solo(2, 0, 8)))
    assert sentence.startswith(
        "GPU:1 worked at first and then failed every time, so it was left out: "
    )
    assert not find_left_out([timed(), failed(1), timed()], DEVICES, solo(2, 0, 8))
    (sentence,) = say_all(find_left_out([timed(), failed(1, cause="device")], DEVICES, SPLIT))
    assert sentence.startswith("GPU:1 worked at first and can't be used now: ")


def explain_few_steps(layout: Layout, rows: int) -> str:
    """The beginning of the verdict."""
    return write_verdict(find_few_steps(layout, rows))


def test_an_epoch_of_few_steps_is_said_where_the_number_of_rows_is_certain() -> None:
    """With the option that bounds it."""
    assert find_few_steps(SPLIT, 0) == find_few_steps(SPLIT, 100 * (820 + 568)) == []
    assert explain_few_steps(SPLIT, 28000) == (
        "An epoch is only 20 steps, because a step takes 1388 of the 28000 rows; for 100, "
        "search with"
        " --max-global-batch 280."
    )
    assert "only 1 step," in explain_few_steps(SPLIT, 2000)
    assert (
        "An epoch is less than one step, because a step takes 1388 of the 1280 rows;"
        in explain_few_steps(SPLIT, 1280)
    )
    assert explain_few_steps(SPLIT, 64).endswith("of the 64 rows.")
