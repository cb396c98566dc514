"""Simulated machines: the step times and memory use of their devices, without noise.

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
    """The time of gradient synchronization in each step, within a host and across hosts.

    Within a host, it is `base_ms`, plus `per_device_ms` for each device after the first. With
    several hosts, `network_ms` is added, and `per_host_ms` for each host after the first.
    """

    base_ms: Amount = 0.0
    per_device_ms: Amount = 0.0
    network_ms: Amount = 0.0
    per_host_ms: Amount = 0.0

    def seconds(self, devices: int, hosts: int = 1) -> float:
        """Return how long a gradient synchronization takes in seconds, or 0 for a single device.

        If the devices are on two or more hosts, the time for the network is added.
        """
        within = self.base_ms + self.per_device_ms * (devices - 1) if devices >= 2 else 0.0
        across = self.network_ms + self.per_host_ms * (hosts - 1) if hosts >= 2 else 0.0
        return (within + across) / 1000


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of a device's performance: its step time, memory use and power.

    `curve` and `memory_curve` are piecewise linear in the number of rows. Raises `ValueError` if a
    curve's batch sizes don't rise, if `memory_curve` falls, or if the name has no letter or digit.
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
        """The name in lowercase letters, digits and hyphens, for device ids."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace(" ", "")).strip("-")

    @property
    def fixed_ms(self) -> float:
        """The part of a step's time that doesn't depend on the batch size, in milliseconds.

        It is the smallest intercept of the curve's segments, but at least 0 and at most the time of
        the largest batch.
        """
        begins = (
            t0 - max(0.0, t1 - t0) / (b1 - b0) * b0 for (b0, t0), (b1, t1) in pairwise(self.curve)
        )
        return max(0.0, min(*begins, self.curve[-1][1]))

    def seconds(self, batch: int, passes: int = 1) -> float:
        """Return how long a step of `batch` rows takes in `passes` passes, in seconds.

        A pass is a gradient-accumulation pass. Noise, compute limits and contention aren't
        included. An empty batch takes no time.
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
        """Return the power draw in watts.

        `busy` is the fraction of the time in which the device computes. Idle power is 8 % of the
        power at full load. The rest is multiplied by 0.3 · `busy` + 0.65 · throughput / highest
        throughput.
        """
        effort = min(1.0, samples_per_second / self.samples_per_second)
        return (self.power_watts or USUAL_WATTS) * (
            IDLE_POWER + (1 - IDLE_POWER) * (0.3 * busy + 0.65 * effort)
        )

    @property
    def samples_per_second(self) -> float:
        """The highest throughput with any of the recorded batch sizes."""
        fastest = 0.0
        for batch, _ in self.curve:
            seconds = self.seconds(batch)
            fastest = max(fastest, batch / seconds if seconds else math.inf)
        return fastest

    def gain(self, processes: int) -> float:
        """Return the total throughput of several processes on the device, divided by that of one.

        Without `pack_gain`, the result is 1, because the processes then only share the device's
        time.
        """
        points = self.pack_gain
        if not points or processes <= 1:
            return 1.0
        if points[0][0] > 1:
            points = ((1, 1.0), *points)
        last, most = points[-1]
        return most if processes >= last else interpolate(points, processes)

    def memory_bytes(self, batch: int) -> int:
        """Return how many bytes of memory a training step of `batch` rows needs.

        An empty batch needs none.
        """
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
    """The step times of a model whose layers are placed on several devices.

    It never runs out of memory.
    """

    name: Annotated[str, Meta(min_length=1)]
    curve: Curve  # (batch, step ms)
    # number of devices that the model uses, beginning with the first
    devices: Annotated[int, Meta(ge=2)] = 2

    def __post_init__(self) -> None:
        check_rising("curve", self.curve)

    def seconds(self, batch: int) -> float:
        """Return how long a training step of `batch` rows takes, in seconds."""
        return max(0.0, interpolate(self.curve, batch)) / 1000


class SimulatedShards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory and time of a model whose state can be sharded over several devices, as in FSDP."""

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
    """A temporary change of a simulated device: less memory, less speed, or a failure.

    Times are in seconds from the start. Raises `ValueError` unless the event ends later than it
    begins.
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
        """Return True if the event affects a device at this time.

        `position` is the device's index in the machine.
        """
        return position == self.device and self.at_seconds <= at_seconds < self.until_seconds


class Machine(msgspec.Struct, frozen=True):
    """A simulated machine: its devices, synchronization times, limits and scheduled events.

    In its methods, `position` is a device's index in `devices`.
    """

    devices: tuple[SimulatedDevice, ...]
    sync: Sync = Sync()
    limits: tuple[Limit, ...] = ()  # one for each device; empty: none is limited
    placements: tuple[SimulatedPlacement, ...] = ()
    events: tuple[SimulatedEvent, ...] = ()
    shards: SimulatedShards | None = None

    def limit(self, position: int) -> Limit:
        """Return the limit of a device."""
        return self.limits[position] if self.limits else Limit()

    def described(self) -> tuple[Device, ...]:
        """Return the devices as `Device` objects, which have ids such as `sim-0-gtx1080`."""
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
        """Return how long a device takes to compute its share, in seconds.

        Its compute limit is included. If `busy_together` is True, other devices work at the same
        time, and the resulting slow-down is included, too.
        """
        device = self.devices[position]
        percent = self.limit(position).percent
        seconds = device.seconds(share, passes) * (100 / percent if percent else 1.0)
        return seconds * (1 + device.contention) if busy_together else seconds

    def pack_seconds(
        self, position: int, share: int, processes: int, busy_together: bool = False
    ) -> float:
        """Return the step time in seconds when several training processes share a device.

        Each process computes `share` rows. If `busy_together` is True, other devices work at the
        same time, which slows this one down.
        """
        return (
            processes
            * self.device_seconds(position, share, busy_together)
            / self.devices[position].gain(processes)
        )

    def placement(self, name: str) -> SimulatedPlacement | None:
        """Return the placement with this name, or None if the machine has none."""
        return next((placement for placement in self.placements if placement.name == name), None)

    def sync_seconds(self, active: Sequence[int]) -> float:
        """Return how long a gradient synchronization among these devices takes, in seconds."""
        return self.sync.seconds(
            len(active), len({self.devices[position].host for position in active})
        )

    def step_noise(self, shares: Sequence[int]) -> float:
        """Return the relative standard deviation of the time of a step.

        It is the highest of all devices that have rows.
        """
        return max(
            (d.noise for d, share in zip(self.devices, shares, strict=True) if share > 0),
            default=0.0,
        )

    def memory_bytes(self, position: int, rows: int) -> int:
        """Return how many bytes a device needs to train on `rows` rows, without sharding."""
        return self.devices[position].memory_bytes(rows)

    def part_bytes(self, position: int, rows: int, part: float, in_passes: bool = False) -> int:
        """Return how many bytes a device needs if it holds the fraction `part` of the state.

        The state is the model's parameters, gradients and optimizer state. `rows` is the number of
        rows in a gradient-accumulation pass. If a step has only one pass (`in_passes` is False),
        gradients and activations don't exist at the same time, which saves memory. Raises
        `ValueError` if the machine's model can't be sharded.
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
        """Return how many bytes training may use on a device.

        This is the device's memory, or its limit if that is lower.
        """
        own = round(self.devices[position].memory_mib * MIB)
        capped = self.limit(position).memory_bytes
        return own if capped is None else min(own, capped)

    def short_bytes(self, position: int, at_seconds: float) -> int:
        """Return how many bytes of a device's usable memory other processes occupy at this time."""
        taken = sum(
            event.memory_taken_mib
            for event in self.events
            if event.applies_to(position, at_seconds)
        )
        left = max(0, round((self.devices[position].memory_mib - taken) * MIB))
        return max(0, self.usable_memory_bytes(position) - left)

    def slowed(self, position: int, at_seconds: float) -> float:
        """Return the fraction by which a device is slowed at this time, or 0 if it isn't slowed."""
        if not self.events:
            return 0.0
        return max(
            (event.slowed for event in self.events if event.applies_to(position, at_seconds)),
            default=0.0,
        )

    def lost(self, position: int, at_seconds: float) -> bool:
        """Return True if a device has failed at this time."""
        return any(event.lost and event.applies_to(position, at_seconds) for event in self.events)


def check_rising(key: str, points: Points) -> None:
    """Raise `ValueError` unless the first coordinates of the points are strictly increasing."""
    for (size0, _), (size1, _) in pairwise(points):
        if size1 <= size0:
            raise ValueError(
                f"`{key}` {'repeats' if size1 == size0 else 'is not sorted at'} {size1}"
            )


def interpolate(points: Points, batch: float) -> float:
    """Return the value at `batch` of the piecewise linear curve through the points.

    Outside the points, the first or last segment is extended. If that segment falls, the value at
    its end is returned instead.
    """
    above = bisect_left(points, batch, key=lambda point: point[0])
    right = min(max(above, 1), len(points) - 1)
    batch0, y0 = points[right - 1]
    batch1, y1 = points[right]
    if y1 < y0:
        batch = min(max(batch, batch0), batch1)
    return y0 + (y1 - y0) * (batch - batch0) / (batch1 - batch0)
