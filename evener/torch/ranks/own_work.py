"""The timing of one rank's steps, divided into its own work, waiting for other ranks, and waiting
for data.

The sum of gradients makes every rank's backward pass equally long. Ranks differ in the time until
the last gradient is ready, as the exchange of all gradients can't end before it is ready on every
rank.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...live.files import MOST_CHANGES, Details, Doing, ShareChange, clean
from ...live.journal import TrainingJournal
from ...live.reporter import DeviceTimes, Reporter, middle, spread, sum_up
from ...plan.check import describe
from ...training.retreat import Retreat, say
from ..sums.collectives import own_collectives
from ..sums.noise import RankNoise
from .ranks import RankShares

KEPT_STEPS = 25  # that medians are taken over
OWN: Doing = "own work"
SUM: Doing = "sum"
UPDATE: Doing = "update"
BETWEEN: Doing = "between steps"
INPUT: Doing = "input"


class HostClock:
    """The clock of a CPU, which computes at once: marks points of time whose distance is known once
    they are past.
    """

    mark = staticmethod(time.perf_counter)
    computed = staticmethod(time.thread_time)  # seconds that the CPU has computed for this thread

    def is_past(self, mark: float) -> bool:
        """True for every mark."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """The seconds between two marks."""
        return end - start

    def reuse(self, marks: Sequence[float]) -> None:
        """Do nothing: numbers need no second use."""


class GpuClock:
    """The clock of a GPU, which computes later than the loop runs: events on the current stream."""

    def __init__(self, make_event: Callable[..., Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._free: list[Any] = []

    def mark(self) -> Any:
        """An event after all that is enqueued now."""
        event = self._free.pop() if self._free else self._make_event(enable_timing=True)
        event.record()
        return event

    def computed(self) -> float:
        """NaN: whether a GPU computes all the time isn't known."""
        return math.nan

    def is_past(self, mark: Any) -> bool:
        """True if the GPU has come to a mark; doesn't wait."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds of the GPU between two marks."""
        return float(start.elapsed_time(end)) / 1e3

    def reuse(self, marks: Sequence[Any]) -> None:
        """Take back events to record them again, which takes less time than new ones."""
        self._free.extend(marks)


class TimedStep(NamedTuple):
    """Seconds of one step; NaN for what isn't known."""

    sizes: tuple[int, ...]  # rows of each rank
    own_work_s: float  # from the batch's arrival until the last gradient is ready
    waiting_s: float  # from there until the backward pass ends
    input_s: float  # until the batch arrives
    step_s: float
    # from the backward pass until the next batch is asked for, without the optimizer's step
    between_s: float
    number: int = 0  # of the batch
    disturbed: bool = False  # evener looked at the loss, or memory ran out
    behind: float = math.nan  # 1 if the GPU was behind its host when gradients were sent, else 0
    computing: float = math.nan  # the part of own work in which the CPU computed for the loop
    idle_input_s: float = math.nan  # of input_s: the loop's thread waited for others to fetch rows


class _Marked(NamedTuple):
    """A step's marks."""

    sizes: tuple[int, ...]
    asked: Any  # for this batch; None where a loop began with it
    marks: Sequence[tuple[Doing, Any]]  # the phase that began at each; own work at the first
    done: Any  # the next batch is asked for
    number: int
    disturbed: bool
    behind: float
    computed_s: float  # by the CPU, in own work
    idle_input_s: float


