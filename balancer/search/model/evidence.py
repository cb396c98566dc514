"""What exploration saw of one device, and what it says of others of the same product."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.step_time import Point


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
