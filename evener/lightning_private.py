"""Access to the private parts of Lightning that evener uses, all in one place."""

from __future__ import annotations

import weakref
from typing import Any

# The method that the training loop calls before each batch to check if a rank received SIGTERM.
ASKS = "_broadcast_sigterm_tensor"
# The methods that an optimizer's wrapper calls around a step of manual optimization.
AROUND_STEPS = ("_on_before_step", "_on_after_step")


def loaders(fit_loop: Any) -> list[Any]:
    """Return the DataLoaders of a fit loop."""
    found: list[Any] = fit_loop._combined_loader.flattened
    return found


def replace_loader(fit_loop: Any, loader: Any) -> None:
    """Make a running fit loop take its batches from `loader`."""
    fit_loop._combined_loader.flattened = [loader]
    fit_loop._data_fetcher.setup(fit_loop._combined_loader)
    iter(fit_loop._data_fetcher)


def searches_rate(callback: Any) -> bool:
    """Return whether the callback belongs to the learning-rate finder."""
    return any(kind.__name__ == "_LRCallback" for kind in type(callback).__mro__)


def divides_rows(trainer: Any) -> bool:
    """Return whether the Trainer divides rows among ranks (option `use_distributed_sampler`)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_strategy(trainer: Any, strategy: Any) -> None:
    """Make the trainer and its wrapped optimizers use `strategy`."""
    trainer._accelerator_connector.strategy = strategy
    for each in wrapped_optimizers(strategy):
        each._strategy = weakref.proxy(strategy)


def wrapped_optimizers(strategy: Any) -> list[Any]:
    """Return the LightningOptimizer wrappers of a strategy's optimizers."""
    return list(strategy._lightning_optimizers)


def logged(loop: Any) -> Any:
    """Return the collection in which a loop stores logged metrics."""
    return loop._results


def default_states(metric: Any) -> dict[str, Any]:
    """Return the default values of a metric's states, by name."""
    found: dict[str, Any] = metric._defaults
    return found


def move_batch(module: Any, batch: Any, device: Any) -> Any:
    """Move a batch to a device with the transfer hooks of the module and its data module."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


def signal_connector(trainer: Any) -> Any:
    """Return the trainer's signal connector."""
    return trainer._signal_connector


def sigterm_handler(trainer: Any) -> Any:
    """Return the trainer's handler for SIGTERM."""
    return trainer._signal_connector._sigterm_notifier_fn
