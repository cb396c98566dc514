"""Checkpoints of a sharded model, which can be loaded with another number of ranks.

A checkpoint is a folder with safetensors files, written one unit (a group of layers) at a time, and
an index that transformers can also read. It can be loaded with any shares, or by PyTorch alone. The
index is replaced atomically once its files are on disk, so the old checkpoint stays intact until
then.

For a model with PEFT's adapters, the folder has the trained parameters and PEFT's own files. Packed
(4-bit) weights aren't written, because they are frozen and the program loads them itself.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import RequestError
from ...system.files import write_atomically
from ..messages import broadcast_message
from ..private import unsaved_buffers
from ..sums.collectives import own_collectives, spread
from .adapters import export_adapters, find_names
from .flat import Flat
from .make import find
from .sharded import Sharded
from .slot import Slot
from .whole_model import WholeModel, is_alone

INDEX = "model.safetensors.index.json"  # transformers' own file name
ADAPTER_INDEX = "training.safetensors.index.json"  # for adapters; transformers ignores it
WHOLE = "model.safetensors"  # a model in a single file
FILE_BYTES = 1 << 30  # approximate size of a file with unsharded tensors
_FILE = re.compile(r"(model|optimizer)-[0-9a-f]{8}-\d{5}\.safetensors")

_FOREIGN: dict[str, Any] = {
    "groups": [],
    "names": [],
    "optimizer": {},
    "counters": {},
    "extra": None,
}

Tensors = dict[str, torch.Tensor]
AnyModel = Sharded | WholeModel


def find_sharded(model: Any) -> Sharded | WholeModel:
    """Return the object that manages a sharded model.

    For a single rank, which doesn't shard its model, this is a WholeModel. Raises RequestError if
    several ranks train a model that isn't sharded.
    """
    found = getattr(model, "exchange", None)
    if isinstance(found, Sharded):
        return found
    if not is_alone():
        raise RequestError(
            "The model isn't sharded.", "Use torch.save(model.state_dict(), ...) on one rank."
        )
    return WholeModel(model)


# ---------------------------------------------------------------------- whole tensors


def model_state(model: Any) -> Tensors:
    """Gather the state dict of a sharded model on rank 0, with unsharded tensors on the CPU.

    Every rank has to call this. Ranks other than 0 get an empty dict.
    """
    sharded, state = find_sharded(model), Tensors()
    names = {slot.names[0]: slot.names for slot in sharded.slots}
    for tensors in _parameters(sharded, {}):
        for name, tensor in tensors.items():
            state |= dict.fromkeys(names[name], tensor)
    return {**state, **_buffers(model)} if sharded.place.rank == 0 else {}


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Gather the state dict of a sharded model's optimizer on rank 0.

    Its tensors are unsharded and on the CPU. Every rank has to call this; ranks other than 0 get an
    empty dict. Raises RequestError if the optimizer has no sharded parameters and there are several
    ranks.
    """
    sharded = find(optimizer)
    if sharded is None and is_alone():
        return dict(optimizer.state_dict())
    if sharded is None:
        raise RequestError(
            "The optimizer has no sharded model's parameters.", "Use its own state_dict."
        )
    numbers = {name: number for number, name in enumerate(_names(sharded, optimizer))}
    counters = {name: torch.tensor(value) for name, value in _counters(sharded, optimizer).items()}
    state: dict[int, Any] = {}
    for tensors in (counters, *_states(sharded, optimizer)):
        for name, tensor in tensors.items():
            parameter, _, kind = name.rpartition("/")
            state.setdefault(numbers[parameter], {})[kind] = tensor
    return (
        {"state": state, "param_groups": _number(_groups(optimizer))}
        if sharded.place.rank == 0
        else {}
    )


def _flats(sharded: AnyModel) -> Iterator[Flat]:
    """Yield the flat tensors of parameters of all units, except those of packed (4-bit) weights."""
    for unit in [sharded.root, *sharded.units]:
        for flat in unit.flats:
            if not flat.packed:
                yield flat


def _whole_slots(sharded: AnyModel) -> list[Slot]:
    return sharded.whole.slots if sharded.whole is not None else []


