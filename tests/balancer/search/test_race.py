"""Step times in stairs: what a few points tell of them, and searches that end at their edges."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evener.balancer.search import split_stage
from evener.balancer.search.drive import simple
from evener.balancer.search.model.contention import slowed
from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.points import Point
from evener.balancer.search.model.stairs import stairs
from evener.balancer.search.model.step_time import Curve, fit
from evener.balancer.search.observations import Device
from evener.balancer.search.predictions import View
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Problem, Timed
from tests.support import machine_families, search_oracle
from tests.support.recording_prober import RecordingProber
from tests.support.search_machines import Bench, searched

ERROR = 0.002
MACHINES = 16
NEAR = 0.01  # of the best throughput


def stepped(fixed: float, slope: float, height: float, batch: int) -> float:
    """Seconds of a line rounded up to a multiple of a height."""
    return max(1, math.ceil((fixed + slope * batch) / height - 1e-9)) * height


def device(alone: list[Point], beside: list[Point]) -> Device:
    """A device that measured these points."""
    return Device(tuple(alone), (), tuple(beside), Memory(None), len(alone), "")


def seeded(seed: int, devices: int) -> Bench:
    """Devices of 6 to 18 stairs each, none like another."""
    chance = random.Random(f"stairs/{seed}/{devices}")
    drawn = []
    for _ in range(devices):
        slope, most = chance.uniform(0.15, 1.0), chance.randint(200, 2000)
        drawn.append((slope * chance.uniform(5, 80), slope, 0, most))
    heights = tuple((fixed + slope * most) / chance.uniform(6, 18) for fixed, slope, _, most in drawn)
    return Bench(tuple(drawn), 0.001 * chance.uniform(1, 10), stairs=heights)


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 40), st.floats(0.05, 1.0), st.floats(5, 14), st.integers(300, 2000), st.randoms())
def test_a_height_is_found_through_the_noise(
    fixed: float, slope: float, count: float, most: int, chance: random.Random
) -> None:
    """However the largest time is off, on which the guesses are built: the height, or a part of it."""
    height = (fixed + slope * most) / count
    points = []
    for batch in (8, 64, most // 3, most // 2, most):
        time = stepped(fixed, slope, height, batch)
        points.append((batch, time * (1 + max(-2.0, min(2.0, chance.gauss(0, 1))) * ERROR), ERROR))
    assume(len({round(time / height) for _, time, _ in points}) >= 3)
    found = stairs(tuple(points), convinced=True)
    assert found is not None
    assert found.height >= height * 0.99


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 40), st.floats(0.05, 1.0), st.floats(5, 14), st.integers(300, 2000))
def test_the_true_number_of_stairs_is_among_those_that_may_be(
    fixed: float, slope: float, count: float, most: int
) -> None:
    """At every batch, and it alone where a batch was measured."""
    height = (fixed + slope * most) / count
    measured = (8, 64, most // 3, most // 2, most)
    curve = fit((Point(b, stepped(fixed, slope, height, b), ERROR) for b in measured), stepped=True)
    assume(curve is not None and curve.stair and abs(curve.stair / height - 1) < 1e-3)
    assert curve is not None
    for batch in range(1, most, 7):
        if abs((fixed + slope * batch) / height % 1 - 0.5) > 0.5 - 1e-4:
            continue  # on an edge
        assert round(stepped(fixed, slope, height, batch) / height) in curve.levels(batch)
    for batch in measured:
        assert list(curve.levels(batch)) == [round(stepped(fixed, slope, height, batch) / height)]


def test_a_smooth_curve_has_no_stairs_to_count() -> None:
    assert not Curve((0.0, 1.0), (1.0, 2.0), 1.0).levels(10)


@settings(max_examples=60, deadline=None)
@given(st.floats(3, 40), st.floats(0.05, 1.0), st.floats(6, 14), st.integers(300, 2000), st.floats(0.2, 1.0))
def test_a_share_beyond_an_edge_is_not_taken_for_contention(
    fixed: float, slope: float, count: float, most: int, part: float
) -> None:
    """Another stair than was predicted moves the line under the stairs, and makes no other time slower."""
    height = (fixed + slope * most) / count
    share = max(1, round(part * most))
    alone = [Point(b, stepped(fixed, slope, height, b), ERROR) for b in (8, 64, most // 3, most // 2, most)]
    curve = fit(alone, stepped=True)
    assume(curve is not None and curve.stair and abs(curve.stair / height - 1) < 1e-3)
    one = device(alone, [Point(share, stepped(fixed, slope, height, share), ERROR)])
    assert slowed(one, curve) == one.alone


def test_contention_is_seen_in_stairs_too() -> None:
    """A share whose number of stairs is sure, and that took 20 % longer than so many."""
    alone = [Point(b, stepped(3.1, 0.043, 5.0, b), ERROR) for b in (8, 64, 400, 560, 990)]
    one = device(alone, [Point(400, 1.2 * stepped(3.1, 0.043, 5.0, 400), ERROR)])
    assert [p.seconds for p in slowed(one, fit(alone))] == pytest.approx([1.2 * p.seconds for p in alone], rel=0.01)


def test_a_knee_between_batches_is_no_sign_of_contention() -> None:
    """Where a curve has a knee that few points place, a share between two of them tells the shape, not a slow-down."""
    alone = [Point(8, 1.005, 0.005), Point(64, 1.002, 0.005), Point(2048, 9.816, 0.014), Point(2638, 13.132, 0.01)]
    curve = fit(alone)
    assert curve is not None
    assert curve.bent
    one = device(alone, [Point(480, 3.02, 0.006)])
    assert slowed(one, curve) == one.alone


def test_layouts_on_two_sides_of_an_edge_are_not_the_same() -> None:
    """Their shares differ by less than a measurement of a smooth curve tells."""
    bench = Bench(((4.0, 0.32, 0, 1135), (6.0, 0.97, 0, 900)), 0.018, stairs=(36.0, 88.0))
    search, _ = searched(bench, bench.problem(tolerance=0.0))
    view: View = search._known().view
    curve = view.beside[0]
    assert curve is not None
    assert curve.stair
    edge = curve.largest(5 * curve.stair, 2000)
    within, beyond = Layout("split", (edge, 10)), Layout("split", (edge + 1, 10))
    assert not view.same(within, beyond)
    assert view.same(within, Layout("split", (edge - 1, 10)))
    assert not view.same(within, Layout("split", (edge // 2, 10)))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_searches_end_near_the_edges(devices: int) -> None:
    """Nearly every machine is trained within 1 % of its best; more splits than elsewhere, but not many."""
    missed = []
    for seed in range(MACHINES):
        bench = seeded(seed, devices)
        search, seen = searched(bench, bench.problem(tolerance=0.0))
        best = search.best()
        assert best is not None
        missed.append(1 - bench.rate(best.layout.shares) / best_rate(bench))
        splits = [one for one in seen if one.probe.stage == "split"]
        assert len(splits) <= split_stage.MOST_OF_STAIRS
    assert sum(part <= NEAR for part in missed) >= 0.85 * MACHINES, missed


@pytest.mark.parametrize("devices", [2, 3])
def test_a_tolerance_costs_no_more_than_itself_at_the_edges(devices: int) -> None:
    """The smallest batch within it is often the fastest, too, and is raced as either."""
    missed = []
    for seed in range(MACHINES):
        bench = seeded(seed, devices)
        best = searched(bench, bench.problem(tolerance=0.02))[0].best()
        assert best is not None
        missed.append(1 - bench.rate(best.layout.shares) / best_rate(bench))
    assert sum(part <= 0.02 + NEAR for part in missed) >= 0.9 * MACHINES, missed


def test_the_fastest_prediction_races_though_its_batch_is_the_smallest_tolerable() -> None:
    """None of the splits keeps to all three edges; what they taught does."""
    devices = (
        (5.769, 1.0145, 0, 1307),
        (2.367, 0.24561, 0, 444),
        (1.835, 0.34254, 0, 1186),
        (119.053, 0.89246, 0, 159),
    )
    bench = Bench(devices, 0.01187, stairs=(71.046, 7.2513, 72.2737, 31.05176))
    best = searched(bench, bench.problem(tolerance=0.02))[0].best()
    assert best is not None
    assert bench.rate(best.layout.shares) >= 0.97 * best_rate(bench)


def best_rate(bench: Bench) -> float:
    """The most samples/s of one device or of all, by trying every finish time."""
    times = [[bench.own(i, share) for share in range(1, most + 1)] for i, (*_, most) in enumerate(bench.devices)]
    found = [share / time for alone in times for share, time in enumerate(alone, 1)]
    for finish in {time for alone in times for time in alone}:
        done = sorted((sum(time <= finish for time in alone) for alone in times), reverse=True)
        found += [sum(done[:k]) / (finish + bench.sync_seconds) for k in range(2, len(done) + 1) if done[k - 1]]
    return max(found)


def test_a_fixed_batch_gives_what_it_has_to_spare_to_those_in_doubt() -> None:
    """Of shares that are predicted to be as fast, each device's lies as far below its edge as the sum allows."""
    devices = ((2.653, 0.2594, 0, 479), (5.381, 0.1991, 0, 1775), (8.897, 0.7842, 0, 3755), (20.136, 0.574, 0, 1905))
    bench = Bench(devices, 0.0011, stairs=(9.584, 26.122, 175.536, 81.695))
    search, seen = searched(bench, bench.problem(tolerance=0.0, global_batch=1024))
    best = search.best()
    assert best is not None
    assert bench.step(best.layout.shares) == pytest.approx(least_step(bench, 1024), rel=1e-6)
    assert all(one.probe.layout.global_batch == 1024 for one in seen if one.probe.stage == "split")


