"""One probe on standing children: first step, warm-up and timed blocks, until the timing rules say enough."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from evener.balancer.events import ProbeProgress
from evener.balancer.probes.block_timing import LONGEST_BLOCK_SECONDS, Block, Measured, Timing
from evener.balancer.probes.child_group import BrokenError, Mishap, Party
from evener.balancer.probes.interference import Guard, Lookout
from evener.balancer.probes.prober import Report
from evener.balancer.probes.protocol import Prepare, Prepared, Ran, Run
from evener.balancer.search.statistics import relative_half_width
from evener.balancer.types import Probe, Timed

_T = TypeVar("_T")
REPORT_SECONDS = 0.2  # between two signs of progress of one probe
BLOCK_SLACK = 20.0  # a block may take so many times what it should
CHUNKS = 8  # of a pack's block: how often each training looks at the clock


class Limits(msgspec.Struct, frozen=True):
    """How long each phase may take before the child counts as hung; seconds."""

    start: float = 120.0
    build: float = 600.0  # imports of a framework on a slow disk, and the model
    prepare: float = 600.0  # tracing, autotuning, compiling
    block: float = 60.0  # or BLOCK_SLACK times what it should take, if that is more


class Stand(msgspec.Struct, frozen=True):
    """How a party's ranks lie on the devices of the request."""

    positions: tuple[int, ...]  # in rank order; one child over several devices: in the order of its devices
    together: bool  # ranks wait for each other in each step
    one_child: bool  # one process over all positions
    own_cores: bool  # CPU slices: own compute is known from CPU time
    threads: int = 1  # of each rank
    busy_cores: tuple[float, ...] = ()  # that each rank's step keeps busy; empty: one


class Watch:
    """Tells how one probe is doing, not more often than anybody can see."""

    def __init__(self, probe: Probe, report: Report, now: Callable[[], float]) -> None:
        self.phase = "starting"
        self._probe, self._report, self._now = probe, report, now
        self._last = float("-inf")

    def enter(self, phase: str) -> None:
        """A new phase is always told."""
        if phase != self.phase or self._last < 0:
            self.phase, self._last = phase, float("-inf")
            self.tell()

    def tell(self, rate: float | None = None, relative: float | None = None) -> None:
        """The figures so far."""
        if (at := time.monotonic()) - self._last >= REPORT_SECONDS:
            self._last = at
            self._report(ProbeProgress(self._probe, self.phase, rate, relative, self._now()))


