"""Whose memory a coming probe needs: what children held, and which idle ones would leave it too little.

A framework's allocator keeps what it once had, so an idle child holds its peak in use, and somewhat more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evener.balancer.probes.launch_plan import Key, key_of
from evener.balancer.probes.procfs import available_memory
from evener.balancer.types import Probe
from evener.devices.types import Device

USED = 0.92  # of a GPU's memory, for all children that hold some
CONTEXT_BYTES = 600 << 20  # of a GPU, for each process: what its driver's context takes beside the allocator
KEPT = 1.4  # times the peak in use: what an allocator was seen to keep, its free pieces counted
LOW_HOST_BYTES = 1 << 30  # idle children end when the machine has less to give

Held = Mapping[Key, Mapping[int, int]]  # children -> position -> peak bytes


class Room:
    """Peaks seen so far by position and share."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._peaks: dict[int, dict[int, int]] = {}
        self._short: dict[int, int] = {}

    def kept(self, position: int, peak_bytes: int) -> int:
        """What a process that used so much at its peak may hold."""
        return round(peak_bytes * KEPT) if self._devices[position].kind == "gpu" else peak_bytes

    def learn(self, position: int, share: int, held_bytes: int) -> None:
        """A process held so much for such a share."""
        self._peaks.setdefault(position, {})[share] = held_bytes

    def shrink(self, position: int, short_bytes: int) -> None:
        """Others hold so much of what the device was said to have."""
        self._short[position] = short_bytes

    def too_many(self, probes: Sequence[Probe], idle: Held) -> list[Key]:
        """Idle children that have to go before these probes start; the ones that will run them stay."""
        wanted = {key_of(probe.layout) for probe in probes}
        others = [key for key in idle if key not in wanted]
        if (available_memory() or LOW_HOST_BYTES) < LOW_HOST_BYTES:
            return others
        needs = self._needs(probes)
        tight = {position for position, need in needs.items() if self._crowded(position, need, wanted, idle)}
        return [key for key in others if tight.intersection(key.positions)]

    def _needs(self, probes: Sequence[Probe]) -> dict[int, int | None]:
        needs: dict[int, int | None] = {}
        for probe in probes:
            layout = probe.layout
            for position in layout.active:
                most = self._most(position, layout.shares[position])
                needs[position] = None if most is None else most * layout.processes
        return needs

    def _most(self, position: int, share: int) -> int | None:
        """At most what a process will hold, by what others held: memory rises with the share, no faster than it."""
        known = self._peaks.get(position, {})
        return min((round(size * max(1.0, share / seen)) for seen, size in known.items()), default=None)

    def _crowded(self, position: int, need: int | None, wanted: set[Key], idle: Held) -> bool:
        """Whether a GPU could not hold the idle children and one that needs so much; unknown counts as everything."""
        device = self._devices[position]
        if device.kind != "gpu":
            return False  # slices have a cap each
        usable = device.usable_memory_bytes
        if need is None or usable is None:
            return True
        held = {key: sizes[position] for key, sizes in idle.items() if position in sizes}
        own = max((size for key, size in held.items() if key in wanted), default=0)
        others = sum(size + CONTEXT_BYTES for key, size in held.items() if key not in wanted)
        return max(need, own) + others > USED * (usable - self._short.get(position, 0))
