"""The verdict: what to do and why, what each rival gains or loses, ties called ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from evener.balancer.families import Placement, find_family, pack_on, place_on, split_evenly
from evener.balancer.result.rivals import Rival, describe, describe_all, find_larger, list_rivals
from evener.balancer.result.verdict import find_verdict, waiting_share
from evener.balancer.result.words import say, say_all, write_verdict
from evener.balancer.search.layouts import Candidate
from evener.balancer.search.ranking import Standing
from evener.balancer.search.search import Search
from evener.balancer.types import Interval, Layout, Probe, Result, Timed, layout_of, solo
from evener.devices.types import Device


def candidate(family: str, layout: Layout) -> Candidate:
    """Of a family of this name."""
    return Candidate(find_family(family), layout)


LABELS = ("GPU:0", "GPU:1")
SOLO = candidate("solo", solo(2, 0, 256))
EVEN = candidate("even", cast(Layout, split_evenly(2, (0, 1), 256)))
SPLIT = candidate("split", Layout("split", (150, 106)))
PACK = candidate("pack", pack_on(SOLO.layout, 5))
PLACE = candidate("place", cast(Layout, place_on(2, Placement("towers"), 256)))


class Costs:
    """A search that knows what keeping in step and each share alone take, and nothing else."""

    mean_length = 0.0

    def __init__(self, sync: float | None = None, apart: float | None = None) -> None:
        self._sync, self._apart = sync, apart

    @property
    def devices(self) -> Costs:
        return self

    @property
    def sync_seconds(self) -> float | None:
        return self._sync

    def apart_seconds(self, _layout: Layout) -> float | None:
        return self._apart

    def results(self) -> tuple[Result, ...]:
        return ()


def explain(
    chosen: Result, rivals: Sequence[Rival], labels: Sequence[str], costs: Costs | None = None
) -> str:
    """The sentence of the verdict, of GPUs on one host."""
    devices = [Device(f"GPU-{i}", i, "NVIDIA A", "gpu", None) for i in range(len(labels))]
    return write_verdict(find_verdict(cast(Search, costs or Costs()), chosen, rivals, devices))


def result(one: Candidate, rate: float, error: float = 0.005) -> Result:
    """A layout's throughput with its relative error."""
    return Result(one.layout, Interval(rate, rate * (1 - error), rate * (1 + error)), 2)


def rival(
    one: Candidate, gain: float, of: float = 1000.0, tie: bool = False, unclear: bool = False
) -> Rival:
    """Another layout, over which the chosen one of so many samples/s gains so much."""
    rate = of / (1 + gain)
    return Rival(one, Interval(rate, rate, rate), gain, tie, unclear)


def standing(
    one: Candidate, rate: float, against: float | None = None, tie: bool = False
) -> Standing:
    """A place in the ranking, known to 0.1 %."""
    difference = None if against is None else Interval(against, against - 0.001, against + 0.001)
    return Standing(one, Interval(rate, rate, rate), difference, tie, 3)


# ---------------------------------------------------------------------- the sentence


def test_a_split_says_its_shares_and_what_it_gains() -> None:
    """Over the even split and the best single device, in percent."""
    words = explain(
        result(SPLIT, 2123), [rival(EVEN, 0.173, 2123), rival(SOLO, 0.578, 2123)], LABELS
    )
    assert words == (
        "Split 0.586:0.414 over GPU:0 and GPU:1 (150 + 106 samples): 2 123 samples/s ± 0.5 %,"
        " 17 % faster than the even split and 58 % faster than GPU:0 alone."
    )


def test_a_tie_with_the_even_split_is_called_one() -> None:
    words = explain(result(SPLIT, 2123), [rival(EVEN, 0.006, tie=True)], LABELS)
    assert words.endswith("as fast as the even split within the error.")


def test_passes_are_a_part_of_the_share() -> None:
    """In a split and alone."""
    split, alone = layout_of((820, 568), (300, 568)), layout_of((820, 0), (410, 0))
    assert "(820 = 2 × 273 + 274) + 568 samples)" in explain(
        result(candidate("split", split), 2123), [], LABELS
    )
    assert "GPU:0 alone, 820 = 2 × 410 samples a step" in explain(
        result(candidate("solo", alone), 2123), [], LABELS
    )


