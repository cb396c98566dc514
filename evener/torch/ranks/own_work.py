"""Measure how long each step of a rank computes, and how long it waits for other ranks and data.

Own work is the time in which the rank computes. It ends when the rank's last gradient is ready. The
backward pass ends later, with an all-reduce, at the same time on every rank. A step is divided into
phases (`Phase`). The timer records a time stamp (mark) where each phase begins.
"""

from __future__ import annotations

import inspect
import math
import os
import resource
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import cycle
from threading import get_ident
from typing import Any, Final, Literal, NamedTuple

import msgspec
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...live.files import (
    MOST_CHANGES,
    MOST_STEPS,
    Details,
    Doing,
    LastStep,
    PendingShares,
    ShareChange,
    clean,
)
from ...live.journal import TrainingJournal
from ...live.reporter import DeviceTimes, Reporter, middle, spread, sum_up
from ...plan.check import describe
from ...system.thread_writes import ThreadWrites
from ...training.launched import launched_run
from ...training.retreat import Retreat, print_line
from ...training.running_sums import RunningSums
from ...training.step_sums import StepSums
from ..hooks import ProcessHooks
from ..private import default_store
from ..sums.collectives import own_collectives
from ..sums.noise import RankNoise
from .ranks import RankShares
from .timed_batches import IF_HOST_LIMITS, ON_CPU, ON_GPU, TimedBatches
from .timed_batches import Rate as TimedRate

KEPT_STEPS = 25  # number of steps over which medians are computed
KEPT_MARKED = 100  # number of steps that a GPU may be behind its host before marks are dropped
# number of steps timed together, because single ones would find a cold CPU cache
TIMED_AT_ONCE = 16
# number of warm-up steps, which aren't in the sums: kernels are chosen, memory is allocated
WARM_STEPS = 3
# Distances between batches whose CPU times are measured; not all are, as each measurement takes
# microseconds. The sum of the distances is a prime, so that every position in a cycle of batches,
# such as the batches of one update, is measured equally often. A window of rebalancing has at least
# one measured batch.
STRIDES = (3, 5, 4, 2, 5, 4)
# minimum duration and bytes for the time between two steps to count as file time
LEAST_FILE_SECONDS = 1e-3
LEAST_FILE_BYTES = 64 << 10
ENDS_SECONDS = 0.5e-3  # longer than the last kernels of a backward pass take
Phase = Literal[Doing, "validation", "files", "before the update"]
OWN: Doing = "own work"
SUM: Doing = "sum"
UPDATE: Doing = "update"
BETWEEN: Doing = "between steps"
INPUT: Doing = "input"
VALIDATION: Final = "validation"
FILES: Final = "files"
PREPARATION: Final = "before the update"  # after the sum of gradients, such as clipping
_SHOWN: dict[Phase, Doing] = {OWN: OWN, SUM: SUM, UPDATE: UPDATE}  # all others are shown as BETWEEN
_STEPS, _FILES, _VALIDATION = map(
    StepSums.__struct_fields__.index, ("steps", "files_s", "validation_s")
)
_IDLE = slice(StepSums.__struct_fields__.index("idle_input_s"), None)
# end of the fields that don't overlap
PARTS_END = StepSums.__struct_fields__.index("between_s") + 1


class HostClock:
    """Clock for training on a CPU, whose time stamps are seconds of `time.perf_counter`."""

    mark = staticmethod(time.perf_counter)
    computed = staticmethod(time.thread_time)  # CPU time of this thread, in seconds
    computed_by_all = staticmethod(time.process_time)  # the same, for all threads of the process

    def is_past(self, mark: float) -> bool:
        """Return True, because a CPU's time stamps are always in the past."""
        return True

    def is_captured(self) -> bool:
        """Return False, because only GPUs capture CUDA graphs."""
        return False

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two time stamps."""
        return end - start

    def reuse(self, marks: Sequence[float]) -> None:
        """Do nothing, because these time stamps are numbers, not CUDA events that can be reused."""


class GpuClock:
    """Clock for training on a GPU, whose time stamps are CUDA events on the current stream.

    A `device` of None means the current one. `make_event` creates an event, and `find_stream`
    returns a device's current stream.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        make_event: Callable[..., Any] = torch.cuda.Event,
        find_stream: Callable[[torch.device | None], Any] = torch.cuda.current_stream,
    ) -> None:
        self._device = device
        self._make_event = make_event
        self._find_stream = find_stream
        self._free: list[Any] = []

    def mark(self) -> Any:
        """Record a CUDA event after all work that is queued on the GPU, and return it."""
        event = self._free.pop() if self._free else self._make_event(enable_timing=True)
        event.record(self._find_stream(self._device))
        return event

    def computed(self) -> float:
        """Return NaN, because CPU time isn't measured when a GPU computes."""
        return math.nan

    computed_by_all = computed

    def is_past(self, mark: Any) -> bool:
        """Return whether the GPU has reached the event."""
        return bool(mark.query())

    def is_captured(self) -> bool:
        """Return whether a CUDA graph is being captured, during which events can't be timed."""
        return bool(torch.cuda.is_current_stream_capturing())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events that the GPU has reached."""
        return float(start.elapsed_time(end)) / 1e3

    def reuse(self, marks: Sequence[Any]) -> None:
        """Take back CUDA events that are no longer needed, so that they can be recorded again."""
        self._free.extend(marks)


class TimedStep(NamedTuple):
    """Duration of one step and of its phases, in seconds, with NaN for unknown durations."""

    sizes: tuple[int, ...]  # rows of each rank
    own_work_s: float  # from the batch's arrival until the last gradient is ready
    waiting_s: float  # from there until the backward pass ends
    input_s: float  # until the batch arrives
    step_s: float
    # from the backward pass until the next batch is requested, without the optimizer's step
    between_s: float
    number: int = 0  # of the batch
    disturbed: bool = False  # True if evener checked the loss or memory ran out
    behind: float = math.nan  # 1 if the GPU was behind its host when gradients were sent, else 0
    computing: float = math.nan  # the fraction of own work in which the CPU computed for the loop
    # part of input_s in which the loop's thread waited for other threads to fetch rows
    idle_input_s: float = math.nan
    # the step's times, including the time since the last loop, in the order of StepSums
    sums: tuple[float, ...] = ()


class _CpuTimes:
    """CPU seconds that a batch's computation took in the loop's thread and in the whole process.

    They are NaN until they have been measured.
    """

    def __init__(self, clock: Any, idle_s: float, stands_for: int) -> None:
        # CPU times are measured in only some timed batches. This batch represents all batches since
        # the last measurement; `stands_for` is their number.
        self.stands_for = stands_for
        self._clock = clock
        self._thread = get_ident()  # the thread in which own work began
        self._all_began_s = clock.computed_by_all()
        self._began_s = clock.computed()
        # `idle_s` is this thread's idle time (see `_idle_seconds`) when it requested the batch
        self.idle_input_s = _idle_seconds() - idle_s
        self.own_s = math.nan  # CPU time of the loop's thread in own work
        self.all_own_s = math.nan  # CPU time of all threads in own work

    def note_gradients(self) -> None:
        """Measure the CPU times; called when the batch's last gradient is ready."""
        own_thread = get_ident() == self._thread
        self.own_s = self._clock.computed() - self._began_s if own_thread else math.nan
        self.all_own_s = self._clock.computed_by_all() - self._all_began_s


