"""Find the fastest shares from the devices' curves and the cost of the gradient exchange.

The method is water-filling: all devices get the same finish time, and each computes as many samples
as it can until then. A step of a set A of k devices takes T = (max over i in A of t_i(b_i)) + c_k,
where c_k is the time of the gradient exchange. By a finish time tau, device i can compute b_i(tau)
= max{b <= M_i : t_i(b) <= tau} samples. So the best k devices for tau are those with the largest
b_i(tau), and sorting replaces the enumeration of subsets. This is exact because c depends only on
the number of devices.

For a fixed batch B and k devices, the result is the smallest tau whose k largest b_i(tau) sum to at
least B. It is found by bisection, which is exact for any rising t_i. If the batch isn't fixed, the
throughput is S_k(tau) = (sum of b_i(tau)) / (tau + c_k). Its formula changes only at the times at
which a device reaches a point of its curve or its limit M_i. Between two such times, it is a ratio
of two affine functions of tau, so it only rises or only falls. Therefore the optimum is at one of
these times. If shares are only a few quanta (the unit of shares, in rows), nearby times are tried,
too.
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
    """A device's step-time curve, its maximum rows, and its position among all devices."""

    position: int
    curve: Curve | PassCurve
    limit: int


class Allocation(msgspec.Struct, frozen=True):
    """The rows of each device, and the step time in seconds, which includes the gradient exchange.

    `shares` consists of pairs of a device's position and its rows.
    """

    shares: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def global_batch(self) -> int:
        """The total number of rows of all devices."""
        return sum(share for _, share in self.shares)

    @property
    def samples_per_second(self) -> float:
        """The rows per second, or inf if the step time is 0."""
        return self.global_batch / self.seconds if self.seconds > 0 else math.inf


# Costs[k]: seconds of gradient exchange among k devices that computation can't hide
Costs = Sequence[float]


