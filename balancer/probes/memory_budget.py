"""The choice of idle children that must end because the next probe needs their memory.

PyTorch's children give their cache back while they rest, and say what they keep. TensorFlow's allocator keeps what it
once had: such an idle child still holds its peak, and somewhat more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from evener.devices.registry import find_backend
from evener.devices.types import Device

from ..types import Probe
from .launch_plan import GroupKey

USED = 0.92  # of a GPU's memory, for all children that hold some
CONTEXT_BYTES = 600 << 20  # of a GPU, for each process: what its driver's context takes beside the allocator
KEPT = 1.4  # times the peak in use: what an allocator was seen to keep, its free pieces included
LOW_HOST_BYTES = 1 << 30  # all other idle children end when the host has less memory left

HeldBytes = Mapping[GroupKey, Mapping[int, int]]  # group -> position -> peak bytes


class MemoryBudget:
    """The memory that processes were seen to hold, by position and rows per pass, and what each device has left."""

    def __init__(self, devices: Sequence[Device], available_bytes: Callable[[], int]) -> None:
        self._devices, self._available_bytes = devices, available_bytes  # the latter: of the host with the least
        self._peaks: dict[int, dict[int, int]] = {}
        self._short: dict[int, int] = {}

    def estimate_held(self, position: int, peak_bytes: int) -> int:
        """The bytes that an idle process still holds if its peak was `peak_bytes`."""
        return round(peak_bytes * KEPT) if find_backend(self._devices[position].kind).own_memory else peak_bytes

    def record_held(self, position: int, rows: int, held_bytes: int) -> None:
        """Record that a process held `held_bytes` for passes of `rows` rows."""
        self._peaks.setdefault(position, {})[rows] = held_bytes

    def record_short(self, position: int, short_bytes: int) -> None:
        """Record the bytes of a device's memory that other users hold."""
        self._short[position] = short_bytes

    def groups_to_end(self, probes: Sequence[Probe], idle: HeldBytes) -> list[GroupKey]:
        """Idle groups that have to end before these probes start; the ones that will run them stay."""
        wanted = {GroupKey.for_layout(probe.layout) for probe in probes}
        others = [key for key in idle if key not in wanted]
        if others and self._available_bytes() < LOW_HOST_BYTES:
            return others
        needs = self._needs(probes)
        tight = {position for position, need in needs.items() if self._is_tight(position, need, wanted, idle)}
        return [key for key in others if tight.intersection(key.positions)]

    def _needs(self, probes: Sequence[Probe]) -> dict[int, int | None]:
        needs: dict[int, int | None] = {}
        for probe in probes:
            layout = probe.layout
            for position in layout.active:
                most = self._estimate_need(position, layout.pass_rows[position])
                needs[position] = None if most is None else most * layout.processes
        return needs

    def _estimate_need(self, position: int, rows: int) -> int | None:
        """An upper bound, from what processes held for other passes: memory grows with the rows, at most as fast."""
        peaks = self._peaks.get(position, {})
        return min((round(size * max(1.0, rows / seen)) for seen, size in peaks.items()), default=None)

    def _is_tight(self, position: int, need: int | None, wanted: set[GroupKey], idle: HeldBytes) -> bool:
        """True if a GPU can't hold the idle children beside one that needs this much; an unknown need is all of it."""
        device = self._devices[position]
        if not find_backend(device.kind).own_memory:
            return False  # each slice has its own cap
        usable = device.usable_memory_bytes
        if need is None or usable is None:
            return True
        held = {key: sizes[position] for key, sizes in idle.items() if position in sizes}
        own = max((size for key, size in held.items() if key in wanted), default=0)
        others = sum(size + CONTEXT_BYTES for key, size in held.items() if key not in wanted)
        return max(need, own) + others > USED * (usable - self._short.get(position, 0))
