"""Find the fastest shares from the devices' curves and the synchronization cost.

The method is water-filling: all devices get the same finish time, and each computes as many samples
as it can until then. A step of a set A of k devices takes T = max over i in A of t_i(b_i) + c_k.
Here c_k is the time of the gradient exchange. By a finish time tau, device i can compute b_i(tau) =
max{b <= M_i : t_i(b) <= tau} samples. So the best k devices for tau are those with the largest
b_i(tau), and sorting replaces the enumeration of subsets. This is exact because c depends only on
the number of devices.

For a fixed batch B and k devices, the result is the least tau whose k largest b_i(tau) sum to B or
more. It is found by bisection, which is exact for any rising t_i. For a free batch, the throughput
is S_k(tau) = sum b_i(tau) / (tau + c_k). It changes its form only at the times at which a device
reaches a knot of its curve or its limit M_i. Between two such times, it is a ratio of two affine
functions of tau, so it only rises or only falls. Therefore the optimum is at one of these times. If
shares are only a few quanta, nearby times are tried, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from .curves import Curve, PassCurve

# number of bisections of an interval of finish times; the rest is far below a nanosecond
HALVINGS = 48
EXACT_DEVICES = 32  # maximum number of devices for which all finish times of a free batch are tried
MOST_TIMES = 400  # maximum number of finish times that are tried for a free batch
COARSE = 200  # in quanta; for smaller shares, one more quantum is tried
ROUNDS = 8  # how often a quantum is added to such shares


class DeviceCurve(msgspec.Struct, frozen=True):
    """A device's position among all devices, its step-time curve and its maximum rows."""

    position: int
    curve: Curve | PassCurve
    limit: int


class Allocation(msgspec.Struct, frozen=True):
    """Rows of the devices, as pairs of position and rows, and the step time in seconds.

    The step time includes the gradient exchange.
    """

    shares: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def global_batch(self) -> int:
        """Total rows."""
        return sum(share for _, share in self.shares)

    @property
    def samples_per_second(self) -> float:
        """Rows per second; inf if the step time is 0."""
        return self.global_batch / self.seconds if self.seconds > 0 else math.inf


# Costs[k]: seconds of gradient exchange among k devices that computation can't hide
Costs = Sequence[float]


