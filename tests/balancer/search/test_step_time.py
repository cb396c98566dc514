"""Curves from few noisy points, the cost of synchronization, and how a split slows its devices."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.balancer.search.machine_model import fit_sync_costs
from evener.balancer.search.model import step_time
from evener.balancer.search.model.evidence import DeviceEvidence, group_devices
from evener.balancer.search.model.lower_bound import lower_bound_curve
from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.step_time import Point, fit_curve, merge_points
from tests.support import recorded_machines

positive = st.floats(1e-4, 10.0)


def device(alone: list[Point], in_splits: tuple[Point, ...] = (), lost: str = "") -> DeviceEvidence:
    """Return a device with these points."""
    return DeviceEvidence(tuple(alone), (), in_splits, Memory(None), len(alone), lost)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), positive, st.floats(0, 0.05)), min_size=1, max_size=8)
)
def test_every_fit_rises(points: list[tuple[int, float, float]]) -> None:
    """Water-filling needs rising curves. If times fall, a curve stays level."""
    curve = fit_curve(Point(*point) for point in points)
    assert curve is not None
    times = [curve.seconds(batch) for batch in range(1, 6000, 37)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    assert all(math.isfinite(time) and time >= 0 for time in times)


def test_without_points_there_is_no_curve() -> None:
    assert fit_curve(()) is None


@given(positive, st.floats(1e-6, 1e-2), st.integers(300, 5000))
def test_a_straight_line_is_found(fixed: float, slope: float, far: int) -> None:
    """Three exact points of a line predict every other point."""
    curve = fit_curve(Point(b, fixed + slope * b, 0.001) for b in (8, 64, far))
    assert curve is not None
    assert curve.simple
    assert not curve.bent
    for batch in (1, 30, far // 2, 2 * far):
        assert curve.seconds(batch) == pytest.approx(fixed + slope * batch, rel=1e-3)


def test_one_point_is_all_slope() -> None:
    """Nothing is known about a fixed cost, so it doesn't limit the next batch."""
    curve = fit_curve([Point(8, 0.04, 0.001)])
    assert curve is not None
    assert curve.seconds(16) == pytest.approx(0.08)


def test_a_knee_is_found() -> None:
    """Four points determine a knee: time is level up to 400 samples and straight after it."""
    truth = {b: 0.02 * max(1.0, b / 400) for b in (8, 64, 1100, 2000)}
    curve = fit_curve(Point(b, t, 0.002) for b, t in truth.items())
    assert curve is not None
    assert curve.simple
    assert curve.flat
    for batch in (200, 390, 500, 800, 1500, 4000):
        assert curve.seconds(batch) == pytest.approx(0.02 * max(1.0, batch / 400), rel=0.01)


def test_a_knee_with_one_point_behind_it_lies_at_the_last_flat_one() -> None:
    """Any place from 64 to 1000 is possible.

    The last is the steepest, and predicts the most for the batches before it.
    """
    curve = fit_curve(Point(b, t, 0.001) for b, t in ((8, 0.02), (64, 0.02), (1000, 0.05)))
    assert curve is not None
    assert curve.seconds(64) == pytest.approx(0.02)
    assert curve.seconds(532) == pytest.approx(0.035)
    assert curve.seconds(1000) == pytest.approx(0.05)


def test_a_bend_goes_through_its_points_and_keeps_its_factor_beyond_them() -> None:
    """0.01 + 1.3e-5 * b^1.21 isn't a simple shape.

    Exact points are met, and those between nearly.
    """
    batches = (8, 64, 317, 611, 1000)
    curve = fit_curve(Point(b, 0.01 + 1.3e-5 * b**1.21, 0.0005) for b in batches)
    assert curve is not None
    assert not curve.simple
    assert curve.bent
    for batch in (*batches, 480, 800):
        assert curve.seconds(batch) == pytest.approx(0.01 + 1.3e-5 * batch**1.21, rel=0.02)
    line, _ = step_time._simplest_curve(
        [Point(b, 0.01 + 1.3e-5 * b**1.21, 0.0005) for b in batches]
    )
    factor = curve.seconds(1000) / line.seconds(1000)
    assert factor > 1.005
    assert [curve.seconds(b) for b in (1500, 3000)] == pytest.approx(
        [factor * line.seconds(b) for b in (1500, 3000)]
    )


def test_noise_is_not_taken_for_shape() -> None:
    """Points that scatter by their errors stay a straight line, which is nearer to their mean than
    each of them.
    """
    rng = random.Random(5)
    off = []
    for _ in range(200):
        points = [
            Point(b, (10 + 0.2 * b) * (1 + rng.gauss(0, 0.01)), 0.01) for b in (8, 64, 500, 1000)
        ]
        curve = fit_curve(points)
        assert curve is not None
        off.append(abs(curve.seconds(700) / 150 - 1))
    assert sorted(off)[100] < 0.007


