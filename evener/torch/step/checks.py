"""Check before each optimizer step that gradients are summed and that the state fits in memory."""

from __future__ import annotations

import sys
import weakref
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import DeviceError, RequestError
from ...training.retreat import print_line
from ..hooks import ProcessHooks
from ..sums.collectives import average
from ..sums.exchange import EXCHANGES, Exchange
from .batches import BatchTracker
from .recovery import (
    FREED_NEXT,
    SHORT,
    describe_memory,
    drop_frames,
    free_memory,
    is_out_of_memory,
)

_PARAMETERS = itemgetter("params")  # returns the parameters of an optimizer's parameter group


class OptimizerCheck:
    """Checks before an optimizer's step that gradients are summed over ranks.

    Before the first step, it also checks that the optimizer's state fits in memory.
    """

    # it runs in a hook that PyTorch calls before each optimizer step

    def __init__(self) -> None:
        # step schedules once per batch; accelerate by default steps them once per process
        self.steps_schedules = True
        self._watched: set[type] = set()
        # a hash of the parameters when last checked
        self._known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.hooks = ProcessHooks(lambda: [register_optimizer_step_pre_hook(self._before_step)])

    def forget(self) -> None:
        """Forget which optimizers were checked, so that each is checked again at its next step."""
        self._known.clear()

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        if FREED_NEXT:
            FREED_NEXT.clear()
            torch.cuda.empty_cache()
        if SHORT:
            update_one_by_one(optimizer)
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:  # with a closure, the backward passes follow later
            check_summed(optimizer)
        trainer = _find_trainer()
        if trainer is None:
            return None
        found = hash(tuple(map(id, chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))))
        known = self._known.get(optimizer) == found
        by_loss = isinstance(optimizer, LBFGS)
        if known and not by_loss:
            return None
        if closure is None:
            return self._look(optimizer, found, trainer)

        def checked() -> Any:
            loss = closure()
            if not known:
                self._look(optimizer, found, trainer)
            device = optimizer.param_groups[0]["params"][0].device
            return average(loss, trainer.sizes, device, trainer.timer) if by_loss else loss

        if len(arguments) > 1:
            return (arguments[0], checked, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": checked}

    def _look(self, optimizer: Any, found: int, trainer: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if trained:
            trainer.check_trained(trained)
            check_memory(optimizer, trained)
            self._known[optimizer] = found
            self._watch_schedules()

    def _watch_schedules(self) -> None:
        """Make the accelerate library step learning-rate schedules once per batch.

        Otherwise, it steps them once per process.
        """
        # accelerate's default would be right if each process had a whole batch
        kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
        if kind is None or kind in self._watched or not self.steps_schedules:
            return
        self._watched.add(kind)
        step = kind.step

        def step_once(schedule: Any, *arguments: Any, **keywords: Any) -> None:
            if any(
                getattr(optimizer, "optimizer", optimizer) in self._known
                for optimizer in schedule.optimizers
            ):
                # accelerate's name for a batch that all processes share
                schedule.split_batches = True
            step(schedule, *arguments, **keywords)

        kind.step = step_once


OPTIMIZER_CHECK = OptimizerCheck()


def _find_trainer() -> Any:
    """Return the BatchWeights object that weights the gradients, or None if there is none."""
    # None if no weights are needed, or if a trainer's adapter weights the losses
    found = BatchTracker.newest()
    if (
        found is None
        or found.shares.world == 1
        or found.weigh == "trainer"
        or not found.is_training()
    ):
        return None
    return found


# number of state tensors of a parameter's size
_STATE_TENSORS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1}


def check_memory(optimizer: Any, trained: list[Any]) -> None:
    """Raise a DeviceError if the state of an optimizer's first step doesn't fit in memory."""
    # otherwise the first step would fail after updating some of the weights
    if optimizer.state:
        return
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    tensors = _STATE_TENSORS.get(type(optimizer).__name__, 0) or int(momentum)
    if not _memory_holds(trained, tensors):
        size = tensors * sum(each.numel() * each.element_size() for each in trained) / 2**30
        raise DeviceError(
            f"There is no room for the {size:.1f} GiB of {type(optimizer).__name__}'s state, "
            f"which its first step"
            f" makes: {describe_memory(trained[0].device)}. No weight was changed.",
            "Take smaller passes (evener balance --micro), or an optimizer with less state.",
        )
    update_one_by_one(optimizer, tensors)


def update_one_by_one(optimizer: Any, tensors: int = 0) -> None:
    """Make an optimizer update parameters one by one, without `foreach`, if memory is short.

    `tensors` is the number of state tensors per parameter that the step allocates.
    """
    # a step that ran out of memory halfway would leave only some of the parameters updated
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        at_once = group.get("foreach", False)
        if at_once is None:  # PyTorch's default
            at_once = all(each.is_cuda for each in trained)
        if (
            trained
            and at_once
            and not group.get("fused")
            and not _memory_holds(trained, tensors + 1)
        ):
            group["foreach"] = False
            print_line(
                f"evener: memory is short, so {type(optimizer).__name__} updates one "
                f"parameter at a time."
            )


def _memory_holds(parameters: list[Any], copies: int) -> bool:
    """Return whether memory has room for `copies` copies of each parameter."""
    # the copies are allocated and freed again to find out
    for last in (False, True):
        held: list[torch.Tensor] = []
        try:
            held += (torch.empty_like(parameter) for parameter in parameters for _ in range(copies))
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            held.clear()
            drop_frames(error)
        if not last:
            free_memory(parameters[0].device)
    return False


# By optimizer: the number of sums of each exchange at its last step.
_applied: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def check_summed(optimizer: Any) -> None:
    """Raise RequestError if an optimizer is about to use gradients that weren't summed."""
    exchanges = [each for each in EXCHANGES if isinstance(each, Exchange) and not each.single_rank]
    before = _applied.get(optimizer)
    _applied[optimizer] = {id(exchange): exchange.sums for exchange in exchanges}
    if not any(exchange.waits for exchange in exchanges):
        return
    with_gradients = _list_with_gradients(optimizer)
    own = [exchange for exchange in exchanges if exchange.has_any(with_gradients)]
    if any(each.unsummed for each in own):
        raise RequestError(
            "The optimizer is about to apply gradients that weren't summed over the ranks: "
            "their backward pass was under no_sync, or isn't the batch's last.",
            "Leave the last backward pass before each optimizer step out of no_sync, also at "
            "the end of an epoch.",
        )
    if before is not None and not _has_summed(own, before):
        _check_detected(own)


def _check_detected(exchanges: list[Exchange]) -> None:
    """Raise RequestError if gradients come from a backward pass that evener didn't detect."""
    if any(exchange.waits for exchange in exchanges):
        raise RequestError(
            "The optimizer is about to apply gradients of a wrapped model that weren't summed "
            "over the ranks: they came from torch.autograd.grad or torch.func, or from a loss that "
            "isn't computed from what the model returns.",
            "Call backward() on a loss of what the model returns, and return auxiliary losses "
            "with it.",
        )


def _has_summed(exchanges: list[Exchange], earlier_sums: dict[int, int]) -> bool:
    """Return whether any exchange has all-reduced gradients since the optimizer's last step.

    `earlier_sums` maps the id of each exchange to the number of sums that it had completed at that
    step.
    """
    return any(exchange.sums > earlier_sums.get(id(exchange), 0) for exchange in exchanges)


def _list_with_gradients(optimizer: Any) -> set[int]:
    """Return the ids of the optimizer's parameters that have a gradient now."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(each) for each in every if each.grad is not None}