class _MarkedStep(NamedTuple):
    """A step with the time stamps of its phases, before their durations are computed."""

    # the device may still be computing the step; a mark is a point in time of the device's clock

    sizes: tuple[int, ...]
    requested: Any  # mark when this batch was requested; None if a loop began with it
    # phases since the end of the last loop, if a loop began with this batch
    between_loops: Sequence[tuple[Phase, Any]]
    marks: Sequence[tuple[Phase, Any]]  # the phase that began at each mark; own work at the first
    done: Any  # mark when the next batch was requested
    number: int
    is_step: bool  # True if its gradients were computed, or an optimizer has used them
    disturbed: bool
    behind: float
    cpu: _CpuTimes | None  # None: not measured in this step
    # batches of a validation before the loop that began with it, and after its update
    validations: tuple[int, int]
    is_shared: bool  # `done` is the next batch's first mark
    untimed: _Untimed  # the batches since the last timed one


class _Untimed(msgspec.Struct):
    """Totals for the batches since the last timed one.

    No time stamps are recorded for these batches. Only the time that they spent on files and on
    validation is known, from the host's clock.
    """

    batches: int = 0
    steps: int = 0  # number of these batches with gradients
    files_s: float = 0.0
    validation_s: float = 0.0


class _StepDurations(NamedTuple):
    """Durations of the phases of one training step, in seconds."""

    spans: Mapping[Phase, float]  # from the batch's arrival until the next batch is requested
    last_s: float  # after the last mark
    input_s: float
    step_s: float
    sums: tuple[float, ...]  # those of TimedStep