def test_a_loss_is_not_hidden() -> None:
    words = explain(result(SPLIT, 900), [rival(EVEN, 0.0, 900), rival(SOLO, -0.1, 900)], LABELS)
    assert "10 % slower than GPU:0 alone" in words


def test_an_even_split_is_not_compared_with_itself() -> None:
    """Only with the single device."""
    words = explain(
        result(EVEN, 1810), [rival(SPLIT, 0.0, 1810, tie=True), rival(SOLO, 0.35, 1810)], LABELS
    )
    assert words == (
        "Split evenly over GPU:0 and GPU:1 (128 + 128 samples): 1 810 samples/s ± 0.5 %, 35 % "
        "faster than GPU:0 alone."
    )


def test_an_even_split_over_fewer_devices_is_not_the_even_split() -> None:
    three = candidate("split", Layout("split", (100, 80, 60)))
    two = split_evenly(3, (0, 1), 240)
    assert two is not None
    assert "even" not in explain(
        result(three, 1000), [rival(candidate("even", two), 0.2)], ("A", "B", "C")
    )


def test_a_single_device_says_what_two_would_lose_and_why() -> None:
    """With the cost of keeping in step, where it is known."""
    chosen = result(SOLO, 1345)
    words = explain(chosen, [rival(SPLIT, 0.1, 1345)], LABELS, Costs(0.034))
    assert words == (
        "Use GPU:0 alone, 256 samples a step: 1 345 samples/s ± 0.5 %;"
        " a split over GPU:0 and GPU:1 loses 9 %, because synchronizing the devices costs 34 "
        "ms a step."
    )
    tie = explain(chosen, [rival(SPLIT, 0.003, 1345, tie=True)], LABELS)
    assert tie.endswith(
        "; a split over GPU:0 and GPU:1 is no faster within the error (1 341 samples/s)."
    )
    assert explain(chosen, [], LABELS).endswith("; no split over several devices was measured.")


def test_what_does_not_shrink_with_the_share_is_named_where_it_costs_more_than_sync() -> None:
    """150 of 256 samples that take nearly as long alone gain nothing, however cheap the rest is."""
    chosen, rivals, whole = result(SOLO, 1345), [rival(SPLIT, 0.1, 1345)], 256 / 1345
    words = explain(chosen, rivals, LABELS, Costs(0.0004, 0.9 * whole))
    assert words.endswith(
        f"loses 9 %, because its longest part alone still takes {900 * whole:.0f} ms,"
        f" against the {1000 * whole:.0f} ms of all 256."
    )
    assert explain(chosen, rivals, LABELS).endswith("loses 9 %.")


def test_a_cause_that_does_not_cover_the_loss_is_not_named() -> None:
    """A step of 2.8 ms became 7.2, and keeping in step takes 0.16 of them."""
    chosen = result(SOLO, 256 / 0.0028)
    slow = rival(SPLIT, 7.2 / 2.8 - 1, 256 / 0.0028)
    words = explain(chosen, [slow], LABELS, Costs(0.00016, 0.0017))
    assert words.endswith(
        "loses 61 %: its step takes 7.2 ms, its longest part alone 1.7 ms; the rest is unexplained."
    )


def test_another_batch_is_named_and_one_that_is_far_off_is_not_compared() -> None:
    """A split of 256 samples says nothing of a plan of 4096."""
    alone = result(candidate("solo", solo(2, 0, 4096)), 1000)
    small = list_rivals(alone, [], [result(SPLIT, 30)])
    assert explain(alone, small, LABELS).endswith(
        "; no split over several devices was measured near 4096 samples."
    )
    near = list_rivals(alone, [], [result(candidate("split", Layout("split", (2000, 1000))), 800)])
    assert "a split over GPU:0 and GPU:1 at 3000 samples loses 20 %" in explain(alone, near, LABELS)
    larger = result(candidate("split", Layout("split", (1000, 500))), 1500)
    found = list_rivals(larger, [standing(SOLO, 1000.0)])
    assert explain(larger, found, LABELS).endswith(", 50 % faster than GPU:0 alone at 256 samples.")


