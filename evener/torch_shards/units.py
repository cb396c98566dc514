"""The units of a model: modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList

from ..errors import RequestError

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