class StepTimer:
    """Measures how long each step of a rank takes for input, computing, waiting and updating.

    Arguments:

    - `clock`: a HostClock or a GpuClock.
    - `single_rank`: whether there are no other ranks to wait for.

    `sums` has the totals of all steps after the first few. If gradients accumulate over two
    batches, only the second batch counts as a step, but its time includes both.
    """

    # A timed batch has marks (`_marks`). For any other batch, only the current phase is stored
    # (`_doing`). Methods handle such a batch first and return: the step of a real model displaces
    # most of this code from the CPU's cache, so even few lines take time. If only some batches are
    # timed, a timed batch in `sums` also represents the untimed batches before it. But time for
    # files and validation is measured in all batches, by the host.

    def __init__(self, clock: Any, single_rank: bool) -> None:
        # False if compute time can't be separated from waits for other ranks
        self.can_time_compute = True
        self._clock = clock  # a HostClock or a GpuClock
        self._single_rank = single_rank
        self._on_host = isinstance(clock, HostClock)
        self._choice: TimedBatches | None = None  # None: every batch is timed
        if isinstance(clock, HostClock | GpuClock):
            self._choice = TimedBatches(ON_CPU if self._on_host else ON_GPU)
        self._timed = self._next_timed = True  # the newest batch is timed; the next one is
        self._choose_at = 0  # the number of the next batch for which `_choice` is asked
        self._doing: Phase | None = None  # the phase of a batch that isn't timed
        self._validated = (0.0, 0.0)  # when validation began and last went on, in such a batch
        self._untimed = _Untimed()  # batches since the last timed one
        self._asked: Any = None
        self.sizes: tuple[int, ...] = ()  # of the newest batch
        # called with each batch and the number of updates
        self.begun: Callable[[tuple[int, ...], int], None] | None = None
        self._updates = 0  # number of optimizer steps
        self._marks: list[tuple[Phase, Any]] = []  # marks of the current batch
        self._apart: list[tuple[Phase, Any]] = []  # marks since the end of the last loop
        self._before: Sequence[tuple[Phase, Any]] = ()  # the same for the batch that began a loop
        # True if validation ran since the last update or the end of the last loop
        self._validates = False
        self._validation_batches = 0  # number of batches of that validation
        self._validated_before = 0  # the same, of a validation before the loop of the newest batch
        self._batches = 0  # number of batches that have begun
        # True once the batch's gradients were computed, and applied
        self._computed = self._applied = False
        self._disturbed = False  # the step
        self._behind = math.nan
        self._strides = cycle(STRIDES)
        self._measured_at = 1  # the number of the next batch whose CPU times are measured
        self._last_measured = 0  # the number of the last batch whose CPU times were measured
        self._cpu: _CpuTimes | None = None  # of the newest batch
        self._idle_s = math.nan  # this thread's idle time when the loop requested that batch
        # counts the bytes written by the loop's thread, from its first batch on
        self._writes: ThreadWrites | None = None
        self._written = 0  # the last count of these bytes
        # the host's time from which files may take a part of the time between two steps
        self._files_from = 0.0
        # steps whose times aren't computed yet
        self._marked: deque[_MarkedStep] = deque(maxlen=KEPT_MARKED)
        self._steps: deque[tuple[_MarkedStep, _StepDurations]] = deque(maxlen=KEPT_STEPS)
        self._counted = 0  # number of steps
        self.sums = RunningSums()  # sums over all steps except warm-up
        _add_timer(self)
        self.release = _OPTIMIZER_HOOKS.hold(self)  # call it to stop watching optimizers' steps

    def begin(self, sizes: tuple[int, ...]) -> None:
        """Begin a batch; called when its loader yields it.

        `sizes` has the row count of each rank.
        """
        self.sizes = sizes
        if self._next_timed:
            self._begin_timed()
        else:
            self._batches += 1
            self._timed = self._computed = self._applied = self._validates = False
            self._doing = OWN
        if self.begun is not None:
            self.begun(sizes, self._updates)

    def _begin_timed(self) -> None:
        if self._writes is None:
            self._writes = ThreadWrites()
            self._written = self._writes.count_bytes()
        self._before, self._validated_before = (), 0
        if self._apart:
            self._note_files(self._apart)
            self._before, self._apart = self._apart, []
            self._validated_before = self._validation_batches if self._validates else 0
        self._batches += 1
        self._cpu = None
        self._timed = True
        if self._batches >= self._measured_at:
            self._measured_at = self._batches + next(self._strides)
            stands_for = self._batches - self._last_measured
            self._cpu = _CpuTimes(self._clock, self._idle_s, stands_for)
            self._last_measured = self._batches
        self._marks = [(OWN, self._clock.mark())]
        self._computed = self._applied = self._validates = self._disturbed = False
        self._behind = math.nan

    def time_all(self) -> None:
        """Time every batch from now on."""
        self._choice, self._choose_at = None, 0

    def time_fewer(self, rate: TimedRate) -> None:
        """Time only some of the batches from now on, at the given rate."""
        self._choice = TimedBatches(rate)
        self._choose_at = 0

    def time_few(self) -> None:
        """Time only a few batches from now on, because the host is busy and timing slows it down.

        Nothing changes if some batches are already left untimed.
        """
        if self._choice is None:
            most = IF_HOST_LIMITS.most_stride
            self._choice = TimedBatches(IF_HOST_LIMITS, first_stride=most)
            self._choose_at = 0

    def disturb(self) -> None:
        """Exclude the current step from statistics, for example because an audit slows it down."""
        self._disturbed = True

    def _enter(self, phase: Phase, *previous: Phase) -> None:
        """Begin `phase` if the current phase is one of `previous`."""
        if self._marks and self._marks[-1][0] in previous:
            self._note_files(self._marks)
            self._marks.append((phase, self._clock.mark()))
            if phase == BETWEEN:
                self._begin_between()

    def _note_files(self, marks: list[tuple[Phase, Any]]) -> None:
        """If files were written since the last step, count the time since then as file time.

        `marks` lists the phases so far with the time stamps of their beginnings; it is modified in
        place.
        """
        # Bytes are counted only if the phase is long enough to matter, because counting takes
        # microseconds. So the count may include bytes of earlier steps.
        if marks and marks[-1][0] == BETWEEN and self._has_written():
            marks[-1] = (FILES, marks[-1][1])

    def _begin_between(self) -> None:
        """Record the host's time when the phase between two steps begins."""
        self._files_from = time.perf_counter() + LEAST_FILE_SECONDS

    def _has_written(self) -> bool:
        """Return whether the loop's thread has written many bytes to files since the last step."""
        is_long = time.perf_counter() >= self._files_from
        return is_long and self._count_written() >= LEAST_FILE_BYTES

    def _note_untimed_files(self) -> None:
        """Count the time since an untimed batch as file time, if files were written since then."""
        # the whole time between the batches then counts as file time
        if self._has_written():
            began_s = self._files_from - LEAST_FILE_SECONDS
            self._untimed.files_s += time.perf_counter() - began_s

    def _count_written(self) -> int:
        """Return how many bytes the loop's thread has written to files since the last call."""
        if self._writes is None:
            # no batch has begun yet
            return 0
        before = self._written
        self._written = self._writes.count_bytes()
        return self._written - before

    def note_gradients(self) -> None:
        """Record that this rank's gradients are computed, and that it now waits for other ranks."""
        # called in each pass of a batch; the last call counts
        if not (self.can_time_compute or self._single_rank):
            return
        self._computed = True
        if not self._timed:
            self._doing = SUM
            return
        marks = self._marks
        if marks and marks[-1][0] == SUM:
            marks.pop()
        elif marks and marks[-1][0] == BETWEEN:  # in another pass, or before another update
            marks[-1] = (OWN, marks[-1][1])
        self._enter(SUM, OWN)
        if self._cpu is not None:
            self._cpu.note_gradients()

    def note_sent(self) -> None:
        """Record whether the GPU is still computing after the host has sent the last gradients.

        If it isn't, the GPU may have waited for the host.
        """
        # a GPU that isn't behind may be waiting for the host to launch kernels
        if self._on_host or not self._timed or not math.isnan(self._clock.computed()):
            return
        if self._marks and self._marks[-1][0] == SUM:
            self._behind = float(not self._clock.is_past(self._marks[-1][1]))

    def note_enqueued(self) -> None:
        """Record whether the GPU is still computing after the host has queued the backward pass.

        If it isn't, the GPU may have waited for the host.
        """
        # A GPU that ends the pass within ENDS_SECONDS was waiting for the host. The host waits
        # here, so only batches whose CPU times are measured are examined.
        if self._cpu is None or self._on_host:
            return
        ends = time.perf_counter() + ENDS_SECONDS
        self.note_sent()
        while self._behind == 1.0 and time.perf_counter() < ends:
            self.note_sent()

    def note_backward(self) -> None:
        """Record that the all-reduce of gradients has ended, and with it the backward pass."""
        if self._timed:
            self._enter(BETWEEN, SUM)
        elif self._doing == SUM:
            self._doing = BETWEEN
            self._files_from = time.perf_counter() + LEAST_FILE_SECONDS

    def is_captured(self) -> bool:
        """Return whether a CUDA graph is being captured."""
        return bool(self._clock.is_captured())

    def note_pass_alone(self) -> None:
        """Record the end of a backward pass without an all-reduce, for example under `no_sync`."""
        # also records whether the GPU is behind its host
        if not self._timed:
            self._doing = BETWEEN
            self._files_from = time.perf_counter() + LEAST_FILE_SECONDS
            return
        computed = self._computed
        self.note_gradients()
        self.note_enqueued()
        self.note_backward()
        self._computed = computed  # only an update makes the batch a step

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager that counts the time inside as file time, if the rank is computing.

        Between steps, the timer itself detects that files are written.
        """
        if self._doing == OWN:
            began_s = time.perf_counter()
            yield
            self._untimed.files_s += time.perf_counter() - began_s
            return
        is_own = bool(self._marks) and self._marks[-1][0] == OWN
        self._enter(FILES, OWN)
        yield
        if is_own:
            self._enter(OWN, FILES)

    def note_update(self) -> None:
        """Record that a step of an optimizer begins."""
        self._applied = True
        self._updates += 1
        if not self._timed:
            self._computed = self._computed or self._single_rank  # nothing else says so
            if self._doing == BETWEEN and time.perf_counter() >= self._files_from:
                self._note_untimed_files()
            self._doing = UPDATE
            return
        self._note_timed_update()

    def _note_timed_update(self) -> None:
        marks = self._marks
        if not (self.can_time_compute or self._single_rank):
            if marks and marks[-1][0] == BETWEEN:  # another backward pass before this update
                marks[-1] = (OWN, marks[-1][1])
            self._enter(UPDATE, OWN)
        elif self._single_rank and marks and not _is_after_sum(marks):
            self.note_gradients()  # nothing else reports that they are ready
            if marks[-1][0] == SUM:
                marks.append((UPDATE, marks[-1][1]))
        if _is_after_sum(marks):
            self._note_files(marks)
            if marks[-1][0] == BETWEEN:
                marks[-1] = (PREPARATION, marks[-1][1])
        self._enter(UPDATE, SUM, BETWEEN, FILES, PREPARATION)

    def note_updated(self) -> None:
        """Record that a step of an optimizer has ended."""
        if self._timed:
            self._enter(BETWEEN, UPDATE)
        elif self._doing == UPDATE:
            self._doing = BETWEEN
            self._files_from = time.perf_counter() + LEAST_FILE_SECONDS

    def note_validation(self) -> None:
        """Record that a validation batch begins, unless a training step is being computed."""
        # a validation is timed from its first batch until its last begins; see `_add_last_batch`
        if self._doing is not None:
            self._note_untimed_validation()
            return
        marks = self._marks or self._apart
        if not marks or marks[-1][0] not in (BETWEEN, VALIDATION):
            return
        if not self._marks:
            self._asked = None  # the next loop hasn't really begun
        if self._validates and marks[-1][0] == BETWEEN:
            _, mark = marks.pop()  # the validation continues
            self._clock.reuse([mark])
        phase = BETWEEN if marks[-1][0] == VALIDATION else VALIDATION
        self._note_files(marks)
        marks.append((phase, self._clock.mark()))
        self._validation_batches = 1 + (self._validation_batches if self._validates else 0)
        self._validates = True
        if phase == BETWEEN:
            self._begin_between()

    def _note_untimed_validation(self) -> None:
        """Record that a validation batch begins after a training batch that isn't timed."""
        # of several batches, the time until the last one begins is measured
        if self._doing not in (BETWEEN, VALIDATION):
            return
        now = time.perf_counter()
        self._validation_batches = 1 + (self._validation_batches if self._validates else 0)
        if self._validates:
            self._validated = (self._validated[0], now)
            self._doing = BETWEEN
            self._begin_between()
            return
        if self._doing == BETWEEN:
            self._note_untimed_files()
        self._validated = (now, 0.0)
        self._doing, self._validates = VALIDATION, True

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Context manager that counts the time inside as waiting for other ranks."""
        if self._validates:  # the validation continues
            with own_collectives():
                yield
            return
        if self._doing is not None:
            doing = self._doing
            if doing == BETWEEN:
                self._note_untimed_files()
            self._doing = SUM
            with own_collectives():
                yield
            self._doing = doing
            self._begin_between()
            return
        before = self._marks[-1][0] if self._marks else SUM
        self._enter(SUM, OWN, UPDATE, BETWEEN)
        with own_collectives():
            yield
        if before != SUM:
            self._enter(before, SUM)

    def begin_wait(self) -> bool:
        """Count the time from now on as waiting for other ranks, within a pass.

        Return False, without any effect, if the rank isn't computing.
        """
        if self._doing == OWN:
            self._doing = SUM
            return True
        if not self._marks or self._marks[-1][0] != OWN:
            return False
        self._marks.append((SUM, self._clock.mark()))
        return True

    def end_wait(self) -> None:
        """End the wait that `begin_wait` began, because the rank computes again."""
        if self._doing == SUM:
            self._doing = OWN
        self._enter(OWN, SUM)

    def now(self) -> tuple[int, Doing]:
        """Return the number of the current batch, and what the rank is doing now."""
        doing = self._marks[-1][0] if self._marks else self._doing
        if doing is None:
            return self._batches, BETWEEN if self._asked is None else INPUT
        return self._batches, _SHOWN.get(doing, BETWEEN)

    def finish(self) -> bool:
        """End the current batch, because the loop requests the next one.

        Return whether the batch's gradients were computed. A second call before the next batch
        returns False.
        """
        is_step = self._computed or self._applied
        if self._doing is not None:
            self._finish_untimed(is_step)
            if self._batches + 1 < self._choose_at:  # the next one isn't timed either
                self._asked = math.nan
                return self._computed
            self._choose_next()
            self._asked = self._clock.mark() if self._next_timed else math.nan
        elif not self._marks and self._asked is not None:
            return False  # the loop has requested it already
        else:
            self._choose_next()
            done = self._clock.mark()
            if self._marks:
                self._note_files(self._marks)
                self._finish_timed(done, is_step)
            self._asked, self._marks, self._before = done, [], ()
        self._idle_s = math.nan
        if self._next_timed and self._batches + 1 >= self._measured_at:
            self._idle_s = _idle_seconds()
        return self._computed

    @property
    def has_trained(self) -> bool:
        """Whether the newest batch's gradients were computed, or an optimizer has stepped since."""
        return self._computed or self._applied

    def start_loop(self) -> None:
        """Begin to measure a training loop, when it requests its first batch.

        The time until it gets that batch counts as input time. Nothing happens while a batch of
        another loop is being trained.
        """
        if self._asked is None and not self._marks and self._doing is None:
            self.finish()

    def _finish_untimed(self, is_step: bool) -> None:
        """End a batch whose phases aren't timed.

        `is_step` is True if its gradients were computed or an optimizer has used them.
        """
        if self._doing == BETWEEN and time.perf_counter() >= self._files_from:
            self._note_untimed_files()
        if self._validates:
            self._note_validated()
        self._untimed.batches += 1
        self._untimed.steps += is_step
        self._doing, self._timed = None, True  # until the next batch begins

    def _choose_next(self) -> None:
        """Decide whether to time the next batch."""
        number = self._batches + 1
        is_chosen = self._choice is None or self._choice.is_timed(number)
        self._next_timed = is_chosen or bool(self._apart)
        self._choose_at = 0 if self._choice is None else self._choice.find_next(number)

    def _finish_timed(self, done: Any, is_step: bool) -> None:
        """End a timed batch; `done` is the time stamp of its end.

        `is_step` is True if its gradients were computed or an optimizer has used them.
        """
        step = _MarkedStep(
            self.sizes,
            self._asked,
            self._before,
            self._marks,
            done,
            self._batches,
            is_step,
            self._disturbed,
            self._behind,
            self._cpu,
            (self._validated_before, self._validation_batches if self._validates else 0),
            self._next_timed,
            # A loop's first batch is always timed, and unlike the others, so it represents none
            _Untimed() if self._before else self._untimed,
        )
        if not self._before:
            self._untimed = _Untimed()
        self._marked.append(step)
        if len(self._marked) >= TIMED_AT_ONCE:
            self._time_past()
            self._count_written()

    def _note_validated(self) -> None:
        """Add the duration of a validation that followed an untimed batch."""
        begun, ended = self._validated
        whole_s = time.perf_counter() - begun
        known_s = ended - begun if ended else whole_s
        last_s = _last_batch_seconds(known_s, self._validation_batches)
        self._untimed.validation_s += min(known_s + last_s, whole_s)

    def pause(self) -> None:
        """End the loop. The time until the next loop isn't part of any step."""
        left = self._asked
        if left is not None and not self._next_timed:
            left = self._clock.mark()
        self._timed = self._next_timed = True
        self._asked, self._marks, self._idle_s = None, [], math.nan
        self._before, self._doing = (), None
        self._computed = self._applied = self._validates = False
        if left is not None:
            self._apart = [(BETWEEN, left)]
            self._begin_between()

    def last(self, count: int = KEPT_STEPS) -> list[TimedStep]:
        """Return the durations of the last `count` steps, the oldest first.

        Steps that are still being computed are left out.
        """
        self._time_past()
        missing = sum(each.is_step for each in self._marked)
        if count <= missing:
            return []
        return [self._make_timed_step(*step) for step in list(self._steps)[-(count - missing) :]]

    def _time_past(self) -> None:
        """Compute the durations of all steps that the device has finished since the last call."""
        while self._marked and self._clock.is_past(self._marked[0].done):
            marked = self._marked.popleft()
            spent = self._time(marked)
            if marked.is_step:
                self._steps.append((marked, spent))
            if self._counted >= WARM_STEPS and not marked.disturbed:
                self._add_to_sums(marked, spent)
            self._counted += marked.is_step + marked.untimed.steps
            if not self._on_host:
                self._clock.reuse(_list_marks(marked))

    def _add_to_sums(self, marked: _MarkedStep, spent: _StepDurations) -> None:
        """Add a timed batch to the totals, weighted by the number of batches that it represents.

        `spent` has the durations of the batch.
        """
        # Three durations aren't weighted: files and validation are measured in every batch, and
        # each measurement of idle time covers all batches since the previous one.
        untimed = marked.untimed
        seconds = sum(spent.sums[1:PARTS_END])
        if not untimed.batches:
            self.sums.add(spent.sums, seconds, seconds)
            return
        weighted = [(1 + untimed.batches) * each for each in spent.sums]
        weighted[_STEPS] = spent.sums[_STEPS] + untimed.steps
        weighted[_FILES] = spent.sums[_FILES] + untimed.files_s
        weighted[_VALIDATION] = spent.sums[_VALIDATION] + untimed.validation_s
        weighted[_IDLE] = spent.sums[_IDLE]
        self.sums.add(weighted, sum(weighted[1:PARTS_END]), seconds)

    def last_steps(self) -> tuple[LastStep, ...]:
        """Return what the last steps spent their time on, to show it in the monitor."""
        return tuple(
            LastStep(step.number, *_join_parts(step.sums)) for step in self.last(MOST_STEPS)
        )

    def behind_part(self) -> float:
        """Return the fraction of steps in which the GPU never waited for the host.

        The result is -1 if that is unknown.
        """
        known = [step.behind for step in self.last() if not math.isnan(step.behind)]
        return sum(known) / len(known) if known else -1.0

    def medians(self) -> tuple[DeviceTimes, Details]:
        """Return median durations of the last steps, in seconds, or 0 where unknown.

        The first result has the compute and waiting times. The second has the times for input, for
        the whole step and between steps.
        """
        steps = self.last()
        own, waiting, inputs, times, between = (
            [value for step in steps if not math.isnan(value := getattr(step, name))]
            for name in ("own_work_s", "waiting_s", "input_s", "step_s", "between_s")
        )
        work, step_s, step_spread = sum_up(own, waiting), middle(times), spread(times)
        return work, Details(
            input_s=middle(inputs),
            step_s=step_s,
            step_spread=step_spread,
            between_s=middle(between),
        )

    def _time(self, marked: _MarkedStep) -> _StepDurations:
        """Compute the durations of a step that is finished."""
        asked, marks = marked.requested, marked.marks
        spans, last_s = _total_phases(self._clock.seconds, marks, marked.done)
        _add_last_batch(spans, last_s, marked.validations[1])
        if asked is None:
            sums = self._list_step_sums(marked, spans, 0.0)
            return _StepDurations(spans, last_s, math.nan, math.nan, sums)
        input_s = self._clock.seconds(asked, marks[0][1])
        step_s = self._clock.seconds(asked, marked.done)
        return _StepDurations(
            spans, last_s, input_s, step_s, self._list_step_sums(marked, spans, input_s)
        )

    def _make_timed_step(self, marked: _MarkedStep, spent: _StepDurations) -> TimedStep:
        """Return a step's durations as a TimedStep, with NaN for unknown ones."""
        phase_seconds = _list_ended_phases(marked, spent)
        own_s, waiting_s = (phase_seconds.get(phase, math.nan) for phase in (OWN, SUM))
        cpu, are_parts_known = marked.cpu, self.can_time_compute
        return TimedStep(
            sizes=marked.sizes,
            own_work_s=own_s if are_parts_known else math.nan,
            waiting_s=waiting_s if are_parts_known else math.nan,
            input_s=spent.input_s,
            step_s=spent.step_s,
            between_s=_add_up_between(phase_seconds),
            number=marked.number,
            disturbed=marked.disturbed,
            behind=marked.behind,
            computing=cpu.own_s / own_s if cpu is not None and own_s > 0 else math.nan,
            idle_input_s=math.nan if cpu is None else _smaller(spent.input_s, cpu.idle_input_s),
            sums=spent.sums,
        )

    def _list_step_sums(
        self, marked: _MarkedStep, spans: Mapping[Phase, float], input_s: float
    ) -> tuple[float, ...]:
        """Return a step's durations in seconds, in the order of StepSums' fields.

        `spans` has the durations of its phases, and `input_s` is the time until its batch arrived.
        If a loop began with this step, the time since the previous loop is included.
        """
        # the time since the previous loop includes the fetching of the first batch, unless
        # `start_loop` was called before
        own_s, meeting_s, undivided_s = spans.get(OWN, 0.0), spans.get(SUM, 0.0), 0.0
        files_s, validation_s = spans.get(FILES, 0.0), spans.get(VALIDATION, 0.0)
        between_s, idle_own_s, idle_input_s = spans.get(BETWEEN, 0.0), 0.0, 0.0
        if marked.between_loops:
            end = marked.marks[0][1] if marked.requested is None else marked.requested
            between_loops, rest_s = _total_phases(self._clock.seconds, marked.between_loops, end)
            _add_last_batch(between_loops, rest_s, marked.validations[0])
            files_s += between_loops.get(FILES, 0.0)
            validation_s += between_loops.get(VALIDATION, 0.0)
            between_s += between_loops.get(BETWEEN, 0.0)
        if not (self.can_time_compute or self._single_rank):
            own_s, meeting_s, undivided_s = 0.0, 0.0, own_s + meeting_s
        if marked.cpu is not None:
            stands_for = marked.cpu.stands_for
            idle_own_s = stands_for * _at_least_zero(own_s - marked.cpu.all_own_s)
            idle_input_s = stands_for * _at_least_zero(_smaller(input_s, marked.cpu.idle_input_s))
        return (
            float(marked.is_step),
            input_s,
            own_s,
            meeting_s,
            undivided_s,
            spans.get(UPDATE, 0.0) + spans.get(PREPARATION, 0.0),
            files_s,
            validation_s,
            between_s,
            idle_input_s,
            idle_own_s,
        )


