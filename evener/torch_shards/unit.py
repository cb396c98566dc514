"""A unit: a module whose parameters are gathered before it computes, and freed after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import RequestError
from .flat import Flat, ShardPlace, Slot, starts

Owners = list[tuple[Any, str]]  # the modules that have a parameter, and its name in each


class Parameter:
    """A parameter before it is cut, with the modules that have it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.names: list[str] = []
        self.owners: Owners = []
        self.units: set[str] = set()


def find_parameters(model: Any, units: Mapping[str, Any]) -> dict[str, list[Parameter]]:
    """The parameters of each unit by its name; "" has those of no unit, or of several."""
    found: dict[int, Parameter] = {}
    for path, module, unit in _walk("", model, "", {id(each): name for name, each in units.items()}):
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            each = found.setdefault(id(tensor), Parameter(tensor))
            each.names.append(f"{path}.{name}".lstrip("."))
            if (module, name) not in each.owners:
                each.owners.append((module, name))
            each.units.add(unit)
            _check_kind(each.names[0], tensor)
    sorted_: dict[str, list[Parameter]] = {"": [], **{name: [] for name in units}}
    for each in found.values():
        sorted_[next(iter(each.units)) if len(each.units) == 1 else ""].append(each)
    return sorted_


def _walk(path: str, module: Any, unit: str, units: Mapping[int, str]) -> Iterator[tuple[str, Any, str]]:
    """Modules, each in all its places, with the unit that each place is in."""
    unit = units.get(id(module), unit)
    yield path, module, unit
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{path}.{name}".lstrip("."), child, unit, units)


def _check_kind(name: str, tensor: Any) -> None:
    if type(tensor) is not torch.nn.Parameter:
        raise RequestError(
            f"The parameter {name} is a {type(tensor).__name__}, which can't be cut into shards.",
            "Shard a model of plain parameters: neither quantized, nor lazy, nor sharded already.",
        )


class Unit:
    """A module with its flats, one for each type of parameter, trained or frozen; `name` is "" for the model itself."""

    def __init__(
        self, name: str, module: Any, parameters: Sequence[Parameter], place: ShardPlace, dtype: Any, held: Any
    ):
        self.name, self.module = name, module
        kinds: dict[Any, list[Parameter]] = {}
        for each in parameters:
            kinds.setdefault((each.tensor.dtype, each.tensor.requires_grad), []).append(each)
        self.flats = [_make_flat(each, place, dtype, held) for each in kinds.values()]
        self.slots = [slot for flat in self.flats for slot in flat.slots]
        self.trained = [flat for flat in self.flats if flat.trainable]
        self.gathered = False
        self.hidden = False  # gathered, while the modules have the pieces
        self.unsent = False  # there may be gradients that weren't summed
        self._work: list[Any] | None = None  # of a gather that is under way

    def begin_gather(self) -> None:
        """Begin to gather the whole parameters, unless they are there."""
        if not self.gathered and self._work is None:
            self._work = [work for flat in self.flats for work in flat.gather()]

    def gather(self) -> None:
        """Have the modules compute with whole parameters."""
        if self.gathered and not self.hidden:
            return
        self.begin_gather()
        for work in self._work or ():
            work.wait()
        self._work, self.gathered, self.hidden = None, True, False
        for slot in self.slots:
            slot.point_to(slot.whole)

    def hide(self) -> None:
        """Keep the whole parameters for the backward pass, while the model's parameters are this rank's pieces."""
        if self.gathered:
            self.hidden = True
            for slot in self.slots:
                slot.point_to(slot.piece)

    def free(self) -> None:
        """Drop the whole parameters; the modules have this rank's pieces."""
        if self._work is not None:
            self.gather()
        if not self.gathered:
            return
        self.gathered = self.hidden = False
        for slot in self.slots:
            slot.point_to(slot.piece)
        for flat in self.flats:
            flat.free()

    def send(self, weight: float) -> None:
        """Begin to sum the gradients."""
        self.unsent = False
        for flat in self.trained:
            flat.send(weight)

    def receive(self) -> None:
        """Wait for the sum."""
        for flat in self.trained:
            flat.receive()

    def forget(self) -> None:
        """Drop the gradients of a backward pass that didn't end, and those accumulated before it."""
        self.unsent = False
        for flat in self.trained:
            flat.forget()

    def check_unchanged(self) -> None:
        """RequestError if a parameter was frozen, unfrozen or converted since the model was sharded."""
        for flat in self.flats:
            for slot in flat.slots:
                if slot.piece.requires_grad != flat.trainable or slot.piece.dtype != flat.shard.dtype:
                    raise RequestError(
                        f"The parameter {slot.names[0]} was frozen, unfrozen or converted after split.shard.",
                        "Do that before split.shard.",
                    )


def _make_flat(parameters: Sequence[Parameter], place: ShardPlace, dtype: Any, held: Any) -> Flat:
    shapes = [each.tensor.shape for each in parameters]
    slots = [
        Slot(each.names, each.owners, shape, start)
        for each, shape, start in zip(parameters, shapes, starts(shapes), strict=True)
    ]
    return Flat(place, slots, [each.tensor for each in parameters], dtype, held)
