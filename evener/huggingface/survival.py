"""A Trainer's passes when one runs out of memory: its rows are computed again in smaller passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..torch_split.exchange import Exchange
from ..torch_split.kept_state import keep_attributes
from ..torch_split.parts import Part
from ..torch_split.retry import Passes
from ..torch_split.wrapped import take_over, watch
from .gathering import Gathering
from .loss import TrainerLoss
from .passes import Pass


class Survival:
    """Computes the passes of `trainer`, a failed one in pieces.

    An Exchange takes the place of DistributedDataParallel's own sums, which can't be taken up again after an error.
    """

    def __init__(self, trainer: Any, passes: Passes, world: int, gathering: Gathering) -> None:
        self._trainer, self._passes, self._world, self._gathering = trainer, passes, world, gathering
        self._model: Any = None  # of the newest pass
        self._exchanges: list[Exchange] = []  # of its gradients; none where they are summed by others
        self._backward = trainer.accelerator.backward
        trainer.accelerator.backward = self.backward

    def compute(
        self, model: Any, inputs: Any, now: Pass, loss: Callable[[], TrainerLoss], train: Callable[[Any, Pass], Any]
    ) -> torch.Tensor:
        """The sum of what `train` returns for the pass or its pieces; figures that are noted meanwhile count once."""
        self._follow(model)
        if not self._exchanges:
            return train(inputs, now)
        with self._gathering.one_pass():
            return self._compute(model, inputs, now, loss, train)

    def _compute(
        self, model: Any, inputs: Any, now: Pass, loss: Callable[[], TrainerLoss], train: Callable[[Any, Pass], Any]
    ) -> torch.Tensor:
        total, left = torch.zeros((), device=self._trainer.args.device), now.rows
        whole = Part(inputs, now.rows, 1.0, lambda loss: loss)
        for part in self._passes.take([whole], [model], self._exchanges, begins=now.first):
            ends = part.rows == left
            attributes, gathered = self._keep(), self._gathering.keep()
            with part:
                try:
                    weight = now.weight * loss().part_of(inputs, now.rows, part.batch, part.rows)
                    piece = Pass(part.rows, weight, now.first and left == now.rows, now.last and ends, ends)
                    total = total + train(part.batch, piece)
                    part.computed = True
                    left -= part.rows
                finally:
                    if not (part.computed and ends):
                        attributes()
                    if not part.computed:
                        gathered()
        return total

    def note(self, loss: Any) -> None:
        """The loss of a pass: a trainer that calls its backward() itself leaves gradients that can't be undone."""
        if loss.requires_grad:
            loss.register_hook(lambda _: self._passes.note_backward())

    def backward(self, loss: Any, **options: Any) -> None:
        """The accelerator's own, of a pass that may fail."""
        self._passes.open()
        self._backward(loss, **options)
        self._passes.close()

    def _keep(self) -> Callable[[], None]:
        """Note what the trainer has before a pass; the function that puts it back."""
        trainer = self._trainer
        return keep_attributes(trainer, apart=(trainer.train_dataset, trainer.eval_dataset))

    def _follow(self, model: Any) -> None:
        """Sum the gradients of this model from now on; every rank calls it in its first pass."""
        if model is self._model:
            return
        self._model, self._exchanges = model, []
        if self._world == 1:
            self._exchanges = [Exchange(model, alone=True)]
            return
        wrapper = getattr(model, "_orig_mod", model)  # of torch.compile
        if not isinstance(wrapper, DistributedDataParallel) or _sums_its_own_way(wrapper):
            return
        exchange = take_over(wrapper)
        exchange.weigh(1.0 / self._world)
        watch(model, None, lambda *_: None)
        self._exchanges = [exchange]


def _sums_its_own_way(wrapper: Any) -> bool:
    """Whether it has what an Exchange has no equal of: a communication hook, mixed precision, sparse gradients."""
    sparse = any(getattr(module, "sparse", False) is True for module in wrapper.modules())
    return bool(wrapper._comm_hooks) or wrapper.mixed_precision is not None or sparse
