"""Tiny models of all transformers classes with a loss, and rows for them, found by trial
and error.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from functools import partial, wraps
from itertools import product
from typing import Any

import torch
import transformers
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.tiny_configs import LABELS, tiny_config
from tests.support.tiny_inputs import input_kinds
from tests.support.tiny_labels import label_kinds
from tests.support.tiny_rows import Recipe, Rows, UnfitError, collate

MOST_PARAMETERS = 8_000_000
SECONDS = 2.0  # to try rows of each precision
SEED = 5
TAUGHT = ("labels", "return_loss", "start_positions", "future_values", "target_values")


class NotTinyError(Exception):
    """No small model or no rows were found for a class; has the reason."""


def has_loss(kind: Any) -> bool:
    """Return whether its forward accepts labels or computes a loss without them."""
    names = inspect.signature(kind.forward).parameters
    return (
        any(name in TAUGHT or name.endswith(("_labels", "_label")) for name in names)
        or "For" in kind.__name__
    )


def classes_with_loss() -> Iterator[str]:
    """Yield the names of transformers' model classes that have a loss."""
    for name in sorted(dir(transformers)):
        if not name[0].isupper() or name.endswith("PreTrainedModel"):
            continue
        if "modeling_" not in transformers._class_to_module.get(name, ""):
            continue
        kind = getattr(transformers, name)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and has_loss(kind):
            yield name


def make_model(name: str, dtype: str = "float64") -> Any:
    """Return a tiny model of this class, without dropout and with constant BatchNorm statistics."""
    try:
        with torch.device("meta"):
            size = sum(tensor.numel() for tensor in _build(name).parameters())
        if size > MOST_PARAMETERS:
            raise NotTinyError(f"{size / 1e6:.0f} million parameters")
        torch.manual_seed(SEED)
        model = _build(name)
    except NotTinyError:
        raise
    except Exception as error:  # model code may raise anything
        raise NotTinyError(f"configuration: {_shorten(error)}") from None
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, _BatchNorm):
            module.eval()
            module.train = partial(_stay, module)
    if dtype == "float32":
        return model
    return widen(model.double()) if dtype == "widened" else model.double()


def _build(name: str) -> Any:
    kind = getattr(transformers, name)
    # the start and the end of an answer
    labels = 2 if name.endswith("ForQuestionAnswering") else LABELS
    config = tiny_config(kind.config_class, labels)
    for each in (
        config,
        *(each for each in vars(config).values() if isinstance(each, PreTrainedConfig)),
    ):
        each._experts_implementation = "eager"  # other implementations compute in float32 or less
    return kind(config)


class Wide(TorchFunctionMode):
    """Replaces float32 in a model's code by float64."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = [torch.float64 if each is torch.float32 else each for each in arguments]
        given = {
            name: torch.float64 if each is torch.float32 else each
            for name, each in (keywords or {}).items()
        }
        return function(*wide, **given)


def widen(model: Any) -> Any:
    """Return the model with its explicit float32 computations in float64."""
    own = model.forward

    @wraps(own)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        with Wide():
            return own(*arguments, **keywords)

    model.forward = forward
    return model


def try_recipe(model: Any, recipe: Recipe, rows: int = 5) -> None:
    """Train the model on these rows, and raise LookupError if there is no loss to learn from.

    It may also raise whatever the model raises.
    """
    outputs = model(**collate(Rows(model, recipe, rows).rows))
    loss: Any = outputs.get("loss")
    if loss is None or loss.ndim or not math.isfinite(loss):
        raise LookupError("no loss")
    loss.backward()
    if not any(each.grad is not None and each.grad.any() for each in model.parameters()):
        raise LookupError("no gradient")


def _stay(module: Any, mode: bool = True) -> Any:
    return module


def find_recipe(name: str) -> Recipe:
    """Return rows for which the class has a loss, in float64 if possible."""
    seen: list[str] = []
    for dtype in ("float64", "widened", "float32"):
        model = make_model(name, dtype).train()
        began = time.monotonic()
        for inputs, labels in product(input_kinds(model), label_kinds(model)):
            recipe = Recipe(inputs, labels, dtype)
            try:
                try_recipe(model, recipe)
            except UnfitError:
                continue
            except Exception as error:  # model code may raise anything
                seen.append(_shorten(error))
            else:
                return recipe
            if time.monotonic() - began > SECONDS:
                break
        if not any("dtype" in each or "Float" in each or "Double" in each for each in seen):
            break  # another precision wouldn't help
    raise NotTinyError(f"rows: {seen[0] if seen else 'no inputs known'}")


def _shorten(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]}"
