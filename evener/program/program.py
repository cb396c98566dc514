"""The program that `evener run` started, as one of its processes trains it in a plain PyTorch loop."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..errors import EvenerError, RequestError
from ..torch_split.guard import Guard, Steps
from ..torch_split.optimizers import OPTIMIZER_CHECK
from ..torch_split.planned import PlannedTraining
from ..torch_split.ranks import find_shares
from .notes import Notebook, read_settings

NO_GROUP = (
    "it trains without a process group, so each process trains on all rows; wrap the model in"
    " DistributedDataParallel and shuffle by a DistributedSampler, as under torchrun"
)
CLIPPED = "each rank clips its own gradients before they are summed, so what is learned depends on the shares"
EXCHANGED = (
    "the program exchanges figures between its ranks itself; an average of ranks' mean losses now differs slightly, and"
    " so does whatever depends on it"
)
RATES = "its ranks compute their losses with different numbers, or step at different rates"
OTHER_ROWS = (
    "its data set returns a different row when asked for the same one again, so its rows differ from those under its"
    " own launcher"
)
RATE_STEPS = 2  # by shares, after each of which ranks compare their rates
LOOK_AGAIN = 4  # times as many steps until the guard looks once more
LOCAL = "its ranks step by gradients that they haven't exchanged"
NO_LOOP = "its model isn't in DistributedDataParallel, or its rows come from no DataLoader with a DistributedSampler"


class FirstStep(msgspec.Struct, frozen=True):
    """A rank's view of the program's first step; shares may change where all are alike and without a fault."""

    fault: str
    digest: int = 0  # of the order of rows
    global_batch: int = 0
    steps: int = 0
    numbers: int = 0  # a digest of those in its loss, and of its optimizers' rates
    varies: bool = False  # rows are others when they are fetched again


class Program:
    """Trains the program by shares, from the second step on that it has trained.

    `training` is there from then on. Where the program can't be trained so, it stays as it is.
    """

    def __init__(self) -> None:
        self.notebook = Notebook(read_settings())
        self.models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in DDP, as they were made
        self.training: PlannedTraining | None = None
        self._loop: Any = None  # that has given the newest batch
        self._guard: Guard | None = None
        self._updated = False  # an optimizer has stepped since that batch
        self._compared = False  # the order of rows of this loop's epoch
        self._fault = ""  # in what the program does with gradients
        self._rates: list[float] = []  # of the optimizers that have stepped since that batch
        self._steps = 0  # by shares
        self._uneven = 0  # of them with different shares
        self._look = LOOK_AGAIN  # the step at which the guard looks next
        self._others = 0  # trainers that train, and have hooks of their own

    @property
    def rank(self) -> int:
        """This process's place among those that train."""
        return int(dist.get_rank())

    @property
    def world(self) -> int:
        """The processes that train together."""
        return int(dist.get_world_size())

    @property
    def shares(self) -> tuple[int, ...]:
        """The rows of each rank in a full batch; empty as long as they are the program's own."""
        return () if self.training is None else self.training.shares.batches

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each rank in the current batch; empty where they are the program's own."""
        return () if self._loop is None or self._loop.steps is None else self._loop.sizes

    def trains(self) -> bool:
        """True if a loop that begins now trains, as far as can be seen."""
        group = dist.is_available() and dist.is_initialized() and self.world > 1
        return group and not self._others and torch.is_grad_enabled() and any(each.training for each in self.models)

    def note_update(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped."""
        self._updated = True
        if self._others:
            return
        if self._uneven < RATE_STEPS:
            self._rates += _read_rates(optimizer)
        if not (dist.is_available() and dist.is_initialized()):
            self.notebook.stay(NO_GROUP)
        else:
            self.notebook.last_words = NO_LOOP

    def note_clipping(self) -> None:
        """Gradients are clipped; RequestError where that depends on the shares, and they have left even."""
        if self._others or all(each.require_backward_grad_sync for each in self.models):
            return
        self._fault = CLIPPED
        if self.training is not None:
            raise RequestError(f"Shares have left even, but {CLIPPED}.", "Clip once a step, after its last batch.")

    def note_exchange(self) -> None:
        """The program's own code exchanges something between its ranks, while a model trains."""
        if len(set(self.sizes)) > 1 and any(each.training for each in self.models):
            self.notebook.warn(EXCHANGED)

    def begin(self, loop: Any) -> None:
        """A loop gets a batch."""
        if loop is not self._loop:
            self._loop, self._compared = loop, False
        self._updated = False
        self._rates.clear()
        if self.training is not None and self._steps == self._look and loop.steps is not None and self._guard is None:
            self._guard = Guard(self.models, loop.batch)
        if self.training is None and not self.notebook.why and self._guard is None and not loop.dealer.fault:
            self._guard = Guard(self.models, loop.batch)
        if self.training is not None and loop.steps is None:
            self.training.weights.begin((1,) * self.world)  # rows of another loader, shared out by the program itself
        loop.begin()

    def finish(self, loop: Any) -> None:
        """The loop asks for its next batch."""
        loop.done()
        if loop is not self._loop or not self._updated:
            self._drop_guard()
            return
        if self.training is not None and loop.steps is not None:
            self._look_again(loop)
        if self.training is None and not self.notebook.why:
            self._take_over(loop)
        elif self.training is not None and loop.steps is not None and not self._compared:
            self._compared = True
            loop.steps.compare(loop.dealer.digest)

    def end(self) -> None:
        """A loop is over."""
        self._drop_guard()

    def _drop_guard(self) -> None:
        """Begin anew with the next batch, if the guard saw no backward pass in this one."""
        if self._guard is not None and not self._guard.done:
            self._guard.close()
            self._guard = None

    def _look_again(self, loop: Any) -> None:
        """Compare what may have changed since shares left even; all ranks come here after the same step."""
        self._steps += 1
        if self._uneven < RATE_STEPS and len(set(self.sizes)) > 1:
            self._uneven += 1
            if len(set(self._exchange(_digest(self._rates)))) > 1:
                raise RequestError(
                    "Since shares have left even, its ranks step at different rates: one goes by a rank's own rows.",
                    "Use the global batch instead, or start it with its own launcher.",
                )
        if self._steps <= self._look:
            return
        self._look *= LOOK_AGAIN
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()
        fault = next(filter(None, self._exchange(guard.fault if guard is not None and guard.measured else "")), "")
        if fault and self.training is not None:
            if self.notebook.settings.strict:
                raise RequestError(f"Shares can't stay uneven: {fault}", "Leave --strict out to train evenly.")
            self._look = sys.maxsize
            self.training.stay_even(loop.sampler, loop.ahead)
            self.notebook.warn(
                f"shares go back to even for good: in step {self._steps}, {fault.rstrip('.')}; earlier steps may have"
                " learned something else than with even shares"
            )

    def _exchange(self, own: Any) -> list[Any]:
        """What each rank has."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, own, group=dist.new_group(backend="gloo"))  # kept, it would outlive the program's
        return every

    def _take_over(self, loop: Any) -> None:
        """Train by shares from the next batch on, if all ranks can; they come here after the same step."""
        every = self._exchange(self._make_offer(loop))
        fault = next((each.fault for each in every if each.fault), "")
        if not fault and len({each.numbers for each in every}) > 1:
            fault = RATES
        if not fault and len({msgspec.structs.astuple(each)[1:4] for each in every}) > 1:
            fault = "its ranks draw different orders of rows, or batches of other sizes"
        if fault:
            self.stay(fault)
            return
        settings = self.notebook.settings
        try:
            follows = settings.rebalance
            found = find_shares(None, None, every[0].global_batch, {"rebalance": follows})
            training = PlannedTraining(found, rebalance=follows, noise=settings.noise, journal=True)
            for each in self.models:
                if each.training:
                    training.wrap(each)
        except EvenerError as error:
            self.stay(error.message)
            return
        self.training = training
        OPTIMIZER_CHECK.steps_schedules = False
        if any(each.varies for each in every):
            self.notebook.warn(OTHER_ROWS)
        loop.follow(self.follow(loop))
        loop.sampler.change_shares(self.shares, loop.ahead)
        self.notebook.watch(training, "DistributedDataParallel and DataLoader")

    def follow(self, loop: Any) -> Steps:
        """Change the shares of this loop too; returns what is to hear of its steps."""
        assert self.training is not None
        self.training.follow(loop.sampler, loop.ahead)
        return Steps(self.training, True)

    def _make_offer(self, loop: Any) -> FirstStep:
        guard, self._guard = self._guard, None
        fault = next((words for each in self.models if each.training and (words := find_fault(each))), "")
        fault = fault or loop.dealer.fault or self._fault
        if guard is not None:
            guard.close()
            fault = fault or guard.fault or ("" if guard.exchanges else LOCAL)
        if fault or loop.sampler is None:
            return FirstStep(fault or NO_LOOP)
        numbers = _digest([*(guard.numbers if guard is not None else ()), *self._rates])
        return FirstStep("", loop.dealer.digest, loop.sampler.global_batch, len(loop.sampler), numbers, loop.varies())

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """A context in which a trainer with hooks of its own trains."""
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1

    def stay(self, why: str) -> None:
        """Leave the program as it is, or end it where it was started so."""
        self.notebook.stay(why)
        if self.notebook.settings.strict:
            raise RequestError(f"Shares can't leave even: {self.notebook.why}.", "Leave --strict out to train evenly.")


def _digest(numbers: list[float]) -> int:
    return crc32(repr(numbers).encode())


def _read_rates(optimizer: Any) -> list[float]:
    """The numbers by which an optimizer steps: rates, momenta and so on of each group."""
    groups = [[each for name, each in group.items() if name != "params"] for group in optimizer.param_groups]
    numbers = (int, float, torch.Tensor)
    return [
        float(each)
        for each in tree_leaves(groups)
        if isinstance(each, numbers) and torch.numel(torch.as_tensor(each)) == 1
    ]


def find_fault(model: Any) -> str:
    """Why a model in DistributedDataParallel stays as it is; empty if it can be taken over."""
    if type(model) is not torch.nn.parallel.DistributedDataParallel:
        return f"its model is in a {type(model).__name__}"
    if model.process_group is not dist.group.WORLD:
        return "its model is trained by some of the processes only"
    if model._comm_hooks or model.mixed_precision is not None:
        return "its DistributedDataParallel has a communication hook or mixed precision of its own"
    if model._join_config.enable:
        return "its ranks join with different numbers of batches"
    return ""


PROGRAM = Program()