class Trial:
    """The measurement of one probe: `run` gives what was timed; BrokenError and StoppedError come out of the party."""

    def __init__(
        self, probe: Probe, party: Party, stand: Stand, limits: Limits, watch: Watch, guard: Guard | None = None
    ) -> None:
        self._probe, self._party, self._stand = probe, party, stand
        self._limits, self._watch, self._guard = limits, watch, guard
        self.memory: tuple[int | None, ...] = ()  # peak by position in the stand
        self._cpu_seconds, self._work_seconds = 0.0, 0.0  # alone on its own cores: of all blocks, without spinning
        self.prepared = 0.0  # when the first step was done, by the monotonic clock

    def run(self, warm_up_shares: tuple[int, ...] | None, stop: threading.Event, started: float) -> Timed:
        """Time the probe; `warm_up_shares`, if given, step once before it, as some frameworks trace two sizes apart."""
        self._watch.enter("warming up")
        if warm_up_shares is not None:
            self._prepare(warm_up_shares, stop)
        first = self._prepare(self._shares(), stop)
        self.prepared = time.monotonic()
        measured = self._time(first, stop)
        count = len(self._probe.layout.shares)
        return Timed(
            probe=self._probe,
            step_seconds=measured.step.value,
            low_seconds=measured.step.low,
            high_seconds=measured.step.high,
            steps=measured.steps,
            memory_bytes=self._spread(self.memory, count),
            device_seconds=self._spread(measured.own_seconds, count),
            first_step_seconds=first,
            elapsed_seconds=time.monotonic() - started,
            warnings=measured.warnings,
        )

    @property
    def busy_cores(self) -> float | None:
        """Cores that a step keeps busy, alone on cores of its own; at least one, at most its threads."""
        if not self._work_seconds:
            return None
        return min(max(1.0, self._cpu_seconds / self._work_seconds), float(self._stand.threads))

    def _shares(self) -> tuple[int, ...]:
        """What each child is told: the shares of all ranks, or of its own devices."""
        return tuple(self._probe.layout.shares[position] for position in dict.fromkeys(self._stand.positions))

    def _prepare(self, shares: tuple[int, ...], stop: threading.Event) -> float:
        replies = self._party.order(lambda _: Prepare(shares), Prepared, self._limits.prepare, stop)
        return max(cast(Prepared, reply).first_step_seconds for reply in replies)

    def _time(self, first_step_seconds: float, stop: threading.Event) -> Measured:
        timing = Timing(self._probe.seconds, self._probe.whole, self._probe.steps)
        step_seconds = first_step_seconds
        lookout = Lookout(self._guard, self._stand.positions)
        while steps := timing.next_steps():
            limit = max(self._limits.block, BLOCK_SLACK * steps * step_seconds)
            run = self._run_order(steps, step_seconds)
            replies = self._party.order(lambda _, run=run: run, Ran, limit, stop)  # type: ignore[misc]
            ran = [cast(Ran, reply) for reply in replies]
            if self._probe.layout.processes == 1 and any(reply.steps != steps for reply in ran):
                raise BrokenError((Mishap(0, False, "protocol", "it ran another number of steps than it was told"),))
            block = lookout.judged(self._block(ran))
            timing.add(block)
            step_seconds = block.step_seconds
            self._tell(timing)
        measured = timing.result()
        if measured is None:
            raise BrokenError((Mishap(0, False, "protocol", "no block was timed"),))
        return measured

    def _run_order(self, steps: int, step_seconds: float) -> Run:
        """So many steps; trainings of a pack run for the same time instead, so that none idles while another works."""
        if self._probe.layout.processes == 1:
            return Run(steps)
        return Run(max(1, steps // CHUNKS), min(steps * step_seconds, LONGEST_BLOCK_SECONDS))

    def _block(self, ran: list[Ran]) -> Block:
        """The group's block: as long as its slowest rank's; of a pack, the time in which each takes a step."""
        if self._probe.layout.processes > 1:
            return self._pack_block(ran)
        wall = max(reply.wall_seconds for reply in ran)
        stand = self._stand
        self.memory = tuple(size for reply in ran for size in reply.memory_bytes)
        if len(set(stand.positions)) == 1:
            return Block(ran[0].steps, wall, self._cpu_share(ran), (wall,))
        if stand.own_cores and not stand.one_child:
            cores = stand.busy_cores or (1.0,) * len(ran)
            own = tuple(
                min(wall, reply.cpu_seconds / busy + reply.spun_seconds) for reply, busy in zip(ran, cores, strict=True)
            )
            return Block(ran[0].steps, wall, None, own)
        return Block(ran[0].steps, wall)

    def _cpu_share(self, ran: list[Ran]) -> float | None:
        """CPU time over wall time of one process that never waits; None where that says nothing of disturbance."""
        (one, *others), stand = ran, self._stand
        if others or not stand.own_cores:
            return None
        self._cpu_seconds += one.cpu_seconds
        self._work_seconds += max(0.0, one.wall_seconds - one.spun_seconds)
        return (one.cpu_seconds + one.spun_seconds) / one.wall_seconds if stand.threads == 1 else None

    def _pack_block(self, ran: list[Ran]) -> Block:
        """Rates over nearly the same window add up; memory does too."""
        self.memory = tuple(_total([reply.memory_bytes[0] for reply in ran]) for _ in ran)
        steps = max(1, round(sum(reply.steps for reply in ran) / len(ran)))
        combined = sum(reply.steps / reply.wall_seconds for reply in ran)
        return Block(steps, steps * len(ran) / combined)

    def _tell(self, timing: Timing) -> None:
        self._watch.enter(timing.phase)
        interval = timing.interval()
        layout = self._probe.layout
        if interval is not None:
            rate = layout.global_batch * layout.processes / interval.value
            self._watch.tell(rate, relative_half_width(interval))

    def _spread(self, values: tuple[_T | None, ...], count: int) -> tuple[_T | None, ...]:
        """Values in the stand's order as values by position of the request; the last of one position counts."""
        by_position = dict(zip(self._stand.positions, values, strict=False))
        return tuple(by_position.get(position) for position in range(count))


def _total(sizes: list[int | None]) -> int | None:
    """The sum; None if one is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