def split_fixed(
    devices: Sequence[DeviceCurve], costs: Costs, batch: int, quantum: int = 1, min_devices: int = 2
) -> Allocation | None:
    """Return the fastest division of `batch` rows among at least `min_devices` devices.

    `costs[k]` is the time in seconds of a gradient exchange among k devices. Shares are multiples
    of `quantum` rows. Returns None if the batch doesn't fit on the devices, or has too few rows to
    give each of `min_devices` devices a quantum.
    """
    devices = [device for device in devices if device.limit >= quantum]
    most = min(len(devices), batch // quantum)
    largest = heapq.nlargest(most, (device.limit for device in devices))
    if most < min_devices or sum(largest) < batch:
        return None
    natural = _split_among_count(devices, most, batch, quantum, 0.0, 0)
    if natural is None:
        return None
    least, shares = natural
    if len(shares) >= min_devices:
        return _try_fewer(devices, costs, batch, quantum, min_devices, least, shares)
    # fewer devices would suffice, but `min_devices` are required: each further device gets one
    # quantum
    forced = _split_among_count(devices, min_devices, batch, quantum, least, min_devices)
    if forced is None:
        return None
    _, shares = forced
    return _allocation(devices, shares, _slowest(devices, shares) + costs[min_devices])


def _try_fewer(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    batch: int,
    quantum: int,
    min_devices: int,
    min_seconds: float,
    shares: dict[int, int],
) -> Allocation:
    """Return the fastest allocation that uses no more devices than `shares` does.

    - `costs[k]`: time in seconds of a gradient exchange among k devices.
    - `min_devices`: minimum number of devices.
    - `min_seconds`: finish time of the given shares in seconds, without the exchange.
    - `shares`: rows by index in `devices`.
    """
    # Fewer devices may be faster, because their exchange is cheaper. The search halves the range of
    # device counts recursively, and skips ranges that can't be faster.
    best = _allocation(devices, shares, _slowest(devices, shares) + costs[len(shares)])
    ranges = [(min_devices, len(shares) - 1)]
    while ranges:
        low, high = ranges.pop()
        if low > high:
            continue
        seconds_left = best.seconds - min(costs[low : high + 1])
        if _samples_by(devices, high, seconds_left, quantum) < batch:
            continue  # fewer devices never compute more samples by then
        middle = (low + high) // 2
        ranges += (low, middle - 1), (middle + 1, high)
        found = _split_among_count(devices, middle, batch, quantum, min_seconds, 0)
        if found is None or len(found[1]) < min_devices:
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
    min_devices: int = 2,
) -> Allocation | None:
    """Return the allocation with the most samples/s, for any global batch up to `limit`.

    `costs[k]` is the time in seconds of a gradient exchange among k devices. Shares are multiples
    of `quantum` rows. Returns None if no allocation has at least `min_devices` devices.
    """
    devices = [device for device in devices if device.limit >= quantum]
    found = []
    for time in finish_times(devices, quantum):
        one = _best_within_seconds(devices, costs, time, quantum, limit, min_devices)
        if one:
            found.append(one)
    if limit is not None and sum(device.limit for device in devices) > limit:
        capped = split_fixed(devices, costs, limit // quantum * quantum, quantum, min_devices)
        if capped:
            found.append(capped)
    best = max(found, key=lambda one: one.samples_per_second, default=None)
    if best is None or len(devices) > EXACT_DEVICES:
        return best
    return _improve_nearby(devices, costs, best, quantum, limit, min_devices)


def smallest_reaching(
    devices: Sequence[DeviceCurve],
    costs: Costs,
    rate: float,
    quantum: int = 1,
    limit: int | None = None,
    min_devices: int = 2,
) -> Allocation | None:
    """Return the allocation with the smallest global batch that reaches `rate` samples/s.

    `costs[k]` is the time in seconds of a gradient exchange among k devices. Shares are multiples
    of `quantum` rows. Returns None if no global batch up to `limit`, on at least `min_devices`
    devices, reaches the rate.
    """
    devices = [device for device in devices if device.limit >= quantum]
    found: list[Allocation] = []
    for crossing in sorted(_find_crossings(devices, costs, rate, quantum, min_devices)):
        least = rate * (crossing.early + costs[crossing.devices])  # samples
        if least <= min((allocation.global_batch for allocation in found), default=math.inf):
            found += filter(None, [_earliest_reaching(devices, costs, rate, crossing, quantum)])
    allowed = [
        allocation for allocation in found if limit is None or allocation.global_batch <= limit
    ]
    if all(one.global_batch < COARSE * quantum * len(one.shares) for one in allowed):
        # a layout near a finish time may reach the rate too
        best = split_free(devices, costs, quantum, limit, min_devices)
        if best and best.samples_per_second >= rate:
            allowed.append(best)
    return min(allowed, key=lambda one: (one.global_batch, one.seconds), default=None)


def single_best(
    device: DeviceCurve, quantum: int = 1, limit: int | None = None
) -> Allocation | None:
    """Return the batch with the most samples/s on one device.

    It is a multiple of `quantum` rows, and has at most `limit` rows. If several batches are equally
    fast, the smallest is returned. Returns None if `limit` is below one quantum.
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
    """Return the smallest batch with which one device reaches `rate` samples/s.

    The batch is a multiple of `quantum` rows, and has at most `limit` rows. Returns None if no such
    batch reaches the rate.
    """
    limit = device.limit if limit is None else min(device.limit, limit) // quantum * quantum
    if limit < quantum or limit < rate * device.curve.seconds(quantum):
        return None  # unreachable even if the limit took only one quantum's time
    bounded = DeviceCurve(device.position, device.curve, limit)
    found = (
        smallest_reaching([bounded], (0.0, 0.0), rate, quantum, limit, min_devices=1),
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
    """Return the indices of the `k` largest sizes, except for sizes of 0."""
    # equal sizes are in the order of their indices
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    return [i for i in order[:k] if sizes[i] > 0]


def _samples_by(
    devices: Sequence[DeviceCurve], k: int, seconds: float, quantum: int, min_active: int = 0
) -> int:
    """Return how many rows at most `k` devices can finish together within `seconds` seconds.

    Returns 0 if fewer than `min_active` devices can finish any rows.
    """
    sizes = _largest_shares(devices, seconds, quantum)
    if min_active and sum(1 for size in sizes if size) < min_active:
        return 0
    return sum(sizes if k >= len(sizes) else heapq.nlargest(k, sizes))


def _split_among_count(
    devices: Sequence[DeviceCurve],
    k: int,
    batch: int,
    quantum: int,
    min_seconds: float,
    min_active: int,
) -> tuple[float, dict[int, int]] | None:
    """Divide a batch among at most `k` devices so that they finish as early as possible.

    The finish time is at least `min_seconds`, and at least `min_active` devices get rows. Returns
    the finish time in seconds, and the rows by index in `devices`. Returns None if the batch
    exceeds the devices' limits.
    """
    late = max(device.curve.seconds(device.limit) for device in devices)
    if _samples_by(devices, k, late, quantum, min_active) < batch:
        return None
    early = min_seconds
    if _samples_by(devices, k, early, quantum, min_active) >= batch:
        late = early
    for _ in range(HALVINGS):
        middle = (early + late) / 2
        if not early < middle < late or late - early <= 1e-12 * late:
            break
        if _samples_by(devices, k, middle, quantum, min_active) >= batch:
            late = middle
        else:
            early = middle
    return late, _divide_batch(devices, k, batch, quantum, early, late)


def _divide_batch(
    devices: Sequence[DeviceCurve],
    k: int,
    batch: int,
    quantum: int,
    early_seconds: float,
    late_seconds: float,
) -> dict[int, int]:
    """Return shares of at most `k` devices that add up to the batch.

    `late_seconds` is a time by which these devices can finish the batch. `early_seconds` is the
    same time, or an earlier one by which they can't finish it. The result maps indices in `devices`
    to rows.
    """
    # Each device gets what it finishes by `early_seconds`, but at least one quantum. Then single
    # quanta are added, up to what the device finishes by `late_seconds`. Each of these quanta goes
    # to the device that would finish it first.
    most = _largest_shares(devices, late_seconds, quantum)
    chosen = _largest(most, min(k, batch // quantum))
    shares = {
        i: min(
            most[i],
            max(quantum, devices[i].curve.largest(early_seconds, devices[i].limit, quantum)),
        )
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
    """Return the finish times to try if the global batch isn't fixed, in seconds and sorted.

    At these times, the slope of a device's curve changes, or a device finishes its first quantum.
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
    min_devices: int,
) -> Allocation | None:
    """Return the allocation with the most samples/s among those that finish within `seconds`.

    Each device in it computes as many rows as it can within `seconds`. Returns None if fewer than
    `min_devices` devices can finish a quantum, or if even `min_devices` devices would compute more
    than `limit` rows.
    """
    # each device of the allocation computes as much as it can in that time
    sizes = _largest_shares(devices, seconds, quantum)
    order = _largest(sizes, len(sizes))
    best = 0
    best_rate = 0.0
    for k, total in enumerate(accumulate(sizes[i] for i in order), 1):
        if k < min_devices:
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
    min_devices: int,
) -> Allocation:
    """Look for a faster allocation than `best` by adding single quanta to small shares.

    Returns `best` itself if none has more samples/s. `limit` is the maximum global batch.
    """
    # with shares of a few quanta, the optimum may lie between two breakpoints
    by_device = {device.position: device for device in devices}
    for _ in range(ROUNDS):
        small = [(by_device[i], share) for i, share in best.shares if share < COARSE * quantum]
        times = {
            x.curve.seconds(share + quantum) for x, share in small if share + quantum <= x.limit
        }
        tried = (
            _best_within_seconds(devices, costs, time, quantum, limit, min_devices)
            for time in times
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
    """The first interval of finish times in which a given number of devices reaches a throughput.

    Times are in seconds.
    """

    samples: int
    early: float
    late: float
    devices: int


def _find_crossings(
    devices: Sequence[DeviceCurve], costs: Costs, rate: float, quantum: int, min_devices: int
) -> list[_Crossing]:
    """Return, for each number of devices, the first interval of finish times that reaches `rate`.

    `rate` is in samples/s. Device counts below `min_devices`, and those that never reach the rate,
    are left out.
    """
    found: dict[int, _Crossing] = {}
    for early, late in pairwise((0.0, *finish_times(devices, quantum))):
        largest_first = sorted(_largest_shares(devices, late, quantum), reverse=True)
        for k, samples in enumerate(accumulate(largest_first), 1):
            if k < min_devices or k in found:
                continue
            if samples >= rate * (late + costs[k]):
                found[k] = _Crossing(samples, early, late, k)
    return list(found.values())


def _earliest_reaching(
    devices: Sequence[DeviceCurve], costs: Costs, rate: float, crossing: _Crossing, quantum: int
) -> Allocation | None:
    """Return the allocation with the earliest finish time at which `rate` is reached.

    `rate` is in samples/s. The finish time is searched for in the interval of `crossing`. Returns
    None if no device can finish any rows in that time.
    """
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