def _list_ended_phases(marked: _MarkedStep, spent: _StepDurations) -> dict[Phase, float]:
    """Return the seconds of each phase of a step, leaving out phases whose end is unknown."""
    seconds, last = dict(spent.spans), marked.marks[-1][0]
    if last not in (OWN, SUM, UPDATE):  # nothing marks the end of these phases
        return seconds
    seconds[last] -= spent.last_s
    if not any(phase == last for phase, _ in marked.marks[:-1]):
        del seconds[last]
    return seconds


def _add_up_between(phase_seconds: Mapping[Phase, float]) -> float:
    """Add up the phases between two steps, and return the sum in seconds.

    The result is NaN if the duration of none of these phases is known.
    """
    phases: tuple[Phase, ...] = (PREPARATION, BETWEEN, FILES, VALIDATION)
    between = [phase_seconds[phase] for phase in phases if phase in phase_seconds]
    return sum(between) if between else math.nan


def _list_marks(marked: _MarkedStep) -> list[Any]:
    """Return the time stamps that only this step uses, so that they can be reused later."""
    # two phases may begin at the same mark, and the next step may use the last mark
    marks = [] if marked.requested is None else [marked.requested]
    for _, mark in (*marked.between_loops, *marked.marks):
        if not marks or mark is not marks[-1]:
            marks.append(mark)
    return marks if marked.is_shared else [*marks, marked.done]


