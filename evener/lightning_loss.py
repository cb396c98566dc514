"""What the loss of a LightningModule is a mean over, tried on a few rows before the first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from evener.errors import RequestError
from evener.torch_split.batch_weights import BatchWeights, WholeBatchLossError
from evener.torch_split.kept_state import kept_state
from evener.torch_split.loss_measure import LossMeasure
from evener.torch_split.loss_trial import REMEDY, LossTrial, agree, make_trial, warn_unchecked
from evener.torch_split.parts import Part

COUNTED = "what count= counts"


def check_loss(strategy: Any, loader: Any, weights: BatchWeights, count: Callable[[Part], Any] | None) -> None:
    """RequestError on every rank unless `training_step` returns a mean over rows, or over what `count` counts.

    A loss that is the whole batch's already, by split.loss or split.gather, needs no check.
    """

    def find() -> None:
        weights.tries_loss = True
        try:
            with kept_state([], strategy.root_device), _silent(strategy.lightning_module):
                found = _try_loss(strategy, loader, count)
            if count is not None and COUNTED not in found:
                raise RequestError("The loss is a mean over rows, not over what count= counts.", "Leave count= out.")
        except RequestError:
            raise
        except WholeBatchLossError:
            pass
        except Exception as error:  # of the user's own code, or out of memory
            warn_unchecked(f"{type(error).__name__}: {error}".split("\n")[0])
        finally:
            weights.tries_loss = False

    agree(find)


def _try_loss(strategy: Any, loader: Any, count: Callable[[Part], Any] | None) -> tuple[str, ...]:
    """What the loss may be a mean over; none where there are too few rows to try."""

    def counted(batch: Any) -> dict[str, float]:
        return {} if count is None else {COUNTED: float(count(Part(batch, 1, 1.0, abs)))}

    trial = make_trial(loader.dataset, loader.batch_sampler.sampler, loader.collate_fn)
    if trial is None:
        return ("rows", COUNTED)
    measure = LossMeasure(strategy.lightning_module, [], strategy.root_device)
    try:
        return LossTrial(measure, trial, counted).find_meaning(lambda batch: _compute(strategy, batch)).mean_over
    except RequestError as error:
        counting = "For a mean over tokens, say what is counted: split.strategy(count=lambda part: (part.batch["
        counting += '"labels"] != -100).sum()). ' if count is None else ""
        raise RequestError(error.message, f"{counting}{REMEDY}") from None


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
    """Nothing is logged."""
    trainer = module.trainer
    loggers, trainer.loggers = trainer.loggers, [DummyLogger() for _ in trainer.loggers]
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log, module.log_dict
        trainer.loggers = loggers