def _parameters(sharded: AnyModel, wanted: Collection[str]) -> Iterator[Tensors]:
    """Yield the model's parameters on rank 0, in dicts of unsharded CPU tensors by name.

    On other ranks, the dicts are empty. If `wanted` has names, only the flat tensors that contain
    these parameters are gathered. Every rank has to iterate over this.
    """
    # There is one dict for each flat tensor. The last dicts have the unsharded parameters.
    for flat in _flats(sharded):
        if not wanted or any(slot.names[0] in wanted for slot in flat.slots):
            yield _gather_parameters(flat, flat.shard)
    slots = [slot for slot in _whole_slots(sharded) if not wanted or slot.names[0] in wanted]
    yield from _copy_to_host(sharded, {slot.names[0]: slot.piece for slot in slots})


def _copy_to_host(sharded: AnyModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[Tensors]:
    """On rank 0, yield CPU copies of `tensors`, in dicts of about 1 GiB."""
    # each dict has at least FILE_BYTES, except the last one
    if sharded.place.rank:
        return
    copied, size = Tensors(), 0
    for name, each in tensors.items():
        copied[name] = each.detach().cpu().clone()
        size += each.nbytes
        if size >= FILE_BYTES:
            yield copied
            copied, size = Tensors(), 0
    if copied:
        yield copied


@torch.no_grad()  # type: ignore[untyped-decorator]
def _gather_parameters(flat: Flat, shard: torch.Tensor) -> Tensors:
    """Gather a flat tensor from all ranks, and return its parameters by name on rank 0.

    `shard` is this rank's part of the tensor. Other ranks get an empty dict. Every rank has to call
    this.
    """
    whole = torch.empty(flat.cuts[-1][1], dtype=shard.dtype, device=shard.device)
    for work in flat.collect(whole, shard):
        work.wait()
    if flat.rank:
        return {}
    own = whole.cpu()
    return {
        slot.names[0]: own[slot.start : slot.start + slot.numel].view(slot.shape).clone()
        for slot in flat.slots
    }


def _buffers(model: Any) -> Tensors:
    return {
        f"{path}.{name}".lstrip("."): buffer.detach().cpu().clone()
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in unsaved_buffers(module)
    }


def _states(sharded: AnyModel, optimizer: Any) -> Iterator[Tensors]:
    """Yield the optimizer's unsharded states on rank 0, with keys such as "head.weight/exp_avg".

    Every rank has to iterate over this.
    """
    # Step counters are left out. There is one dict for each flat tensor and kind. The last dicts
    # have the states of unsharded parameters.
    for flat in _flats(sharded):
        yield from _gather_optimizer_states(flat, optimizer)
    whole = Tensors()
    for slot in _whole_slots(sharded):
        state = optimizer.state.get(slot.piece, {})
        whole |= {f"{slot.names[0]}/{kind}": state[kind] for kind in _shard_kinds(state)}
    yield from _copy_to_host(sharded, whole)


def _gather_optimizer_states(flat: Flat, optimizer: Any) -> Iterator[Tensors]:
    """Yield the unsharded optimizer states of a flat tensor's parameters.

    There is one dict for each kind of state, such as "exp_avg".
    """
    slots = [slot for slot in flat.slots if optimizer.state.get(slot.piece)]
    kinds = [kind for slot in slots for kind in _shard_kinds(optimizer.state[slot.piece])]
    for kind in dict.fromkeys(kinds):
        values = {slot: optimizer.state[slot.piece].get(kind) for slot in slots}
        values = {slot: value for slot, value in values.items() if _is_shard(value)}
        dtype = next(iter(values.values())).dtype
        shard = torch.zeros(flat.stop - flat.start, dtype=dtype, device=flat.shard.device)
        for slot, value in values.items():
            low, high = flat.range_of(slot)
            shard[low:high].copy_(value)
        names = {slot.names[0] for slot in values}
        whole = _gather_parameters(flat, shard).items()
        yield {f"{name}/{kind}": tensor for name, tensor in whole if name in names}


def _shard_kinds(state: Mapping[str, Any]) -> list[str]:
    """Return the kinds of optimizer state that are sharded, such as "exp_avg"."""
    # step counters have no axis
    return [kind for kind, value in state.items() if _is_shard(value)]


def _counters(sharded: AnyModel, optimizer: Any) -> dict[str, float]:
    """Return the optimizer's scalar states, such as step counts.

    Keys are for example "head.weight/step".
    """
    return {
        f"{slot.names[0]}/{kind}": float(value)
        for slot in sharded.slots
        for kind, value in optimizer.state.get(slot.piece, {}).items()
        if value is not None and not _is_shard(value)
    }


def _is_shard(value: Any) -> bool:
    return bool(torch.is_tensor(value) and value.ndim)


def _names(sharded: AnyModel, optimizer: Any) -> list[str]:
    """Return the names of the parameters that an optimizer trains, in the order of its groups."""
    names = {id(slot.piece): slot.names[0] for slot in sharded.slots}
    return [
        names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with options such as learning rates, as JSON values.

    "params" is the number of parameters in the group.
    """
    return [
        {key: value.item() if torch.is_tensor(value) else value for key, value in group.items()}
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]


def _number(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups whose "params" are indices, as in an optimizer's state dict.

    In the given groups, "params" is only the number of parameters. The indices continue from one
    group to the next.
    """
    numbers = count()
    return [{**group, "params": list(islice(numbers, group["params"]))} for group in groups]


# ---------------------------------------------------------------------- a folder


def save(
    folder: str | os.PathLike[str], model: Any, optimizer: Any = None, extra: Any = None
) -> None:
    """Write a checkpoint of the model, the optimizer and `extra` to `folder`.

    Every rank has to call this. Rank 0 writes safetensors files, with an index that transformers
    can read. A PEFT model's adapters are also written in PEFT's format. `extra` is any value that
    JSON can store. An older checkpoint is removed only after the new one is complete. Raises
    RequestError on every rank if writing fails.
    """
    sharded = find_sharded(model)
    writes, has_adapters = sharded.place.rank == 0, hasattr(model, "peft_config")
    writer = _Writer(Path(folder), writes, _index_of(model))
    writer.run(writer.open)
    adapters: list[str] = []
    if has_adapters:
        writer.run(lambda: adapters.extend(find_names(model, sharded)))
        adapters = _from_first(adapters)
    exported: Tensors = {}
    for tensors in _parameters(sharded, adapters):
        writer.write("model", tensors)
        exported.update(tensors if has_adapters else {})
    writer.write("model", _buffers(model))
    for state in _states(sharded, optimizer) if optimizer is not None else ():
        writer.write("optimizer", state)
    rest: dict[str, Any] = {"groups": [], "names": [], "counters": {}, "extra": extra}
    if optimizer is not None:
        rest["groups"], rest["names"] = _groups(optimizer), _names(sharded, optimizer)
        rest["counters"] = _counters(sharded, optimizer)
    writer.run(lambda: writer.close(rest))
    if has_adapters:
        writer.run(lambda: export_adapters(Path(folder), model, exported))
    _agree(writer.fault, "Free some space, or name another folder: the old checkpoint is intact.")


class _Writer:
    """Writes the files of a checkpoint on rank 0, and removes them again if that fails."""

    def __init__(self, folder: Path, writes: bool, index: str) -> None:
        self._folder, self._writes, self._token = folder, writes, secrets.token_hex(4)
        self._index = index
        self._maps: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}}
        self._files = self._size = 0
        self.fault = ""

    def run(self, action: Callable[[], None]) -> None:
        """Run `action` on the rank that writes.

        If it raises an error, its message is stored in `fault`, so that all ranks can raise an
        error. Nothing happens on other ranks, or after an earlier error.
        """
        # an error isn't raised at once, because the other ranks wait for this rank
        if not self._writes or self.fault:
            return
        try:
            action()
        except Exception as error:
            self.fault = (
                f"The checkpoint {self._folder} can't be written: {str(error).rstrip('.')}."
            )
            self._remove(lambda name: self._token in name)

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._index == INDEX and (self._folder / WHOLE).exists():
            raise RequestError(
                f"{WHOLE} is there, which transformers would read instead", "Name another folder."
            )
        _safetensors()

    def write(self, kind: str, tensors: Tensors) -> None:
        """Write tensors to a new file; `kind` is "model" or "optimizer"."""
        if tensors:
            self.run(lambda: self._write(kind, tensors))

    def _write(self, kind: str, tensors: Tensors) -> None:
        self._files += 1
        path = self._folder / f"{kind}-{self._token}-{self._files:05}.safetensors"
        _safetensors().torch.save_file(tensors, path, metadata={"format": "pt"})
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        self._maps[kind] |= dict.fromkeys(tensors, path.name)
        self._size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def close(self, rest: dict[str, Any]) -> None:
        """Write the index, which makes the checkpoint valid; then remove older checkpoints.

        `rest` has the optimizer's groups, names and counters, and the user's `extra`.
        """
        own = {"schema": 1, "optimizer": self._maps["optimizer"], **rest}
        index = {
            "metadata": {"total_size": self._size, "evener": own},
            "weight_map": self._maps["model"],
        }
        write_atomically(self._folder / self._index, json.dumps(index, indent=1).encode())
        self._remove(lambda name: self._token not in name)

    def _remove(self, chosen: Callable[[str], bool]) -> None:
        for path in self._folder.glob("*.safetensors"):
            if _FILE.fullmatch(path.name) and chosen(path.name):
                path.unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import_module("safetensors.torch")
        return import_module("safetensors")
    except ImportError:
        raise RequestError(
            "Checkpoints need safetensors.", "Install it: pip install safetensors."
        ) from None