def _smaller(first: float, second: float) -> float:
    """Return the smaller of two numbers, or NaN if either is NaN."""
    return math.nan if math.isnan(first) or math.isnan(second) else min(first, second)


def _at_least_zero(seconds: float) -> float:
    """Return `seconds`, or 0 for negative numbers and NaN."""
    return seconds if seconds > 0 else 0.0


def _total_phases(
    seconds: Callable[[Any, Any], float], marks: Sequence[tuple[Phase, Any]], end: Any
) -> tuple[dict[Phase, float], float]:
    """Return the total seconds of each phase, and the seconds since the last phase began.

    `marks` has each phase with the time stamp of its beginning. The last phase ends at `end`.
    `seconds` returns the time between two time stamps.
    """
    # a phase may occur several times
    took_s = 0.0
    spans: dict[Phase, float] = {}
    phase, start = marks[0]
    for next_phase, stop in (*marks[1:], (phase, end)):
        took_s = max(0.0, seconds(start, stop))  # streams of a GPU may overlap
        spans[phase] = spans.get(phase, 0.0) + took_s
        phase, start = next_phase, stop
    return spans, took_s


def _add_last_batch(spans: dict[Phase, float], rest_s: float, batches: int) -> None:
    """Move the estimated time of a validation's last batch from BETWEEN to VALIDATION in `spans`.

    Nothing marks the end of that batch, so its time was counted as time between steps. `rest_s` is
    the time since the batch began, and `batches` is the validation's number of batches.
    """
    # the last batch is assumed to take as long as each of the others
    moved_s = min(_last_batch_seconds(spans.get(VALIDATION, 0.0), batches), rest_s)
    if moved_s > 0 and BETWEEN in spans:
        spans[VALIDATION] += moved_s
        spans[BETWEEN] -= moved_s


