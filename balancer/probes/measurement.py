"""Run a probe's steps in its processes, and combine their times into one measurement."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import TypeVar, cast

import msgspec

from evener.devices.backend import Vitals
from evener.shares.curves import Work
from evener.training.limits import LEAST_SHARE

from ..events import ProbeProgress, Report
from ..statistics import relative_half_width
from ..types import KeptBatch, Layout, MeasurementDoubt, PartSeconds, Probe, Timed
from .block_timing import Block, BlockTimer, StepTiming, has_grown
from .children import ChildGroup
from .failures import GroupError, RankFailure, StoppedError
from .interference import DeviceWatch, ProbeInterference
from .launch_plan import RankMap
from .protocol import (
    BatchKept,
    KeepBatch,
    Prepare,
    Prepared,
    Ran,
    RunSteps,
    Stack,
    TimedOnDevice,
    TimeOnDevice,
)

_T = TypeVar("_T")
REPORT_SECONDS = 0.2  # seconds between two reports on one probe
BLOCK_SLACK = 20.0  # a block's time limit, relative to its expected seconds
CLOSER_SHARE = 0.2  # fraction of a probe's seconds in which the limits of its step are measured
# number of times per step that an allocator frees cached memory, from which on a warning is given
SHORT_OF_MEMORY = 0.5
CHUNKS = 8  # chunks per block of a pack; each training checks the clock after a chunk
PACK_STEPS = 4  # steps of each training in a block, because trainings don't end together
# seconds of the longest block of a pack, which may then have fewer steps
LONGEST_PACK_SECONDS = 2.0


class Timeouts(msgspec.Struct, frozen=True):
    """Timeouts for replies of probe processes, in seconds."""

    # seconds each for the imports of a framework from a slow disk, and for the model
    build: float = 600.0
    prepare: float = 600.0  # tracing, autotuning, compiling
    block: float = 60.0  # seconds, or BLOCK_SLACK times the expected time if that is more


def prepare_command(layout: Layout, ranks: RankMap) -> Prepare:
    """Return the command that sets the share of each process, and how it is split into passes."""

    def pick(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sizes[position] for position in ranks.unique_positions)

    costs = tuple(
        cost
        for position in ranks.unique_positions
        if layout.costs and (cost := layout.costs[position])
    )
    micro, tokens = (
        pick(layout.micro) if layout.in_passes else (),
        pick(layout.tokens) if layout.tokens else (),
    )
    return Prepare(pick(layout.shares), micro, costs, tokens, layout.length)


class ProgressReporter:
    """Reports the phase and the throughput of a probe, at most once every REPORT_SECONDS."""

    def __init__(self, probe: Probe, report: Report, now: Callable[[], float]) -> None:
        self.phase = "starting"
        self._probe, self._report, self._now = probe, report, now
        self._latest: tuple[float | None, float | None] = (None, None)
        self._entered, self._last = time.monotonic(), float("-inf")

    def enter(self, phase: str) -> None:
        """Begin a phase such as "building", and report it at once if it is a new one."""
        if phase != self.phase or self._last < 0:
            self.phase, self._entered, self._last = phase, time.monotonic(), float("-inf")
            self.update()

    def update(self, rate: float | None = None, relative_error: float | None = None) -> None:
        """Set the throughput in samples/s and its error, and report them if a report is due.

        `relative_error` is half the width of the 95 % interval, as a fraction of the throughput.
        """
        self._latest = rate, relative_error
        self.repeat()

    def report_stop(self, stack: Stack, note: str) -> None:
        """Report that the probe was stopped, and at which line of the user's code.

        `stack` contains that line. `note` is appended to the line in the report.
        """
        at = time.monotonic()
        phase = stack.step if self.phase == "building" else self.phase
        seconds, where = at - self._entered, f"{stack.where}{note}" if stack.where else ""
        self._report(ProbeProgress(self._probe, phase, *self._latest, self._now(), seconds, where))

    def repeat(self) -> None:
        """Report the latest phase and throughput again, if a report is due."""
        if (at := time.monotonic()) - self._last >= REPORT_SECONDS:
            self._last = at
            self._report(
                ProbeProgress(
                    self._probe, self.phase, *self._latest, self._now(), at - self._entered
                )
            )


class Measurement:
    """Measures one probe with a group of running probe processes.

    - `row_tokens`: mean number of tokens per row in the data, to which step times are scaled; 0 if
      rows have no lengths.
    - `idle_readings`: driver readings of devices that no probe uses, for their idle power.
    - `measure_limits`: whether to also time steps without data loading and, on GPUs, steps whose
      kernels are all enqueued beforehand.
    """

    def __init__(
        self,
        probe: Probe,
        group: ChildGroup,
        timeouts: Timeouts,
        progress: ProgressReporter,
        monitor: DeviceWatch,
        row_tokens: float = 0.0,
        idle_readings: Mapping[int, Vitals] | None = None,
        *,
        measure_limits: bool = False,
    ) -> None:
        self._probe, self._group, self._ranks = probe, group, group.ranks
        self._row_tokens = row_tokens  # tokens per row on average, if rows have lengths
        self._work: list[tuple[Work, ...]] = []  # the work of each rank in a step, by block
        self._timeouts, self._progress, self._monitor = timeouts, progress, monitor
        self._idle = idle_readings  # readings of unused devices
        self._watts: dict[int, float] = {}
        self._memory_bytes: Sequence[
            int | None
        ] = ()  # the peak of each rank or device of the group
        self._not_finite: tuple[MeasurementDoubt, ...] = ()
        # how often each rank's allocator had to free cached memory, and the number of those steps
        self._memory_retries: Counter[int] = Counter()
        self._steps_with_retries = 0
        self._closer = measure_limits
        self._kept: KeptBatch | None = None
        self._enqueued_seconds: float | None = None
        self._cpu_seconds, self._work_seconds = (
            0.0,
            0.0,
        )  # alone on its own cores: over all blocks, without spinning

    def run(
        self,
        stop: threading.Event,
        started: float,
        warm_up_share: int,
        short_bytes: tuple[int, ...],
    ) -> Timed:
        """Prepare the processes, time blocks of steps, and return the result.

        - `started`: the monotonic time at which the probe began.
        - `warm_up_share`: the most rows per device in an extra first step with a smaller batch; 0
          means no such step.
        - `short_bytes`: how many bytes other programs hold on each device; copied into the result.

        Raises GroupError if a process fails, and StoppedError once `stop` is set.
        """
        self._progress.enter("warming up")
        command = prepare_command(self._probe.layout, self._ranks)
        smaller = tuple(max(1, min(share // 2, warm_up_share)) for share in command.shares)
        if warm_up_share and smaller != command.shares:
            self._prepare(Prepare(smaller, smaller if command.micro else ()), stop)
        first = self._prepare(command, stop)
        start_seconds = time.monotonic() - started if self._group.fresh else 0.0
        timing = self._time_blocks(first, stop)
        if self._closer and self._probe.layout.processes == 1:
            with suppress(GroupError, StoppedError):  # the step's own measurement is still valid
                self._measure_limits(timing, stop)
        return Timed(
            probe=self._probe,
            step_seconds=timing.step.value,
            low_seconds=timing.step.low,
            high_seconds=timing.step.high,
            steps=timing.steps,
            memory_bytes=self._by_position(self._memory_bytes),
            device_seconds=self._by_position(timing.own_seconds),
            first_step_seconds=first,
            elapsed_seconds=time.monotonic() - started,
            warnings=(*timing.warnings, *self._not_finite, *self._find_short_memory()),
            start_seconds=start_seconds,
            import_seconds=min(self._group.import_seconds, start_seconds),
            short_bytes=short_bytes,
            work=self._by_position(self._mean_work()) if self._work else (),
            watts=tuple(map(self._watts.get, range(len(self._probe.layout.shares))))
            if self._watts
            else (),
            parts=self._by_position(timing.parts) if timing.parts else (),
            kept=self._kept,
            enqueued_seconds=self._enqueued_seconds,
            link_bytes_per_second=self._group.link_speed or None,
            link_path=self._group.link_path,
        )

    def _measure_limits(self, timing: StepTiming, stop: threading.Event) -> None:
        """Time steps without data loading and, on GPUs, without the delay of enqueuing kernels."""
        on_gpus = not self._ranks.own_cores
        known = [part.input_seconds for part in timing.parts]
        largest = max((each for each in known if each is not None), default=None)
        waits = largest is None or largest >= LEAST_SHARE * timing.step.value
        if not (waits or on_gpus) or not self._keep_batch(True, stop):
            return
        # the ranks reuse one batch, unless the step hardly waits for input
        if waits:
            self._kept = self._time_with_kept_batch(timing.step.value, stop)
        if on_gpus:
            timed = self._group.call(
                lambda _: TimeOnDevice(), TimedOnDevice, self._timeouts.block, stop
            )
            seconds = [cast(TimedOnDevice, reply).seconds for reply in timed]
            self._enqueued_seconds = max((each for each in seconds if each), default=None)
        self._keep_batch(False, stop)

    def _keep_batch(self, keep: bool, stop: threading.Event) -> bool:
        """Tell all ranks to reuse one batch for all further steps if `keep`, else to load new ones.

        Returns whether the workload can reuse a batch on all ranks.
        """
        replies = self._group.call(lambda _: KeepBatch(keep), BatchKept, self._timeouts.block, stop)
        return all(cast(BatchKept, reply).able for reply in replies)

    def _time_with_kept_batch(self, step_seconds: float, stop: threading.Event) -> KeptBatch:
        """Warm up, and then measure the step time with a batch that stays in memory.

        `step_seconds` is the step time with new batches.
        """
        seconds = max(CLOSER_SHARE * self._probe.seconds, 2 * step_seconds)
        # a warm-up, because cores and GPUs that have waited for rows are slower at first
        self._time_kept_for(seconds / 2, step_seconds, stop)
        return self._time_kept_for(seconds, step_seconds, stop)

    def _time_kept_for(
        self, seconds: float, step_seconds: float, stop: threading.Event
    ) -> KeptBatch:
        timer = BlockTimer(seconds)
        while steps := timer.next_steps():
            limit = max(self._timeouts.block, BLOCK_SLACK * steps * step_seconds)
            command = RunSteps(steps)
            replies = self._group.call(lambda _, command=command: command, Ran, limit, stop)  # type: ignore[misc]
            wall = max(cast(Ran, reply).wall_seconds for reply in replies)
            timer.add(Block(steps, wall))
        timing = timer.result()
        assert timing is not None, "a timer without blocks asks for more"
        return KeptBatch(timing.step.value, timing.step.low, timing.step.high)

    @property
    def busy_cores(self) -> float | None:
        """Mean number of CPU cores that a step keeps busy.

        It is None unless the probe has a single rank with CPU cores of its own.
        """
        if not self._work_seconds:
            return None
        return min(max(1.0, self._cpu_seconds / self._work_seconds), float(self._ranks.threads))

    def _prepare(self, command: Prepare, stop: threading.Event) -> float:
        replies = self._group.call(lambda _: command, Prepared, self._timeouts.prepare, stop)
        return max(cast(Prepared, reply).first_step_seconds for reply in replies)

    def _time_blocks(self, first_step_seconds: float, stop: threading.Event) -> StepTiming:
        probe = self._probe
        timer = BlockTimer(probe.seconds, probe.whole, probe.steps, first_step_seconds)
        step_seconds = first_step_seconds
        interference = ProbeInterference(self._monitor, self._ranks.unique_positions, self._idle)
        self._monitor.find_neighbours(self._ranks.unique_positions)  # begin a new reading
        while steps := timer.next_steps():
            limit = max(self._timeouts.block, BLOCK_SLACK * steps * step_seconds)
            command = self._run_command(steps, step_seconds)
            replies = self._group.call(lambda _, command=command: command, Ran, limit, stop)  # type: ignore[misc]
            ran = [cast(Ran, reply) for reply in replies]
            if self._probe.layout.processes == 1 and any(reply.steps != steps for reply in ran):
                raise GroupError(
                    RankFailure(
                        0, "protocol", "it ran another number of steps than it was asked to"
                    )
                )
            self._not_finite = self._find_not_finite(ran)
            before = self._memory_bytes
            block = interference.annotate(self._make_block(ran))
            block = msgspec.structs.replace(block, grew=has_grown(before, self._memory_bytes))
            timer.add(block)
            step_seconds = block.step_seconds
            self._report_progress(timer)
        self._watts = interference.mean_watts()
        timing = timer.result()
        if timing is None:
            raise GroupError(RankFailure(0, "protocol", "no block was timed"))
        return self._add_neighbours(timing)

    def _add_neighbours(self, timing: StepTiming) -> StepTiming:
        """Add to each device's breakdown how much of the time other programs used the device."""
        positions = self._ranks.unique_positions
        if len(timing.parts) != len(positions):
            return timing
        seen = self._monitor.find_neighbours(positions)
        parts = tuple(
            msgspec.structs.replace(
                part,
                neighbour=seen[i].part,
                busy=seen[i].own_part,
                neighbours=seen[i].names,
            )
            if i in seen
            else part
            for i, part in zip(positions, timing.parts, strict=True)
        )
        return msgspec.structs.replace(timing, parts=parts)

    def _find_not_finite(self, replies: Sequence[Ran]) -> tuple[MeasurementDoubt, ...]:
        """Return a warning for the first step whose loss was NaN or infinite, if there is one."""
        found = [
            (reply.not_finite_step, rank)
            for rank, reply in enumerate(replies)
            if reply.not_finite_step
        ]
        if not found:
            return ()
        step, rank = min(found)
        return (MeasurementDoubt("not_finite", float(step), self._ranks.positions[rank]),)

    def _find_short_memory(self) -> tuple[MeasurementDoubt, ...]:
        """Return a warning for the rank whose allocator had to free cached memory most often.

        Empty if that happened in less than half of the steps.
        """
        if not self._memory_retries:
            return ()
        rank, count = self._memory_retries.most_common(1)[0]
        per_step = count / self._steps_with_retries
        if per_step < SHORT_OF_MEMORY:
            return ()
        return (MeasurementDoubt("short_of_memory", per_step, self._ranks.positions[rank]),)

    def _run_command(self, steps: int, step_seconds: float) -> RunSteps:
        """Return the command that runs the steps of the next block.

        Independent processes on one device run for a fixed time, based on `step_seconds`, instead
        of a fixed number of steps. So none is idle while others finish.
        """
        if self._probe.layout.processes == 1:
            # the trainings of a pack run for the same time, so that none idles while others finish
            return RunSteps(steps)
        return RunSteps(
            max(1, steps // CHUNKS),
            min(max(steps, PACK_STEPS) * step_seconds, LONGEST_PACK_SECONDS),
        )

    def _make_block(self, replies: Sequence[Ran]) -> Block:
        """Combine the ranks' replies about a block; the time of the slowest rank counts."""
        if self._probe.layout.processes > 1:
            return self._make_pack_block(replies)
        replies = self._scale_to_mean_tokens(replies)
        wall_seconds = max(reply.wall_seconds for reply in replies)
        self._memory_bytes = tuple(size for reply in replies for size in reply.memory_bytes)
        self._memory_retries.update(
            {rank: reply.memory_retries for rank, reply in enumerate(replies)}
        )
        self._steps_with_retries += replies[0].steps
        parts = tuple(self._describe_parts(reply) for reply in replies)
        # ranks that make the same objects collect at the same time
        gc_seconds = max(reply.gc_seconds for reply in replies)
        longest_gc_seconds = max(reply.longest_gc_seconds for reply in replies)
        if len(self._ranks.unique_positions) == 1:
            share = self._cpu_share(replies[0])
            own = (wall_seconds * min(1.0, share or 1.0),)
            return Block(
                replies[0].steps,
                wall_seconds,
                share,
                own,
                parts=parts,
                gc_seconds=gc_seconds,
                longest_gc_seconds=longest_gc_seconds,
            )
        return Block(
            replies[0].steps,
            wall_seconds,
            None,
            self._own_seconds(replies, wall_seconds),
            parts=parts,
            gc_seconds=gc_seconds,
            longest_gc_seconds=longest_gc_seconds,
        )

    def _own_seconds(self, replies: Sequence[Ran], wall_seconds: float) -> tuple[float | None, ...]:
        """Return how long each rank computed in a block, in seconds, without waiting for others.

        Returns an empty tuple if this can't be measured.
        """
        if any(reply.waited_seconds is not None for reply in replies):
            return tuple(_subtract_waiting(wall_seconds, reply.waited_seconds) for reply in replies)
        if not self._ranks.own_cores or self._ranks.one_process:
            return ()
        # the CPU time divided by the number of cores that the rank keeps busy
        computed = zip(replies, self._ranks.busy_cores, strict=True)
        return tuple(
            min(wall_seconds, reply.cpu_seconds / busy + reply.spun_seconds)
            for reply, busy in computed
        )

    def _describe_parts(self, reply: Ran) -> PartSeconds:
        """Return how a rank spent its time in a block of steps, in seconds.

        The parts are data loading, the optimizer, waiting for CPU cores, and idle time.
        """
        idle = None
        if self._ranks.own_cores and len(self._ranks.positions) == 1:
            # idle time: no thread computed, waited for a core or fetched rows
            busy = reply.cpu_seconds + reply.spun_seconds + (reply.starved_seconds or 0.0)
            idle = max(0.0, reply.wall_seconds - busy - (reply.input_seconds or 0.0))
        return PartSeconds(
            input_seconds=reply.input_seconds,
            update_seconds=reply.update_seconds,
            starved_seconds=min(reply.starved_seconds or 0.0, reply.wall_seconds),
            idle_seconds=idle,
            taken_by=reply.taken_by,
        )

    def _scale_to_mean_tokens(self, replies: Sequence[Ran]) -> Sequence[Ran]:
        """Scale the times of a block as if its rows had the mean number of tokens.

        Otherwise the times would vary with the random lengths of the rows.
        """
        work = [reply.work for reply in replies if reply.work]
        tokens = sum(each.tokens for each in work)
        layout, steps = self._probe.layout, replies[0].steps
        usual = layout.global_batch * self._row_tokens * steps
        factor = usual / tokens if usual and tokens and not layout.length else 1.0
        if work:
            self._work.append(tuple(_scale(each, factor / steps) for each in work))
        return [_scale_times(reply, factor) for reply in replies]

    def _mean_work(self) -> list[Work | None]:
        """Return each rank's mean work per step, such as its tokens, over all blocks."""
        ranks = zip(*self._work, strict=True)
        return [
            Work(*map(fmean, zip(*map(msgspec.structs.astuple, rank), strict=True)))
            for rank in ranks
        ]

    def _cpu_share(self, reply: Ran) -> float | None:
        """Return the fraction of a block in which the process got the CPU cores that it needed.

        Returns None if it is unknown.
        """
        # other processes may use its cores, so the fraction is unknown
        if not self._ranks.own_cores:
            return None
        self._cpu_seconds += reply.cpu_seconds
        self._work_seconds += max(0.0, reply.wall_seconds - reply.spun_seconds)
        # the time that threads waited for a core, if the kernel reports it
        if reply.starved_seconds is not None:
            return max(0.0, 1 - reply.starved_seconds / reply.wall_seconds)
        return (
            # a single thread that isn't on a core waits for one
            (reply.cpu_seconds + reply.spun_seconds) / reply.wall_seconds
            if self._ranks.threads == 1
            else None
        )

    def _make_pack_block(self, replies: Sequence[Ran]) -> Block:
        """Combine the replies of independent processes that share one device.

        A step of the result stands for one step of each process.
        """
        sizes = [reply.memory_bytes[0] for reply in replies]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        self._memory_bytes = (total,) * len(replies)
        steps = max(1, round(sum(reply.steps for reply in replies) / len(replies)))
        each = (
            # the longest time, because a training steps faster while another one hasn't begun or
            # has finished
            max(reply.wall_seconds for reply in replies)
            * len(replies)
            / sum(reply.steps for reply in replies)
        )
        return Block(steps, steps * each)

    def _report_progress(self, timer: BlockTimer) -> None:
        self._progress.enter(timer.phase)
        interval = timer.interval()
        layout = self._probe.layout
        if interval is not None:
            rate = layout.global_batch * layout.processes / interval.value
            self._progress.update(rate, relative_half_width(interval))

    def _by_position(self, values: Sequence[_T | None]) -> tuple[_T | None, ...]:
        """Arrange one value per rank by device position, with None for unused devices."""
        by_position = dict(zip(self._ranks.positions, values, strict=False))
        return tuple(
            by_position.get(position) for position in range(len(self._probe.layout.shares))
        )


def _subtract_waiting(wall_seconds: float, waited: float | None) -> float | None:
    return None if waited is None else max(0.0, wall_seconds - waited)


def _scale_times(reply: Ran, factor: float) -> Ran:
    names = (
        "wall_seconds",
        "cpu_seconds",
        "spun_seconds",
        "waited_seconds",
        "input_seconds",
        "update_seconds",
        "starved_seconds",
        "gc_seconds",
        "longest_gc_seconds",
    )
    times = {name: time * factor for name in names if (time := getattr(reply, name)) is not None}
    return msgspec.structs.replace(reply, **times)


def _scale(work: Work, factor: float) -> Work:
    return Work(*(each * factor for each in msgspec.structs.astuple(work)))
