"""The private parts of Lightning that evener uses, each with its purpose.

tests/evener/test_lightning_private.py checks each name, so it fails first if a new version of
Lightning changes one of them. This module doesn't import Lightning, because it has two names.
"""

from __future__ import annotations

import weakref
from typing import Any

# The method that the loop calls before each batch to check whether a rank received SIGTERM.
ASKS = "_broadcast_sigterm_tensor"
# The methods that an optimizer's wrapper calls around a step of manual optimization.
AROUND_STEPS = ("_on_before_step", "_on_after_step")


def loaders(fit_loop: Any) -> list[Any]:
    """Return the loaders from which a training run fetches its batches."""
    found: list[Any] = fit_loop._combined_loader.flattened
    return found


def replace_loader(fit_loop: Any, loader: Any) -> None:
    """Replace a training run's loaders with a single loader, before any batch is fetched."""
    fit_loop._combined_loader.flattened = [loader]
    fit_loop._data_fetcher.setup(fit_loop._combined_loader)
    iter(fit_loop._data_fetcher)


def searches_rate(callback: Any) -> bool:
    """True if the callback belongs to Lightning's learning-rate search."""
    return any(kind.__name__ == "_LRCallback" for kind in type(callback).__mro__)


def shares_out_rows(trainer: Any) -> bool:
    """True if the trainer replaces samplers with DistributedSampler."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_strategy(trainer: Any, strategy: Any) -> None:
    """Set the strategy of a trainer and of its optimizers' wrappers."""
    trainer._accelerator_connector.strategy = strategy
    for each in wrapped_optimizers(strategy):
        each._strategy = weakref.proxy(strategy)


def wrapped_optimizers(strategy: Any) -> list[Any]:
    """Return the wrapped optimizers that `training_step` uses in manual optimization."""
    return list(strategy._lightning_optimizers)


def logged(loop: Any) -> Any:
    """Return the metrics that a loop, or a trainer's running loop, has logged."""
    return loop._results


def default_states(metric: Any) -> dict[str, Any]:
    """Return the states of a torchmetrics metric before its first update."""
    found: dict[str, Any] = metric._defaults
    return found


def move_batch(module: Any, batch: Any, device: Any) -> Any:
    """Move a batch to a device, and run the module's hooks before and after the transfer."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


def signal_connector(trainer: Any) -> Any:
    """Return the object that handles a trainer's signals; SIGTERM sets its `received_sigterm`."""
    return trainer._signal_connector


def sigterm_handler(trainer: Any) -> Any:
    """Return Lightning's own handler of SIGTERM."""
    return trainer._signal_connector._sigterm_notifier_fn
