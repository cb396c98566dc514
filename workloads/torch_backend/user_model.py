"""A workload made by the user's function, which returns a module, optimizer and loss.

def build():
    module = Net()
    return module, torch.optim.Adam(module.parameters()), torch.nn.CrossEntropyLoss(), training_data()

def training_data():                  # the fourth value that `build` returns, or a function next to it
    return dataset                    # as passed to `split.loader`; or (dataset, {"num_workers": 4})

def sample_batch(n):                  # instead, if there is no data set
    return inputs, targets            # n rows each, on the host

A transformers Trainer, and a LightningModule with its data, need no changes: a probe computes the
trainer's own loss on its own collated batches, clips gradients as it does and steps its optimizer.

def build():
    return Trainer(model=..., args=..., train_dataset=...)  # or an SFTTrainer, or your own subclass

def build():
    return module, dataset  # a LightningModule, and its data set or DataLoader
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, default_collate

from evener.errors import RequestError
from evener.torch.rows.loader import Loader

from .. import user_code
from ..protocol import WorkerSetup, Workload
from .batches import Data, read_lengths
from .workload import Recipe, TorchWorkload

_FORM = (
    "Return (module, optimizer, loss), with the training data or sample_batch fourth, "
    "or a dict with these keys."
)
_KEYS = ("module", "optimizer", "loss", "sample_batch", "training_data")


def build(name: str, setup: WorkerSetup, settings: Mapping[str, Any]) -> Workload:
    """Make a workload from the user's function, which has a name such as `train.py:build`."""
    return TorchWorkload(setup, partial(load_recipe, name, settings))


def load_recipe(name: str, settings: Mapping[str, Any]) -> Recipe:
    """Call the user's function, and return a recipe made from its result.

    Raises `RequestError` if the functions return nothing usable, or if there is no data.
    """
    return make_recipe(name, user_code.load(name, settings))


def make_recipe(name: str, user_module: user_code.UserModule) -> Recipe:
    """Make a recipe from the result of the user's function and the module's data functions.

    Raises `RequestError` if the result isn't usable, or if there is no data.
    """
    recipe = find_recipe(name, user_module.result)
    if recipe is not None:
        return recipe
    recipe = from_user(name, user_module.result)
    if (
        recipe.data is None
        and recipe.sample_batch is None
        and user_module.training_data is not None
    ):
        recipe = msgspec.structs.replace(recipe, data=to_data(name, user_module.training_data()))
    if recipe.data is not None and user_module.lengths is not None:
        recipe.data.lengths = read_lengths(
            user_module.lengths(recipe.data.dataset), recipe.data.rows
        )
    recipe = msgspec.structs.replace(
        recipe, sample_batch=recipe.sample_batch or user_module.sample_batch
    )
    if recipe.sample_batch is None and recipe.data is None:
        raise RequestError(
            f"{name} has neither training_data() nor sample_batch(n).",
            "Put one beside the function: your training's data set, or n inputs and n targets.",
        )
    return recipe


def from_user(name: str, result: Any) -> Recipe:
    """Make a recipe from a tuple, mapping or object with a module, optimizer and loss.

    Raises `RequestError` if something is missing or has the wrong type.
    """
    given = _by_name(name, result)
    module, optimizer, loss, sample, data = (given.get(key) for key in _KEYS)
    _check_trained(name, module, optimizer)
    for key, each in (("loss", loss), ("sample_batch", sample)):
        if each is not None and not callable(each):
            raise RequestError(
                f"{name} gives an object of type {type(each).__name__} as its {key}.",
                "Return a function.",
            )
    return Recipe(
        module, optimizer, loss, None if data is None else to_data(name, data), sample_batch=sample
    )


def _check_trained(name: str, module: Any, optimizer: Any) -> None:
    """Raise `RequestError` unless the optimizer updates parameters of the module."""
    if not isinstance(module, torch.nn.Module):
        raise RequestError(
            f"{name} gives an object of type {type(module).__name__} as its module.",
            "Return a torch.nn.Module.",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"{name} gives an object of type {type(optimizer).__name__} as its optimizer.",
            (
                "Return one made over the module's parameters, such as "
                "torch.optim.Adam(module.parameters())."
            ),
        )
    owned = {id(parameter) for parameter in module.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in owned for parameter in updated):
        raise RequestError(
            f"The optimizer of {name} updates nothing of its module.",
            "Make it over its parameters.",
        )