def test_a_device_that_is_faster_in_the_split_than_alone_is_no_rival() -> None:
    """It made 400 samples/s alone and makes 890 of the split's, so alone it wasn't at its best
    batch.
    """
    plan = result(SPLIT, 2123)
    assert "alone" not in explain(plan, list_rivals(plan, [standing(SOLO, 400.0)]), LABELS)
    assert "69 % faster than GPU:0 alone" in explain(
        plan, list_rivals(plan, [standing(SOLO, 1257.0)]), LABELS
    )


def test_the_best_single_device_is_compared_whether_raced_or_not() -> None:
    found = list_rivals(result(SPLIT, 2123), [standing(SPLIT, 2123.0)], (), result(SOLO, 1257))
    assert explain(result(SPLIT, 2123), found, LABELS).endswith(", 69 % faster than GPU:0 alone.")
    assert list_rivals(result(SOLO, 1257), [], (), result(SOLO, 1257)) == ()


def test_a_rate_that_is_not_known_is_not_said() -> None:
    """Nor what it gains, and nothing is compared with such a rival."""
    words = explain(
        result(SPLIT, 2123, 0.3),
        list_rivals(result(SPLIT, 2123, 0.3), [standing(SOLO, 1000.0)]),
        LABELS,
    )
    assert words == (
        "Split 0.586:0.414 over GPU:0 and GPU:1 (150 + 106 samples). The samples/s are too "
        "uncertain (± 30.0 %)."
    )
    found = list_rivals(
        result(SPLIT, 2123),
        [msgspec.structs.replace(standing(SOLO, 1000.0), throughput=Interval(1000, 600, 1400))],
    )
    assert "GPU:0 alone" not in explain(result(SPLIT, 2123), found, LABELS)
    found = list_rivals(result(SOLO, 2123), [], [result(SPLIT, 2000, 0.4)])
    assert explain(result(SOLO, 2123), found, LABELS).endswith(
        "; the speed of a split over several devices isn't known."
    )


def test_one_device_has_no_rivals() -> None:
    """Its batch and its speed."""
    words = explain(result(candidate("solo", solo(1, 0, 64)), 90.5, 0.0), [], LABELS[:1])
    assert words == "Use GPU:0, 64 samples a step: 90.50 samples/s."


def test_a_pack_says_that_each_training_takes_longer() -> None:
    """Five with 2.5 times the samples/s: each step takes twice as long; a split and a placement
    lose against it.
    """
    found = [rival(SOLO, 1.5, 2000), rival(SPLIT, 1.0, 2000), rival(PLACE, 3.0, 2000)]
    words = explain(result(PACK, 2000), found, LABELS)
    assert words.startswith(
        "Run 5 trainings side by side on GPU:0, 256 samples each: 2 000 samples/s"
    )
    assert "150 % faster than GPU:0 alone, though each training takes 2.0 times as long" in words
    assert "a split over GPU:0 and GPU:1 loses 50 %" in words
    assert "the placement towers loses 75 %" in words


def test_a_placement_names_itself() -> None:
    words = explain(result(PLACE, 2000), [rival(PACK, 1.0, 2000)], LABELS)
    assert words.startswith(
        "Place the model's parts as towers over GPU:0 and GPU:1, 256 samples: 2 000 samples/s"
    )
    assert "5 trainings side by side lose 50 %" in words


def test_packs_that_tie_and_those_that_may_are_named() -> None:
    """They are no loss, and no gain that anybody could show."""
    place = rival(PLACE, 0.05, tie=True, unclear=True)
    words = explain(
        result(SOLO, 1000), [rival(EVEN, 0.1), rival(PACK, 0.003, tie=True), place], LABELS
    )
    assert words.endswith(
        "; pack of 5 ties with it; place towers can't be distinguished from it yet."
    )


