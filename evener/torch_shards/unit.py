"""Units: modules whose parameters are gathered before they compute and freed after; which, and the bytes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList

from ..errors import RequestError
from .flat import Flat, ShardPlace, Slot, starts

PARTS = 8  # of a model without repeated blocks: a unit is about this part of it


def choose_units(model: Any, wanted: Sequence[Any] | type | None) -> dict[str, Any]:
    """The units of a model by name, none inside another: those of the classes or modules in `wanted`.

    By default the blocks of its outermost ModuleLists and layers beside them that are as large, such as embeddings; or
    else modules of up to an eighth of it.
    """
    if wanted is None:
        blocks = dict(_blocks("", model))
        least = min(map(_count, blocks.values()), default=0)
        return (
            {**blocks, **dict(_layers("", model, least))}
            if blocks
            else dict(_by_size("", model, _count(model) / PARTS))
        )
    kinds = [each for item in (wanted if isinstance(wanted, Sequence) else (wanted,)) for each in _in_list(item)]
    classes = tuple(each for each in kinds if isinstance(each, type))
    modules = {id(each) for each in kinds if isinstance(each, Module)}
    found = dict(_outermost("", model, classes, modules))
    if not found:
        raise RequestError(
            "None of the model's modules is one of units=.", "Give classes of its blocks, or the blocks themselves."
        )
    return found


def _in_list(wanted: Any) -> Iterable[Any]:
    """The modules in a ModuleList or ModuleDict, which isn't called itself; else what is given."""
    return tuple(wanted.children()) if isinstance(wanted, ModuleList | ModuleDict) else (wanted,)


def _outermost(name: str, module: Any, classes: tuple[type, ...], modules: set[int]) -> Iterator[tuple[str, Any]]:
    for each, child in module.named_children():
        if isinstance(child, classes) or id(child) in modules:
            yield f"{name}{each}", child
        else:
            yield from _outermost(f"{name}{each}.", child, classes, modules)


def _blocks(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """The modules of the outermost lists of repeated blocks."""
    for each, child in module.named_children():
        if _repeats(child):
            yield from _called(f"{name}{each}.", child)
        else:
            yield from _blocks(f"{name}{each}.", child)


def _layers(name: str, module: Any, least: float) -> Iterator[tuple[str, Any]]:
    """Layers of at least this size outside of lists of blocks."""
    for each, child in module.named_children():
        if not any(child.children()) and _count(child) >= least:
            yield f"{name}{each}", child
        elif not _repeats(child):
            yield from _layers(f"{name}{each}.", child, least)


def _repeats(module: Any) -> bool:
    kinds = [type(child) for child in module.children() if _count(child)]
    return isinstance(module, ModuleList) and len(kinds) > 1 and len(set(kinds)) < len(kinds)


def _called(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """The modules in a container that are called themselves."""
    for each, child in module.named_children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _called(f"{name}{each}.", child)
        elif _count(child):
            yield f"{name}{each}", child


def _by_size(name: str, module: Any, most: float) -> Iterator[tuple[str, Any]]:
    for each, child in module.named_children():
        own = f"{name}{each}"
        if isinstance(child, ModuleList | ModuleDict) or (_count(child) > most and any(child.children())):
            yield from _by_size(f"{own}.", child, most)
        elif _count(child):
            yield own, child


def _count(module: Any) -> int:
    return sum(each.numel() for each in module.parameters())


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


def count_gathered(model: Any, units: Mapping[str, Any], dtype: Any) -> int:
    """The most bytes that a rank holds beside its part of the state and activations.

    The model's own parameters, two units, and the gradients of all these before their sum.
    """
    sizes = []
    for own in find_parameters(model, units).values():
        tensors = [each.tensor for each in own]
        whole = sum(each.numel() * (dtype or each.dtype).itemsize for each in tensors)
        sizes.append(whole + sum(each.numel() * each.element_size() for each in tensors if each.requires_grad))
    return int(sizes[0] + sum(sorted(sizes[1:])[-2:]))


class Ledger:
    """Bytes of `shards`, `gathered` units with their gradients before the sum, and `gradients` after it; `peak` of all.

    The optimizer's state comes with its first step, and stays.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.peak = 0

    def add(self, kind: str, size: int) -> None:
        """Count bytes that come, or go where `size` is negative."""
        self.now[kind] += size
        self.most[kind] = max(self.most[kind], self.now[kind])
        self.peak = max(self.peak, self.now.total())

    def note_state(self, optimizer: Any) -> None:
        """Count the state of an optimizer of the model's pieces, but for its counters of steps."""
        tensors = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        size = sum(each.numel() * each.element_size() for each in tensors if each.ndim)
        self.add("state", size - self.now["state"])
