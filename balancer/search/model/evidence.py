"""What exploration saw of one device."""

from __future__ import annotations

import msgspec

from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.step_time import Point


class DeviceEvidence(msgspec.Struct, frozen=True):
    """One device's points. `rounds` counts its solo probes; `lost` says why it is left out, or is empty."""

    alone: tuple[Point, ...]  # a process of its own, the other devices busy too
    at_rest: tuple[Point, ...]  # a process of its own, the others at rest
    in_splits: tuple[Point, ...]  # its own part of the step of splits
    memory: Memory
    rounds: int
    lost: str
    alone_in_passes: tuple[Point, ...] = ()  # as in the first two, but in several passes
    split_in_passes: tuple[Point, ...] = ()
    undivided: bool = False  # a step in passes failed for a reason other than memory