def test_a_fixed_batch_finds_the_one_split_that_keeps_to_both_edges() -> None:
    """82 + 46 of 128: one sample more on either device takes another stair; each split halves what is not known."""
    devices = (
        (133.9956, 0.98557, 0, 321),
        (23.5182, 0.18343, 0, 747),
        (25.8306, 0.27201, 0, 3719),
        (8.0045, 0.6459, 0, 188),
    )
    bench = Bench(devices, 0.00255, stairs=(28.81372, 9.658333, 101.467806, 19.017999))
    best = searched(bench, bench.problem(tolerance=0.0, global_batch=128))[0].best()
    assert best is not None
    assert best.layout.shares == (0, 82, 0, 46)
    assert bench.step(best.layout.shares) == pytest.approx(least_step(bench, 128), rel=1e-6)


def least_step(bench: Bench, batch: int) -> float:
    """The shortest step of exactly so many samples on two devices or more."""
    times = [[bench.own(i, share) for share in range(1, most + 1)] for i, (*_, most) in enumerate(bench.devices)]
    finishes = sorted({time for alone in times for time in alone})
    return next(t for t in finishes if sum(sum(time <= t for time in alone) for alone in times) >= batch) + (
        bench.sync_seconds
    )


def test_one_device_alone_goes_on_to_the_edge_of_its_best_stair() -> None:
    """With nothing to split, the rounds that splits would have taken go to its own edges."""
    bench = Bench(((4.5, 0.32, 0, 1135),), stairs=(36.4,))
    search, seen = searched(bench, bench.problem(tolerance=0.0))
    best = search.best()
    assert best is not None
    assert bench.rate(best.layout.shares) >= (1 - NEAR) * best_rate(bench)
    assert any(one.probe.stage == "split" for one in seen)
    batches = [one.probe.layout.global_batch for one in seen if one.probe.stage == "split"]
    assert len(set(batches)) == len(batches), "none is measured twice"