Value = TypeVar("Value")


def _from_first(own: Value) -> Value:
    """Return rank 0's value on all ranks.

    Every rank has to call this.
    """
    if is_alone():
        return own
    with own_collectives():
        return broadcast_message(own)


def _agree(fault: str, remedy: str) -> None:
    """Raise RequestError on every rank if rank 0 has failed.

    Every rank has to call this. `fault` is rank 0's error message, or "" if it hasn't failed. On
    other ranks, `fault` is ignored. `remedy` is the error's advice to the user.
    """
    if found := _from_first(fault):
        raise RequestError(found, remedy)


def load(folder: str | os.PathLike[str], model: Any, optimizer: Any = None) -> Any:
    """Load a checkpoint that `save` wrote into a model, and return the checkpoint's `extra`.

    Every rank has to call this. The number of ranks and the sizes of their parts may have changed
    since the checkpoint was saved. Without `optimizer`, the optimizer's state isn't loaded. Raises
    RequestError on every rank if the checkpoint doesn't fit the model or can't be read.
    """
    # rank 0 reads the checkpoint, one unit at a time
    return _load(folder, model, find_sharded(model), optimizer)


def load_whole(folder: str | os.PathLike[str], model: Any, optimizer: Any) -> Any:
    """Load a sharded model's checkpoint into an unsharded model and its optimizer.

    Every rank has to call this. Returns the checkpoint's `extra`.
    """
    return _load(folder, model, WholeModel(model), optimizer)


