"""Before an optimizer changes weights, a look at whether the gradients that it takes were weighted and exchanged.

LBFGS also goes by the loss that its closure returns: ranks get that of the whole batch, and so take the same steps.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import DeviceError, RequestError
from .memory import describe_memory, drop_frames, free_memory, is_out_of_memory


class OptimizerCheck:
    """Looks at each optimizer of the process before its first step, and again when it has other parameters.

    `trainer` gives the BatchWeights of the batch that is trained on.
    """

    def __init__(self) -> None:
        self.trainer: Callable[[], Any] = lambda: None
        self._watched: set[type] = set()
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        trainer = self.trainer()
        known, by_loss = self._counts.get(optimizer) == count, isinstance(optimizer, LBFGS)
        if (known and not by_loss) or trainer is None or not trainer.is_training():
            return None
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:
            return self._look(optimizer, count, trainer)

        def checked() -> Any:
            loss = closure()
            if not known:
                self._look(optimizer, count, trainer)
            return trainer.average(loss, optimizer.param_groups[0]["params"][0].device) if by_loss else loss

        if len(arguments) > 1:
            return (arguments[0], checked, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": checked}

    def _look(self, optimizer: Any, count: int, trainer: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        trained = [each for each in parameters if isinstance(each, Parameter) and each.grad is not None]
        if trained:
            trainer.check_trained(trained)
            check_memory(optimizer, trained)
            self._counts[optimizer] = count
            self._watch_schedules()

    def _watch_schedules(self) -> None:
        """accelerate steps a schedule once for each process, as if each had a whole batch: here once for a batch."""
        kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
        if kind is None or kind in self._watched:
            return
        self._watched.add(kind)
        step = kind.step

        def step_once(schedule: Any, *arguments: Any, **keywords: Any) -> None:
            if any(getattr(each, "optimizer", each) in self._counts for each in schedule.optimizers):
                schedule.split_batches = True  # accelerate's word for a batch that all processes share
            step(schedule, *arguments, **keywords)

        kind.step = step_once


OPTIMIZER_CHECK = OptimizerCheck()


def check_weighted(trained: list[Any], exchanged: Mapping[int, bool]) -> None:
    """RequestError unless gradients of all parameters are weighted and were exchanged, as `exchanged` says by id."""
    missing = sum(id(each) not in exchanged for each in trained)
    if missing == len(trained):
        raise RequestError(
            "The optimizer trains a model whose gradients aren't weighted: the ranks would learn something else.",
            "Write model = split.wrap(model) (after accelerate, split.wrap(accelerator.prepare(model)); of a copy,"
            " split.wrap(copy.deepcopy(model.module)); for FSDP, Split(..., weigh='loss') and split.scale(loss); in"
            " Lightning, L.Trainer(strategy=split.strategy()), before split.loader).",
        )
    if missing:
        raise RequestError(
            f"Of {len(trained)} parameters that the optimizer trains, {missing} weren't in the model when split.wrap"
            " was called, so their gradients aren't exchanged.",
            "Add and unfreeze layers before split.wrap, or wrap again: model = split.wrap(model.module).",
        )
    if not all(exchanged[id(each)] for each in trained):
        raise RequestError(
            "The gradients were never exchanged with the other ranks.",
            "Call the model that split.wrap returned, not model.module, and end each window without no_sync.",
        )


_STATE_TENSORS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1}  # as large as a parameter


def check_memory(optimizer: Any, trained: list[Any]) -> None:
    """DeviceError if memory has no room for the optimizer's state: its first step would end with some weights moved."""
    if optimizer.state:
        return
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    tensors = _STATE_TENSORS.get(type(optimizer).__name__, 0) or int(momentum)
    device = trained[0].device
    for last in (False, True):
        room: list[torch.Tensor] = []
        try:
            room += (torch.empty_like(each) for each in trained for _ in range(tensors))
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            drop_frames(error)
        finally:
            del room
        free_memory(device)
        if last:
            size = tensors * sum(each.numel() * each.element_size() for each in trained) / 2**30
            raise DeviceError(
                f"There is no room for the {size:.1f} GiB of {type(optimizer).__name__}'s state, which its first step"
                f" makes: {describe_memory(device)}. No weight was changed.",
                "Take smaller passes (evener balance --micro), or an optimizer with less state.",
            )
