"""The check of what a LightningModule's loss is a mean over, on a few rows before the first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from .errors import RequestError
from .torch_split.parts import Part
from .torch_split.split_check import check_part_loss


def check_module_loss(strategy: Any, loader: Any, count: Callable[[Part], Any] | None) -> None:
    """RequestError on every rank unless `training_step` returns a mean over rows, or over what `count` counts."""
    module = strategy.lightning_module
    rows = SimpleNamespace(  # as a loop's own loader has them
        dataset=loader.dataset, batch_sampler=loader.batch_sampler.sampler, collate_fn=loader.collate_fn
    )
    try:
        with _silent(module):
            check_part_loss(lambda part: _compute(strategy, part.batch), rows, count, [module], strategy.root_device)
    except RequestError as error:
        counted = (
            "For a mean over tokens or class weights, say what is counted: split.strategy(count=lambda part: ...)."
        )
        raise RequestError(
            error.message, error.remedy if count or "mean" not in error.message else f"{counted} {error.remedy}"
        ) from None


def _compute(strategy: Any, batch: Any) -> Any:
    """The loss of a batch, on its way as in a step."""
    module, precision = strategy.lightning_module, strategy.precision_plugin
    batch = module._on_before_batch_transfer(precision.convert_input(batch), dataloader_idx=0)
    batch = module._apply_batch_transfer_handler(batch, device=strategy.root_device, dataloader_idx=0)
    arguments = module.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
    with precision.train_step_context():
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