def to_data(name: str, data: Any) -> Data:
    """Convert the user's training data, which is a data set or (data set, options).

    Raises `RequestError` for anything else, such as a `DataLoader`.
    """
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
        return Data(*data)
    if data is None or isinstance(data, tuple | list | DataLoader | Loader):
        raise RequestError(
            f"{name} gives an object of type {type(data).__name__} as its training data.",
            "Return the data set, or (data set, options), as you give them to split.loader.",
        )
    return Data(data)


def _by_name(name: str, result: Any) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        unknown = [str(key) for key in result if key not in _KEYS]
        if unknown:
            raise RequestError(
                f"{name} gives {unknown[0]!r}, which is none of {', '.join(_KEYS)}.", _FORM
            )
        return result
    if isinstance(result, tuple | list) and len(result) in (3, 4):
        keys = _KEYS if callable(result[-1]) else (*_KEYS[:3], "training_data")
        return dict(zip(keys, result, strict=False))
    if not isinstance(result, torch.nn.Module) and all(hasattr(result, key) for key in _KEYS[:3]):
        return {key: getattr(result, key, None) for key in _KEYS}
    raise RequestError(f"{name} gives an object of type {type(result).__name__}.", _FORM)


def find_recipe(name: str, result: Any) -> Recipe | None:
    """Make a recipe from a transformers Trainer or from (LightningModule, data).

    Returns None if the result is neither. Raises `RequestError` for a LightningModule without data
    or with manual optimization.
    """
    if _is_a(result, "transformers.", "Trainer"):
        return _from_trainer(result)
    if _is_a(result, "lightning.", "LightningModule"):
        raise RequestError(
            f"{name} gives a LightningModule without data.", "Return (module, dataset)."
        )
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and _is_a(result[0], "lightning.", "LightningModule")
    ):
        return _from_lightning(name, *result)
    return None


class LossModule(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """Module whose output is the loss of a batch, computed as the user's trainer computes it."""

    def __init__(self, module: Any, compute: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._compute = compute

    def forward(self, batch: Any) -> Any:
        """Return the loss of the batch."""
        return self._compute(batch)


class TrainerSteps:
    """Does what a transformers Trainer does in a training step, such as computing the loss."""

    def __init__(self, trainer: Any, optimizer: Any) -> None:
        self._trainer = trainer
        self._passes = 0  # number of passes in this step
        self._loss: Any = None  # the sum of these passes' losses
        self._batch: Any = None  # the batch of the last pass
        optimizer.register_step_pre_hook(self._work_before_update)
        optimizer.register_step_post_hook(lambda *_: trainer.model.zero_grad())

    def compute(self, batch: Any) -> Any:
        """Return the loss of one batch, computed as in the Trainer's own training step."""
        trainer = self._trainer
        trainer.model.train()
        if isinstance(batch, Mapping) and isinstance(labels := batch.get("labels"), torch.Tensor):
            labels.ne(-100).sum().to(trainer.args.device)
        with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._passes, self._batch = self._passes + 1, batch
        return loss

    def _work_before_update(self, *_arguments: Any) -> None:
        """Clip gradients, and do whatever else the Trainer does before its optimizer's step."""
        # The Trainer waits for the loss, counts the operations of each pass (which visits all
        # parameters), and clips the gradients.
        trainer, loss = self._trainer, self._loss
        if trainer.args.logging_nan_inf_filter and loss is not None:
            bool(torch.isnan(loss) or torch.isinf(loss))
        for _ in range(self._passes):
            trainer.floating_point_ops(self._batch)
        self._passes = 0
        self._loss = self._batch = None
        if trainer.args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(
                trainer.model.parameters(), trainer.args.max_grad_norm
            )


def _enable_checkpointing(trainer: Any) -> None:
    """Enable activation checkpointing if the Trainer's arguments ask for it."""
    # The Trainer does that in `train`, which a probe doesn't call. Newer versions of transformers
    # have new names for the arguments and for the model's method.
    arguments, model = trainer.args, trainer.model
    if not hasattr(arguments, "activation_checkpointing"):
        if arguments.gradient_checkpointing:
            options = arguments.gradient_checkpointing_kwargs
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return
    if not arguments.activation_checkpointing:
        return
    options = dict(arguments.activation_checkpointing_kwargs or {})
    # these two are no options of torch.utils.checkpoint
    chosen = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=options or None, **chosen
        )
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **chosen)