def _last_batch_seconds(others_s: float, batches: int) -> float:
    """Estimate the duration of a validation's last batch as the mean of its other batches.

    `others_s` is the time that the other batches took together. `batches` is the number of batches
    with the last one.
    """
    return others_s / (batches - 1) if batches > 1 else 0.0


def _is_after_sum(marks: Sequence[tuple[Phase, Any]]) -> bool:
    """Return whether the last phase of a step began at the end of its all-reduce."""
    return len(marks) > 1 and marks[-1][0] == BETWEEN and marks[-2][0] == SUM


def _join_parts(sums: Sequence[float]) -> tuple[float, float, float, float]:
    """Return how long a step took for input, computing and waiting, and the time between steps.

    All four are in seconds. `sums` has the step's durations in the order of StepSums' fields.
    """
    # if ranks wait for each other within a pass, that counts as computing
    step = StepSums(0, *sums[1:])
    return step.input_s, step.own_work_s + step.undivided_s, step.meeting_s, step.all_between_s


def _idle_seconds() -> float:
    """Return how many seconds this thread has spent without running on a CPU.

    Only differences between two results are meaningful.
    """
    return time.perf_counter() - time.thread_time()


def make_timer(device: torch.device, single_rank: bool) -> StepTimer:
    """Create a StepTimer with the clock for a device."""
    return StepTimer(make_clock(device), single_rank)


