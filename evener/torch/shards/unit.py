"""Units: modules of a sharded model whose parameters are gathered and freed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList

from ...errors import RequestError
from ..packed import explain_unusable, is_packed
from .flat import Flat
from .place import ShardRank
from .slot import Slot, byte_count

PARTS = 8  # approximate number of units of a model without repeated blocks
# a layer with this fraction of the smallest block's parameters is a unit, so that it isn't whole
# all through a pass
LARGE_LAYER = 0.3


def choose_units(model: Any, wanted: Sequence[Any] | type | None) -> dict[str, Any]:
    """Return the modules whose parameters are gathered together, by name.

    `wanted` has classes, or modules of the model; None chooses repeated blocks and large layers.
    Raises RequestError if no module of the model is one of these.
    """
    if wanted is None:
        return _choose_blocks(model)
    given: Sequence[Any] = wanted if isinstance(wanted, Sequence) else (wanted,)
    kinds = [each for item in given for each in (item.children() if _lists(item) else (item,))]
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    modules = {id(kind) for kind in kinds if isinstance(kind, Module)}
    found = dict(
        _find_outermost("", model, lambda each: isinstance(each, classes) or id(each) in modules)
    )
    if not found:
        raise RequestError(
            "None of the model's modules is one of units=.",
            "Give classes of its blocks, or the blocks themselves.",
        )
    return found


def _find_outermost(
    name: str,
    module: Any,
    accepts: Callable[[Any], bool],
    may_search: Callable[[Any], bool] = lambda _: True,
) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules that `accepts` accepts, without searching inside these modules.

    A module that isn't accepted is searched if `may_search` returns True for it. `name` is a prefix
    for all names.
    """
    for each, child in module.named_children():
        if accepts(child):
            yield f"{name}{each}", child
        elif may_search(child):
            yield from _find_outermost(f"{name}{each}.", child, accepts, may_search)


def _choose_blocks(model: Any) -> dict[str, Any]:
    """Choose the modules to gather one at a time: repeated blocks and large layers."""

    def is_called(module: Any) -> bool:
        return not _lists(module) and _count(module) > 0

    lists = _find_outermost("", model, _repeats)
    blocks = {
        own: block
        for name, each in lists
        for own, block in _find_outermost(f"{name}.", each, is_called, _lists)
    }
    if blocks:
        least = LARGE_LAYER * min(map(_count, blocks.values()))
        layers = _find_outermost(
            "",
            model,
            lambda each: not any(each.children()) and _count(each) >= least,
            lambda each: not _repeats(each),
        )
        return {**blocks, **dict(layers)}
    # without repeated blocks: modules with up to an eighth of the model's parameters
    most = _count(model) / PARTS

    def opens(module: Any) -> bool:
        return _lists(module) or (_count(module) > most and any(module.children()))

    return dict(
        _find_outermost("", model, lambda each: not opens(each) and _count(each) > 0, opens)
    )


def _lists(module: Any) -> bool:
    return isinstance(module, ModuleList | ModuleDict)  # lists and dicts aren't called themselves


def _repeats(module: Any) -> bool:
    kinds = [type(child) for child in module.children() if _count(child)]
    return isinstance(module, ModuleList) and len(kinds) > 1 and len(set(kinds)) < len(kinds)


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_parameters(model: Any, units: Mapping[str, Any]) -> dict[str, list[Slot]]:
    """Return the parameters of each unit, by the unit's name.

    The name "" stands for the rest of the model; it also has the parameters that several units
    share. Raises RequestError for parameters that can't be sharded, such as quantized ones.
    """
    found: dict[int, Slot] = {}
    for path, module, unit in _walk_with_units(
        "", model, "", {id(each): name for name, each in units.items()}
    ):
        for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            each = found.setdefault(id(tensor), Slot(tensor))
            each.names.append(f"{path}.{name}".lstrip("."))
            if (module, name) not in each.owners:
                each.owners.append((module, name))
            each.units.add(unit)
            _check_kind(each.names[0], tensor)
    sorted_: dict[str, list[Slot]] = {"": [], **{name: [] for name in units}}
    for each in found.values():
        sorted_[next(iter(each.units)) if len(each.units) == 1 else ""].append(each)
    return sorted_


