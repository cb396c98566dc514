"""Times the steps of a script that evener leaves unchanged, for the summary after it exits.

Such a script trains in a single process, or in several processes with equal shares.
`evener.program.install` calls these functions when a DataLoader yields a batch, in backward passes,
and when an optimizer steps. A step usually begins with a batch of a DataLoader. If rows don't
come from a DataLoader, a step is the time between two updates of the same optimizer, and its rows
are unknown.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from threading import get_ident
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..live.reporter import is_reported_elsewhere
from ..torch.private import backward_number, leave_uncompiled, wrap_next_batch
from ..torch.ranks.own_work import StepReporter, StepTimer, make_clock
from ..torch.ranks.ranks import describe_own_rows
from ..torch.ranks.timed_batches import ON_GPU
from ..training.first_rank import is_eveners_rank, is_released
from ..training.retreat import print_line

# Updates without a batch of a DataLoader in between, after which the rows come from no DataLoader
FEWEST_UPDATES = 8
# Batches in a row without a backward pass, after which a loader is for validation. Some loops
# request a batch before they train with the last one.
MOST_UNTRAINED = 2
# The number of steps, in the first ones and then in every CHECK_STEPS, in which it is checked
# whether something else reports the steps
FIRST_STEPS, CHECK_STEPS = 4, 64
# Backward passes after which a program probably stays with equal shares if it has begun so
MOST_WAITED = 64
# Values of a batch, and items of each of its lists, among which its first tensor is looked for. A
# batch may have a hundred thousand numbers in lists, such as texts that aren't padded.
MOST_SEARCHED, MOST_ITEMS = 100, 16


class _Iteration:
    """One loop over a loader, with a count of successive batches that had no backward pass.

    A loop whose batches have no backward pass is for validation.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = None if loader is None else weakref.ref(loader)
        batch_size = getattr(loader, "batch_size", None)
        self.batch_size = batch_size if isinstance(batch_size, int) else None
        self.passes = -1  # number of backward passes when the last batch was requested
        self.untrained = 0  # number of batches in a row without a backward pass
        # how often a loader had been found to be for validation, when this iteration was found to
        # train; -1: it isn't known to train
        self.trains_since = -1

    @property
    def loader(self) -> Any:
        """The loader of this loop, or None if it is unknown or was deleted."""
        return None if self._loader is None else self._loader()


class _Loaders:
    """Set of data loaders that compares them by identity and holds weak references to them."""

    def __init__(self) -> None:
        self._loaders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __contains__(self, loader: Any) -> bool:
        return loader is not None and self._loaders.get(id(loader)) is loader

    def add(self, loader: Any) -> None:
        """Add a loader; None is ignored."""
        if loader is not None:
            self._loaders[id(loader)] = loader

    def discard(self, loader: Any) -> None:
        """Remove a loader if it is in the set."""
        self._loaders.pop(id(loader), None)


class _Harmless:
    """Context manager that prints an exception and stops the timing, instead of raising it."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.end_by(error)
        return True

    def end_by(self, error: Exception) -> None:
        """Print the error and stop the timing."""
        fault = f"{type(error).__name__}: {error}"
        print_line(f"evener: its steps are no longer timed, because of an error in evener: {fault}")
        with suppress(Exception):
            self._stop()


class _UpdateTimer(StepTimer):
    """Step timer that never raises an error in the user's optimizer step."""

    # updates on threads other than the one that creates it are ignored

    def __init__(self, device: torch.device, single_rank: bool, harmless: _Harmless) -> None:
        super().__init__(make_clock(device), single_rank)
        self.time_fewer(ON_GPU)  # also on a CPU: shares don't depend on these times
        self.thread = get_ident()  # the thread that trains; 0 to ignore all threads
        self._harmless = harmless

    def note_update(self) -> None:
        """Record the start of an optimizer step."""
        if get_ident() == self.thread:
            try:
                super().note_update()
            except Exception as error:
                self._harmless.end_by(error)

    def note_updated(self) -> None:
        """Record the end of an optimizer step."""
        if get_ident() == self.thread:
            try:
                super().note_updated()
            except Exception as error:
                self._harmless.end_by(error)


