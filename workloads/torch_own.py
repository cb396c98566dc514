"""The user's own torch module as a workload: a function that gives the module, its optimizer and its loss.

def build():
    module = Net()
    return module, torch.optim.Adam(module.parameters()), torch.nn.CrossEntropyLoss(), sample_batch

def sample_batch(n):                  # in the module, or fourth in what `build` returns
    return inputs, targets            # n rows each, on the host
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from evener.errors import RequestError
from workloads import custom
from workloads.base import Place, Workload
from workloads.torch_recipe import Recipe, TorchWorkload

_FORM = "Return (module, optimizer, loss) or (module, optimizer, loss, sample_batch), or a dict with these keys."
_KEYS = ("module", "optimizer", "loss", "sample_batch")


def build(name: str, place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload of `file.py:attribute` or `package.module:attribute`; what the user's lines raise names them."""
    own = OwnRecipe(name, settings)
    workload = TorchWorkload(place, own.build_recipe, own.sample_batch)
    workload.step = custom.guarded(workload.step, own.source)  # type: ignore[method-assign]
    return workload


class OwnRecipe:
    """Loads the user's module when the workload asks for the recipe, once the device and its limits are set."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._settings = settings
        self._sample: Callable[[int], Any] | None = None
        self.source: Any = None

    def build_recipe(self) -> Recipe:
        """What the user's function gives; UserCodeError if it raises, RequestError if it gives something else."""
        own = custom.load(self._name, self._settings)
        self.source = own.source
        recipe, sample = from_user(self._name, own.result)
        self._sample = own.sample_batch if sample is None else custom.guarded(sample, own.source)
        if self._sample is None:
            raise RequestError(
                f"{self._name} has no sample_batch(n).",
                "Put one beside the function, or return it fourth: it gives n inputs and n targets.",
            )
        return recipe

    def sample_batch(self, rows: int) -> Any:
        """The user's batch of `rows` rows."""
        assert self._sample is not None
        return self._sample(rows)


def from_user(name: str, result: Any) -> tuple[Recipe, Callable[[int], Any] | None]:
    """The recipe and `sample_batch` in what a user's function returned; RequestError names what is wrong with it."""
    given = _by_name(name, result)
    module, optimizer, loss, sample = (given.get(key) for key in _KEYS)
    if not isinstance(module, torch.nn.Module):
        raise RequestError(f"{name} gives a {type(module).__name__} as its module.", "Return a torch.nn.Module.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"{name} gives a {type(optimizer).__name__} as its optimizer.",
            "Return one made over the module's parameters, such as torch.optim.Adam(module.parameters()).",
        )
    owned = {id(parameter) for parameter in module.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in owned for parameter in updated):
        raise RequestError(f"The optimizer of {name} updates nothing of its module.", "Make it over its parameters.")
    for key, each in (("loss", loss), ("sample_batch", sample)):
        if each is not None and not callable(each):
            raise RequestError(f"{name} gives a {type(each).__name__} as its {key}.", "Return a function.")
    return Recipe(module, optimizer, loss), sample


def _by_name(name: str, result: Any) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        unknown = [str(key) for key in result if key not in _KEYS]
        if unknown:
            raise RequestError(f"{name} gives {unknown[0]!r}, which is none of {', '.join(_KEYS)}.", _FORM)
        return result
    if isinstance(result, tuple | list) and len(result) in (3, 4):
        return dict(zip(_KEYS, result, strict=False))
    if not isinstance(result, torch.nn.Module) and all(hasattr(result, key) for key in _KEYS[:3]):
        return {key: getattr(result, key, None) for key in _KEYS}
    raise RequestError(f"{name} gives a {type(result).__name__}.", _FORM)