class StepTimer:
    """Times the steps of one rank's training; `alone` if no gradient waits for another rank's.

    A step without gradients, such as one of two batches that are taken together, isn't counted.
    """

    def __init__(self, clock: Any, alone: bool) -> None:
        self.has_own_work = True  # False where ranks wait for each other within a pass
        self._clock = clock  # a HostClock or a GpuClock
        self._alone = alone
        self._asked: Any = None
        self.sizes: tuple[int, ...] = ()  # of the newest batch
        self.begun: Callable[[tuple[int, ...], int], None] = lambda *_: (
            None
        )  # hears of each batch, and of updates
        self._updates = 0  # of optimizers
        self._marks: list[tuple[Doing, Any]] = []
        self._batches = 0  # that were begun
        self._computed = self._applied = False  # gradients of the batch
        self._disturbed = False  # the step
        self._behind = math.nan
        self._computed_s = (math.nan, math.nan)  # as own work began, and when gradients were ready
        self._thread = 0  # in which own work began
        self._idle_s = math.nan  # of this thread so far, as the loop asked for its batch
        self._idle_input_s = math.nan  # of the newest batch
        self._steps: deque[_Marked | TimedStep] = deque(maxlen=KEPT_STEPS)
        _timers.add(self)

    def begin(self, sizes: tuple[int, ...]) -> None:
        """Begin a batch of which the ranks have these rows."""
        self.sizes = sizes
        self._idle_input_s = _idle_seconds() - self._idle_s
        self._marks = [(OWN, self._clock.mark())]
        self._batches += 1
        self._computed = self._applied = False
        self._disturbed, self._behind, self._thread = False, math.nan, get_ident()
        self._computed_s = (self._clock.computed(), math.nan)
        self.begun(sizes, self._updates)

    def disturb(self) -> None:
        """Note that the current step isn't one as others are: evener checks a loss in it, or memory
        has run out.
        """
        self._disturbed = True

    def _enter(self, doing: Doing, *after: Doing) -> None:
        """Begin `doing` if one of `after` goes on."""
        if self._marks and self._marks[-1][0] in after:
            self._marks.append((doing, self._clock.mark()))

    def note_gradients(self) -> None:
        """Note that the last gradient is ready; with several passes, called for each."""
        if not (self.has_own_work or self._alone):
            return
        self._computed = True
        marks = self._marks
        if marks and marks[-1][0] == SUM:
            marks.pop()
        elif marks and marks[-1][0] == BETWEEN:  # of another pass, or before another update
            marks[-1] = (OWN, marks[-1][1])
        self._enter(SUM, OWN)
        ready_s = self._clock.computed() if get_ident() == self._thread else math.nan
        self._computed_s = (self._computed_s[0], ready_s)

    def note_sent(self) -> None:
        """Note that the host has enqueued the sum of all gradients.

        A GPU that hasn't come to the last gradient by now is behind its host.
        """
        if self._marks and self._marks[-1][0] == SUM and math.isnan(self._clock.computed()):
            self._behind = float(not self._clock.is_past(self._marks[-1][1]))

    def note_backward(self) -> None:
        """Note that the backward pass has ended, with its waiting for other ranks."""
        self._enter(BETWEEN, SUM)

    def note_update(self) -> None:
        """Note that an optimizer begins."""
        if (
            self._alone
            and self._marks
            and [doing for doing, _ in self._marks[-2:]] != [SUM, BETWEEN]
        ):
            self.note_gradients()  # nothing else says that they are ready
        self._applied = True
        self._updates += 1
        self._enter(UPDATE, SUM, BETWEEN)

    def note_updated(self) -> None:
        """Note that an optimizer has ended."""
        self._enter(BETWEEN, UPDATE)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """A context in which evener waits for other ranks, which is no own work."""
        before = self._marks[-1][0] if self._marks else SUM
        self._enter(SUM, OWN, UPDATE, BETWEEN)
        with own_collectives():
            yield
        if before != SUM:
            self._enter(before, SUM)

    def now(self) -> tuple[int, Doing]:
        """The number of batches begun, and what the loop is doing now; a GPU may be behind it."""
        doing = self._marks[-1][0] if self._marks else BETWEEN if self._asked is None else INPUT
        return self._batches, doing

    def finish(self) -> bool:
        """End a step as the loop asks for its next batch; True if its gradients were computed and
        exchanged.
        """
        done = self._clock.mark()
        if self._marks and (self._computed or self._applied):
            began_s, ready_s = self._computed_s
            step = _Marked(
                self.sizes,
                self._asked,
                self._marks,
                done,
                self._batches,
                self._disturbed,
                self._behind,
                ready_s - began_s,
                self._idle_input_s,
            )
            self._steps.append(step)
        computed = self._computed
        self.pause()
        self._asked, self._idle_s = done, _idle_seconds()
        return computed

    def pause(self) -> None:
        """End a loop: time before the next batch belongs to no step."""
        self._asked, self._marks, self._idle_s = None, [], math.nan
        self._computed = self._applied = False

    def last(self, count: int = KEPT_STEPS) -> list[TimedStep]:
        """The steps among the last `count` that the device has computed."""
        for place, step in enumerate(self._steps):
            if isinstance(step, _Marked) and self._clock.is_past(step.done):
                self._steps[place] = self._time(step)
                self._clock.reuse([mark for _, mark in step.marks])
        return [step for step in list(self._steps)[-count:] if isinstance(step, TimedStep)]

    def medians(self) -> tuple[DeviceTimes, Details]:
        """The medians of the last steps, 0 for unknown ones: of this device, and of the whole
        step.
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

    def _time(self, marked: _Marked) -> TimedStep:
        seconds, asked, marks = self._clock.seconds, marked.asked, marked.marks
        input_s = math.nan if asked is None else seconds(asked, marks[0][1])
        spans = dict.fromkeys((OWN, SUM, UPDATE, BETWEEN), math.nan)
        closed = (
            [*marks, (BETWEEN, marked.done)] if marks[-1][0] == BETWEEN else marks
        )  # nothing says when others end
        for (doing, start), (_, end) in pairwise(closed):
            spans[doing] = seconds(start, end) + (0.0 if math.isnan(spans[doing]) else spans[doing])
        return TimedStep(
            marked.sizes,
            spans[OWN] if self.has_own_work else math.nan,
            spans[SUM] if self.has_own_work else math.nan,
            input_s,
            math.nan if asked is None else seconds(asked, marked.done),
            spans[BETWEEN],
            marked.number,
            marked.disturbed,
            marked.behind,
            marked.computed_s / spans[OWN] if spans[OWN] > 0 else math.nan,
            min(input_s, marked.idle_input_s),
        )


def _idle_seconds() -> float:
    """Seconds in which this thread hasn't computed, from some point of time on."""
    return time.perf_counter() - time.thread_time()


