"""The sentence of a comparison: what to do, why, what ties, what knobs gave."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from evener.balancer.result.explain_ranking import moved_share, name, verdict
from evener.balancer.search.layouts import Candidate, Placement, alone, evenly, packed, placed
from evener.balancer.search.ranking import Standing
from evener.balancer.types import Interval, Layout, Probe, Timed

LABELS = ("GPU:0", "GPU:1")
SOLO = alone(2, 0, 256)
EVEN = evenly(2, (0, 1), 256)
assert EVEN is not None
SPLIT = Candidate("split", Layout("split", (150, 106)))
PACK = packed(SOLO.layout, 5)
PLACE = placed(2, Placement("towers"), 256)
assert PLACE is not None


def standing(one: Candidate, rate: float, against: float | None = None, tie: bool = False) -> Standing:
    """A place in the ranking, known to 0.1 %."""
    step = one.layout.global_batch * one.layout.processes / rate
    difference = None if against is None else Interval(against, against - 0.001, against + 0.001)
    return Standing(one, Interval(rate, rate, rate), Interval(step, step, step), difference, tie, 3)


def turn(layout: Layout, step: float, own: tuple[float | None, ...]) -> Timed:
    """One measured turn with each device's own part of the step."""
    return Timed(Probe(layout, "race", 1.0), step, step, step, 9, (None, None), own, step, 1.0)


def no_turns(layout: Layout) -> Sequence[Timed]:
    """Nobody can tell where the time went."""
    return ()


def test_one_that_wins_says_what_two_lose_and_how_much_of_it_is_moving_data() -> None:
    """At 91 % of the throughput with 7 % of the step without work: 6.8 points of the 9 would not be lost."""
    found = [standing(SOLO, 1000.0), standing(EVEN, 910.0, -0.09)]
    words = verdict(found, LABELS, lambda layout: [turn(layout, 1.0, (0.93, 0.9))])
    assert words == (
        "One GPU is fastest (GPU:0, 1 000 samples/s at 256):"
        " two lose 9 %, of which 7 % is spent moving data and waiting."
    )


def test_where_nobody_can_tell_the_reason_is_left_out() -> None:
    found = [standing(SOLO, 1000.0), standing(PLACE, 800.0, -0.2)]
    words = verdict(found, LABELS, no_turns)
    assert words.endswith("the placement towers loses 20 %.")


def test_a_split_says_what_it_gains_over_one_and_over_even() -> None:
    found = [standing(SPLIT, 1500.0), standing(EVEN, 1200.0, -0.2), standing(SOLO, 1000.0, -1 / 3)]
    words = verdict(found, LABELS, no_turns)
    assert words == (
        "The split 150 + 106 over GPU:0 and GPU:1 is fastest (1 500 samples/s):"
        " 50 % more than one alone; 25 % more than an even split."
    )


def test_a_pack_says_that_each_training_takes_longer() -> None:
    found = [standing(PACK, 2000.0), standing(SOLO, 1000.0, -0.5)]
    words = verdict(found, LABELS, no_turns)
    assert words.startswith("Five trainings side by side on GPU:0 are fastest (together 2 000 samples/s):")
    assert "100 % more than one alone, though each training takes 2.5 times as long" in words


def test_ties_are_called_ties() -> None:
    found = [standing(SOLO, 1000.0), standing(EVEN, 1001.0, 0.001, tie=True)]
    assert verdict(found, LABELS, no_turns).endswith("; even split ties with it.")


def test_a_knob_is_told_whichever_way_it_went() -> None:
    xla = Candidate("solo", msgspec.structs.replace(SOLO.layout, knobs=("xla",)))
    mixed = Candidate("solo", msgspec.structs.replace(SOLO.layout, knobs=("mixed",)))
    found = [standing(xla, 1200.0), standing(SOLO, 1000.0, -1 / 6), standing(mixed, 1176.0, -0.02)]
    words = verdict(found, LABELS, no_turns)
    assert "with XLA is fastest" in words
    assert "XLA gives 20 %" in words
    assert "more than one alone" not in words
    assert "mixed precision loses 2 %" in words


@pytest.mark.parametrize(
    ("one", "expected"),
    [(SOLO, "best single device"), (EVEN, "even split"), (SPLIT, "best split"), (PLACE, "place towers"),
     (PACK, "pack of 5"), (packed(SOLO.layout, 2, "mps"), "pack of 2 under MPS")],
)  # fmt: skip
def test_names_for_tables_and_evidence(one: Candidate, expected: str) -> None:
    assert name(one, 2) == expected


def test_an_even_split_over_some_of_the_devices_says_how_many() -> None:
    some = evenly(4, (0, 2), 64)
    assert some is not None
    assert name(some, 4) == "even over 2"


def test_waiting_is_what_the_busiest_device_does_not_compute() -> None:
    assert moved_share([turn(EVEN.layout, 1.0, (0.7, 0.6))]) == pytest.approx(0.3)
    assert moved_share([turn(EVEN.layout, 1.0, (0.7, None))]) is None
    assert moved_share([]) is None
