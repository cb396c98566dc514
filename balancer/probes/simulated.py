"""Run probes on simulated devices."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from evener.devices.machine import MIB, Machine

from ..events import ProbeProgress, Report
from ..statistics import relative_half_width
from ..types import MEASURED_PART, Facts, Failed, ModelState, Observation, OutOfMemory, Probe, Timed
from .block_timing import Block, BlockTimer

# seconds of real time between checks of `stop`, if simulated probes take real time
TICK_SECONDS = 0.1
SHORTEST_STEP_SECONDS = 1e-9  # a step is never free
LATER = (
    "micro",
    "costs",
    "tokens",
    "length",
    "state",
)  # fields of a layout that don't affect the seed if they are empty


class SimulatedProber:
    """Computes the outcomes of probes from a machine's description, with random noise.

    - `seed`: the same seed gives the same noise.
    - `pace`: real seconds to wait for each simulated second; 0 means no waiting.
    - `start_seconds`: initial time of the simulated clock; above 0 for a resumed run.
    - `end_seconds`: the simulated time at which probes stop.
    """

    def __init__(
        self,
        machine: Machine,
        seed: int,
        pace: float = 0.0,
        start_seconds: float = 0.0,
        end_seconds: float = math.inf,
    ) -> None:
        self._machine = machine
        self._end = end_seconds
        self._seed = seed
        self._pace = pace
        self._clock = start_seconds
        self._closed = threading.Event()

    def measure(
        self,
        probes: tuple[Probe, ...],
        report: Report,
        stop: threading.Event,
        finished: tuple[Probe, ...] = (),
    ) -> Iterator[Observation]:
        """Run probes at the same time, and yield the outcome of each as it ends.

        Probes that are cut off by `stop` or `end_seconds` yield nothing. `finished` has probes of
        the same round that have ended; their devices don't count as idle.
        """
        start = self._clock
        busy = {position for probe in (*probes, *finished) for position in probe.layout.active}
        runs = [_SimulatedProbe(self._machine, self._seed, probe, busy, start) for probe in probes]
        reports = sorted(
            ((at, i, one) for i, run in enumerate(runs) for at, one in run.reports),
            key=lambda r: r[:2],
        )
        for at, i, progress in reports:
            last = progress is runs[i].reports[-1][1]
            if stop.is_set() or not self._wait_until(start + at, stop):
                return
            if self._pace or last:
                report(msgspec.structs.replace(progress, at_seconds=self._clock))
            if last:
                yield runs[i].seen

    def now(self) -> float:
        """Return the simulated seconds since the search began."""
        return self._clock

    def facts(self) -> Facts:
        """Return the facts about the simulated workload.

        These include a digest of the machine's description, which identifies the workload, and how
        much memory the model's state takes (None for a model that can't be sharded).
        """
        machine = msgspec.structs.asdict(self._machine)
        shards = self._machine.shards
        if shards is None:
            del machine["shards"]  # the digest must equal that of older files
        digest = blake2b(msgspec.json.encode(machine), digest_size=8).hexdigest()
        state = None
        if shards is not None:
            sizes = (shards.state_mib, shards.gathered_mib, shards.gradients_mib)
            whole, gathered, gradients = (round(size * MIB) for size in sizes)
            state = ModelState(whole, gathered, gradient_bytes=gradients)
        return Facts(engine="simulated", workload_digest=digest, state=state)

    def close(self) -> None:
        """Stop all waiting, so that running probes end at once."""
        self._closed.set()

    def _wait_until(self, simulated_seconds: float, stop: threading.Event) -> bool:
        """Advance the simulated clock to this time, and wait for as long as the pace requires.

        Returns False if the probe was stopped before, or if the prober's `end_seconds` come first.
        """
        # no wait if `pace` is 0
        at = min(simulated_seconds, self._end)
        until = time.monotonic() + max(0.0, at - self._clock) * self._pace
        while self._pace:
            left = until - time.monotonic()
            if left <= 0:
                break
            if stop.wait(min(left, TICK_SECONDS)) or self._closed.is_set():
                return False
        self._clock = max(self._clock, at)
        return simulated_seconds <= self._end


class _SimulatedProbe:
    """One simulated probe; computes its progress reports and its outcome when it is created."""

    def __init__(
        self, machine: Machine, seed: int, probe: Probe, busy: set[int], start_seconds: float = 0.0
    ) -> None:
        self._machine = machine
        self._probe = probe
        self._start = start_seconds
        layout = msgspec.structs.asdict(probe.layout)
        for name in LATER:
            if not layout[name]:
                del layout[name]
        drawn = {
            "layout": layout,
            "stage": probe.stage,
            "seconds": probe.seconds,
            "turn": probe.turn,
        }
        self._random = random.Random(
            blake2b(f"{seed}:".encode() + msgspec.json.encode(drawn), digest_size=8).digest()
        )
        # positions of all devices that run a probe meanwhile
        self._busy = busy
        self.reports: list[tuple[float, ProbeProgress]] = []  # with seconds since the start
        self.seen = self._measure()

    def _measure(self) -> Observation:
        layout = self._probe.layout
        machine = self._machine
        missing = self._missing()
        if missing:
            return self._failed(missing)
        lost = self._find_lost_device(0.0)
        if lost:
            return lost
        if layout.traits.placed:
            placement = machine.placement(layout.placement)
            assert placement is not None, "a missing one has failed above"
            step = max(SHORTEST_STEP_SECONDS, placement.seconds(layout.global_batch))
            return self._timed(step, (None,) * len(layout.shares), ())
        step, parts = self._simulate_step()
        short = tuple(
            machine.short_bytes(i, self._start) if i in layout.active else 0
            for i in range(len(layout.shares))
        )
        needed = [size or 0 for size in self._memory()]
        full = tuple(i for i, size in enumerate(needed) if size > self._usable_bytes(i) - short[i])
        if full:
            self._report(step, "building", None, None)
            return OutOfMemory(
                self._probe, full, "the samples do not fit the simulated memory", step, short
            )
        return self._timed(step, parts, short)

    def _usable_bytes(self, position: int) -> int:
        """Return how much memory of a device, in bytes, a training step can use."""
        usable = self._machine.usable_memory_bytes(position)
        shards, layout = self._machine.shards, self._probe.layout
        if shards is None or not layout.state:
            return usable
        # fragmentation takes a part of the memory in a sharded step
        return round(usable * (1 - shards.fragments))

    def _missing(self) -> str:
        """Return why the simulated machine can't run this layout, or "" if it can."""
        layout = self._probe.layout
        if layout.traits.placed and self._machine.placement(layout.placement) is None:
            return f"the simulated machine has no placement {layout.placement!r}"
        if layout.traits.side_by_side and layout.placement:
            return "simulated devices share memory between plain processes only"
        if layout.traits.sharded and self._machine.shards is None:
            return "the simulated machine's model can't be sharded"
        return "a simulated machine has no XLA and no other precision" if layout.knobs else ""

    def _simulate_step(self) -> tuple[float, tuple[float | None, ...]]:
        """Return the step time and each device's compute time in seconds, without noise."""
        # the compute time is None for a device without rows
        layout = self._probe.layout
        machine = self._machine
        active = layout.active
        crowd = len(self._busy | set(active)) > 1 if not layout.traits.together else len(active) > 1
        parts = tuple(
            self._own_seconds(i, crowd) if share else None for i, share in enumerate(layout.shares)
        )
        slowest = max((part for part in parts if part is not None), default=0.0)
        gathers = machine.shards.gather_ms / 1000 if machine.shards and layout.state else 0.0
        slowest += gathers * max(map(layout.passes, active))
        return max(SHORTEST_STEP_SECONDS, slowest + machine.sync_seconds(active)), parts

    def _own_seconds(self, position: int, crowd: bool) -> float:
        layout = self._probe.layout
        machine = self._machine
        share = layout.shares[position]
        processes = layout.processes
        if processes > 1:
            return machine.pack_seconds(position, share, processes, crowd)
        if not layout.state:
            return machine.device_seconds(position, share, crowd, layout.passes(position))
        # all devices meet in each pass: one with fewer rows than passes computes filler rows
        passes = max(map(layout.passes, layout.active))
        return machine.device_seconds(position, max(share, passes), crowd, passes)

    def _timed(
        self, step: float, own_seconds: tuple[float | None, ...], short_bytes: tuple[int, ...]
    ) -> Observation:
        noise = self._machine.step_noise(self._probe.layout.shares)
        watts = self._mean_watts(step, own_seconds)
        elapsed = first = step * self._draw(noise, 1)
        timer = BlockTimer(self._probe.seconds, self._probe.whole, self._probe.steps, first)
        while True:
            steps = timer.next_steps()
            if not steps:
                break
            lost = self._find_lost_device(elapsed)
            if lost:
                return lost
            slowed, slowest = self._slowed(elapsed)
            held, own = self._throttle(step, own_seconds, elapsed)
            block_seconds = steps * held * self._draw(noise, steps)
            own = tuple(p and p * block_seconds / held for p in own)
            timer.add(Block(steps, block_seconds, own_seconds=own, slowed=slowed, slowest=slowest))
            elapsed += block_seconds
            self._report_timing(elapsed, timer)
        timing = timer.result()
        if timing is None:
            return self._failed("no block was timed")
        return Timed(
            probe=self._probe,
            step_seconds=timing.step.value,
            low_seconds=timing.step.low,
            high_seconds=timing.step.high,
            steps=timing.steps,
            memory_bytes=self._memory(),
            device_seconds=timing.own_seconds,
            first_step_seconds=first,
            elapsed_seconds=elapsed,
            warnings=timing.warnings,
            short_bytes=short_bytes,
            watts=watts,
        )

    def _mean_watts(
        self, step: float, own_seconds: tuple[float | None, ...]
    ) -> tuple[float | None, ...]:
        """Return the mean power of each device in watts.

        Returns an empty tuple if the power is unknown.
        """
        layout = self._probe.layout
        found = list[float | None]()
        if layout.traits.placed:  # the busy time of each of its devices isn't specified
            return ()
        for position, device in enumerate(self._machine.devices):
            rate = layout.shares[position] * layout.processes / step
            busy = min(1.0, (own_seconds[position] or 0.0) / step)
            other = position in self._busy and position not in layout.active
            found.append(None if other or device.power_watts is None else device.watts(busy, rate))
        return tuple(found) if any(found) else ()

    def _throttle(
        self, step: float, own_seconds: tuple[float | None, ...], elapsed: float
    ) -> tuple[float, tuple[float | None, ...]]:
        """Return the step time and compute times, lengthened for devices that are throttled now.

        `elapsed` is the time since the probe began, in seconds.
        """
        at = self._start + elapsed
        speeds = [1 - self._machine.slowed(i, at) for i in range(len(own_seconds))]
        longest = max(filter(None, own_seconds), default=0.0)
        if not longest:
            slowest = min(speeds[i] for i in self._probe.layout.active)
            return step / slowest, own_seconds
        # a throttled device computes for longer, and the other devices wait for it
        held = tuple(part and part / speed for part, speed in zip(own_seconds, speeds, strict=True))
        longest_held = max(filter(None, held))
        return step + longest_held - longest, held

    def _slowed(self, elapsed: float) -> tuple[float, int]:
        """Return the slowdown of the most throttled device, as a fraction, and its position.

        The position is -1 if no device is throttled. `elapsed` is the time since the probe began,
        in seconds.
        """
        active = self._probe.layout.active
        slowed, position = max((self._machine.slowed(i, self._start + elapsed), -i) for i in active)
        return slowed, -position if slowed else -1

    def _find_lost_device(self, elapsed: float) -> Failed | None:
        """Return the failure of the probe if a device has been lost by now, or None.

        `elapsed` is the time since the probe began, in seconds.
        """
        at = self._start + elapsed
        for i in self._probe.layout.active:
            if self._machine.lost(i, at):
                self._report(elapsed, "measuring" if elapsed else "starting", None, None)
                label = self._machine.described()[i].label
                return Failed(
                    self._probe, "device", f"{label}: the simulated device is lost", (i,), elapsed
                )
        return None

    def _memory(self) -> tuple[int | None, ...]:
        layout = self._probe.layout
        if layout.traits.placed:
            return (None,) * len(layout.shares)
        if layout.traits.sharded:
            parts = layout.state or (MEASURED_PART,) * len(layout.shares)
            pairs = enumerate(zip(layout.pass_rows, parts, strict=True))
            return tuple(  # a device without rows computes a filler row at first
                self._machine.part_bytes(i, max(1, rows), part, layout.in_passes)
                if i in layout.active
                else None
                for i, (rows, part) in pairs
            )
        return tuple(
            self._machine.memory_bytes(i, rows) * layout.processes if rows else None
            for i, rows in enumerate(layout.pass_rows)
        )

    def _draw(self, noise: float, steps: int) -> float:
        """Return a random factor for the duration of a block with this many steps.

        `noise` is the relative standard deviation of a single step's duration.
        """
        return max(0.01, self._random.gauss(1.0, noise / steps**0.5)) if noise else 1.0

    def _report_timing(self, elapsed: float, timer: BlockTimer) -> None:
        interval = timer.interval()
        batch = self._probe.layout.global_batch * self._probe.layout.processes
        rate = batch / interval.value if interval else None
        self._report(
            elapsed, timer.phase, rate, relative_half_width(interval) if interval else None
        )

    def _report(
        self, at_seconds: float, phase: str, rate: float | None, relative_error: float | None
    ) -> None:
        self.reports.append(
            (at_seconds, ProbeProgress(self._probe, phase, rate, relative_error, at_seconds))
        )

    def _failed(self, detail: str) -> Failed:
        self._report(0.0, "building", None, None)
        return Failed(self._probe, "unsupported", detail, self._probe.layout.active, 0.0)