class UnchangedTraining:
    """Times the training steps of this process and reports them to the monitor.

    A step lasts from one batch of a DataLoader to the next. Without a DataLoader, it lasts from one
    update of the first optimizer to the next. Timing begins after the first update, and ends for
    good if something else reports the steps, such as a Trainer's hooks.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._thread = 0  # the thread that trains
        self._device: torch.device | None = None  # set at the first update
        self._world = 1  # number of processes that train together
        self._waited = 0  # number of backward passes after which it was undecided who reports
        self._timer: _UpdateTimer | None = None  # set after that update
        self._reporter: StepReporter | None = None  # set at the first step
        self._iterations: weakref.WeakKeyDictionary[Any, _Iteration] = weakref.WeakKeyDictionary()
        self._training = _Loaders()  # loaders of training loops
        self._validating = _Loaders()  # loaders for validation
        self._validations = 0  # how often a loader was found to be for validation
        self._newest: _Iteration | None = None  # the iteration that was asked for a batch last
        self._newest_iterator: Callable[[], Any] = lambda: None  # returns its iterator
        # rows of each iteration's batches since the last step; a step may take several loaders'
        self._rows: dict[_Iteration, int] = {}
        self._passes = 0  # number of backward passes and updates
        self._has_batch = False  # True from a batch of a DataLoader until the end of its loop
        self._updated = False  # True if an optimizer has stepped since the step began
        self._updates = 0  # number of updates in a row without a batch of a DataLoader
        # True once it is known that the program's rows come from no DataLoader
        self._is_without_loader = False
        self._first: weakref.ref[Any] | None = None  # the optimizer whose update ends such a step
        self._has_loader = False  # True once a batch of a DataLoader was trained
        self._steps = 0
        self._harmless = _Harmless(self._stop)

    def note_loop(self, loader: Any, iterator: Any) -> None:
        """Record an iterator of a loader, whose batches will be timed."""
        if not self._is_over:
            # an iterator of the program's own class may not allow weak references
            with self._harmless, suppress(TypeError):
                self._iterations[iterator] = _Iteration(loader)

    def begin_loop(self, loader: Any) -> None:
        """Start the timer when a loop over a training loader begins.

        The time until the loop's first batch then counts as input time.
        """
        if self._timer is None or self._has_batch or not self._is_own_thread:
            return
        with self._harmless:
            if torch.is_grad_enabled() and loader in self._training:
                self._timer.start_loop()

    def fetch(self, wrapped: Any, iterator: Any, arguments: Any, keywords: Any) -> Any:
        """Fetch the next batch, which ends the previous step and begins a new one.

        A batch for validation is fetched without timing.
        """
        timer = self._timer
        if timer is None or self._is_without_loader or get_ident() != self._thread:
            return wrapped(*arguments, **keywords)
        iteration = None
        try:
            iteration = self._begin_fetch(timer, iterator)
        except Exception as error:
            self._harmless.end_by(error)
        if iteration is None:
            return wrapped(*arguments, **keywords)
        try:
            batch = wrapped(*arguments, **keywords)
        except StopIteration:
            with self._harmless:
                self._end_loop(iteration)
            raise
        try:
            self._begin_step(iteration, batch)
        except Exception as error:
            self._harmless.end_by(error)
        return batch

    def _begin_fetch(self, timer: StepTimer, iterator: Any) -> _Iteration | None:
        """End the previous step, and return the record of the loop that fetches a batch.

        The result is None if the loop is for validation.
        """
        iteration = self._newest
        if iteration is None or self._newest_iterator() is not iterator:
            iteration = self._find_iteration(iterator)
        if not torch.is_grad_enabled() or self._is_validation(iteration):
            self._rows.pop(iteration, None)
            timer.note_validation()
            return None
        if self._has_batch:
            self._end_step(timer)
        else:
            timer.start_loop()
        return iteration

    def _find_iteration(self, iterator: Any) -> _Iteration:
        """Return the record of a loop, given its iterator; a new iterator gets a new record."""
        iteration = self._iterations.get(iterator)
        if iteration is None:
            iteration = self._iterations[iterator] = _Iteration(None)
        self._newest, self._newest_iterator = iteration, weakref.ref(iterator)
        return iteration

    def _begin_step(self, iteration: _Iteration, batch: Any) -> None:
        """Begin timing a step, and record its batch's row count."""
        rows = _count_rows(batch, iteration.batch_size)
        self._rows[iteration] = self._rows.get(iteration, 0) + rows
        if self._timer is not None:
            self._has_batch = True
            self._timer.begin((rows,))

    def _end_loop(self, iteration: _Iteration) -> None:
        """Pause the timer after the last batch of a loop."""
        self._has_batch = False
        if iteration.untrained:
            self._rows.pop(iteration, None)
        if self._timer is not None:
            self._timer.pause()

    def _is_validation(self, iteration: _Iteration) -> bool:
        """Return whether a loop is for validation, judging by batches without backward passes."""
        # It is if several batches of this iteration, or of an earlier one over the same loader,
        # weren't followed by a backward pass.
        passes, iteration.passes = iteration.passes, self._passes
        if iteration.trains_since == self._validations and passes != self._passes:
            return False  # most batches
        loader = iteration.loader
        if passes == self._passes:
            iteration.untrained += 1
            iteration.trains_since = -1
            if iteration.untrained == MOST_UNTRAINED:
                self._validations += 1
                self._validating.add(loader)
        elif passes >= 0:
            iteration.untrained = 0
            iteration.trains_since = self._validations
            self._validating.discard(loader)
            self._training.add(loader)
        return iteration.untrained >= MOST_UNTRAINED or loader in self._validating

    def run_backward(self, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        """Hook of `autograd.backward` that counts backward passes.

        The first backward pass after the first update starts the timing.
        """
        if self._timer is None and self._device is not None and not self._is_over:
            with self._harmless:
                self._begin(self._device)
        result = wrapped(*arguments, **keywords)
        timer = self._timer
        # a backward pass inside another one, as with checkpointing, doesn't count
        if timer is not None and backward_number() == -1 and get_ident() == self._thread:
            try:
                self._note_pass(timer)
            except Exception as error:
                self._harmless.end_by(error)
        return result

    def _note_pass(self, timer: StepTimer) -> None:
        self._passes += 1
        if timer.is_captured():
            self._stop()
        elif self._world == 1:
            timer.note_pass_alone()

    def save(self, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        """Hook of `torch.save` that times the writing of files.

        This is only needed if rows don't come from a DataLoader. With one, the timer itself notices
        files that are written between steps.
        """
        if self._timer is None or not self._is_without_loader or not self._is_own_thread:
            return wrapped(*arguments, **keywords)
        with self._timer.writing():
            return wrapped(*arguments, **keywords)

    @property
    def _is_own_thread(self) -> bool:
        return self._thread in (0, get_ident())

    def end_update(self, optimizer: Any, *_: Any) -> None:
        """Optimizer hook that counts an update; without a DataLoader, a training step ends here."""
        if self._is_over or not self._is_own_thread:
            return
        timer = self._timer
        try:
            if timer is None:
                self._thread = get_ident()
                self._device = _find_device(optimizer)
            elif timer.is_captured():
                self._stop()
            else:
                self._note_update(timer, optimizer)
        except Exception as error:
            self._harmless.end_by(error)

    def _note_update(self, timer: StepTimer, optimizer: Any) -> None:
        self._updated = True
        self._passes += 1
        if self._has_batch or self._has_loader:
            return
        first = None if self._first is None else self._first()
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is optimizer:
            self._updates += 1
            self._is_without_loader = self._updates >= FEWEST_UPDATES
            if self._is_without_loader:
                self._end_step(timer)
                timer.begin((0,))

    @leave_uncompiled
    def _begin(self, device: torch.device) -> None:
        """Start timing, unless another part of evener already reports this process's steps."""
        if not self._is_own_thread:
            return
        owner = self._find_owner()
        if owner != "nobody":
            self._waited += 1
            self._is_over = owner == "other"
            return
        self._world = _count_processes()
        self._timer = _UpdateTimer(device, self._world == 1, self._harmless)
        # With several ranks, the backward pass includes the exchange of gradients. Only training by
        # shares measures the two separately.
        self._timer.can_time_compute = self._world == 1
        wrap_next_batch(self.fetch)
        _follow_forks()

    def leave_to_parent(self) -> None:
        """Stop timing in this forked process, because its parent goes on timing."""
        if self._timer is not None:
            self._is_over = True
            self._thread = -1  # the id of no thread
            self._timer.thread = 0

    def _end_step(self, timer: StepTimer) -> None:
        """Finish a step, and report it if an optimizer has stepped."""
        timer.finish()
        if not self._updated:
            return
        if self._steps % CHECK_STEPS < FIRST_STEPS and self._find_owner() != "nobody":
            self._stop()
            return
        self._updated = False
        self._steps += 1
        self._has_loader |= self._has_batch
        rows = max(self._rows.values()) if self._rows else 0
        self._rows.clear()
        if self._reporter is None:
            assert self._device is not None
            shares = describe_own_rows(self._device, rows, self._world)
            self._reporter = StepReporter(shares, timer)
            self._reporter.without_loader = self._is_without_loader
        self._reporter.report(rows)

    def _find_owner(self) -> Literal["nobody", "other", "undecided"]:
        """Find out whether something else reports this process's steps.

        The result is "other" if something does, or if the number of processes is unknown. It is
        "undecided" while the processes may still begin to train with a plan's shares, and otherwise
        "nobody".
        """
        own = None if self._reporter is None else self._reporter.reporter
        if is_reported_elsewhere(own):
            return "other"
        world = _count_processes()
        if world <= 1:
            return "nobody" if world else "other"
        from .program import PROGRAM

        if PROGRAM.training is not None:
            return "other"
        # a reason that isn't final may be overtaken by a later loop
        is_likely = bool(PROGRAM.notebook.pending_reason) and self._waited >= MOST_WAITED
        return "nobody" if PROGRAM.notebook.why or is_likely else "undecided"

    def _stop(self) -> None:
        """Stop timing for good, and remove this process from the monitor."""
        self._is_over = True
        if self._reporter is not None:
            self._reporter.reporter.discard()
        if self._timer is not None:
            self._timer.thread = 0
            self._timer.release()
        self._timer = self._reporter = None


UNCHANGED = UnchangedTraining()


@cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=lambda: UNCHANGED.leave_to_parent())


def begin_loop(wrapped: Any, loader: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `DataLoader.__iter__` that records the iterator, to time the loop's steps."""
    UNCHANGED.begin_loop(loader)
    iterator = wrapped(*arguments, **keywords)
    UNCHANGED.note_loop(loader, iterator)
    return iterator


def _count_processes() -> int:
    """Return how many processes train together, or 0 if unknown."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    # unknown if a launcher has started several processes that have no process group
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1" or (is_eveners_rank() and not is_released())
    return int(is_alone)


def _find_device(optimizer: Any) -> torch.device:
    """Return the device of the optimizer's first parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter.device
    return torch.device("cpu")


def _count_rows(batch: Any, batch_size: int | None) -> int:
    """Return the number of rows in a batch: its first dimension, but at most `batch_size`.

    If no tensor is found, return `batch_size`, or 0 without one.
    """
    first = batch[0] if isinstance(batch, list) and batch else batch
    shape = first.shape if type(first) is torch.Tensor else ()
    if not shape:
        found = _find_tensor(batch)
        shape = () if found is None else found.shape
    if batch_size is None:
        return shape[0] if shape else 0
    return shape[0] if shape and shape[0] < batch_size else batch_size


def _find_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor with a dimension in a nested batch, or None."""
    left = [batch]
    for _ in range(MOST_SEARCHED):
        if not left:
            break
        value = left.pop()
        if isinstance(value, torch.Tensor):
            if value.ndim:
                return value
        elif isinstance(value, list | tuple | Mapping):
            inner = value.values() if isinstance(value, Mapping) else value
            left.extend(reversed([*islice(inner, MOST_ITEMS)]))
    return None
