"""The messages and the curves that a search shows while it runs."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from evener.balancer.search.decisions import find_doubt
from evener.balancer.search.layouts import BALANCE, LayoutOptions
from evener.balancer.search.search import Search
from evener.balancer.types import Facts, Probe, Stage, Stop
from evener.shares.curves import Cost
from tests.support import machine_families_hard as hard
from tests.support import search_trials as trials
from tests.support.search_machines import Bench, searched
from tests.support.text_machines import TextMachine

PAIR = Bench(((10.0, 0.1, 0, 4000), (12.0, 0.16, 0, 4000)), 0.002)
SAID = {
    "solo": "Measures every device alone",
    "rest": "alone while the others are idle",
    "split": "Measures a real step split over 2 devices",
    "pack": "Packs {processes} trainings on one device",
    "race": "layouts in turns; this is turn {turn}",
    "knobs": "with other knobs",
    "check": "Measures the chosen layout again",
}


def announced(
    search: Search, machine: Bench | TextMachine, lengths: tuple[int, ...] = ()
) -> list[tuple[Probe, str]]:
    """Return each probe with the message before it."""
    found = []
    while probes := search.ask():
        found += [(probe, search.belief().doing) for probe in probes]
        for one in machine.measure(probes):
            search.tell(one)
        search.learn_data(Facts(lengths=lengths))
    assert search.belief().doing == "Done."
    return found


@pytest.mark.parametrize(
    "options", [BALANCE, LayoutOptions(("solo", "split", "pack"), knobs=("xla",))]
)
def test_the_purpose_of_a_probe_is_reported(options: LayoutOptions) -> None:
    said = announced(Search(PAIR.problem(global_batch=1000, tolerance=0.0), options), PAIR)
    for probe, words in said:
        expected = SAID[probe.stage].format(processes=probe.layout.processes, turn=probe.turn + 1)
        assert expected in words
    assert {probe.stage for probe, _ in said} >= (
        {"solo", "rest", "split", "check"} | set(options.knobs and ("knobs",))
    )
    first = next(words for probe, words in said if probe.stage == Stage.REST)
    assert "what every split has to beat" in first
    splits = [words for probe, words in said if probe.stage == Stage.SPLIT]
    assert "the fastest that the curves predict" in splits[0]
    assert all("what the last ones showed" in words for words in splits[1:])


def test_the_rounds_alone_differ_in_what_they_show() -> None:
    said = announced(Search(PAIR.problem()), PAIR)
    rounds = {probe.turn: words for probe, words in said if probe.stage == Stage.SOLO}
    for turn, words in (
        (0, "a first time"),
        (1, "the slope"),
        (2, "the largest batch"),
        (3, "still in doubt"),
    ):
        assert words in rounds[turn]


def test_rows_of_unequal_length_are_announced_by_what_is_dealt() -> None:
    machine = TextMachine((Cost(0.001, 2e-5, 1e-8),) * 2)
    said = announced(Search(machine.problem(global_batch=64)), machine, machine.lengths)
    passes = [words for probe, words in said if probe.layout.length]
    whole = [words for probe, words in said if probe.stage == Stage.SOLO and probe.layout.costs]
    splits = [words for probe, words in said if probe.stage == Stage.SPLIT]
    assert passes
    assert all("passes of rows of" in words for words in passes)
    assert whole
    assert all("the global batch, assigned by what its rows cost" in words for words in whole)
    assert splits
    assert all("rows assigned to 2 devices" in words for words in splits)


def test_a_drawn_curve_goes_from_one_sample_to_the_largest_batch() -> None:
    """It has at most 25 points, and none before anything ran."""
    search = Search(PAIR.problem())
    assert not any(curve.points for curve in search.belief().curves)
    announced(search, PAIR)
    for position, curve in enumerate(search.belief().curves):
        sizes = [size for size, _ in curve.points]
        assert sizes[0] == 1
        assert sizes[-1] == curve.largest_batch
        assert all(a < b for a, b in pairwise(sizes))
        assert 20 <= len(sizes) <= 25
        for size, seconds in curve.points:
            assert seconds == pytest.approx(PAIR.own(position, size), rel=0.02)


@pytest.mark.parametrize(
    ("times", "unsure"),
    [(1.0, ""), (1.02, ""), (1.1, "% less samples/s"), (0.8, "% more samples/s")],
)
def test_a_figure_that_the_devices_contradict_is_doubted(times: float, unsure: str) -> None:
    """They differ by over 3 % and by more than the interval."""
    search, _ = searched(PAIR, PAIR.problem(budget_seconds=60.0))
    best = search.best()
    assert best is not None
    figure = best.throughput
    other = type(figure)(*(times * one for one in (figure.value, figure.low, figure.high)))
    doubt = find_doubt(search.evaluation.model, msgspec.structs.replace(best, throughput=other))
    assert unsure in doubt
    assert bool(unsure) == bool(doubt)


def test_a_search_that_ran_out_of_memory_again_and_again_says_so() -> None:
    """Such a device may be able to hold more than its share, so the search ends as unsure."""
    (case,) = (one for one in hard.cases("memory_bend", 17008) if one.mode == "free")
    found = trials.run(case.machine, case.ask, case.seed)
    assert not found.settled
    assert "ran out of memory" in found.why
    assert found.why.startswith(Stop.UNSURE.value)