def test_fewer_rows_than_a_faster_batch_count_as_what_that_takes() -> None:
    """A recorded GPU took 7.39 ms for 128 rows and 7.08 ms for 256, so 256 rows are possible in
    7.08 ms.
    """
    curve = fit_curve(
        Point(b, t / 1000, 0.002)
        for b, t in ((8, 6.9), (64, 7.3), (128, 7.39), (256, 7.08), (512, 9.0))
    )
    assert curve is not None
    assert curve.seconds(128) == curve.seconds(256) == pytest.approx(0.00708, rel=0.01)
    assert curve.largest(0.0071, 512, 1) >= 256
    assert curve.seconds(512) == pytest.approx(0.009, rel=0.03)


def test_points_of_nearly_one_batch_are_averaged_by_their_errors() -> None:
    """100 and 101 samples count as one batch.

    The more precise point has more weight, and the mean is more precise than both.
    """
    (merged,) = merge_points([Point(100, 1.0, 0.01), Point(101, 1.2, 0.1)])
    assert merged.batch in (100, 101)
    assert merged.seconds == pytest.approx(1.0, rel=0.02)
    assert merged.error < 0.01
    assert len(merge_points([Point(100, 1.0, 0.01), Point(103, 1.3, 0.1)])) == 2
    assert len(merge_points([Point(128, 1.0, 0.002), Point(129, 1.4, 0.002)])) == 2, (
        "a stair lies between them"
    )


def test_merged_points_have_batches_of_their_own() -> None:
    """A device whose speed varies has different times for one batch.

    Some are like those of a near batch.
    """
    points = [
        Point(64, 0.2, 0.002),
        Point(500, 1.0, 0.02),
        Point(505, 1.01, 0.001),
        Point(505, 1.4, 0.001),
    ]
    merged = [point.batch for point in merge_points(points)]
    assert merged == sorted(set(merged))
    curve = fit_curve(points)
    assert curve is not None
    assert lower_bound_curve(points, curve).seconds(500) > 0


@pytest.mark.parametrize(("error", "level"), [(0.03, True), (0.003, False)])
def test_two_points_may_be_level_if_noise_explains_their_rise(error: float, level: bool) -> None:
    """9.40 s and 9.93 s differ by less than the errors of two lone steps, but not of two probes."""
    points = [Point(8, 9.40, error), Point(16, 9.93, error)]
    curve = fit_curve(points)
    assert curve is not None
    most = lower_bound_curve(points, curve).seconds(400)
    assert most == (pytest.approx(9.67, abs=0.1) if level else curve.seconds(400))


@given(
    st.sampled_from([8, 16, 64, 100, 128, 300]),
    st.floats(0.0, 50.0),
    st.floats(2.0, 30.0),
    st.integers(0, 60),
)
def test_plateaus_are_read_from_a_few_batches(
    width: int, base: float, rise: float, shift: int
) -> None:
    """The curve meets every point, and tiled plateaus end where they do, whatever their width and
    start.
    """
    tiles = shift < 30 and width & (width - 1) == 0
    shift = 0 if tiles else shift

    def seconds(batch: int) -> float:
        return (base + rise * math.ceil((batch + shift) / width)) / 1000

    batches = sorted(
        {2, 2 + width // 4, width, 2 * width - 1, 3 * width - 1, 3 * width + 2, 6 * width + 1}
    )
    points = [Point(batch, seconds(batch), 0.001) for batch in batches]
    curve = fit_curve(points)
    assert curve is not None
    for batch in batches:
        assert curve.seconds(batch) == pytest.approx(seconds(batch), rel=0.05)
    if tiles and curve.simple and not curve.flat:
        assert all(
            curve.seconds(n * width) == pytest.approx(seconds(n * width), rel=0.05)
            for n in range(1, 9)
        )


def test_waves_of_64_samples_are_seen_in_times_of_others() -> None:
    """Two of a device's times are level, two are 50.2 ms higher, so 128 samples end the second
    wave.

    The measured points show this, but not that there is a third wave, which is only an optimistic
    assumption.
    """
    times = {4: 75.9, 32: 75.9, 93: 126.2, 128: 126.1}
    points = [Point(batch, time / 1000, 0.002) for batch, time in times.items()]
    curve = fit_curve(points)
    assert curve is not None
    assert curve.largest(0.080, 1000, 1) == 64
    assert curve.largest(0.1262, 1000, 1) == 128
    assert curve.seconds(129) < 0.13
    assert lower_bound_curve(points, curve).seconds(129) == pytest.approx(0.1764, rel=0.01)


def test_two_small_times_far_below_a_line_are_no_stair() -> None:
    """1.3 and 2.5 ms differ by a little of the next rise, and by half of themselves."""
    times = {8: 1.275, 64: 2.495, 933: 33.16, 1803: 65.25}
    curve = fit_curve(Point(batch, time / 1000, 0.0005) for batch, time in times.items())
    assert curve is not None
    assert curve.seconds(64) == pytest.approx(0.002495, rel=0.05)
    assert curve.seconds(400) > 0.010


def test_costs_between_and_beyond_the_splits_that_ran() -> None:
    """One cost is assumed to shrink with fewer devices; two costs make a line."""
    assert fit_sync_costs([], 3) == (0.0, 0.0, 0.0, 0.0)
    one = fit_sync_costs([(4, 0.3, 0.01)], 8)
    assert one[4] == pytest.approx(0.3)
    assert one[2] == pytest.approx(0.1)
    assert one[8] == pytest.approx(0.3)
    assert one[1] == 0.0
    two = fit_sync_costs([(4, 0.3, 0.01), (2, 0.2, 0.01)], 6)
    assert two[6] == pytest.approx(0.4)
    assert two[1] == 0.0


def test_costs_of_one_number_of_devices_are_averaged_and_never_negative() -> None:
    """The more precise sample has more weight. A step quicker than its slowest device is noise."""
    assert fit_sync_costs([(2, 0.2, 0.01), (2, 0.3, 0.1)], 2)[2] == pytest.approx(0.201, abs=1e-3)
    assert fit_sync_costs([(2, -0.1, 0.01)], 2) == (0.0, 0.0, 0.0)


def line(factor: float = 1.0, error: float = 0.002) -> list[Point]:
    """Return three batches of one straight curve, slower by a factor."""
    return [Point(b, factor * (0.01 + 1e-4 * b), error) for b in (8, 64, 400)]


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        ([device(line()), device(line(1.001)), device(line(1.2))], [[0, 1], [2]]),
        ([device(line(1.2)), device(line()), device(line(1.001))], [[0], [1, 2]]),
        ([device(line(1.0, 0.05)), device(line(1.03, 0.05))], [[0, 1]]),
        ([device(line()), device(line(), lost="gone")], [[0], [1]]),
        ([device(line()), device(line()[:1])], [[0], [1]]),
        ([device(line()), device([*line()[:2], Point(400, 0.055, 0.002)])], [[0], [1]]),
    ],
)
def test_devices_that_noise_tells_apart_share_no_curve(
    devices: list[DeviceEvidence], groups: list[list[int]]
) -> None:
    """Each has its own group: its largest batch is 10 % slower, it has one common batch, or it is
    lost.
    """
    assert sorted(group_devices(devices)) == groups


