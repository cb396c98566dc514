"""The smallest global batch within the tolerance: what a measurement may say against it, and who stands in for it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings

from evener.balancer.search.predictions import INSURED
from evener.balancer.search.search import Search
from evener.balancer.types import Layout, Problem
from evener.devices.simulated.machine import Machine, SimulatedDevice, Sync
from tests.support import search_oracle
from tests.support.recording_prober import RecordingProber
from tests.support.search_machines import Bench, benches, searched

BENCH = Bench(((30.0, 0.2, 0, 4000), (40.0, 0.3, 0, 4000)), 0.004)


def searched_with(slow: Layout | None, factor: float) -> Search:
    """A search of BENCH in which one layout's steps take longer than they should."""
    search = Search(BENCH.problem(tolerance=0.02))
    return search.run(
        lambda probes: BENCH.measure(probes, factor if any(probe.layout == slow for probe in probes) else 1.0)
    )


def splits(search: Search) -> list[Layout]:
    """The uneven splits of the race, the smallest first."""
    found = [one.candidate.layout for one in search.ranking() if one.candidate.family == "split"]
    return sorted(found, key=lambda layout: layout.global_batch)


def test_the_smallest_batch_within_the_tolerance_is_taken() -> None:
    """It misses what the tolerance allows, and the fastest layout has a much larger batch."""
    search = searched_with(None, 1.0)
    best, (rate, batch) = search.best(), BENCH.best()
    assert best is not None
    smallest, insured, *_ = splits(search)
    assert best.layout == smallest
    assert 0.978 <= BENCH.rate(smallest) / rate <= 0.985
    assert batch > 1.3 * smallest.global_batch
    assert smallest.global_batch < insured.global_batch < 1.2 * smallest.global_batch


@pytest.mark.parametrize("factor", [1.007, 1.012, 1.05])
def test_a_measurement_against_the_smallest_batch_does_not_end_at_the_fastest(factor: float) -> None:
    """A layout a little inside the tolerance races too, and is taken before the fastest, of a much larger batch."""
    smallest, *_ = splits(searched_with(None, 1.0))
    best = searched_with(smallest, factor).best()
    assert best is not None
    assert smallest.global_batch < best.layout.global_batch <= 1.25 * smallest.global_batch
    assert BENCH.rate(best.layout) >= 0.978 * BENCH.best()[0]


def test_a_miss_that_no_measurement_can_tell_is_forgiven() -> None:
    """0.3 % beyond the tolerance is less than the noise between two probes; the batch stays the smallest."""
    smallest, *_ = splits(searched_with(None, 1.0))
    best = searched_with(smallest, 1.003).best()
    assert best is not None
    assert best.layout == smallest


@settings(max_examples=20, deadline=None)
@given(benches(fewest=2, most=3))
def test_it_is_not_smaller_than_what_the_whole_tolerance_allows(bench: Bench) -> None:
    """The less that may be missed, the larger the batch; each misses no more than it may."""
    search, _ = searched(bench, bench.problem(tolerance=0.02))
    found = search._reading.predictions
    if found.tolerable and found.insured:
        fastest = max(one.samples_per_second for one in (found.fastest_split, found.fastest_single) if one)
        assert found.insured.global_batch >= found.tolerable.global_batch
        assert found.tolerable.samples_per_second >= fastest * (1 - 0.02 - 1e-6)
        assert found.insured.samples_per_second >= fastest * (1 - 0.02 * INSURED - 1e-6)


def test_batches_are_not_doubled_for_a_gain_that_the_tolerance_leaves() -> None:
    """Sums take 4 ms: beyond 7,000 rows each doubling gains less than 1 %. Without a tolerance all of it is wanted."""
    far = Bench(((2.0, 0.12, 0, 16_000), (2.0, 0.12, 0, 16_000)), 0.004)
    largest, explored = {}, 0
    for tolerance in (0.0, 0.02):
        search, seen = searched(far, far.problem(tolerance=tolerance))
        batches = [one.probe.layout.global_batch for one in seen if one.probe.layout.kind == "split"]
        largest[tolerance] = max(batches)
        explored = sum(one.probe.stage == "split" for one in seen)
        best = search.best()
        assert best is not None
        assert far.rate(best.layout) >= (1 - tolerance - 0.005) * far.best()[0]
    assert largest[0.0] > 30_000
    assert largest[0.02] < 10_000
    assert explored == 2


@pytest.mark.parametrize("seed", range(4))
def test_noise_that_moves_the_smallest_batch_a_little_has_no_split_of_its_own(seed: int) -> None:
    """Of the predicted smallest batches within the tolerance, exploration measures none within 10 % of another."""
    far = Bench(((2.0, 0.12, 0, 2500), (2.0, 0.12, 0, 2500)), 0.004)
    chance = random.Random(seed)
    search = Search(far.problem(tolerance=0.02))
    batches: list[int] = []
    while probes := search.ask():
        for probe in probes:
            search.tell(far.measure([probe], chance.gauss(1, 0.03))[0])
            if probe.stage == "split":
                batches.append(probe.layout.global_batch)
    fastest = max(batches)
    smaller = sorted(batch for batch in batches if batch < 0.9 * fastest)
    assert all(b > 1.1 * a for a, b in itertools.pairwise(smaller))


@pytest.mark.parametrize("noise", [0.003, 0.03])
@pytest.mark.parametrize("speed", [1.0, 0.6])
def test_the_smallest_batch_is_measured_without_a_fastest_of_many_times_its_size(speed: float, noise: float) -> None:
    """On CPU slices every larger batch gains a little; steps of seconds would be measured to find out how little."""
    devices = tuple(
        SimulatedDevice(
            name="slice",
            memory_mib=6000.0,
            memory_base_mib=600.0,
            memory_per_sample_mib=0.03,
            noise=noise,
            curve=((1, 2.1 / factor), (64000, 2.0 + 7040.0 / factor)),
        )
        for factor in (1.0, speed)
    )
    machine = Machine(devices, Sync(25.0, 0.0))
    memory = tuple(machine.usable_memory_bytes(i) for i in range(2))
    prober, search = RecordingProber(machine, seed=1), Search(Problem(2, memory))
    best = search.run(prober.measure).best()
    assert best is not None
    splits = [seen.probe.layout for seen in prober.seen if seen.probe.stage == "split"]
    assert len(splits) <= 3
    assert max(layout.global_batch for layout in splits) <= 1.1 * best.layout.global_batch
    rate = machine.samples_per_second(best.layout.shares)
    assert rate >= 0.97 * search_oracle.free(machine, 0.02).samples_per_second
