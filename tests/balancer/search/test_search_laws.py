"""The laws of ask and tell, on random machines."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.families import is_even
from evener.balancer.jobs import check_problem
from evener.balancer.search.search import Search
from evener.balancer.types import (
    Facts,
    Failed,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Stage,
    Timed,
)
from evener.errors import RequestError
from tests.support.recording_prober import run_search
from tests.support.search_machines import Bench, benches, searched


@settings(max_examples=20, deadline=None)
@given(benches(), st.booleans())
def test_asking_twice_is_asking_once(bench: Bench, known: bool) -> None:
    """`ask` changes nothing."""
    search = Search(bench.problem(known))
    while probes := search.ask():
        assert search.ask() == probes
        assert "Races 1 layouts" not in search.belief().doing
        assert search.ask() == probes
        for one in bench.measure(probes):
            search.tell(one)


@settings(max_examples=20, deadline=None)
@given(benches(), st.randoms(use_true_random=False))
def test_the_order_of_telling_and_repeats_do_not_matter(bench: Bench, rng: random.Random) -> None:
    """A search is a function of the set of observations."""
    search, seen = searched(bench, bench.problem())
    shuffled = [*seen, *rng.sample(seen, len(seen) // 2)]
    rng.shuffle(shuffled)
    other = Search(bench.problem())
    for one in shuffled:
        other.tell(one)
    assert other.best() == search.best()
    assert other.evaluation.results() == search.evaluation.results()
    assert other.ask() == search.ask() == ()
    assert other.why_stopped() == search.why_stopped()


@settings(max_examples=20, deadline=None)
@given(benches(), st.data())
def test_every_asking_can_be_taken_up_again(bench: Bench, data: st.DataObject) -> None:
    """A replayed journal requests what the first run requested next, so the plan is the same.

    The probes left of an interrupted request are measured first by the resumed session.
    """
    search, answers = Search(bench.problem()), list[list[Observation]]()
    while probes := search.ask():
        answers.append(bench.measure(probes))
        for one in answers[-1]:
            search.tell(one)
    resumed = Search(bench.problem())
    for one in chain(*answers[: data.draw(st.integers(0, len(answers)))]):
        resumed.tell(one)
    run_search(resumed, bench.measure)
    assert resumed.best() == search.best()


@settings(max_examples=15, deadline=None)
@given(benches(), st.sampled_from([0.25, 4.0]))
def test_scaling_all_times_keeps_the_shares(bench: Bench, scale: float) -> None:
    """Only the devices' relative speeds count."""
    search, _ = searched(bench, bench.problem(tolerance=0.0))
    scaled = Bench(
        tuple(
            (fixed * scale, slope * scale, knee, most) for fixed, slope, knee, most in bench.devices
        ),
        bench.sync_seconds * scale,
    )
    other, _ = searched(scaled, bench.problem(tolerance=0.0))
    best, same = search.best(), other.best()
    assert best is not None
    assert same is not None
    assert bench.rate(same.layout) == pytest.approx(bench.rate(best.layout), rel=0.01)


@settings(max_examples=15, deadline=None)
@given(benches(fewest=2), st.randoms(use_true_random=False))
def test_permuting_the_devices_permutes_the_answer(bench: Bench, rng: random.Random) -> None:
    """A device's position in the request doesn't change how fast the chosen layout is."""
    order = list(range(len(bench.devices)))
    rng.shuffle(order)
    turned = Bench(tuple(bench.devices[i] for i in order), bench.sync_seconds)
    search, _ = searched(bench, bench.problem(tolerance=0.0))
    other, _ = searched(turned, turned.problem(tolerance=0.0))
    best, same = search.best(), other.best()
    assert best is not None
    assert same is not None
    assert turned.rate(same.layout) == pytest.approx(bench.rate(best.layout), rel=0.01)


