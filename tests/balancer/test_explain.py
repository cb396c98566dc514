"""Results in words: what to do and why, ties called ties, doubts with what helps."""

from __future__ import annotations

from typing import get_args

import pytest

from evener.balancer.result.explain import ORDER, Rivals, doubtful, doubts_of, left_out, verdict, warnings
from evener.balancer.types import Failed, Interval, Layout, Probe, Result, Timed, Warned, layout_of, solo
from evener.devices.types import Device

DEVICES = (Device("a", 0, "GTX 1080 Ti", "gpu", None), Device("b", 1, "GTX 1080", "gpu", None))


def result(layout: Layout, rate: float, error: float = 0.005) -> Result:
    """A layout's throughput with its relative error."""
    return Result(layout, Interval(rate, rate * (1 - error), rate * (1 + error)), 2)


SPLIT = result(layout_of((820, 568)), 2123)
EVEN = result(layout_of((694, 694)), 1810)
SINGLE = result(solo(2, 0, 1024), 1345)


def test_a_split_says_its_shares_and_what_it_gains() -> None:
    """Over the even split and the best single device, in percent."""
    said = verdict(SPLIT, Rivals(EVEN, SINGLE, SPLIT, 0.034), DEVICES)
    assert said == (
        "Split 0.591:0.409 over GPU:0 and GPU:1 (820 + 568 samples): 2 123 samples/s ± 0.5 %,"
        " 17 % faster than the even split and 58 % faster than GPU:0 alone."
    )


def test_a_tie_is_called_a_tie() -> None:
    """Where intervals overlap nobody is faster."""
    said = verdict(SPLIT, Rivals(even=result(EVEN.layout, 2110, 0.02)), DEVICES)
    assert "as fast as the even split within the error" in said


def test_an_even_split_is_not_held_against_itself() -> None:
    """Only against the single device."""
    said = verdict(EVEN, Rivals(EVEN, SINGLE, EVEN), DEVICES)
    assert "even split" not in said
    assert "35 % faster than GPU:0 alone" in said


def test_a_single_device_says_what_two_would_lose_and_why() -> None:
    """With the cost of keeping in step, where it is known."""
    slow = result(SPLIT.layout, 1224)
    said = verdict(SINGLE, Rivals(None, SINGLE, slow, 0.034), DEVICES)
    assert said.startswith("Use GPU:0 alone, 1024 samples a step: 1 345 samples/s")
    assert said.endswith("loses 9 %, because keeping them in step costs 34 ms a step.")
    tie = result(SPLIT.layout, 1340)
    assert "is no faster within the error" in verdict(SINGLE, Rivals(split=tie), DEVICES)
    assert "no split over several devices was measured" in verdict(SINGLE, Rivals(), DEVICES)


def test_what_does_not_shrink_with_the_share_is_named_where_it_costs_more_than_keeping_in_step() -> None:
    """Half the samples that take nearly as long alone gain nothing, however cheap the rest is."""
    slow = result(SPLIT.layout, 1224)
    share, whole = max(SPLIT.layout.shares), 1024 / 1345
    said = verdict(SINGLE, Rivals(None, SINGLE, slow, 0.0004, 0.9 * whole), DEVICES)
    assert f"loses 9 %, because a step of {share} samples alone still takes {900 * whole:.0f} ms, against the" in said
    assert said.endswith(f"{1000 * whole:.0f} ms of all 1024.")
    straight = verdict(SINGLE, Rivals(None, SINGLE, slow, 0.0004, whole * share / 1024), DEVICES)
    assert straight.endswith("because keeping them in step costs 0.40 ms a step.")


def test_one_device_has_no_rivals() -> None:
    """Its batch and its speed."""
    said = verdict(result(solo(1, 0, 64), 90.5, 0.0), Rivals(), DEVICES[:1])
    assert said == "Use GPU:0, 64 samples a step: 90.50 samples/s."


@pytest.mark.parametrize("kind", ["pack", "place"])
def test_other_layouts_have_words_too(kind: str) -> None:
    """Packs name their processes, placed models their placement."""
    layout = Layout("pack", (64, 0), 4) if kind == "pack" else Layout("place", (32, 32), 1, "halves")
    said = verdict(result(layout, 100), Rivals(), DEVICES)
    assert ("4 trainings" if kind == "pack" else "halves") in said


def timed(*doubts: Warned) -> Timed:
    """A measurement of SPLIT with doubts."""
    return Timed(Probe(SPLIT.layout, "race", 1.0), 1.0, 0.9, 1.1, 5, (1, 1), (1.0, 1.0), 1.0, 5.0, doubts)


def test_every_doubt_has_a_sentence_and_the_worst_of_a_kind_is_told_once() -> None:
    """In a fixed order; the verdict says what lessens it."""
    codes = get_args(Warned.__annotations__["code"]) or ORDER
    seen = [timed(Warned(code, 0.1)) for code in ORDER] + [timed(Warned("drift", -0.3, 1))]
    assert set(ORDER) == set(codes)
    doubts = doubts_of(seen, SPLIT.layout)
    assert [doubt.code for doubt in doubts] == list(ORDER)
    told = warnings(doubts, DEVICES)
    assert any(text == "GPU:1: Steps became 30.0 % faster while they were timed; measure again with a longer --budget."
               for text in told)  # fmt: skip
    assert (
        doubtful("Do it.", doubts) == "Do it; but steps were held back while it was measured: measure again to be sure."
    )
    assert doubtful("Do it.", [Warned("noisy", 0.1)]) == "Do it."
    assert not doubts_of(seen, EVEN.layout)
    assert doubts_of([timed(Warned("disturbed", 0.9))], EVEN.layout), "a rival saw other work in turns with it"


def test_a_device_on_which_nothing_ran_is_said_to_be_left_out() -> None:
    """One that ran somewhere is not, whatever else failed on it."""
    lost = Failed(Probe(solo(2, 1, 8), "solo", 1.0), "exit", "GPU:1, building: gone", (1,), 1.0)
    alone = Timed(Probe(solo(2, 0, 8), "solo", 1.0), 1.0, 1.0, 1.0, 5, (1, None), (1.0, None), 1.0, 5.0)
    (said,) = left_out([alone, lost], DEVICES, alone.probe.layout)
    assert said.startswith("GPU:1 was left out")
    assert not left_out([timed(), lost], DEVICES, timed().probe.layout)


def test_a_device_that_ran_and_then_failed_to_the_last_is_said_to_be_left_out() -> None:
    """Unless something ran on it again, or it has a part all the same."""
    lost = Failed(Probe(solo(2, 1, 8), "solo", 1.0), "signal", "GPU:1, building: SIGABRT", (1,), 1.0)
    (said,) = left_out([timed(), lost], DEVICES, solo(2, 0, 8))
    assert said.startswith("GPU:1 ran at first and then failed")
    assert "SIGABRT" in said
    assert not left_out([timed(), lost, timed()], DEVICES, solo(2, 0, 8))
