"""How long this rank's steps take, and what of each is its own work, waiting for other ranks, and waiting for data.

DistributedDataParallel makes every rank's backward pass equally long. What tells ranks apart is the time until the last
gradient is ready, as the exchange of all gradients can't end before it is ready on every rank.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

KEPT_STEPS = 25  # that medians are taken over


class Clock(Protocol):
    """Marks points of time whose distance is known once they are past."""

    def mark(self) -> Any:
        """This point."""

    def is_past(self, mark: Any) -> bool:
        """Whether its distance from earlier ones is known."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that are past."""

    def reuse(self, marks: Sequence[Any]) -> None:
        """Nobody asks for these any more."""


class HostClock:
    """For a CPU, which computes what the loop says at once."""

    mark = staticmethod(time.perf_counter)

    def is_past(self, mark: float) -> bool:
        """Always."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """Between the two."""
        return end - start

    def reuse(self, marks: Sequence[float]) -> None:
        """Numbers need no second use."""


class GpuClock:
    """For a GPU, which computes what the loop says later: events on the current stream."""

    def __init__(self, make_event: Callable[..., Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._free: list[Any] = []

    def mark(self) -> Any:
        """An event behind all that is enqueued now."""
        event = self._free.pop() if self._free else self._make_event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the GPU has come to it; nothing waits."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Of the GPU between the two."""
        return float(start.elapsed_time(end)) / 1e3

    def reuse(self, marks: Sequence[Any]) -> None:
        """Record these again, which takes less than a new event."""
        self._free.extend(marks)


class TimedStep(NamedTuple):
    """Seconds of one step; NaN for what isn't known."""

    sizes: tuple[int, ...]  # rows of each rank
    own_work_s: float  # with the batch in hand, until the last gradient is ready
    waiting_s: float  # from there until the optimizer begins
    input_s: float  # until the batch is in hand
    step_s: float


class StepMedians(NamedTuple):
    """The same of the last steps, 0 for what isn't known."""

    own_work_s: float
    waiting_s: float
    input_s: float
    step_s: float
    step_spread: float  # interquartile range over the median


class _Marked(NamedTuple):
    """A step's marks; `turns` are the batch in hand, then the last gradient ready and the optimizer begun by turns."""

    sizes: tuple[int, ...]
    asked: Any  # for this batch; None where a loop began with it
    turns: Sequence[Any]
    done: Any  # the next batch is asked for


class StepTimer:
    """Times the steps of one rank's training; `alone` if no gradient waits for another rank's.

    A step without gradients, such as one of two batches that are taken together, isn't counted.
    """

    def __init__(self, clock: Clock, alone: bool) -> None:
        self.has_own_work = True  # False where ranks wait for each other within a pass
        self._clock = clock
        self._alone = alone
        self._asked: Any = None
        self.sizes: tuple[int, ...] = ()  # of the newest batch
        self._turns: list[Any] = []
        self._computed = self._applied = False  # gradients of the batch
        self._steps: deque[_Marked | TimedStep] = deque(maxlen=KEPT_STEPS)
        _timers.add(self)

    def begin(self, sizes: tuple[int, ...]) -> None:
        """A batch is in hand, of which the ranks have these rows."""
        self.sizes = sizes
        self._turns = [self._clock.mark()]
        self._computed = self._applied = False

    def note_gradients(self) -> None:
        """The last gradient is ready; with several passes, called for each."""
        self._computed = True
        turns = self._turns
        if len(turns) % 2:
            turns.append(self._clock.mark())
        elif turns:
            turns[-1] = self._clock.mark()

    def note_update(self) -> None:
        """An optimizer begins."""
        turns = self._turns
        if turns and len(turns) % 2 and self._alone:
            self.note_gradients()
        self._applied = True
        if turns and not len(turns) % 2:
            turns.append(self._clock.mark())

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """What runs within waits for other ranks: it is no own work."""
        turns = self._turns
        if len(turns) % 2:
            turns.append(self._clock.mark())
        yield
        if turns and not len(turns) % 2:
            turns.append(self._clock.mark())

    def end_pass(self, loss: Any) -> None:
        """Call `note_gradients` at the end of the backward pass of `loss`, before it waits for other ranks."""
        if self.has_own_work and loss.requires_grad:
            loss.register_hook(self._queue)

    def _queue(self, _: Any) -> None:
        # what is queued first is called first: DistributedDataParallel queues its waiting with the last gradient
        torch.autograd.Variable._execution_engine.queue_callback(self.note_gradients)

    def finish(self) -> bool:
        """The loop asks for its next batch; whether gradients of this one were computed, and exchanged."""
        done = self._clock.mark()
        if self._turns and (self._computed or self._applied):
            self._steps.append(_Marked(self.sizes, self._asked, self._turns, done))
        computed = self._computed
        self.pause()
        self._asked = done
        return computed

    def pause(self) -> None:
        """The loop has ended: what comes before its next batch belongs to no step."""
        self._asked, self._turns = None, []
        self._computed = self._applied = False

    def last(self, count: int = KEPT_STEPS) -> list[TimedStep]:
        """Of the last steps, so many at most, those that the device has computed."""
        for place, step in enumerate(self._steps):
            if isinstance(step, _Marked) and self._clock.is_past(step.done):
                self._steps[place] = self._time(step)
                self._clock.reuse(step.turns)
        return [step for step in list(self._steps)[-count:] if isinstance(step, TimedStep)]

    def medians(self) -> StepMedians:
        """Of the last steps."""
        steps = self.last()
        own, waiting, inputs, times = (
            [value for step in steps if not math.isnan(value := getattr(step, name))] for name in TimedStep._fields[1:]
        )
        first, middle, third = quantiles(times) if len(times) > 1 else (0.0, 0.0, 0.0)
        spread = (third - first) / middle if middle > 0 else 0.0
        return StepMedians(_median(own), _median(waiting), _median(inputs), _median(times), spread)

    def _time(self, marked: _Marked) -> TimedStep:
        seconds = self._clock.seconds
        turns = marked.turns
        spans = [seconds(start, end) for start, end in pairwise(turns)]
        asked = marked.asked
        return TimedStep(
            marked.sizes,
            sum(spans[::2]) if spans and self.has_own_work else math.nan,
            sum(spans[1::2]) if len(spans) > 1 and self.has_own_work else math.nan,
            math.nan if asked is None else seconds(asked, turns[0]),
            math.nan if asked is None else seconds(asked, marked.done),
        )


def _median(values: Sequence[float]) -> float:
    return max(0.0, median(values)) if values else 0.0


def make_timer(device: torch.device, alone: bool) -> StepTimer:
    """For the steps of a rank on `device`."""
    return StepTimer(GpuClock() if device.type == "cuda" else HostClock(), alone)


_timers: weakref.WeakSet[StepTimer] = weakref.WeakSet()


def _note_update(*_: Any) -> None:
    for timer in _timers:
        timer.note_update()


register_optimizer_step_pre_hook(_note_update)  # for good: one removed while PyTorch calls them raises there