@settings(max_examples=30, deadline=None)
@given(benches(), st.data())
def test_layouts_keep_to_the_request(bench: Bench, data: st.DataObject) -> None:
    """Shares are multiples of the quantum, sum to a fixed batch and stay below the limits.

    The race never runs out of memory.
    """
    quantum = data.draw(st.sampled_from([1, 1, 8]))
    count = len(bench.devices)
    options: dict[str, Any] = {"multiple_of": quantum}
    kind = data.draw(st.sampled_from(["free", "fixed", "capped"]))
    batch = data.draw(st.integers(count, 300)) * quantum
    if kind == "fixed":
        options["global_batch"] = batch
    elif kind == "capped":
        options["max_global_batch"] = batch
    if data.draw(st.booleans()):
        options["largest_share"] = data.draw(st.integers(quantum, 400))
    search, seen = searched(bench, bench.problem(**options))
    for one in seen:
        layout = one.probe.layout
        assert all(share % quantum == 0 for share in layout.shares)
        assert max(layout.pass_rows) <= int(str(options.get("largest_share", 10**9)))
        assert not (one.probe.stage == Stage.RACE and isinstance(one, OutOfMemory))
        if kind == "capped":
            assert layout.global_batch <= batch
        if kind == "fixed" and one.probe.stage == Stage.SPLIT:
            assert layout.global_batch == batch
    best = search.best()
    if best is not None and kind == "fixed":
        assert best.layout.global_batch == batch


@settings(max_examples=20, deadline=None)
@given(benches(fewest=2, most=5))
def test_never_worse_than_the_even_split_or_one_device(bench: Bench) -> None:
    """The chosen layout is never slower than the rivals it was measured against."""
    search, _ = searched(bench, bench.problem(tolerance=0.0))
    best, lone, everyone = (
        search.best(),
        search.evaluation.best_single(),
        tuple(range(len(bench.devices))),
    )
    even = (
        one
        for one in search.evaluation.results()
        if is_even(one.layout, 1) and one.layout.active == everyone
    )
    assert best is not None
    for rival in (next(even, None), lone):
        if rival is not None:
            assert bench.rate(best.layout) >= 0.995 * bench.rate(rival.layout)


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=True), st.integers(1, 4))
def test_it_ends_whatever_observations_it_gets(chance: random.Random, count: int) -> None:
    """With random outcomes, failures and never enough memory, the search ends with a reason."""
    search = Search(Problem(count, (None,) * count))
    for _ in range(400):
        probes = search.ask()
        if not probes:
            break
        for probe in probes:
            search.tell(_anything(chance, probe))
    else:
        raise AssertionError("the search does not end")
    assert search.why_stopped()


def test_a_device_with_nothing_left_to_try_goes_no_further() -> None:
    """The second of three devices is so slow that none of its batches ends with the others' best
    one.
    """
    search, steps = (
        Search(Problem(3, (None,) * 3)),
        iter([1.0, 8.0, 0.03125, 0.125, 0.125, 0.125, *[2.0] * 1000]),
    )
    while probes := search.ask():
        for probe in probes:
            step, nothing = next(steps), (None,) * 3
            search.tell(Timed(probe, step, step * 0.9, step * 1.1, 5, nothing, nothing, step, 1.0))
    assert search.why_stopped()


def _anything(chance: random.Random, probe: Probe) -> Observation:
    active = probe.layout.active
    outcome = chance.choice(["timed", "timed", "timed", "full", "failed"])
    if outcome == "full":
        return OutOfMemory(probe, chance.choice([(), active[:1]]), "full", 1.0)
    if outcome == "failed":
        return Failed(probe, "exit", "it ended", chance.choice([(), active[:1]]), 1.0)
    step = chance.choice([1e-4, 10.0, 10 ** chance.uniform(-4, 1)])
    nothing = (None,) * len(probe.layout.shares)
    return Timed(probe, step, step * 0.9, step * 1.1, 5, nothing, nothing, step, 1.0)


