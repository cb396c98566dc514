"""Water-filling compared with brute force.

Every share vector is tried for few samples, every subset for more devices.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.shares import waterfill
from evener.shares.curves import Curve
from evener.shares.waterfill import DeviceCurve


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Draw a rising piecewise linear curve with one to three pieces."""
    batches, times = [0.0], [draw(st.floats(0.1, 20.0))]
    for _ in range(draw(st.integers(1, 2))):
        batches.append(batches[-1] + draw(st.integers(1, 8)))
        times.append(times[-1] + draw(st.floats(0.0, 10.0)))
    return Curve(tuple(batches), tuple(times), draw(st.floats(0.05, 3.0)))


@st.composite
def device_curves(draw: st.DrawFn, most: int = 3, limit: int = 9) -> list[DeviceCurve]:
    count = draw(st.integers(2, most))
    return [DeviceCurve(i, draw(curves()), draw(st.integers(1, limit))) for i in range(count)]


def costs(count: int, base: float, each: float) -> tuple[float, ...]:
    return tuple(base + each * (k - 1) if k > 1 else 0.0 for k in range(count + 1))


def seconds(some: list[DeviceCurve], shares: tuple[int, ...], cost: tuple[float, ...]) -> float:
    active = [i for i, share in enumerate(shares) if share]
    return max(some[i].curve.seconds(shares[i]) for i in active) + cost[len(active)]


def every_layout(some: list[DeviceCurve], fewest: int) -> list[tuple[int, ...]]:
    shares = product(*(range(device.limit + 1) for device in some))
    return [one for one in shares if sum(1 for share in one if share) >= fewest]


