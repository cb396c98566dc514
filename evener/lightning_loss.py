"""The check of what a LightningModule's loss is a mean over, on a few rows before the first step."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from .errors import RequestError
from .torch_split.batch import Part
from .torch_split.checks import check_part_loss, check_rows
from .torch_split.weights import BatchWeights, WholeBatchLoss

# the same code under two names; a program that has loaded pytorch_lightning alone trains by that
LIGHTNING = (
    "pytorch_lightning"
    if {"pytorch_lightning", "lightning.pytorch"} & {*sys.modules} == {"pytorch_lightning"}
    else "lightning.pytorch"
)
DummyLogger = import_module(f"{LIGHTNING}.loggers.logger").DummyLogger


def check_module_loss(strategy: Any, loader: Any, count: Callable[[Part], Any] | None) -> bool:
    """True if `training_step` returns a mean over rows, or over what `count` counts; False if that can't be seen.

    RequestError on every rank where it doesn't.
    """
    module = strategy.lightning_module
    rows = SimpleNamespace(  # as a loop's own loader has them
        dataset=loader.dataset, batch_sampler=loader.batch_sampler.sampler, collate_fn=loader.collate_fn
    )
    try:
        with _silent(module):
            found = check_part_loss(
                lambda part: _compute(strategy, part.batch), rows, count, [module], strategy.root_device
            )
        return found is not None
    except RequestError as error:
        counted = (
            "For a mean over tokens or class weights, say what is counted: split.strategy(count=lambda part: ...)."
        )
        raise RequestError(
            error.message, error.remedy if count or "mean" not in error.message else f"{counted} {error.remedy}"
        ) from None


def check_module_part(strategy: Any, weights: BatchWeights, part: Part, rows: int) -> None:
    """RequestError on this rank unless parts of up to `rows` rows of a pass have the loss of these rows together."""
    module = strategy.lightning_module
    if any(isinstance(each, torch.optim.LBFGS) for each in strategy.optimizers):
        raise RequestError("LBFGS goes by the loss of the whole batch.", "Use another optimizer.")
    try:
        with _silent(module):
            check_rows(lambda each: _step(strategy, each.batch), weights, [module], strategy.root_device, part, rows)
    except WholeBatchLoss:
        raise RequestError("split.loss and split.gather are of a whole batch.", "Return a mean over rows.") from None


def _compute(strategy: Any, batch: Any) -> Any:
    """The loss of a batch, on its way as in a step."""
    module, precision = strategy.lightning_module, strategy.precision_plugin
    batch = module._on_before_batch_transfer(precision.convert_input(batch), dataloader_idx=0)
    batch = module._apply_batch_transfer_handler(batch, device=strategy.root_device, dataloader_idx=0)
    return _step(strategy, batch)


def _step(strategy: Any, batch: Any) -> Any:
    """The loss of a batch on the device."""
    module = strategy.lightning_module
    arguments = module.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
    with strategy.precision_plugin.train_step_context():
        result = module.training_step(*arguments.values())
    return result["loss"] if isinstance(result, Mapping) else result


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """A context in which nothing is logged."""
    trainer = module.trainer
    loggers, trainer.loggers = trainer.loggers, [DummyLogger() for _ in trainer.loggers]
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log, module.log_dict
        trainer.loggers = loggers
