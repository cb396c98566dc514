"""What is learnt from few noisy points: shapes, memory, stairs, costs, and which devices are alike."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.points import Point
from evener.balancer.search.model.stairs import stairs
from evener.balancer.search.model.step_time import fit
from evener.balancer.search.model.sync_cost import costs

positive = st.floats(1e-4, 10.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), positive, st.floats(0, 0.05)), min_size=1, max_size=8),
    st.sampled_from([-0.6, 0.0, 1.0]),
    st.booleans(),
)
def test_every_fit_rises(points: list[tuple[int, float, float]], doubt: float, stepped: bool) -> None:
    """Whatever was measured, a larger batch is never believed to take less."""
    curve = fit((Point(*point) for point in points), doubt, stepped)
    assert curve is not None
    times = [curve.seconds(batch) for batch in range(1, 6000, 37)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    assert all(math.isfinite(time) and time >= 0 for time in times)


@given(positive, st.floats(1e-6, 1e-2), st.integers(300, 5000))
def test_a_straight_line_is_found(fixed: float, slope: float, far: int) -> None:
    """Three exact points of a line predict every other."""
    curve = fit(Point(b, fixed + slope * b, 0.001) for b in (8, 64, far))
    assert curve is not None
    assert curve.straight
    assert curve.seconds(far // 2) == pytest.approx(fixed + slope * (far // 2), rel=1e-3)


def test_a_knee_is_found() -> None:
    """Flat to 400 samples and straight after it: four points place the knee."""
    truth = {b: 0.02 * max(1.0, b / 400) for b in (8, 64, 1100, 2000)}
    curve = fit(Point(b, t, 0.002) for b, t in truth.items())
    assert curve is not None
    for batch in (200, 390, 500, 800, 1500):
        assert curve.seconds(batch) == pytest.approx(0.02 * max(1.0, batch / 400), rel=0.01)


def test_noise_is_not_taken_for_shape() -> None:
    """Points that scatter by their errors stay a straight line, and their mean is nearer than each of them."""
    rng = random.Random(5)
    off = []
    for _ in range(200):
        points = [Point(b, (10 + 0.2 * b) * (1 + rng.gauss(0, 0.01)), 0.01) for b in (8, 64, 500, 1000)]
        curve = fit(points)
        assert curve is not None
        off.append(abs(curve.seconds(700) / 150 - 1))
    assert sorted(off)[100] < 0.007


def test_stairs_are_found_and_their_edges_bounded() -> None:
    """Times that are multiples of 5 ms: the height is found, and the surest curve is never faster than the truth."""

    def truth(batch: int) -> float:
        return math.ceil((3.1 + 0.043 * batch) / 5 - 1e-9) * 5 / 1000

    points = [(b, truth(b), 0.001) for b in (8, 64, 400, 560, 990)]
    found = stairs(tuple(points), convinced=True)
    assert found is not None
    assert found.height == pytest.approx(0.005, rel=1e-3)
    surest = fit([Point(*p) for p in points], doubt=1.0)
    assert surest is not None
    assert all(surest.seconds(b) >= truth(b) * 0.998 for b in range(1, 990))
    assert surest.stair
    assert surest.largest(math.inf, 1003, 10) == 1000  # without a limit, no number of stairs is the last


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 20), st.floats(0.005, 0.1), st.floats(2, 12), st.sampled_from([-0.6, 0.0, 1.0]))
def test_curves_in_stairs_rise_however_they_are_doubted(
    fixed: float, slope: float, height: float, doubt: float
) -> None:
    """Hope and doubt bend the line under the stairs, but never downwards."""
    points = [(b, math.ceil((fixed + slope * b) / height) * height / 1000, 0.002) for b in (8, 64, 300, 450, 990)]
    curve = fit((Point(*p) for p in points), doubt, stepped=True)
    assert curve is not None
    times = [curve.seconds(batch) for batch in range(1, 2000, 7)]
    assert times == sorted(times)
    assert all(curve.largest(time, 5000) >= 0 for time in times)


def test_a_bend_is_not_taken_for_stairs() -> None:
    """A curve that is only bent has no step height."""
    points = [(b, 0.01 + 1.3e-5 * b**1.21, 0.001) for b in (8, 64, 317, 611, 1000)]
    assert stairs(tuple(points), convinced=False) is None


def test_a_straight_memory_line_is_predicted_to_the_sample_or_nearly() -> None:
    """Two small batches tell the largest one."""
    memory = Memory(1_000_000, ((8, 1000 + 8 * 300), (64, 1000 + 64 * 300)), ran=64)
    assert memory.next_guess(10**9) == pytest.approx((1_000_000 - 1000) / 300, rel=0.005)
    assert memory.next_guess(10**9) <= (1_000_000 - 1000) / 300
    assert memory.next_guess(500) == 500


@settings(max_examples=60, deadline=None)
@given(st.integers(70, 4000), st.floats(1.0, 1.9), st.floats(0.2, 0.9), st.booleans())
def test_the_retreat_from_out_of_memory_ends_near_the_edge(most: int, bend: float, at: float, known: bool) -> None:
    """Whatever the memory's shape, few probes end near the largest batch that fits, and few of them run out."""

    def used(batch: int) -> int:
        knee = int(at * most)
        return round(10_000 + 100 * min(batch, knee) + 100 * bend * max(0, batch - knee))

    limit = used(most) if known else None
    ran, failed, short = 64, None, 0
    points = [(8, used(8)), (64, used(64))] if known else []
    for _ in range(14):
        guess = Memory(limit, tuple(points), ran, failed, short).next_guess(10**6)
        if guess <= ran:
            break
        if guess <= most:
            ran = guess
            points = [*points, (guess, used(guess))] if known else points
        else:
            failed, short = guess, short + 1
    assert ran >= 0.9 * most
    if known and bend == 1.0:
        assert short == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(64, 4000), min_size=2, max_size=8, unique=True), st.integers(0, 200), st.randoms())