def has_optimizer(folder: str | os.PathLike[str], model: Any) -> bool:
    """Return whether the checkpoint in `folder` contains an optimizer's state.

    The result is also False if there is no readable checkpoint.
    """
    try:
        index = json.loads((Path(folder) / _index_of(model)).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(index["metadata"].get("evener", _FOREIGN)["names"])


def _index_of(model: Any) -> str:
    return ADAPTER_INDEX if hasattr(model, "peft_config") else INDEX


def _load(
    folder: str | os.PathLike[str], model: Any, sharded: AnyModel, optimizer: Any = None
) -> Any:
    reader = _Reader(Path(folder), sharded.place.rank == 0, _index_of(model))
    own = reader.open(sharded, model, optimizer)
    with torch.no_grad():
        for flat in reader.choose(_flats(sharded)):
            flat.shard.copy_(reader.read(flat, "", flat.shard.dtype))
        pieces = {slot.names[0]: slot.piece for slot in _whole_slots(sharded)}
        for name, tensor in reader.read_whole(pieces, sharded.place.device).items():
            pieces[name].copy_(tensor)
        reader.read_buffers(model)
    state = {} if optimizer is None else _read_optimizer(reader, sharded, optimizer, own)
    _agree(
        reader.fault,
        "Load another checkpoint: a part of this one is loaded into the model already.",
    )
    if optimizer is not None:
        optimizer.load_state_dict(state)
        sharded.note_state(optimizer)
    return own["extra"]


def _read_optimizer(
    reader: _Reader, sharded: AnyModel, optimizer: Any, own: dict[str, Any]
) -> dict[str, Any]:
    """Read an optimizer's state dict, with this rank's parts of the states, from a checkpoint.

    `own` is the part of the checkpoint's index that evener wrote.
    """
    numbers = {name: number for number, name in enumerate(_names(sharded, optimizer))}
    state: dict[int, Any] = {}

    def put(name: str, value: Any) -> None:
        parameter, _, kind = name.rpartition("/")
        state.setdefault(numbers[parameter], {})[kind] = value

    for name, value in own["counters"].items():
        put(name, torch.tensor(value))
    for flat in _flats(sharded):
        for name, shard in _read_states(reader, flat, own["optimizer"]):
            put(name, shard)
    parameters = {slot.names[0] for slot in _whole_slots(sharded)}
    kept = [name for name in own["optimizer"] if name.rpartition("/")[0] in parameters]
    for name, tensor in reader.read_whole(kept, sharded.place.device).items():
        put(name, tensor)
    return {"state": state, "param_groups": _number(own["groups"])}


def _read_states(
    reader: _Reader, flat: Flat, stored: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each optimizer state in a checkpoint, and this rank's part of the state.

    `flat` has the parameters. `stored` has the names of all states in the checkpoint, such as
    "head.weight/exp_avg".
    """
    parameters = {slot.names[0] for slot in flat.slots}
    names = {name for name in stored if name.rpartition("/")[0] in parameters}
    kinds = dict.fromkeys(name.rpartition("/")[2] for name in stored if name in names)
    for kind in kinds:
        shard = reader.read(flat, f"/{kind}", flat.shard.dtype)
        for slot in flat.slots:
            name = f"{slot.names[0]}/{kind}"
            if name in names:
                low, high = flat.range_of(slot)
                yield name, shard[low:high].clone()


class _Reader:
    """Reads a checkpoint on rank 0, and sends its tensors to the other ranks.

    Every rank has to call the public methods.
    """

    def __init__(self, folder: Path, reads: bool, index: str) -> None:
        self._folder, self._reads, self._index = folder, reads, index
        self._maps: dict[str, str] = {}
        self.fault = ""

    def open(self, sharded: AnyModel, model: Any, optimizer: Any) -> dict[str, Any]:
        """Read and check a checkpoint's index, and return the part of the index that evener wrote.

        Raises RequestError on every rank if the checkpoint doesn't fit the model or the optimizer.
        """
        fault, own = "", dict[str, Any]()
        if self._reads:
            try:
                own = self._open(sharded, model, optimizer)
            except Exception as error:
                fault = f"The checkpoint {self._folder} can't be loaded: {str(error).rstrip('.')}."
        _agree(fault, "Name a folder that split.save has written for this model.")
        return _from_first(own)

    def _open(self, sharded: AnyModel, model: Any, optimizer: Any) -> dict[str, Any]:
        index = json.loads((self._folder / self._index).read_bytes())
        own: dict[str, Any] = index["metadata"].get("evener", _FOREIGN)
        self._maps = {**index["weight_map"], **own["optimizer"]}
        shapes = {name: buffer.shape for name, buffer in _buffers(model).items()}
        written = [slot for flat in _flats(sharded) for slot in flat.slots]
        for slot in written + _whole_slots(sharded):
            if self._index == INDEX or slot.piece.requires_grad:
                shapes[self._find(slot.names)] = slot.shape
        for name, shape in shapes.items():
            found = self._slice(name).get_shape()
            if tuple(found) != tuple(shape):
                raise RequestError(
                    f"{name} is {tuple(found)} there, and {tuple(shape)} here.",
                    "Load it where it fits.",
                )
        if optimizer is not None:
            self._check_optimizer(own, sharded, optimizer)
        return own

    def _check_optimizer(self, own: dict[str, Any], sharded: AnyModel, optimizer: Any) -> None:
        """Raise RequestError if the optimizer's parameters or groups differ from the saved ones."""
        for name in own["optimizer"]:
            self._slice(name).get_shape()
        missing = set(_names(sharded, optimizer)) ^ set(own["names"])
        if missing or len(own["groups"]) != len(optimizer.param_groups):
            raise RequestError(
                "its optimizer has other parameters or groups", "Make the same optimizer."
            )

    def _find(self, names: Sequence[str]) -> str:
        found = next((name for name in names if name in self._maps), None)
        if found is None:
            raise RequestError(f"it has no {names[0]}", "Load it where it fits.")
        return found

    def _slice(self, name: str) -> Any:
        self._find((name,))
        return _safetensors().safe_open(self._folder / self._maps[name], "pt").get_slice(name)

    def read(self, flat: Flat, suffix: str, dtype: Any) -> torch.Tensor:
        """Return this rank's part of a flat tensor of parameters or optimizer states.

        `suffix` is "" for parameters, and for example "/exp_avg" for an optimizer state. Elements
        that aren't in the checkpoint are 0.
        """
        whole = torch.zeros(flat.cuts[-1][1], dtype=dtype, device=flat.shard.device)
        for slot in flat.slots if self._reads else ():
            name = next((name + suffix for name in slot.names if name + suffix in self._maps), None)
            if name is not None:
                found = self._read_tensor(name)
                if found is not None:
                    whole[slot.start : slot.start + slot.numel].copy_(found.reshape(-1))
        with own_collectives():
            dist.broadcast(whole, 0)
        return whole[flat.start : flat.stop]

    def choose(self, flats: Iterable[Flat]) -> list[Flat]:
        """Return the flat tensors that have at least one parameter in the checkpoint."""
        # a checkpoint of adapters has only some of the model's parameters
        listed = list(flats)
        names = [[name for slot in flat.slots for name in slot.names] for flat in listed]
        have = _from_first([any(each in self._maps for each in own) for own in names])
        return [flat for flat, has in zip(listed, have, strict=True) if has]

    def read_whole(self, names: Iterable[str], device: torch.device) -> Tensors:
        """Read the named tensors on rank 0, and return them unsharded on every rank."""
        found = {name: self._read_tensor(name) for name in names if self._reads}
        listed = {name: each for name, each in found.items() if each is not None}
        kinds = {
            name: [str(each.dtype).removeprefix("torch."), *each.shape]
            for name, each in listed.items()
        }
        tensors = {}
        for name, (dtype, *shape) in _from_first(kinds).items():
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if name in listed:
                tensors[name].copy_(listed[name])
        if not is_alone():
            with own_collectives():
                spread(list(tensors.values()))
        return tensors

    def read_buffers(self, model: Any) -> None:
        """Load the buffers in the checkpoint into the model, on every rank."""
        names = [name for name in _buffers(model) if name in self._maps]
        for name in _from_first(names):
            buffer = model.get_buffer(name)
            found = self._read_tensor(name) if self._reads else None
            values = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            values.copy_(buffer if found is None else found)
            if not is_alone():
                with own_collectives():
                    dist.broadcast(values.reshape(-1).view(torch.uint8), 0)
            buffer.copy_(values)

    def _read_tensor(self, name: str) -> Any:
        """Read a tensor of the checkpoint.

        If that fails, return None and store the error message in `fault`.
        """
        # an error isn't raised at once, because the other ranks wait for this rank
        try:
            with _safetensors().safe_open(self._folder / self._maps[name], "pt") as opened:
                return opened.get_tensor(name)
        except Exception as error:
            self.fault = (
                self.fault
                or f"The checkpoint {self._folder} can't be read: {str(error).rstrip('.')}."
            )
            return None