def make_clock(device: torch.device) -> HostClock | GpuClock:
    """Create a GpuClock for a GPU, or a HostClock for a CPU."""
    return GpuClock(device) if device.type == "cuda" else HostClock()


MEMORY_SECONDS = 5.0  # seconds between two readings of memory
RETREATS = "evener/retreats"  # key of the lines that other ranks write for rank 0's journal


class StepReporter:
    """Reports a rank's training steps to evener's monitor, and on rank 0 to the journal.

    Arguments:

    - `shares`: the shares of all ranks.
    - `timer`: measures the steps.
    - `journal`: whether to record the training run; under `evener launch`, it is always recorded.
    - `noise`: measures the gradient noise scale, or None.
    """

    def __init__(
        self,
        shares: RankShares,
        timer: StepTimer,
        journal: bool = False,
        noise: RankNoise | None = None,
    ) -> None:
        self.shares, self._timer, self._noise = shares, timer, noise
        self.changes: deque[ShareChange] = deque(maxlen=MOST_CHANGES)
        # number of passes that ran out of memory, and a message about the last one
        self.retreats, self.retreat = 0, ""
        self.pending: Callable[[], PendingShares | None] = lambda: None  # the next change of shares
        self.without_loader = False  # True if the rows come from no DataLoader
        self._journal = None
        if (journal or launched_run()) and shares.rank == 0:
            names = tuple(map(describe, shares.shares))
            created = shares.plan.created if shares.plan is not None else ""
            self._journal = TrainingJournal(names, shares.batches, created)
        self._script = os.path.basename(sys.argv[0])
        self._described: RankShares | None = None  # the shares of the last whole report
        self._lines = 0  # number of lines from other ranks in the journal
        self._memory, self._memory_at = (0, 0), -math.inf
        self.reporter = Reporter(
            self._describe,
            self._journal,
            timer.now,
            lambda: self._timer.sums.whole,
            timer.sums.take_fast_step,
        )

    def report(self, rows: int, tokens: tuple[int, int] = (0, 0)) -> None:
        """Report a finished training step.

        `rows` is the number of rows that this rank computed. `tokens` says how many tokens they
        have, without and with padding; zeros mean unknown.
        """
        if self.shares is self._described and self.reporter.count(rows, tokens):
            return
        self._described = self.shares
        self.reporter.report(
            rows,
            devices=(self.shares.share,),
            framework="torch",
            workload=self.shares.workload or self._script,
            tokens=tokens,
        )

    def note_change(self, change: ShareChange) -> None:
        """Report a change of shares to the monitor and the journal."""
        # written to the journal at once, because the run may end before its next regular entry
        self.changes.append(change)
        if self._journal is not None:
            self._journal.note_change(change)

    def note_retreat(self, retreat: Retreat) -> None:
        """Print that a pass ran out of memory, and report it to the monitor and the journal."""
        line = retreat.describe(self.shares.share.label)
        self.retreats, self.retreat = self.retreats + 1, line
        self._timer.disturb()
        print_line(line)
        if self._journal is not None:
            self._journal.note_retreat(line)
        elif self.shares.rank:
            with suppress(RuntimeError):  # the store can't append
                default_store().append(RETREATS, f"{line}\n")

    def _collect_retreats(self) -> None:
        """Copy other ranks' messages about passes that ran out of memory to rank 0's journal."""
        if self._journal is None or self.shares.world == 1:
            return
        with suppress(RuntimeError, ValueError):  # the group's store no longer exists
            store = default_store()
            if store.check([RETREATS]):
                lines = store.get(RETREATS).decode().splitlines()
                for line in lines[self._lines :]:
                    self._journal.note_retreat(line)
                self._lines = len(lines)

    def _read_memory(self) -> tuple[int, int]:
        """Return this process's peak memory and the device's total memory, in bytes.

        They are read only every few seconds; calls in between return the last values.
        """
        now = time.monotonic()
        if now >= self._memory_at + MEMORY_SECONDS:
            self._memory_at, self._memory = now, _read_memory(self.shares.device)
        return self._memory

    def close(self) -> None:
        """Send the last report, and stop reporting."""
        self._collect_retreats()
        self._memory_at = -math.inf
        self.reporter.close()

    def _describe(self) -> tuple[Details, Sequence[DeviceTimes]]:
        self._collect_retreats()
        now, (work, step) = self.shares, self._timer.medians()
        sums = self._timer.sums
        memory_bytes, memory_of_bytes = self._read_memory()
        details = msgspec.structs.replace(
            step,
            training=now.training,
            rank=now.rank,
            world=now.world,
            plan_samples_per_second=now.samples_per_second,
            changes=tuple(self.changes),
            retreats=self.retreats,
            retreat=clean(self.retreat),
            noise=None if self._noise is None else self._noise.scale(),
            recent=sums.recent(),
            errors=sums.errors(),
            whole=sums.whole,
            last_steps=self._timer.last_steps(),
            behind=self._timer.behind_part(),
            memory_bytes=memory_bytes,
            memory_of_bytes=memory_of_bytes,
            pending=self.pending(),
            without_loader=self.without_loader,
            run=launched_run(),
        )
        return details, (work,)