@settings(max_examples=60, deadline=None)
@given(device_curves(), st.floats(0, 5), st.floats(0, 5), st.integers(1, 25), st.integers(1, 2))
def test_a_fixed_batch_is_solved_exactly(
    some: list[DeviceCurve], base: float, each: float, batch: int, fewest: int
) -> None:
    """No share vector that sums to the batch is faster."""
    cost = costs(len(some), base, each)
    found = waterfill.split_fixed(some, cost, batch, 1, fewest)
    rivals = [one for one in every_layout(some, fewest) if sum(one) == batch]
    if not rivals:
        assert found is None
        return
    assert found is not None
    assert found.global_batch == batch
    assert all(1 <= share <= some[i].limit for i, share in found.shares)
    assert found.seconds == pytest.approx(min(seconds(some, one, cost) for one in rivals), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(device_curves(), st.floats(0, 5), st.floats(0, 5), st.integers(1, 2))
def test_a_free_batch_is_solved_to_a_sample(
    some: list[DeviceCurve], base: float, each: float, fewest: int
) -> None:
    """No share vector is faster by more than the rounding of one sample at a finish time."""
    cost = costs(len(some), base, each)
    found = waterfill.split_free(some, cost, 1, None, fewest)
    top = max(sum(one) / seconds(some, one, cost) for one in every_layout(some, fewest))
    assert found is not None
    true = sum(share for _, share in found.shares) / found.seconds
    assert found.samples_per_second == pytest.approx(true)
    count = len(some)
    assert found.samples_per_second >= top * (1 - count / (count + found.global_batch))


@settings(max_examples=40, deadline=None)
@given(device_curves(), st.floats(0, 5), st.floats(0.5, 1.0))
def test_the_smallest_batch_reaches_its_rate(
    some: list[DeviceCurve], base: float, part: float
) -> None:
    """The batch reaches the throughput, and is no larger than the fastest layout's."""
    cost = costs(len(some), base, 0.1)
    fastest = waterfill.split_free(some, cost)
    assert fastest is not None
    found = waterfill.smallest_reaching(some, cost, fastest.samples_per_second * part)
    assert found is not None
    assert found.samples_per_second >= fastest.samples_per_second * part * (1 - 1e-9)
    assert found.global_batch <= fastest.global_batch


@settings(max_examples=12, deadline=None)
@given(
    st.lists(curves(), min_size=5, max_size=8),
    st.floats(0, 3),
    st.floats(0, 2),
    st.integers(20, 200),
)
def test_sorting_replaces_the_enumeration_of_subsets(
    shapes: list[Curve], base: float, each: float, batch: int
) -> None:
    """If the cost depends only on the number of devices, the k most able ones are the best k."""
    some = [DeviceCurve(i, curve, 30) for i, curve in enumerate(shapes)]
    cost = costs(len(some), base, each)
    found = waterfill.split_fixed(some, cost, batch)
    single = []
    for k in range(2, len(some) + 1):
        for subset in combinations(some, k):
            # this subset, whole: no cheaper count inside it
            only = tuple(cost[k] for _ in range(k + 1))
            part = waterfill.split_fixed(list(subset), only, batch, 1, k)
            if part is not None:
                single.append(part.seconds)
    assert (found is None) == (not single)
    if found is not None:
        assert found.seconds == pytest.approx(min(single), rel=1e-6)


@pytest.mark.parametrize("unit", [1.0, 0.001])
def test_many_devices_are_solved_as_well_as_few(unit: float) -> None:
    """Device counts that can't be faster are skipped; the result is the best of all.

    This holds in seconds and in milliseconds.
    """
    shapes = [
        Curve((0.0, 1.0), (unit * (2 + i % 7), unit * (3 + i % 7)), unit * (1 + (i % 5) / 3))
        for i in range(40)
    ]
    some = [DeviceCurve(i, curve, 500) for i, curve in enumerate(shapes)]
    cost = costs(len(some), unit, 0.4 * unit)
    found = waterfill.split_fixed(some, cost, 1600)
    best = min(
        seconds
        for k in range(2, 41)
        if (part := waterfill._split_among_count(some, k, 1600, 1, 0.0, 0))
        for seconds in [part[0] + cost[k]]
    )
    assert found is not None
    assert found.seconds == pytest.approx(best, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(curves(), st.integers(1, 60), st.floats(0.1, 100.0), st.sampled_from([1, 4]))
def test_the_inverse_of_a_curve_is_its_inverse(
    curve: Curve, ceiling: int, limit: float, quantum: int
) -> None:
    """The largest batch finishes in time, and one quantum more doesn't."""
    most = curve.largest(limit, ceiling, quantum)
    assert most % quantum == 0
    assert 0 <= most <= ceiling
    if most:
        assert curve.seconds(most) <= limit * (1 + 1e-6)
    if most + quantum <= ceiling:
        assert curve.seconds(most + quantum) > limit * (1 - 1e-6)


@settings(max_examples=50, deadline=None)
@given(
    curves(),
    st.integers(300, 900),
    st.integers(300, 900),
    st.sampled_from([1, 4]),
    st.floats(0.8, 1.0),
)
def test_one_device_is_solved_by_its_knots_and_its_limit(
    curve: Curve, most: int, cap: int, quantum: int, part: float
) -> None:
    """The fastest and the smallest nearly as fast batch are those of trying all quanta.

    If the curve is flat, or few samples are enough, the smallest may be larger than necessary, but
    never larger than the fastest.
    """
    device = DeviceCurve(3, curve, most // quantum * quantum)
    rates = {n: n / curve.seconds(n) for n in range(quantum, min(device.limit, cap) + 1, quantum)}
    best, top = waterfill.single_best(device, quantum, cap), max(rates.values())
    assert best is not None
    if quantum == 1:
        assert best.samples_per_second >= top * (1 - 1e-9)
    assert best.shares == ((3, best.global_batch),)
    assert best.global_batch in rates
    wanted = part * best.samples_per_second
    found = waterfill.single_reaching(device, wanted, quantum, cap)
    assert found is not None
    assert wanted * (1 - 1e-9) <= found.samples_per_second
    assert found.global_batch in rates
    least = min(n for n, rate in rates.items() if rate >= wanted * (1 - 1e-9))
    assert least <= found.global_batch <= best.global_batch
    assert waterfill.single_reaching(device, 1.01 * top, quantum, cap) is None


def test_one_device_that_holds_less_than_a_quantum_has_no_batch() -> None:
    device = DeviceCurve(0, Curve((0.0, 1.0), (1.0, 2.0), 1.0), 7)
    assert waterfill.single_best(device, 8) is None
    assert waterfill.single_best(device, 4, 3) is None
    assert waterfill.single_reaching(device, 0.01, 8) is None
    found = waterfill.single_best(device, 7)
    assert found is not None
    assert found.global_batch == 7


@settings(max_examples=30, deadline=None)
@given(device_curves(), st.integers(2, 20), st.sampled_from([1, 2]))
def test_a_capped_batch_keeps_to_its_cap(some: list[DeviceCurve], cap: int, quantum: int) -> None:
    """A capped batch has whole quanta and is no slower than a batch of the cap itself."""
    cost = costs(len(some), 0.5, 0.1)
    found = waterfill.split_free(some, cost, quantum, cap)
    whole = waterfill.split_fixed(some, cost, cap // quantum * quantum, quantum)
    if found is None:
        assert whole is None
        return
    assert found.global_batch <= cap
    assert all(share % quantum == 0 for _, share in found.shares)
    if whole is not None:
        assert found.samples_per_second >= whole.samples_per_second * (1 - 1e-9)


@pytest.mark.parametrize(("devices", "most"), [(3, 400), (32, 400), (33, 387), (200, 64)])
def test_finish_times_are_thinned_only_where_they_are_many(devices: int, most: int) -> None:
    """Finish times stay unique and in order, with the first and the last.

    Thinning speeds up the search for a free batch.
    """
    steps = range(1, 16)
    bent = [
        Curve(tuple(map(float, steps)), tuple(n + i / 1000 for n in steps), 1.0)
        for i in range(devices)
    ]
    every = {time for curve in bent for time in (*curve.times, curve.seconds(1000))}
    found = waterfill.finish_times([DeviceCurve(i, curve, 1000) for i, curve in enumerate(bent)], 1)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (min(every), max(every))
    assert len(found) == min(most, len(every))


def test_no_devices_have_no_finish_times() -> None:
    """A search in which every device has failed asks for them."""
    assert waterfill.finish_times([], 1) == []
    assert waterfill.split_free([], (0.0,)) is None