def _from_trainer(trainer: Any) -> Recipe:
    from evener.huggingface.rows import find_lengths, needs_equal_passes, training_rows
    from evener.huggingface.shards import disable_cast_cache, find_autocast

    _enable_checkpointing(trainer)
    optimizer = trainer.create_optimizer()
    compute = TrainerSteps(trainer, optimizer).compute
    rows, collate, _ = training_rows(trainer, trainer.get_train_dataloader)
    lengths = None if needs_equal_passes(trainer) else find_lengths(trainer)
    workers, pinned = trainer.args.dataloader_num_workers, trainer.args.dataloader_pin_memory
    data = _to_data(rows, collate, workers, pinned, lengths=lengths)
    module = LossModule(trainer.model, compute)
    mixed = str(trainer.accelerator.mixed_precision)

    def prepare(in_shards: bool) -> None:
        """Have accelerate wrap the model, as the Trainer does.

        With `in_shards`, autocast's weight cache is turned off, because it would hold the unsharded
        model in memory.
        """
        # Accelerate's autocast wraps the forward pass and converts the outputs to float32.
        if in_shards:
            disable_cast_cache(trainer.accelerator)
        trainer.accelerator.prepare_model(
            trainer.model, device_placement=False, evaluation_mode=True
        )

    return Recipe(
        module,
        optimizer,
        None,
        data,
        mixed_precision=mixed,
        autocast_dtype=find_autocast(trainer.accelerator),
        accumulates=trainer.args.gradient_accumulation_steps > 1,
        prepare=prepare,
    )


def _from_lightning(name: str, module: Any, data: Any) -> Recipe:
    def compute(batch: Any) -> Any:
        result = module.training_step(batch, 0)
        return result["loss"] if isinstance(result, Mapping) else result

    if not module.automatic_optimization:
        raise RequestError(
            f"{name} optimizes by hand, so that a probe can't know its step.",
            "Return (module, optimizer, loss).",
        )
    optimizer = _first_optimizer(module.configure_optimizers())
    if optimizer is None:
        raise RequestError(f"{name}: configure_optimizers gives no optimizer.", "Return one.")
    return Recipe(LossModule(module, compute), optimizer, None, _read_data(data))


def _read_data(data: Any) -> Data:
    """Convert a data set, or a `DataLoader` with its options, to training data."""
    if isinstance(data, DataLoader):
        return _to_data(data.dataset, data.collate_fn, data.num_workers, data.pin_memory)
    return _to_data(data, default_collate)


def _first_optimizer(configured: Any) -> Any:
    """Return the first optimizer in what `configure_optimizers` has returned, or None."""
    if isinstance(configured, Mapping):
        configured = configured.get("optimizer")
    while isinstance(configured, tuple | list):
        configured = configured[0] if configured else None
    return _first_optimizer(configured) if isinstance(configured, Mapping) else configured


def _to_data(rows: Any, collate: Any, workers: int = 0, pinned: bool = False, **more: Any) -> Data:
    """Create training data from rows, with the trainer's options for loading them."""
    # Without workers, nothing is prefetched, just as in the trainer: the rows of a step are loaded
    # when the step begins, while the GPU waits.
    options = {
        "num_workers": workers,
        "pin_memory": pinned and torch.cuda.is_available(),
        "collate_fn": partial(_collate, collate),
    }
    return Data(rows, {**options, **more, "prefetch": None if workers else 0})


def _collate(collate: Any, rows: list[Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Collate rows into the (input, target) pair that `LossModule` is trained on.

    The input holds the whole batch. The target only serves to show the number of rows.
    """
    return {"batch": collate(rows)}, torch.zeros(len(rows))


def _is_a(value: Any, package: str, name: str) -> bool:
    """Return whether a value is an instance of a class with this name from this package.

    Instances of subclasses count too. For the package lightning, classes from `pytorch_lightning`
    also count. Nothing is imported.
    """
    kinds = type(value).__mro__
    return any(
        kind.__name__ == name and f"{kind.__module__}.".startswith((package, f"pytorch_{package}"))
        for kind in kinds
    )
