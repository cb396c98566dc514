"""What exploration saw of one device, and what it says of others of the same product."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.step_time import Point
from evener.balancer.search.statistics import relative_error
from evener.balancer.types import Observation, Timed


class DeviceEvidence(msgspec.Struct, frozen=True):
    """One device's points. `rounds` counts its solo probes; `lost` says why it is left out, or is empty."""

    alone: tuple[Point, ...]  # a process of its own while the other devices work too, which may slow it
    at_rest: tuple[Point, ...]  # a process of its own while the others are idle
    in_splits: tuple[Point, ...]  # its own part of the step of splits
    memory: Memory
    rounds: int
    lost: str
    alone_in_passes: tuple[Point, ...] = ()  # as in the first two, but in several passes
    split_in_passes: tuple[Point, ...] = ()
    undivided: bool = False  # a step in passes failed for a reason other than memory

    def out_of_use(self, quantum: int) -> bool:
        """Whether it failed for good, or ran out of memory at the smallest share."""
        return bool(self.lost) or (self.memory.failed is not None and self.memory.failed <= quantum)


def read_points(seen: Sequence[Observation], position: int, own_part: bool = False) -> Iterator[Point]:
    """Whole steps, or the device's own part of them, with standard errors.

    Each error is the larger of its own error and the error expected from the pooled noise per step: an interval of few
    blocks is often too narrow by luck, and a probe that ends once it is narrow enough selects those.
    """
    found: list[tuple[Timed, float]] = []
    for one in seen:
        seconds = (one.device_seconds[position] if own_part else one.step_seconds) if isinstance(one, Timed) else None
        if isinstance(one, Timed) and seconds:
            found.append((one, seconds))
    own = [relative_error(one) for one, _ in found]
    steps = [max(1, one.steps) for one, _ in found]
    noise = math.sqrt(math.fsum(e * e * n for e, n in zip(own, steps, strict=True)) / max(1, len(own)))
    for (one, seconds), error, count in zip(found, own, steps, strict=True):
        layout = one.probe.layout
        wide = max(error, noise / math.sqrt(count))
        yield Point(layout.shares[position], seconds, wide, layout.passes(position))


def lend_memory_lines(devices: Sequence[DeviceEvidence], products: Sequence[int]) -> tuple[DeviceEvidence, ...]:
    """The devices; those without a memory line of their own borrow one, if their product is known."""
    if not products:
        return tuple(devices)
    return tuple(_borrow(device, own, devices, products) for device, own in zip(devices, products, strict=True))


def _borrow(
    device: DeviceEvidence, own: int, devices: Sequence[DeviceEvidence], products: Sequence[int]
) -> DeviceEvidence:
    """With the line of the largest batch on a device with more memory; with one point, the steepest there may be.

    Devices of equal memory run the same batches at the same time.
    """
    memory = device.memory
    if memory.limit_bytes is None or memory.line is not None:
        return device
    same = [other.memory for other, product in zip(devices, products, strict=True) if product == own]
    larger = [one for one in same if one.points and (one.limit_bytes or 0) > memory.limit_bytes]
    lender = max(larger, key=lambda one: one.points[-1][0], default=None)
    if lender is None:
        return device
    batch, used = lender.points[-1]
    line = lender.line or (0.0, used / batch)
    return msgspec.structs.replace(device, memory=msgspec.structs.replace(memory, borrowed=line)) if line[1] else device