def test_a_knob_is_named_whichever_way_it_went() -> None:
    xla, mixed = (
        candidate("solo", msgspec.structs.replace(SOLO.layout, knobs=(knob,)))
        for knob in ("xla", "mixed")
    )
    words = explain(
        result(xla, 1200),
        [rival(SOLO, 0.2, 1200), rival(mixed, 0.03, 1200), rival(EVEN, 0.5, 1200)],
        LABELS,
    )
    assert words.startswith("Use GPU:0 alone, 256 samples a step, with XLA: 1 200 samples/s")
    assert "XLA gives 20 %" in words
    assert "mixed precision loses 3 %" in words
    assert "makes no difference" in explain(
        result(SOLO, 1000), [rival(EVEN, 1.0), rival(xla, 0.0, tie=True)], LABELS
    )


def test_a_larger_batch_that_is_faster_is_named_with_what_it_adds() -> None:
    """The tolerance chose the smaller one, and the reader may not want it to."""
    larger = candidate("split", Layout("split", (400, 300)))
    words = explain(result(SPLIT, 1000), [rival(larger, 1 / 1.015 - 1), rival(SOLO, 0.5)], LABELS)
    assert words.endswith("; 700 samples a step would be 1.5 % faster.")
    tie = rival(larger, 1 / 1.015 - 1, tie=True)
    assert "would be" not in explain(result(SPLIT, 1000), [tie], LABELS)


def test_only_a_faster_layout_of_one_training_with_more_samples_is_a_larger_batch() -> None:
    larger = candidate("split", Layout("split", (400, 300)))
    most = candidate("split", Layout("split", (800, 600)))
    found = [rival(larger, -0.01), rival(most, -0.02), rival(PACK, -0.3), rival(SOLO, 0.5)]
    assert find_larger(result(SPLIT, 1000), found) == found[1]
    assert find_larger(result(most, 1000), found) is None
    assert find_larger(result(PACK, 1000), found) is None
    assert find_larger(result(SPLIT, 1000), [rival(larger, 0.0)]) is None


# ---------------------------------------------------------------------- rivals


def test_rivals_are_compared_turn_by_turn_with_the_winner() -> None:
    """The figures alone would say 25 %; the turns that both took say 20, and the verdict which it
    is.
    """
    ranking = [standing(SOLO, 1000.0), standing(EVEN, 800.0, -1 / 6)]
    (found,) = list_rivals(result(SOLO, 1000), ranking)
    assert found.candidate == EVEN
    assert found.gain == pytest.approx(0.2)
    assert "loses 17 %, measured in turn" in explain(result(SOLO, 1000), [found], LABELS)
    (found,) = list_rivals(result(SOLO, 1000), [ranking[0], standing(EVEN, 833.0, -1 / 6)])
    assert found.gain == 1000 / 833 - 1
    assert not found.paired


def test_rivals_of_a_layout_that_did_not_win_the_race_are_compared_by_throughput() -> None:
    """Intervals that overlap are a tie."""
    ranking = [standing(SOLO, 1000.0), standing(EVEN, 800.0, -0.2), standing(PACK, 905.0, -0.095)]
    found = {one.candidate: one for one in list_rivals(result(SPLIT, 900, 0.01), ranking)}
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
    found = list_rivals(result(SOLO, 1000), ranking, results)
    assert [one.candidate for one in found] == [SPLIT, EVEN]
    assert "a split over GPU:0 and GPU:1 loses 27 %" in explain(result(SOLO, 1000), found, LABELS)
    assert (
        list_rivals(result(SOLO, 1000), [*ranking, standing(SPLIT, 730.0, -0.27)], results)[
            0
        ].candidate
        == EVEN
    )
    assert list_rivals(result(SPLIT, 1000), [standing(SPLIT, 1000.0)], results) == ()


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
    assert say(describe(one, 2)) == expected


def test_an_even_split_over_some_of_the_devices_says_how_many() -> None:
    some = split_evenly(4, (0, 2), 64)
    assert some is not None
    assert say(describe(candidate("even", some), 4)) == "even over 2"


def test_no_two_layouts_have_one_name() -> None:
    """The slower of two of a kind is another one; the third says its samples."""
    found = [SPLIT, *(candidate("split", Layout("split", (n, 10))) for n in (20, 30)), SOLO]
    assert say_all(describe_all(found, 2)) == (
        "best split",
        "another split",
        "another split, 30 + 10",
        "best single device",
    )


# ---------------------------------------------------------------------- waiting


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
