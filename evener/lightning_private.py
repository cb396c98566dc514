"""The private attributes and methods of Lightning that evener uses, each with its purpose.

tests/evener/test_lightning_private.py checks each of them, so that a new version of Lightning fails
there first. This module doesn't import Lightning, which has two names: lightning and
pytorch_lightning.
"""

from __future__ import annotations

import weakref
from typing import Any

# The method that the training loop calls before each batch to check if a rank received SIGTERM.
ASKS = "_broadcast_sigterm_tensor"
# The methods that an optimizer's wrapper calls around a step of manual optimization.
AROUND_STEPS = ("_on_before_step", "_on_after_step")


def loaders(fit_loop: Any) -> list[Any]:
    """Return the loaders that a fit loop fetches its batches from."""
    found: list[Any] = fit_loop._combined_loader.flattened
    return found


def replace_loader(fit_loop: Any, loader: Any) -> None:
    """Replace a fit loop's loaders with one, before any batch is fetched."""
    fit_loop._combined_loader.flattened = [loader]
    fit_loop._data_fetcher.setup(fit_loop._combined_loader)
    iter(fit_loop._data_fetcher)


def searches_rate(callback: Any) -> bool:
    """True if the callback belongs to Lightning's learning-rate finder."""
    return any(kind.__name__ == "_LRCallback" for kind in type(callback).__mro__)


def shares_out_rows(trainer: Any) -> bool:
    """True if the trainer replaces the loaders' samplers with DistributedSampler."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_strategy(trainer: Any, strategy: Any) -> None:
    """Set the strategy of a trainer and of its wrapped optimizers."""
    trainer._accelerator_connector.strategy = strategy
    for each in wrapped_optimizers(strategy):
        each._strategy = weakref.proxy(strategy)


def wrapped_optimizers(strategy: Any) -> list[Any]:
    """Return the wrapped optimizers that `training_step` uses in manual optimization."""
    return list(strategy._lightning_optimizers)


def logged(loop: Any) -> Any:
    """Return the metrics that were logged in a loop.

    For a trainer, it is the loop that is running.
    """
    return loop._results


def default_states(metric: Any) -> dict[str, Any]:
    """Return the initial values of a torchmetrics metric's states, by name."""
    found: dict[str, Any] = metric._defaults
    return found


def move_batch(module: Any, batch: Any, device: Any) -> Any:
    """Move a batch to a device, with the module's hooks before and after."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


def signal_connector(trainer: Any) -> Any:
    """Return the object that handles a trainer's signals; SIGTERM sets its `received_sigterm`."""
    return trainer._signal_connector


def sigterm_handler(trainer: Any) -> Any:
    """Return Lightning's own handler for SIGTERM."""
    return trainer._signal_connector._sigterm_notifier_fn