def _read_memory(device: torch.device) -> tuple[int, int]:
    """Return this process's peak memory and the device's total memory, in bytes.

    The total is 0 for a CPU.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_reserved(device), total
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, 0


# Reading a tuple of references takes a microsecond less than reading a WeakSet.
_timers: tuple[weakref.ref[StepTimer], ...] = ()


def _add_timer(timer: StepTimer) -> None:
    """Notify a timer of the beginning and end of each optimizer step from now on."""
    global _timers
    _timers = (*_timers, weakref.ref(timer, _remove_timer))


def _remove_timer(reference: weakref.ref[StepTimer]) -> None:
    global _timers
    _timers = tuple(each for each in _timers if each is not reference)


def _note_update() -> None:
    for reference in _timers:
        timer = reference()
        if timer is not None:
            timer.note_update()


def _note_updated(*_: Any) -> None:
    for reference in _timers:
        timer = reference()
        if timer is not None:
            timer.note_updated()


def _notify_timers_of_update(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Optimizer pre-step hook that notifies all timers that an update begins.

    If the step has a closure, the hook returns new arguments with a closure that notifies them
    after the gradients are computed.
    """
    # PyTorch calls this before each step; the first of `arguments` is the optimizer
    if len(arguments) == 1 and not keywords:
        _note_update()
        return None
    closure = keywords.get("closure")
    optimizer_class: Any = type(arguments[0])
    is_first = len(arguments) > 1 and _takes_closure_first(optimizer_class)
    if is_first:
        closure = arguments[1]
    if closure is None or not _timers:
        _note_update()
        return None

    def compute(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        _note_update()
        return result

    if is_first:
        return (arguments[0], compute, *arguments[2:]), keywords
    return arguments, {**keywords, "closure": compute}


@cache
def _takes_closure_first(optimizer_class: Any) -> bool:
    """Return whether the first parameter of an optimizer class's `step` is `closure`."""
    # a user's own optimizer may have another parameter there, such as the loss
    with suppress(TypeError, ValueError):  # the method has no signature
        return list(inspect.signature(optimizer_class.step).parameters)[1:2] == ["closure"]
    return False


def _register() -> list[Any]:
    return [
        register_optimizer_step_pre_hook(_notify_timers_of_update),
        register_optimizer_step_post_hook(_note_updated),
    ]


_OPTIMIZER_HOOKS = ProcessHooks(_register)
