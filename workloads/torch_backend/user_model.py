"""The user's own torch module as a workload: a function that gives the module, its optimizer and its loss.

def build():
    module = Net()
    return module, torch.optim.Adam(module.parameters()), torch.nn.CrossEntropyLoss(), training_data()

def training_data():                  # fourth in what `build` returns, or beside it:
    return dataset                    # what the training gives to `split.loader`; (dataset, {"num_workers": 4}) also

def sample_batch(n):                  # where there is no data set, fourth or beside it too
    return inputs, targets            # n rows each, on the host

A transformers Trainer, and a LightningModule with its data, are taken as they are: see trainer_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from evener.errors import RequestError
from evener.torch_split.loader import Loader

from .. import user_code
from ..protocol import Place, Workload
from .batches import Data
from .samplers import read_lengths
from .trainer_model import find_recipe
from .workload import Recipe, TorchWorkload

_FORM = "Return (module, optimizer, loss), with the training data or sample_batch fourth, or a dict with these keys."
_KEYS = ("module", "optimizer", "loss", "sample_batch", "training_data")


def build(name: str, place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload of `file.py:attribute` or `package.module:attribute`."""
    own = UserRecipe(name, settings)
    return TorchWorkload(place, own.build_recipe, own.sample_batch)


class UserRecipe:
    """Loads the user's module when the workload asks for the recipe, once the device and its limits are set."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._settings = settings
        self._sample: Callable[[int], Any] | None = None

    def build_recipe(self) -> Recipe:
        """The recipe that the user's function gives; RequestError if it gives something else."""
        own = user_code.load(self._name, self._settings)
        recipe = find_recipe(self._name, own.result)
        if recipe is not None:
            return recipe
        recipe, sample = from_user(self._name, own.result)
        if recipe.data is None and sample is None and own.training_data is not None:
            recipe = msgspec.structs.replace(recipe, data=to_data(self._name, own.training_data()))
        if recipe.data is not None and own.lengths is not None:
            recipe.data.lengths = read_lengths(own.lengths(recipe.data.dataset), recipe.data.rows)
        self._sample = sample or own.sample_batch
        if self._sample is None and recipe.data is None:
            raise RequestError(
                f"{self._name} has neither training_data() nor sample_batch(n).",
                "Put one beside the function: your training's data set, or n inputs and n targets.",
            )
        return recipe

    def sample_batch(self, rows: int) -> Any:
        """The user's batch of `rows` rows."""
        assert self._sample is not None
        return self._sample(rows)


def from_user(name: str, result: Any) -> tuple[Recipe, Callable[[int], Any] | None]:
    """The recipe and `sample_batch` in what a user's function returned; RequestError names what is wrong with it."""
    given = _by_name(name, result)
    module, optimizer, loss, sample, data = (given.get(key) for key in _KEYS)
    if not isinstance(module, torch.nn.Module):
        raise RequestError(
            f"{name} gives an object of type {type(module).__name__} as its module.", "Return a torch.nn.Module."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"{name} gives an object of type {type(optimizer).__name__} as its optimizer.",
            "Return one made over the module's parameters, such as torch.optim.Adam(module.parameters()).",
        )
    owned = {id(parameter) for parameter in module.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in owned for parameter in updated):
        raise RequestError(f"The optimizer of {name} updates nothing of its module.", "Make it over its parameters.")
    for key, each in (("loss", loss), ("sample_batch", sample)):
        if each is not None and not callable(each):
            raise RequestError(
                f"{name} gives an object of type {type(each).__name__} as its {key}.", "Return a function."
            )
    return Recipe(module, optimizer, loss, None if data is None else to_data(name, data)), sample


def to_data(name: str, given: Any) -> Data:
    """The user's data set, alone or with the options of its loader; RequestError for what is none."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return Data(*given)
    if given is None or isinstance(given, tuple | list | DataLoader | Loader):
        raise RequestError(
            f"{name} gives an object of type {type(given).__name__} as its training data.",
            "Return the data set, or (data set, options), as you give them to split.loader.",
        )
    return Data(given)


def _by_name(name: str, result: Any) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        unknown = [str(key) for key in result if key not in _KEYS]
        if unknown:
            raise RequestError(f"{name} gives {unknown[0]!r}, which is none of {', '.join(_KEYS)}.", _FORM)
        return result
    if isinstance(result, tuple | list) and len(result) in (3, 4):
        keys = _KEYS if callable(result[-1]) else (*_KEYS[:3], "training_data")
        return dict(zip(keys, result, strict=False))
    if not isinstance(result, torch.nn.Module) and all(hasattr(result, key) for key in _KEYS[:3]):
        return {key: getattr(result, key, None) for key in _KEYS}
    raise RequestError(f"{name} gives an object of type {type(result).__name__}.", _FORM)
