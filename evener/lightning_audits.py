"""Audits of a LightningModule: check that shares give the same gradient as the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from . import lightning_private as private
from .errors import RequestError
from .lightning_passes import compute_part, silent
from .system.replaced import replaced
from .torch.audit.compute import GradientSketcher
from .torch.audit.step import Audited, audit
from .torch.step.part import Part
from .torch.step.wrapped import is_sharded

MOST_BYTES = 1 << 30  # maximum size of weights to copy, because training_step may change them
REMEDIES = {
    "rows": (
        "For a mean over tokens or class weights, say what it is a mean over"
        " (split.strategy(count=)); else change the loss to a mean over rows, or train on one"
        " device."
    ),
}


class ModuleAudit:
    """Compares the gradients of shares and of the whole batch, for a LightningModule's loss."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._audits = strategy.planned.audits
        self._audits.remedies |= REMEDIES
        self._audits.question = " Is it a mean over rows?"

    def after_step(self, loader: Any, step: int, others: Sequence[Any]) -> None:
        """Audit the gradients of batch number `step`, if an audit is due.

        `loader` is the training loader. `others` are training_step's arguments after the batch.
        Raises RequestError if gradients differ.
        """
        own = self._strategy.lightning_module.training_step
        self._audits.after_batch(partial(self._find, loader, step, others), own)

    def find_difference(self, loader: Any) -> str:
        """Audit the loader's first batch, and return how gradients differ, or "" if they agree."""
        found: str = self._audits.find_difference(partial(self._find, loader, 0, None, True))
        return found

    def _find(
        self, loader: Any, step: int, others: Sequence[Any] | None, add_noise: bool
    ) -> Audited | None:
        strategy, module = self._strategy, self._strategy.lightning_module
        numbers = loader.batch_sampler.sampler.rows_of_all(step)
        few_rows = self._audits.take_rows(loader.dataset, loader.collate_fn, numbers)
        if few_rows is None:
            return None
        automatic = module.automatic_optimization
        around = [partial(silent, module)]
        if not automatic:
            around.append(partial(_no_optimizer_steps, strategy))
        sketcher = self._audits.make_sketcher(
            [module],
            strategy.optimizers,
            function=module.training_step,
            contexts=around,
            losses_only=is_sharded(module),
        )
        compute = partial(self._compute, others)
        if not automatic:
            compute = partial(self._compute_manually, others or (), sketcher)
        computations = self._audits.make_computations(few_rows, compute, strategy.count)
        return audit(sketcher, computations, add_noise)

    def _compute(self, others: Sequence[Any] | None, part: Part) -> Any:
        loss = compute_part(self._strategy, part, others)
        if loss is None:
            raise RequestError("training_step returned no loss for some of its rows")
        return loss

    def _compute_manually(
        self, others: Sequence[Any], sketcher: GradientSketcher, part: Part
    ) -> None:
        """Run a training_step with manual optimization on `part`, and add its losses to `sketcher`.

        The sketcher summarizes the losses' gradients. `others` are training_step's arguments after
        the batch. Weights that training_step changes are restored. Raises RequestError if
        training_step passes no loss to `manual_backward`.
        """
        module = self._strategy.lightning_module
        counted = []

        def add(loss: torch.Tensor, *_: Any, **options: Any) -> None:
            counted.append(loss.detach())
            sketcher.add(loss, retain_graph=options.get("retain_graph"))

        weights = _list_weights(module)
        copies = [weight.detach().clone() for weight in weights]
        try:
            with replaced(module, "manual_backward", add):
                compute_part(self._strategy, part, others)
        finally:
            for each, copy in zip(weights, copies, strict=True):
                if not torch.equal(each.detach(), copy):
                    each.data.copy_(copy)
        if not counted:
            raise RequestError("training_step gives no loss to self.manual_backward")


def _list_weights(module: Any) -> list[torch.Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextmanager
def _no_optimizer_steps(strategy: Any) -> Iterator[None]:
    """Context manager in which optimizers take no steps; gradients are restored at the end.

    Raises RequestError if the weights are too large for the audit to copy them.
    """
    weights = _list_weights(strategy.lightning_module)
    if sum(weight.nbytes for weight in weights) > MOST_BYTES:
        raise RequestError(
            "training_step takes its optimizers' steps itself, and copying weights of more than"
            f" {MOST_BYTES >> 30} GiB to put them back would take memory"
        )
    gradients = [weight.grad for weight in weights]
    try:
        with ExitStack() as stack:
            for target, name, stub in _list_stubs(strategy):
                stack.enter_context(replaced(target, name, stub))
            for each in weights:
                each.grad = None
            yield
    finally:
        for each, gradient in zip(weights, gradients, strict=True):
            each.grad = gradient


def _list_stubs(strategy: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the methods to replace during an audit, so that optimizers take no steps.

    Each item is a tuple: an object, the name of its method, and the stub that replaces the method.
    """
    yield strategy, "optimizer_step", lambda _, closure, *__, **___: closure()
    for optimizer in strategy.optimizers:
        yield optimizer, "step", lambda closure=None: None if closure is None else closure()
    for optimizer in private.wrapped_optimizers(strategy):
        for name in private.AROUND_STEPS:
            yield optimizer, name, lambda: None
    for config in strategy.lightning_module.trainer.lr_scheduler_configs:
        yield config.scheduler, "step", lambda *_, **__: None