def split_fixed(
    devices: Sequence[DeviceCurve], costs: Costs, batch: int, quantum: int = 1, fewest: int = 2
) -> Allocation | None:
    """Return the fastest division of `batch` rows, on at least `fewest` devices.

    `costs[k]` is the time in seconds of a gradient exchange among k devices. Shares are multiples
    of `quantum`. Returns None if the batch doesn't fit on the devices or has too few rows for
    `fewest`.
    """
    devices = [device for device in devices if device.limit >= quantum]
    most = min(len(devices), batch // quantum)
    largest = heapq.nlargest(most, (device.limit for device in devices))
    if most < fewest or sum(largest) < batch:
        return None
    natural = _split_among_count(devices, most, batch, quantum, 0.0, 0)
    if natural is None:
        return None
    least, shares = natural
    if len(shares) >= fewest:
        return _try_fewer(devices, costs, batch, quantum, fewest, least, shares)
    # fewer devices would suffice, but `fewest` are required: each extra device gets one quantum
    forced = _split_among_count(devices, fewest, batch, quantum, least, fewest)
    if forced is None:
        return None
    _, shares = forced
    return _allocation(devices, shares, _slowest(devices, shares) + costs[fewest])


def _try_fewer(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    batch: int,
    quantum: int,
    fewest: int,
    least: float,
    shares: dict[int, int],
) -> Allocation:
    """Return the fastest allocation on the same number of devices or fewer."""
    # `costs` are the seconds of gradient exchange by number of devices. `fewest` is the minimum
    # number of devices. `least` is the finish time of the given shares, without the gradient
    # exchange. `shares` are by index in `devices`. Fewer devices may be faster, because their
    # exchange is cheaper. The search halves the range of device counts recursively, and skips
    # ranges that can't be faster.
    best = _allocation(devices, shares, _slowest(devices, shares) + costs[len(shares)])
    ranges = [(fewest, len(shares) - 1)]
    while ranges:
        low, high = ranges.pop()
        if low > high:
            continue
        seconds_left = best.seconds - min(costs[low : high + 1])
        if _samples_by(devices, high, seconds_left, quantum) < batch:
            continue  # fewer devices never compute more samples by then
        middle = (low + high) // 2
        ranges += (low, middle - 1), (middle + 1, high)
        found = _split_among_count(devices, middle, batch, quantum, least, 0)
        if found is None or len(found[1]) < fewest:
            continue
        _, fewer = found
        seconds = _slowest(devices, fewer) + costs[len(fewer)]
        if seconds < best.seconds:
            best = _allocation(devices, fewer, seconds)
    return best


def split_free(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    quantum: int = 1,
    limit: int | None = None,
    fewest: int = 2,
) -> Allocation | None:
    """Return the allocation with the most samples/s, of any global batch up to `limit`.

    `costs[k]` is the time in seconds of a gradient exchange among k devices. Shares are multiples
    of `quantum`. Returns None if no allocation has at least `fewest` devices.
    """
    devices = [device for device in devices if device.limit >= quantum]
    found = []
    for time in finish_times(devices, quantum):
        one = _best_within_seconds(devices, costs, time, quantum, limit, fewest)
        if one:
            found.append(one)
    if limit is not None and sum(device.limit for device in devices) > limit:
        capped = split_fixed(devices, costs, limit // quantum * quantum, quantum, fewest)
        if capped:
            found.append(capped)
    best = max(found, key=lambda one: one.samples_per_second, default=None)
    if best is None or len(devices) > EXACT_DEVICES:
        return best
    return _improve_nearby(devices, costs, best, quantum, limit, fewest)


def smallest_reaching(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    rate: float,
    quantum: int = 1,
    limit: int | None = None,
    fewest: int = 2,
) -> Allocation | None:
    """Return an allocation with the smallest global batch that reaches `rate` samples/s.

    `costs[k]` is the time in seconds of a gradient exchange among k devices. Shares are multiples
    of `quantum`. Returns None if no global batch up to `limit` on at least `fewest` devices reaches
    the rate.
    """
    devices = [device for device in devices if device.limit >= quantum]
    found: list[Allocation] = []
    for crossing in sorted(_find_crossings(devices, costs, rate, quantum, fewest)):
        least = rate * (crossing.early + costs[crossing.devices])  # samples
        if least <= min((allocation.global_batch for allocation in found), default=math.inf):
            found += filter(None, [_earliest_reaching(devices, costs, rate, crossing, quantum)])
    allowed = [
        allocation for allocation in found if limit is None or allocation.global_batch <= limit
    ]
    if all(one.global_batch < COARSE * quantum * len(one.shares) for one in allowed):
        # a layout near a finish time may reach the rate too
        best = split_free(devices, costs, quantum, limit, fewest)
        if best and best.samples_per_second >= rate:
            allowed.append(best)
    return min(allowed, key=lambda one: (one.global_batch, one.seconds), default=None)


def single_best(
    device: DeviceCurve, quantum: int = 1, limit: int | None = None
) -> Allocation | None:
    """Return the batch with the most samples/s on one device, the smallest if several tie.

    It is a multiple of `quantum` and at most `limit`. Returns None if not even one quantum is
    allowed.
    """
    limit = device.limit if limit is None else min(device.limit, limit) // quantum * quantum
    if limit < quantum:
        return None
    curve = device.curve
    knots = {curve.largest(seconds, limit, quantum) for seconds in curve.breakpoints(limit)}
    # a knot may lie between two whole quanta
    sizes = {limit, *knots, *(size + quantum for size in knots)}
    allocations = [
        Allocation(((device.position, size),), curve.seconds(size))
        for size in sizes
        if quantum <= size <= limit
    ]
    return max(
        allocations,
        key=lambda allocation: (allocation.samples_per_second, -allocation.global_batch),
    )


def single_reaching(
    device: DeviceCurve, rate: float, quantum: int = 1, limit: int | None = None
) -> Allocation | None:
    """Return the smallest batch on one device that reaches `rate` samples/s, or None.

    The batch is a multiple of `quantum` and at most `limit`.
    """
    limit = device.limit if limit is None else min(device.limit, limit) // quantum * quantum
    if limit < quantum or limit < rate * device.curve.seconds(quantum):
        return None  # unreachable even if the limit took only one quantum's time
    bounded = DeviceCurve(device.position, device.curve, limit)
    found = (
        smallest_reaching([bounded], (0.0, 0.0), rate, quantum, limit, fewest=1),
        single_best(bounded, quantum),
    )
    enough = (one for one in found if one is not None and one.samples_per_second >= rate)
    return min(enough, key=lambda one: one.global_batch, default=None)


def _largest_shares(devices: Sequence[DeviceCurve], seconds: float, quantum: int) -> list[int]:
    return [device.curve.largest(seconds, device.limit, quantum) for device in devices]


def _slowest(devices: Sequence[DeviceCurve], shares: dict[int, int]) -> float:
    return max(devices[i].curve.seconds(share) for i, share in shares.items())


def _allocation(
    devices: Sequence[DeviceCurve], shares: dict[int, int], seconds: float
) -> Allocation:
    return Allocation(
        tuple(sorted((devices[i].position, share) for i, share in shares.items())), seconds
    )


def _largest(sizes: Sequence[int], k: int) -> list[int]:
    """Return the indices of the `k` largest sizes, without sizes of 0."""
    # equal sizes in the order of their indices
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    return [i for i in order[:k] if sizes[i] > 0]


def _samples_by(
    devices: Sequence[DeviceCurve], k: int, seconds: float, quantum: int, active: int = 0
) -> int:
    """Return how many rows the `k` fastest devices finish within `seconds`.

    Returns 0 if fewer than `active` devices finish any.
    """
    sizes = _largest_shares(devices, seconds, quantum)
    if active and sum(1 for size in sizes if size) < active:
        # fewer devices than needed can finish a quantum
        return 0
    return sum(sizes if k >= len(sizes) else heapq.nlargest(k, sizes))


def _split_among_count(
    devices: Sequence[DeviceCurve], k: int, batch: int, quantum: int, least: float, active: int
) -> tuple[float, dict[int, int]] | None:
    """Return the finish time and the shares of a batch on at most `k` devices.

    None if the devices' limits don't allow the batch.
    """
    # Return None if the devices' limits don't allow the batch. The finish time is at least `least`.
    # At least `active` devices get samples. Shares are by index in `devices`.
    late = max(device.curve.seconds(device.limit) for device in devices)
    if _samples_by(devices, k, late, quantum, active) < batch:
        return None
    early = least
    if _samples_by(devices, k, early, quantum, active) >= batch:
        late = early
    for _ in range(HALVINGS):
        middle = (early + late) / 2
        if not early < middle < late or late - early <= 1e-12 * late:
            break
        if _samples_by(devices, k, middle, quantum, active) >= batch:
            late = middle
        else:
            early = middle
    return late, _divide_batch(devices, k, batch, quantum, early, late)


def _divide_batch(
    devices: Sequence[DeviceCurve], k: int, batch: int, quantum: int, early: float, late: float
) -> dict[int, int]:
    """Return shares that add up to the batch and finish between `early` and `late`."""
    # Shares are by index in `devices`. Each device gets what it finishes by `early`, but at least
    # one quantum. Then single quanta are added, up to what the device finishes by `late`. Each of
    # these quanta goes to the device that would finish it first.
    most = _largest_shares(devices, late, quantum)
    chosen = _largest(most, min(k, batch // quantum))
    shares = {
        i: min(most[i], max(quantum, devices[i].curve.largest(early, devices[i].limit, quantum)))
        for i in chosen
    }
    missing = batch - sum(shares.values())
    queue = [
        (devices[i].curve.seconds(shares[i] + quantum), i)
        for i in chosen
        if shares[i] + quantum <= most[i]
    ]
    heapq.heapify(queue)
    while missing > 0 and queue:
        _, i = heapq.heappop(queue)
        shares[i] += quantum
        missing -= quantum
        if shares[i] + quantum <= most[i]:
            heapq.heappush(queue, (devices[i].curve.seconds(shares[i] + quantum), i))
    # raising idle devices to one quantum overshot the batch: take it from the slowest
    while missing < 0:
        i = max(
            (i for i in chosen if shares[i] > quantum),
            key=lambda i: (devices[i].curve.seconds(shares[i]), i),
        )
        shares[i] -= quantum
        missing += quantum
    return shares


def finish_times(devices: Sequence[DeviceCurve], quantum: int) -> list[float]:
    """Return the step times to try for a free batch, in seconds and ascending.

    They are times at which a curve bends or a device finishes one quantum.
    """
    # At most 400 are returned for up to 32 devices, and fewer for more devices. If there are more
    # finish times, the returned ones are evenly spaced among them.
    times = sorted(
        {t for x in devices for t in (*x.curve.breakpoints(x.limit), x.curve.seconds(quantum))}
    )
    most = MOST_TIMES * EXACT_DEVICES // max(EXACT_DEVICES, len(devices))
    if len(times) > most:
        times = [times[round(n * (len(times) - 1) / (most - 1))] for n in range(most)]
    return times


def _best_within_seconds(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    seconds: float,
    quantum: int,
    limit: int | None,
    fewest: int,
) -> Allocation | None:
    """Return the allocation with the most samples/s within a time limit.

    None if too few devices can finish in time, or if their shares exceed `limit`.
    """
    # The allocation finishes within `seconds`. Return None if fewer than `fewest` devices can
    # finish a quantum, or if the `fewest` largest shares exceed `limit` samples. Each device of the
    # allocation computes as much as it can in that time.
    sizes = _largest_shares(devices, seconds, quantum)
    order = _largest(sizes, len(sizes))
    best = 0
    best_rate = 0.0
    for k, total in enumerate(accumulate(sizes[i] for i in order), 1):
        if k < fewest:
            continue
        if limit is not None and total > limit:
            break  # more devices only add samples
        if total > best_rate * (seconds + costs[k]):
            best = k
            best_rate = total / (seconds + costs[k])
    if not best:
        return None
    shares = {i: sizes[i] for i in order[:best]}
    return _allocation(devices, shares, _slowest(devices, shares) + costs[best])


def _improve_nearby(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    best: Allocation,
    quantum: int,
    limit: int | None,
    fewest: int,
) -> Allocation:
    """Add single quanta to small shares while that raises the samples/s."""
    # with shares of a few quanta, the optimum may lie between two breakpoints
    by_device = {device.position: device for device in devices}
    for _ in range(ROUNDS):
        small = [(by_device[i], share) for i, share in best.shares if share < COARSE * quantum]
        times = {
            x.curve.seconds(share + quantum) for x, share in small if share + quantum <= x.limit
        }
        tried = (
            _best_within_seconds(devices, costs, time, quantum, limit, fewest) for time in times
        )
        allocations = [found for found in tried if found is not None]
        better = max(
            allocations, key=lambda found: (found.samples_per_second, -found.seconds), default=best
        )
        if better.samples_per_second <= best.samples_per_second:
            break
        best = better
    return best


class _Crossing(NamedTuple):
    """An interval of step times, in seconds, in which `devices` devices first reach a rate."""

    samples: int
    early: float
    late: float
    devices: int


def _find_crossings(
    devices: Sequence[DeviceCurve], costs: Costs, rate: float, quantum: int, fewest: int
) -> list[_Crossing]:
    """Return, for each number of devices, the first interval that reaches the rate."""
    # Numbers of devices that never reach `rate` samples/s are left out. The intervals are of finish
    # times. `costs` are the seconds of gradient exchange by number of devices. Numbers below
    # `fewest` are also left out.
    found: dict[int, _Crossing] = {}
    for early, late in pairwise((0.0, *finish_times(devices, quantum))):
        largest_first = sorted(_largest_shares(devices, late, quantum), reverse=True)
        for k, samples in enumerate(accumulate(largest_first), 1):
            if k < fewest or k in found:
                continue
            if samples >= rate * (late + costs[k]):
                found[k] = _Crossing(samples, early, late, k)
    return list(found.values())


def _earliest_reaching(
    devices: Sequence[DeviceCurve], costs: Costs, rate: float, crossing: _Crossing, quantum: int
) -> Allocation | None:
    """Return the allocation at the earliest time in the interval that reaches the rate.

    None if no device finishes any rows by then.
    """
    # The rate is in samples/s.
    _, earliest, latest, k = crossing
    for _ in range(HALVINGS // 2):
        middle = (earliest + latest) / 2
        if _samples_by(devices, k, middle, quantum) >= rate * (middle + costs[k]):
            latest = middle
        else:
            earliest = middle
    sizes = _largest_shares(devices, latest, quantum)
    shares = {i: sizes[i] for i in _largest(sizes, k)}
    if not shares:
        return None
    return _allocation(devices, shares, _slowest(devices, shares) + costs[len(shares)])