def test_out_of_memory_everywhere_names_each_smallest_failure() -> None:
    """If no batch runs, there is no plan, and the reason names every device."""
    bench = Bench(((1.0, 1.0, 0, 0), (1.0, 1.0, 0, 0)))
    search, _ = searched(bench, bench.problem(labels=("GPU:0", "GPU:3")))
    assert search.best() is None
    why = search.why_stopped() or ""
    assert "GPU:0: out of memory at batch 1" in why
    assert "GPU:3: out of memory at batch 1" in why


def test_identical_devices_get_the_even_split() -> None:
    """This is the negative control: there is nothing to gain."""
    bench = Bench(((20.0, 0.5, 0, 700),) * 5, 0.004)
    for options in ({"global_batch": 512}, {"global_batch": 513}, {"tolerance": 0.0}, {}):
        search, _ = searched(bench, bench.problem(**options))
        best = search.best()
        assert best is not None
        assert max(best.layout.shares) - min(best.layout.shares) <= 1


def test_a_device_that_keeps_failing_is_left_out() -> None:
    """It is retried once. Then the others train without it, and the search says why."""
    bench = Bench(((20.0, 0.5, 0, 500), (22.0, 0.6, 0, 500), (25.0, 0.7, 0, 500)))
    search, tries = Search(bench.problem()), 0
    while probes := search.ask():
        for probe in probes:
            if probe.layout.shares[1]:
                tries += 1
                search.tell(Failed(probe, "exit", "the child died", (1,), 1.0))
            else:
                search.tell(bench.measure([probe])[0])
    best = search.best()
    assert tries == 2
    assert best is not None
    assert best.layout.active == (0, 2)


def test_the_budget_is_kept() -> None:
    """The probes' total time stays within the budget, and a shorter budget gives shorter probes."""
    bench = Bench(((20.0, 0.5, 0, 500), (22.0, 0.6, 0, 900)))
    for budget in (3.0, 6.0, 30.0):
        search, _ = searched(bench, bench.problem(budget_seconds=budget))
        assert search._seen.spent_seconds() <= budget
        assert search.best() is not None
    (probe, *_) = Search(bench.problem(budget_seconds=2.0)).ask()
    assert probe.seconds <= 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch": 2},
        {"global_batch": -5},
        {"largest_share": 0},
        {"memory_bytes": (0, 1, 1)},
        {"devices": 0, "memory_bytes": ()},
    ],
)
def test_bad_requests_are_named(options: dict[str, object]) -> None:
    """A request without a solution is refused before anything is measured, with a remedy."""
    problem = msgspec.structs.replace(Problem(3, (None, None, None)), **options)
    with pytest.raises(RequestError) as caught:
        check_problem(problem)
    assert caught.value.remedy


def test_a_budget_of_half_a_second_is_one() -> None:
    assert Search(Problem(1, (None,), budget_seconds=0.5)).ask()


@settings(max_examples=30, deadline=None)
@given(benches(), st.integers(16, 400), st.sampled_from([1, 4]))
def test_a_free_batch_leaves_20_steps_once_the_rows_of_the_data_are_reported(
    bench: Bench, rows: int, quantum: int
) -> None:
    """The first child reports the number of rows before its first observation."""
    search = Search(bench.problem(multiple_of=quantum))
    first, most = search.ask(), max(rows // 20, quantum * len(bench.devices), 8)
    search.learn_data(Facts(rows=rows))
    probes, seen = first, 0
    while probes:
        for one in bench.measure(probes):
            search.tell(one)
            seen += 1
        assert seen < 200, "the search does not end"
        probes = search.ask()
        assert all(one.layout.global_batch <= most for one in probes)


@pytest.mark.parametrize(
    "asked", [Problem(1, (None,), max_global_batch=500), Problem(1, (None,), global_batch=500)]
)
def test_a_requested_batch_may_be_larger_than_the_data(asked: Problem) -> None:
    """The plan warns of it."""
    search = Search(asked)
    search.learn_data(Facts(rows=100))
    assert search.problem == asked