def make_timer(device: torch.device, alone: bool) -> StepTimer:
    """A timer for the steps of a rank on `device`."""
    return StepTimer(GpuClock() if device.type == "cuda" else HostClock(), alone)


RETREATS = "evener/retreats"  # lines of ranks whose journal the first one keeps


class StepReporter:
    """Reports the steps of one rank to the monitor; with `journal`, the first rank keeps one of the
    whole training.

    `shares` are those in force, and `timer` has the times of the steps.
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
        self.retreats, self.retreat = (
            0,
            "",
        )  # passes that ran out of memory, and the last of them in words
        self._journal = None
        if journal and shares.rank == 0:
            names = tuple(map(describe, shares.shares))
            created = shares.plan.created if shares.plan is not None else ""
            self._journal = TrainingJournal(names, shares.batches, created)
        self._lines = 0  # of other ranks' retreats that the journal has
        self._reporter = Reporter(self._describe, self._journal, timer.now)

    def report(self, rows: int, tokens: tuple[int, int] = (0, 0)) -> None:
        """A step on this rank's rows is done; `tokens` are those of the rows, without and with
        padding.
        """
        now = self.shares
        self._reporter.report(
            rows, devices=(now.share,), framework="torch", workload=now.workload, tokens=tokens
        )

    def note_change(self, change: ShareChange) -> None:
        """Note that shares have changed: for the monitor, and in the journal at once, as the
        training may end before it is told of again.
        """
        self.changes.append(change)
        if self._journal is not None:
            self._journal.note_change(change)

    def note_retreat(self, retreat: Retreat) -> None:
        """Say, and note, that a pass ran out of memory and that smaller ones follow."""
        line = retreat.describe(self.shares.share.name or self.shares.share.device)
        self.retreats, self.retreat = self.retreats + 1, line
        self._timer.disturb()
        say(line)
        if self._journal is not None:
            self._journal.note_retreat(line)
        elif self.shares.rank:
            with suppress(RuntimeError):  # of a store that can't append
                dist.distributed_c10d._get_default_store().append(RETREATS, f"{line}\n")

    def _collect_retreats(self) -> None:
        """Give the journal the retreats of other ranks."""
        if self._journal is None or self.shares.world == 1:
            return
        with suppress(RuntimeError, ValueError):  # of a group that is gone
            store = dist.distributed_c10d._get_default_store()
            if store.check([RETREATS]):
                lines = store.get(RETREATS).decode().splitlines()
                for line in lines[self._lines :]:
                    self._journal.note_retreat(line)
                self._lines = len(lines)

    def close(self) -> None:
        """The monitor forgets this training."""
        self._collect_retreats()
        self._reporter.close()

    def _describe(self) -> tuple[Details, Sequence[DeviceTimes]]:
        self._collect_retreats()
        now, (work, step) = self.shares, self._timer.medians()
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
        )
        return details, (work,)


_timers: weakref.WeakSet[StepTimer] = weakref.WeakSet()


def _tell(note: Callable[[StepTimer], None], *_: Any) -> None:
    for timer in _timers:
        note(timer)


# for good: a hook that is removed while PyTorch calls them raises there
register_optimizer_step_pre_hook(partial(_tell, StepTimer.note_update))
register_optimizer_step_post_hook(partial(_tell, StepTimer.note_updated))