def _walk_with_units(
    path: str, module: Any, unit: str, units: Mapping[int, str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield the path of each module, the module, and the name of the unit that contains it.

    `unit` is the name of the unit around `module`, and `units` has names by the id of the module.
    """
    # a module in several places is yielded for each
    unit = units.get(id(module), unit)
    yield path, module, unit
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk_with_units(f"{path}.{name}".lstrip("."), child, unit, units)


def _check_kind(name: str, tensor: Any) -> None:
    if is_packed(tensor):
        fault = explain_unusable(tensor)
        if fault:
            raise RequestError(
                f"The parameter {name} can't be cut into shards. {fault}",
                "Freeze the 4-bit layers and train adapters beside them, as PEFT does.",
            )
        return
    if type(tensor) is not torch.nn.Parameter:
        raise RequestError(
            f"The parameter {name} is a {type(tensor).__name__}, which can't be cut into shards.",
            "Shard a model of plain parameters, or of bitsandbytes' 4-bit layers: no other "
            "quantized parameters, nor lazy ones, nor ones that are sharded already.",
        )


def choose_dtype(slot: Slot, dtype: Any, autocast_dtype: Any) -> Any:
    """Return the dtype in which a sharded parameter is gathered and used in computations.

    Arguments:

    - `dtype`: dtype of computation for the whole model, or None.
    - `autocast_dtype`: dtype of an autocast around the model, or None; it applies to float32
      parameters of Linear layers.
    """
    # An autocast would cast these parameters whenever the layers compute, so the results are the
    # same. Gathering needs half the bytes, and the backward pass needs no cast copies.
    tensor = slot.tensor
    if is_packed(tensor) or not tensor.is_floating_point():
        return tensor.dtype
    if dtype is not None:
        return dtype
    is_linear = all(type(module) is torch.nn.Linear for module, _ in slot.owners)
    is_autocast = autocast_dtype is not None and is_linear and tensor.dtype == torch.float32
    return autocast_dtype if is_autocast else tensor.dtype


def is_lookup(module: Any) -> bool:
    """Return whether a module is an Embedding that doesn't need its weight in the backward pass.

    An Embedding with `max_norm` does need it.
    """
    return type(module) is torch.nn.Embedding and module.max_norm is None


class Unit:
    """A module of a sharded model whose parameters are gathered and freed together.

    Arguments:

    - `name`: name of the module; "" for the model itself.
    - `module`: the module.
    - `parameters`: its parameters that are sharded.
    - `place`: this rank, and the size of each rank's part.
    - `dtype`: dtype of computation for the whole model, or None.
    - `autocast_dtype`: dtype of an autocast around the model, or None.
    - `ledger`: counts the bytes in use.
    """

    # the parameters of a flat have the same dtype, and are all trained or all frozen

    def __init__(
        self,
        name: str,
        module: Any,
        parameters: Sequence[Slot],
        place: ShardRank,
        dtype: Any,
        autocast_dtype: Any,
        ledger: Any,
    ):
        self.name, self.module = name, module
        kinds: dict[Any, list[Slot]] = {}
        for parameter in parameters:
            tensor = parameter.tensor
            parameter.computes = choose_dtype(parameter, dtype, autocast_dtype)
            kind = (tensor.dtype, tensor.requires_grad, is_packed(tensor))
            kinds.setdefault(kind, []).append(parameter)
        self.flats = [Flat(place, each, ledger) for each in kinds.values()]
        self.reads_backward = not is_lookup(module)
        self.slots = [slot for flat in self.flats for slot in flat.slots]
        self._in_rnns = [slot for slot in self.slots if slot.is_in_rnn]
        self.trained = [flat for flat in self.flats if flat.trainable]
        self.gathered = False
        self.hidden = False  # True if it is gathered, but the modules refer to the pieces
        self.unsent = False  # True if there may be gradients that aren't reduced yet
        # called before a collective: a gather (True) or a reduction of gradients (False)
        self.met: Callable[[Unit, bool], None] = lambda *_: None
        self._work: list[Any] | None = None  # work handles of a running gather
        # where the modules keep their parameters, and each one's name and slot; listed at the first
        # use, because hooks replace some of these dictionaries
        self._kept: list[tuple[dict[str, Any], str, Slot]] = []

    def begin_gather(self) -> None:
        """Start to gather the parameters from all ranks, unless they are gathered already."""
        if not self.gathered and self._work is None:
            self.met(self, True)
            self._work = [work for flat in self.flats for work in flat.gather()]

    def gather(self) -> None:
        """Gather the parameters from all ranks, and let the module compute with them."""
        if self.gathered and not self.hidden:
            return
        self.begin_gather()
        for work in self._work or ():
            work.wait()
        self._work, self.gathered, self.hidden = None, True, False
        for parameters, name, slot in self._list_kept():
            parameters[name] = slot.whole
        for slot in self._in_rnns:
            slot.point_to(slot.whole)

    def _list_kept(self) -> list[tuple[dict[str, Any], str, Slot]]:
        if not self._kept:
            for slot in self.slots:
                self._kept += [(each, name, slot) for each, name in slot.find_places()]
        return self._kept

    def _point_to_pieces(self) -> None:
        for parameters, name, slot in self._list_kept():
            parameters[name] = slot.piece
        for slot in self._in_rnns:
            slot.point_to(slot.piece)

    def hide(self) -> None:
        """Make the module refer to this rank's pieces, but don't free the gathered parameters."""
        if self.gathered:
            self.hidden = True
            self._point_to_pieces()

    def free(self) -> None:
        """Free the gathered parameters, and make the module refer to this rank's pieces."""
        if self._work is not None:
            self.gather()
        if not self.gathered:
            return
        if not self.hidden:
            self._point_to_pieces()
        self.gathered = self.hidden = False
        for flat in self.flats:
            flat.free()

    def drop(self) -> None:
        """Free the gathered parameters immediately, even if a gather is still running."""
        self._work, self.gathered, self.hidden = None, False, False
        self._point_to_pieces()
        for flat in self.flats:
            if flat.gathered.has_memory:
                flat.free()

    def count_gradients(self) -> None:
        """Record in the ledger how many bytes the gradients take before they are summed."""
        for flat in self.trained:
            flat.count_gradients()

    def send(self, weight: float) -> None:
        """Start to sum gradients over ranks, with this rank's gradients multiplied by `weight`."""
        self.met(self, False)
        self.unsent = False
        for flat in self.trained:
            flat.send(weight)

    def receive(self) -> None:
        """Wait until the gradients are summed over ranks."""
        for flat in self.trained:
            flat.receive()

    def forget(self) -> None:
        """Discard all gradients."""
        self.unsent = False
        for flat in self.trained:
            flat.forget()

    def check_unchanged(self) -> None:
        """Raise a RequestError if a parameter was frozen, unfrozen or converted after sharding."""
        for flat in self.flats:
            trainable, dtype = flat.trainable, flat.shard.dtype
            for slot in flat.slots:
                piece = slot.piece
                if piece.requires_grad != trainable or piece.dtype != dtype:
                    raise RequestError(
                        f"The parameter {slot.names[0]} was frozen, unfrozen or converted "
                        f"after split.shard.",
                        "Do that before split.shard.",
                    )


class Ledger:
    """Counts the bytes that a sharded model uses on a rank, by category, and their peaks.

    The categories are:

    - `shards`: this rank's parts of the parameters.
    - `gathered`: gathered parameters, and gradients that aren't reduced yet.
    - `gradients`: this rank's parts of the reduced gradients.
    - `state`: the optimizer's state, counted after its first step.
    - `whole`: unsharded parameters with their optimizer state.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.peak = self._total = 0
        self._whole_state = 0

    def add(self, category: str, size: int) -> None:
        """Add `size` bytes to the count of a category; subtract them if `size` is negative."""
        now = self.now[category] + size
        self.now[category] = now
        total = self._total + size
        self._total = total
        if size <= 0:
            return
        if now > self.most[category]:
            self.most[category] = now
        if total > self.peak:
            self.peak = total

    def note_state(self, optimizer: Any, whole: Collection[int] = ()) -> None:
        """Record how many bytes an optimizer's state takes.

        `whole` has the ids of unsharded parameters, whose states are counted separately.
        """
        sizes = Counter(state=0, whole=0)
        for parameter, state in optimizer.state.items():
            category = "whole" if id(parameter) in whole else "state"
            tensors = [each for each in state.values() if torch.is_tensor(each)]
            sizes[category] += sum(byte_count(tensor) for tensor in tensors if tensor.ndim)
        self.add("state", sizes["state"] - self.now["state"])
        self.add("whole", sizes["whole"] - self._whole_state)
        self._whole_state = sizes["whole"]
