"""What threatens a probe from outside, by position of its devices: heat, others' memory, a device that goes.

GPUs are asked through the driver, between timed blocks only; of a slice of the CPU, the machine's free memory is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from evener.balancer.probes.block_timing import Block
from evener.balancer.probes.child_group import BrokenError, Mishap, StoppedError
from evener.balancer.probes.procfs import resident_bytes
from evener.devices.cpu.slices import available_memory_bytes
from evener.devices.nvidia.probe_watch import GpuVitals, Vitals
from evener.devices.types import Device

LOOK_SECONDS = 0.05  # a look takes a millisecond or two; one that takes longer is not waited for
BACK_SECONDS = 0.5  # before a probe, for a driver that was silent and may be back
SILENT_SECONDS = 5.0  # a driver that takes longer for one answer can't be trained on
PATIENCE = 3.0  # times that, in which a busy machine may not come to ask it
SPREAD, SPREAD_BYTES = 0.02, 1 << 30  # of a GPU's memory: what is not told from the driver's own,
SPREAD_SMALL = 0.1  # which is no more than this of a small one's
STEP = 0.01  # of its memory: what others hold is told in such steps, so that trifles are no news
LEAVE_SECONDS = 0.2  # of all watches together, at the end
SETTLE_SECONDS, SETTLE_LOOKS = 0.4, 3  # a driver takes back the memory of an ended process, in its time

Looks = Mapping[int, Vitals]


class Guard:
    """The watches over a session's devices; none is begun before a probe needs it."""

    def __init__(self, devices: Sequence[Device], silent_seconds: float = SILENT_SECONDS) -> None:
        self._devices = devices
        self._silent_seconds = silent_seconds
        self._watches: dict[int, GpuVitals] = {}
        self._known_short: dict[int, int] = {}

    def admit(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait for each driver's answer; BrokenError, which names the device, if it has none or the device is gone."""
        self._looks(positions, LOOK_SECONDS)
        until = time.monotonic() + BACK_SECONDS
        for watch in self._watching(positions):
            watch.answer(max(0.0, until - time.monotonic()))
        until = time.monotonic() + PATIENCE * self._silent_seconds
        while any(w.looks and w.silent_seconds < self._silent_seconds for w in self._watching(positions)):
            if stop.wait(LOOK_SECONDS):
                raise StoppedError
            if time.monotonic() > until:
                break
        self._check(positions)

    def look(self, positions: Iterable[int]) -> Looks:
        """What the drivers tell now, at once; BrokenError if a device has gone, or its driver silent for long."""
        looks = self._looks(positions, LOOK_SECONDS)
        self._check(positions)
        return looks

    def short_bytes(self, positions: Iterable[int], own: Collection[int], clean: Collection[int]) -> dict[int, int]:
        """How much less each device can give than the request was told, as others hold it; nothing where all is there.

        `own` are the pids of the session's children, `clean` the positions on which none of these lives. Where the
        driver doesn't name processes, only a clean device tells what others hold.
        """
        found: dict[int, int] = {}
        for position in dict.fromkeys(positions):
            short = self._settled(position, own, position in clean)
            if short > self._known_short.get(position, 0):
                step = max(1, int(STEP * (self._devices[position].memory_bytes or 0)))
                self._known_short[position] = -(-short // step) * step
            if short:
                found[position] = self._known_short[position]
        return found

    def close(self) -> None:
        """End every watch; one that its driver holds is not waited for."""
        watches, until = list(self._watches.values()), time.monotonic() + LEAVE_SECONDS
        for watch in watches:
            watch.close()
        for watch in watches:
            watch.join(max(0.0, until - time.monotonic()))

    def _watch(self, position: int) -> GpuVitals | None:
        device = self._devices[position]
        if device.kind != "gpu":
            return None
        if position not in self._watches:
            self._watches[position] = GpuVitals(device.id)
        return self._watches[position]

    def _watching(self, positions: Iterable[int]) -> list[GpuVitals]:
        return [watch for i in positions if (watch := self._watch(i))]

    def _looks(self, positions: Iterable[int], wait_seconds: float, full: bool = False) -> Looks:
        """All at once; one that hangs since an earlier look is not waited for again."""
        watches = {i: watch for i in dict.fromkeys(positions) if (watch := self._watch(i))}
        fresh = {i: watch.ask(full) for i, watch in watches.items()}
        until = time.monotonic() + wait_seconds
        return {
            i: watch.answer(max(0.0, until - time.monotonic()) if fresh[i] else 0.0) for i, watch in watches.items()
        }

    def _check(self, positions: Iterable[int]) -> None:
        for rank, position in enumerate(dict.fromkeys(positions)):
            watch = self._watch(position)
            if watch is None:
                continue
            words = watch.answer(0.0).trouble
            if watch.silent_seconds >= self._silent_seconds:
                words = f"The driver has not answered for {watch.silent_seconds:.0f} s."
            if words:
                told = words[:1].lower() + words.removesuffix(".")[1:]
                raise BrokenError((Mishap(rank, False, "device", told, rank),))

    def _settled(self, position: int, own: Collection[int], clean: bool) -> int:
        """What is short, once it is sure that nobody is just leaving."""
        known = self._known_short.get(position, 0) + _spread(self._devices[position].memory_bytes or 0)
        short = self._short(position, own, clean)
        for _ in range(SETTLE_LOOKS):
            if short <= known:
                break
            time.sleep(SETTLE_SECONDS)
            short = min(short, self._short(position, own, clean))
        return short

    def _short(self, position: int, own: Collection[int], clean: bool) -> int:
        device = self._devices[position]
        usable, whole = device.usable_memory_bytes, device.memory_bytes
        if usable is None or whole is None or device.kind == "sim":
            return 0
        if device.kind == "cpu":
            left = available_memory_bytes() + sum(resident_bytes(pid) for pid in own)
            return max(0, usable - left)
        seen = self._looks((position,), SETTLE_SECONDS, full=True)[position]
        others = _others(seen, own, clean)
        if others is None or others < _spread(whole):
            return 0
        return max(0, usable - max(0, whole - others))


def _spread(memory_bytes: int) -> float:
    return max(SPREAD * memory_bytes, min(SPREAD_BYTES, SPREAD_SMALL * memory_bytes))


def _others(seen: Vitals, own: Collection[int], clean: bool) -> int | None:
    """Bytes that others hold; None if they can't be told from the session's own."""
    if seen.used_bytes is None:
        return None
    mine = [size for pid, size in seen.processes.items() if pid in own]
    return max(0, seen.used_bytes - sum(mine)) if clean or mine else None


class Lookout:
    """The guard of one probe: what held its devices back, from one block to the next."""

    def __init__(self, guard: Guard | None, positions: Sequence[int]) -> None:
        self._guard, self._positions = guard, tuple(dict.fromkeys(positions))
        self._before: Looks = guard.look(self._positions) if guard else {}

    def judged(self, block: Block) -> Block:
        """The block, with what the drivers say of its time; BrokenError if a device has gone meanwhile."""
        if self._guard is None:
            return block
        before, self._before = self._before, self._guard.look(self._positions)
        held = [(_share(before.get(i), now, "held_seconds"), i) for i, now in self._before.items()]
        capped = [_share(before.get(i), now, "capped_seconds") for i, now in self._before.items()]
        slowed, position = max(held, default=(0.0, -1))
        return msgspec.structs.replace(
            block, slowed=slowed, capped=max(capped, default=0.0), slowest=position if slowed else -1
        )


def _share(before: Vitals | None, now: Vitals, what: str) -> float:
    """Part of the time between two looks; 0 where either doesn't tell."""
    if before is None or now.at_seconds <= before.at_seconds:
        return 0.0
    first, last = getattr(before, what), getattr(now, what)
    if first is None or last is None:
        return 0.0
    return float(min(1.0, max(0.0, (last - first) / (now.at_seconds - before.at_seconds))))