def test_what_an_allocator_rounds_is_not_taken_for_what_samples_take(
    batches: list[int], rounded: int, chance: random.Random
) -> None:
    """However near the batches that ran lie, the line is off by what their bytes are, and not by many times that."""
    points = tuple((batch, 10_000 + 100 * batch + chance.randint(0, rounded)) for batch in [8, *sorted(batches)])
    line = Memory(10**9, points, ran=max(batches)).line
    assert line is not None
    assert line[1] == pytest.approx(100, abs=rounded / (0.05 * max(batches)) + 1e-6)
    assert line[0] + line[1] * max(batches) == pytest.approx(dict(points)[max(batches)], abs=1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 50_000), st.integers(100, 500), st.integers(61_000, 300_000))
def test_what_a_split_holds_beside_the_samples_leaves_less_room(exchanged: int, share: int, limit: int) -> None:
    """Gradients that are exchanged take their bytes in splits, and none from what a device can do alone."""

    def used(batch: int) -> int:
        return 10_000 + 100 * batch

    points = tuple((batch, used(batch)) for batch in (8, 64, 500))
    memory = Memory(limit, points, ran=500, beside=((share, used(share) + exchanged),))
    assert memory.exchanged_bytes == exchanged
    assert used(memory.next_guess(10**6)) == pytest.approx(limit, rel=0.01)
    room = memory.room(10**6)
    assert room <= memory.next_guess(10**6)
    assert used(room) + exchanged <= limit or room == share
    assert room == share or used(room) + exchanged == pytest.approx(limit, rel=0.01)


@settings(max_examples=100, deadline=None)
@given(st.floats(1.1, 3.0), st.lists(st.integers(600, 3000), min_size=1, max_size=4))
def test_a_bend_of_memory_is_not_taken_for_what_a_split_holds(bend: float, shares: list[int]) -> None:
    """Splits of more samples than ran alone tell where the line goes on, and take no room from anybody."""

    def used(batch: int) -> int:
        return round(10_000 + 100 * min(batch, 500) + 100 * bend * max(0, batch - 500))

    points = tuple((batch, used(batch)) for batch in (8, 64, 500))
    memory = Memory(10**6, points, ran=max(shares), beside=tuple((share, used(share)) for share in sorted(set(shares))))
    assert memory.exchanged_bytes == 0
    assert memory.line is not None
    assert memory.line[0] + memory.line[1] * max(shares) == pytest.approx(used(max(shares)), abs=2)
    assert memory.room(10**6) == memory.next_guess(10**6)


def test_safe_is_what_ran_or_little_more() -> None:
    """A batch is safe if it ran, or is a quarter larger at most, far below the limit, and nothing failed."""
    points = ((8, 1800), (64, 7400), (200, 21_000))
    assert Memory(1_000_000, points, 200).safe(10**6) == 250
    assert Memory(22_000, points, 200).safe(10**6) == 200
    assert Memory(1_000_000, points, 200, failed=300, failures=1).safe(10**6) == 200


def test_costs_between_and_beyond_what_was_measured() -> None:
    """One known cost is believed to shrink with fewer devices; two make a line."""
    assert costs([], 3) == (0.0, 0.0, 0.0, 0.0)
    one = costs([(4, 0.3, 0.01)], 8)
    assert one[4] == pytest.approx(0.3)
    assert one[2] == pytest.approx(0.1)
    assert one[8] == pytest.approx(0.3)
    two = costs([(4, 0.3, 0.01), (2, 0.2, 0.01)], 6)
    assert two[6] == pytest.approx(0.4)
    assert two[1] == 0.0