def test_parts_of_equal_devices_share_no_curve() -> None:
    """One H200 is whole and one has 60 %; a busy host made the points rough.

    Noise could explain a difference of a third.
    """
    points = [
        [Point(8, 0.059, 0.036), Point(64, 0.133, 0.06)],
        [Point(8, 0.063, 0.044), Point(64, 0.175, 0.071)],
    ]
    devices = [device(each) for each in points]
    assert sorted(group_devices(devices)) == [[0, 1]]
    assert sorted(group_devices(devices, (0, 1))) == [[0], [1]]
    records = recorded_machines.records()
    whole, part = (
        records[f"h200x2-torch_{name}"].header for name in ("mnist", "llama-60percent-192")
    )
    assert (whole.job.problem.limits, part.job.problem.limits) == ((0, 0), (0, 1))


def test_of_several_ratios_the_surest_decides() -> None:
    """Two rough batches 5 % apart don't contradict a precise third one, nor do they hide its
    difference.
    """
    rough = [Point(b, 0.01 + 1e-4 * b, 0.05) for b in (8, 64)]
    slower = [Point(p.batch, 1.05 * p.seconds, p.error) for p in rough]
    sure = Point(400, 0.05, 0.001)
    assert sorted(group_devices([device([*rough, sure]), device([*slower, sure])])) == [[0, 1]]
    apart = Point(400, 0.05 * 1.0055, 0.001)
    assert sorted(group_devices([device([*rough, sure]), device([*rough, apart])])) == [[0], [1]]


def test_a_device_that_takes_longer_for_fewer_rows_shares_no_curve() -> None:
    """Single steps of seconds are known to 3 %, and two small batches are equally fast.

    One device takes 11.8 s for 73 rows, the other 6.7 s for 80. Noise may explain 8 % of that.
    """
    small = [Point(8, 6.12, 0.03), Point(16, 6.31, 0.03)]
    slower = [Point(8, 6.56, 0.03), Point(16, 6.56, 0.03), Point(73, 11.82, 0.03)]
    quick = device([*small, Point(80, 6.7, 0.03)])
    assert sorted(group_devices([quick, device(slower)])) == [[0], [1]]
    assert sorted(group_devices([device(slower), quick])) == [[0], [1]]
    noise = device([*slower[:2], Point(73, 7.2, 0.03)])
    assert sorted(group_devices([quick, noise])) == [[0, 1]]
    steep = device([*small, Point(200, 20.0, 0.03)])
    assert sorted(group_devices([quick, steep])) == [[0, 1]], "more rows may take any longer"
    few_rows_more = device([*small, Point(83, 13.4, 0.03)])
    assert sorted(group_devices([quick, few_rows_more])) == [[0], [1]], "3 rows can't double a step"


def test_a_bend_is_shrunk_by_the_part_that_noise_explains() -> None:
    """Points are 20 % off with an error of 10 %.

    A quarter of their squares is noise, and so is a quarter of each bend.
    """
    bends = step_time._bend_factors(
        [Point(10, 12.0, 0.1), Point(20, 16.0, 0.1)], step_time._straight_curve(0.0, 1.0)
    )
    assert bends == [(10, pytest.approx(1.15)), (20, pytest.approx(0.85))]