def search_alone(seed: int) -> tuple[float, int]:
    """The regret of a search on one device with stairs, and how many batches it measured."""
    machine = machine_families.machine("stairs", 1, 0.002, seed)
    prober, search = RecordingProber(machine, seed), Search(Problem(1, (machine.usable_memory_bytes(0),), tolerance=0))
    simple(search, prober.measure)
    best = search.best()
    assert best is not None
    rate = machine.samples_per_second(best.layout.shares)
    solos = sum(one.probe.stage == "solo" for one in prober.seen)
    return 1 - rate / search_oracle.free(machine, 0.0).samples_per_second, solos


def test_a_knee_that_only_one_device_is_believed_to_have_is_seen_before_it_is_raced() -> None:
    """Four times look like a knee at 639 samples, with twice the samples/s of all that was measured: it is none."""
    regret, _ = search_alone(131)
    assert regret <= 0.01


def test_a_lone_device_whose_line_is_refuted_is_seen_once_more() -> None:
    """Times of 1, 1, 3 and 17 heights may be a matter of chance; one more is none."""
    regret, solos = search_alone(124)
    assert solos == 5
    assert regret <= 0.01


@pytest.mark.parametrize("devices", [1, 2])
def test_what_was_measured_to_be_faster_than_all_that_raced_races_too(devices: int) -> None:
    """Where everything is slow in the race, the fastest that was seen before it is among what is."""
    for seed in range(MACHINES):
        bench = seeded(seed, devices)
        search, seen = Search(bench.problem(tolerance=0.02)), list[Timed]()
        while probes := search.ask():
            for one in bench.measure(probes, 3.0 if probes[0].stage == "race" else 1.0):
                search.tell(one)
                seen += [one] if isinstance(one, Timed) else []
        before = [one for one in seen if one.probe.stage != "race"]
        fastest = max(one.samples_per_second for one in before)
        raced = {one.probe.layout for one in seen if one.probe.stage == "race"}
        assert any(one.probe.layout in raced for one in before if one.samples_per_second > 0.999 * fastest)


def test_what_a_device_did_at_rest_counts_for_its_stairs() -> None:
    """Its points alone and those with the others at rest show one stair, so all are read together."""
    bench = Bench(((4.5, 0.32, 0, 1135), (60.0, 9.0, 0, 40)), 0.5, stairs=(36.4, 100.0))
    search, seen = searched(bench, bench.problem(tolerance=0.0))
    rested = [one for one in seen if one.probe.stage == "split" and one.probe.layout.kind == "solo"]
    assert rested
    view = search._known().view
    curve = view.alone[0]
    assert curve is not None
    for one in rested:
        if isinstance(one, Timed) and one.probe.layout.shares[0]:
            assert curve.seconds(one.probe.layout.shares[0]) == pytest.approx(one.step_seconds, rel=0.01)


def test_singles_rise_with_their_batches() -> None:
    """The surest batch of one device is never believed to be faster than what was measured of it."""
    bench = seeded(3, 1)
    search, seen = searched(bench, bench.problem(tolerance=0.0))
    ran = sorted((one.probe.layout.global_batch, one.step_seconds) for one in seen if isinstance(one, Timed))
    assert all(a <= b * (1 + 1e-9) for (_, a), (_, b) in pairwise(ran))
    fastest = max(batch / seconds for batch, seconds in ran)
    best = search.best()
    assert best is not None
    assert best.throughput.value >= fastest * 0.998
