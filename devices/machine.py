"""Simulated machines: step times and memory of the devices in a file, without noise.

device_seconds(b) = ceil_to(stall_ms, passes(b)) / compute share * (1 + contention while others work)
passes(b)         = sum of curve(m) over p passes of m rows each - (p - 1) * (fixed_ms - pass_overhead_ms)
step_seconds      = max over devices with samples of device_seconds + (base_ms + per_device_ms * (k - 1) for k >= 2)
                    + (network_ms + per_host_ms * (h - 1) for h >= 2 hosts)
pack_seconds(b,N) = N * device_seconds(b) / pack_gain(N), for N training runs side by side on one device
placement         = the step time of a model whose parts lie on several devices, given by its own curve
memory_bytes(b)   = memory_base_mib + memory_per_sample_mib * b, or the piecewise linear memory_curve
if sharded        : memory_bytes(b) - (1 - part) * state_mib + gathered_mib, for a device that holds the fraction
                    `part` of the model's state; each pass takes gather_ms longer.
                    A step of one pass accumulates no gradients, so it uses part * gradients_mib less, but at most
                    memory_bytes(b) - memory_bytes(1) less.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from .types import Device, Limit

MIB = 1 << 20
# power at full load if a file gives none; power at idle as a fraction of full load
USUAL_WATTS = 250.0
IDLE_POWER = 0.08
SMALLEST_STALL_MS = 1e-6  # ms; shorter stalls are ignored
LARGEST = 1e12  # largest number in a machine file, so that no product of two overflows

Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
Point = tuple[Annotated[int, Meta(ge=1, le=int(LARGEST))], Positive]
Points = tuple[Point, ...]
Curve = Annotated[Points, Meta(min_length=2)]


class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time per step for synchronizing that computation doesn't hide, in ms.

    Within a host, it is `base_ms`, plus `per_device_ms` for each device after the first. With
    several hosts, `network_ms` is added once, and `per_host_ms` for each host after the first.
    """

    base_ms: Amount = 0.0
    per_device_ms: Amount = 0.0
    network_ms: Amount = 0.0
    per_host_ms: Amount = 0.0

    def seconds(self, devices: int, hosts: int = 1) -> float:
        """Return the seconds per step for synchronizing; 0 for one device.

        `devices` counts only devices with samples, and `hosts` their hosts.
        """
        within = self.base_ms + self.per_device_ms * (devices - 1) if devices >= 2 else 0.0
        across = self.network_ms + self.per_host_ms * (hosts - 1) if hosts >= 2 else 0.0
        return (within + across) / 1000


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[device]]` table of a machine file; the fields are the table's keys.

    Raises ValueError if the points of a curve aren't in ascending order.
    """

    name: str
    memory_mib: Positive  # memory available to a training process
    curve: Curve  # (batch, step ms), as recorded: a larger batch may take less time
    memory_base_mib: Amount = 0.0
    memory_per_sample_mib: Amount = 0.0
    # (batch, MiB): a piecewise linear curve that replaces the two fields above
    memory_curve: Curve = ()
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.0  # relative standard deviation of one step
    stall_ms: Amount = 0.0  # step time is rounded up to a multiple of it
    # overhead of each further pass; None: a pass costs as much as a step of its rows
    pass_overhead_ms: Amount | None = None
    contention: Amount = 0.0  # relative slow-down while other devices work too
    # (runs side by side, combined throughput / throughput of one); constant after the last point
    pack_gain: Points = ()
    power_watts: Positive | None = None  # at full load; None: no power is reported to a search
    host: str = ""  # the device's host, if a file has several hosts
    source: str = ""  # where the values come from

    def __post_init__(self) -> None:
        if not self.slug:
            raise ValueError("`name` has no letter or digit")
        for key in ("curve", "memory_curve", "pack_gain"):
            check_rising(key, getattr(self, key))
        for (batch0, mib0), (batch1, mib1) in pairwise(self.memory_curve):
            if mib1 < mib0:
                raise ValueError(f"`memory_curve` falls from batch {batch0} to {batch1}")

    @property
    def slug(self) -> str:
        """The name as it is used in ids; `GTX 1080 Ti` becomes `gtx1080ti`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace(" ", "")).strip("-")

    @property
    def fixed_ms(self) -> float:
        """The time of a step without rows, in ms, estimated from the curve.

        The line through each pair of neighboring points gives an estimate at 0 rows. The lowest of
        these estimates is used.
        """
        begins = (
            t0 - max(0.0, t1 - t0) / (b1 - b0) * b0 for (b0, t0), (b1, t1) in pairwise(self.curve)
        )
        return max(0.0, min(*begins, self.curve[-1][1]))

    def seconds(self, batch: int, passes: int = 1) -> float:
        """Return the seconds of one step without limit or contention; 0 without rows.

        The step is computed in `passes` passes of about equal size.
        """
        if batch <= 0:
            return 0.0
        rows, larger = divmod(batch, passes)
        sizes = ((rows, passes - larger), (rows + 1, larger))
        milliseconds = sum(
            count * max(0.0, interpolate(self.curve, size)) for size, count in sizes if count
        )
        if passes > 1 and self.pass_overhead_ms is not None:
            milliseconds -= (passes - 1) * (self.fixed_ms - self.pass_overhead_ms)
        if self.stall_ms >= SMALLEST_STALL_MS:
            milliseconds = math.ceil(milliseconds / self.stall_ms - 1e-9) * self.stall_ms
        return milliseconds / 1000

    def watts(self, busy: float, samples_per_second: float) -> float:
        """Return the device's power in watts while it trains at this throughput.

        `busy` is the fraction of time in which it computes. Idle power is 8 % of the power
        at full load.
        """
        effort = min(1.0, samples_per_second / self.samples_per_second)
        return (self.power_watts or USUAL_WATTS) * (
            IDLE_POWER + (1 - IDLE_POWER) * (0.3 * busy + 0.65 * effort)
        )

    @property
    def samples_per_second(self) -> float:
        """The highest throughput that the device reaches alone, over all points of its curve."""
        fastest = 0.0
        for batch, _ in self.curve:
            seconds = self.seconds(batch)
            fastest = max(fastest, batch / seconds if seconds else math.inf)
        return fastest

    def gain(self, processes: int) -> float:
        """Return the throughput of several runs together, as a multiple of one run's.

        `processes` is the number of training runs. Without a `pack_gain` curve, they share the
        device's time, so the gain is 1.
        """
        points = self.pack_gain
        if not points or processes <= 1:
            return 1.0
        if points[0][0] > 1:
            points = ((1, 1.0), *points)
        last, most = points[-1]
        return most if processes >= last else interpolate(points, processes)

    def memory_bytes(self, batch: int) -> int:
        """Return the peak memory in bytes of a training process with this batch; 0 without rows."""
        if batch <= 0:
            return 0
        bent = self.memory_curve
        mib = (
            interpolate(bent, batch)
            if bent
            else self.memory_base_mib + self.memory_per_sample_mib * batch
        )
        return round(max(0.0, mib) * MIB)


class SimulatedPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model whose parts are placed on several devices of a machine file.

    One curve describes the step time of these devices together. The model never runs out of memory.
    """

    name: Annotated[str, Meta(min_length=1)]
    curve: Curve  # (batch, step ms)
    # number of devices that the model uses, beginning with the first
    devices: Annotated[int, Meta(ge=2)] = 2

    def __post_init__(self) -> None:
        check_rising("curve", self.curve)

    def seconds(self, batch: int) -> float:
        """Return the seconds of one step with this batch size, without noise."""
        return max(0.0, interpolate(self.curve, batch)) / 1000


class SimulatedShards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharded training on a simulated machine: the memory that sharding saves, and its cost.

    Each device holds a part of the model's state.
    """

    # parameters, gradients and optimizer state; part of each device's own memory use
    state_mib: Positive
    gathered_mib: Amount = (
        0.0  # on each device, in addition to its part: parameters gathered for use
    )
    gather_ms: Amount = 0.0  # per pass, not hidden by computation
    # the gradients, a part of the state; in one pass they exist only when activations are gone
    gradients_mib: Amount = 0.0
    # fraction of a device's memory lost to fragmentation in a whole step
    fragments: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class SimulatedEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A temporary event on one device of a machine file, such as heat or a failure.

    Times are in seconds of the session's clock.
    """

    at_seconds: Amount
    device: Annotated[int, Meta(ge=0)]  # the device's position in the file, from 0
    until_seconds: float = math.inf
    memory_taken_mib: Amount = 0.0  # by another process
    # fraction of its speed that the device loses, for example to heat
    slowed: Annotated[float, Meta(ge=0, le=0.99)] = 0.0
    lost: bool = False  # True if the device fails

    def __post_init__(self) -> None:
        if not self.until_seconds > self.at_seconds:
            raise ValueError(f"it ends at {self.until_seconds} s, before it begins")

    def applies_to(self, position: int, at_seconds: float) -> bool:
        """True if the event affects the device with this index at this time."""
        return position == self.device and self.at_seconds <= at_seconds < self.until_seconds


class Machine(msgspec.Struct, frozen=True):
    """Simulated devices that train together.

    A `position` is a device's index in the request, from 0.
    """

    devices: tuple[SimulatedDevice, ...]
    sync: Sync = Sync()
    limits: tuple[Limit, ...] = ()  # one for each device; empty: none is limited
    placements: tuple[SimulatedPlacement, ...] = ()
    events: tuple[SimulatedEvent, ...] = ()
    shards: SimulatedShards | None = None

    def limit(self, position: int) -> Limit:
        """Return the limit of the device at `position`, as given after `@` in the request."""
        return self.limits[position] if self.limits else Limit()

    def described(self) -> tuple[Device, ...]:
        """The simulated devices as `Device` objects, the class that describes real devices, too."""
        return tuple(
            Device(
                id=f"sim-{position}-{device.slug}",
                index=position,
                name=device.name,
                kind="sim",
                memory_bytes=round(device.memory_mib * MIB),
                limit=self.limit(position),
                host=device.host,
            )
            for position, device in enumerate(self.devices)
        )

    def device_seconds(
        self, position: int, share: int, busy_together: bool, passes: int = 1
    ) -> float:
        """Return how many seconds one device computes in a step of `share` rows.

        The rows are divided into `passes` passes. If `busy_together`, other devices compute at the
        same time, which may slow this one down (contention).
        """
        device = self.devices[position]
        percent = self.limit(position).percent
        seconds = device.seconds(share, passes) * (100 / percent if percent else 1.0)
        return seconds * (1 + device.contention) if busy_together else seconds

    def pack_seconds(
        self, position: int, share: int, processes: int, busy_together: bool = False
    ) -> float:
        """Return the step time in seconds of equal training runs on one device.

        `processes` is the number of runs, each with `share` rows. If `busy_together`, other devices
        compute at the same time.
        """
        return (
            processes
            * self.device_seconds(position, share, busy_together)
            / self.devices[position].gain(processes)
        )

    def placement(self, name: str) -> SimulatedPlacement | None:
        """Return the placement with this name; None if the machine has no such placement."""
        return next((placement for placement in self.placements if placement.name == name), None)

    def sync_seconds(self, active: Sequence[int]) -> float:
        """Return the seconds per step for synchronizing the devices at the positions `active`."""
        return self.sync.seconds(
            len(active), len({self.devices[position].host for position in active})
        )

    def step_noise(self, shares: Sequence[int]) -> float:
        """Return the relative standard deviation of a step's time, by its noisiest device.

        `shares` are the rows of each device. Devices without rows don't count.
        """
        return max(
            (d.noise for d, share in zip(self.devices, shares, strict=True) if share > 0),
            default=0.0,
        )

    def memory_bytes(self, position: int, rows: int) -> int:
        """Return the peak memory in bytes of one device that computes these rows in one pass."""
        return self.devices[position].memory_bytes(rows)

    def part_bytes(self, position: int, rows: int, part: float, in_passes: bool = False) -> int:
        """Return a device's peak memory in bytes in sharded training, with `rows` per pass.

        The device holds the fraction `part` of the model's state. If `in_passes`, the step has
        several passes, and the device also holds the accumulated gradients. Raises ValueError if
        the machine file describes no shards.
        """
        shards = self.shards
        if shards is None:
            raise ValueError("the machine's model can't be sharded")
        more = round((shards.gathered_mib - (1 - part) * shards.state_mib) * MIB)
        freed = 0 if in_passes else round(part * shards.gradients_mib * MIB)
        activations = self.memory_bytes(position, rows) - self.devices[position].memory_bytes(1)
        used = self.memory_bytes(position, rows) + more
        return max(0, used - min(freed, activations))

    def usable_memory_bytes(self, position: int) -> int:
        """Return the bytes that a training process can use on a device, within its limit."""
        own = round(self.devices[position].memory_mib * MIB)
        capped = self.limit(position).memory_bytes
        return own if capped is None else min(own, capped)

    def short_bytes(self, position: int, at_seconds: float) -> int:
        """Return how many of a device's usable bytes other processes hold at this time.

        `usable_memory_bytes` defines which bytes are usable.
        """
        taken = sum(
            event.memory_taken_mib
            for event in self.events
            if event.applies_to(position, at_seconds)
        )
        left = max(0, round((self.devices[position].memory_mib - taken) * MIB))
        return max(0, self.usable_memory_bytes(position) - left)

    def slowed(self, position: int, at_seconds: float) -> float:
        """Return the fraction of its speed that a device loses to events at this time."""
        if not self.events:
            return 0.0
        return max(
            (event.slowed for event in self.events if event.applies_to(position, at_seconds)),
            default=0.0,
        )

    def lost(self, position: int, at_seconds: float) -> bool:
        """True if an event has made the device fail at this time."""
        return any(event.lost and event.applies_to(position, at_seconds) for event in self.events)


def check_rising(key: str, points: Points) -> None:
    """Raise ValueError unless the batch sizes of a curve's points are strictly ascending.

    `key` is the curve's key in the machine file, for the message.
    """
    for (size0, _), (size1, _) in pairwise(points):
        if size1 <= size0:
            raise ValueError(
                f"`{key}` {'repeats' if size1 == size0 else 'is not sorted at'} {size1}"
            )


def interpolate(points: Points, batch: float) -> float:
    """Return the value at `batch`, interpolated linearly between the points (batch, value).

    Outside the points, the line through the two nearest points is extended. If that line is
    falling, the nearest value is used instead.
    """
    above = bisect_left(points, batch, key=lambda point: point[0])
    right = min(max(above, 1), len(points) - 1)
    batch0, y0 = points[right - 1]
    batch1, y1 = points[right]
    if y1 < y0:
        batch = min(max(batch, batch0), batch1)
    return y0 + (y1 - y0) * (batch - batch0) / (batch1 - batch0)
