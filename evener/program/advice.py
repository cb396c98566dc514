"""Tells the user of a single-GPU script which lines of DDP code would make it train on all GPUs."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, default_collate

from ..torch.private import leave_uncompiled
from .exchanges import is_installed

# options that the suggested DataLoader copies, unless they have these defaults
_LOADER_OPTIONS: dict[str, Any] = {
    "num_workers": 0,
    "collate_fn": default_collate,
    "pin_memory": False,
    "drop_last": False,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "persistent_workers": False,
}

MOST_LISTED = 16  # elements of a script's list that may be models


@leave_uncompiled
def advise(optimizer: Any, loader: Any) -> str:
    """Return a message with the lines of code that make the running script train on all devices.

    The call stack shows which variables hold the trained models and the data loader, and where the
    training loop begins. Therefore, call this during a step of `optimizer`, which is the script's
    optimizer. `loader` is None if the rows don't come from a `DataLoader`.
    """
    # The code is for PyTorch. The suggested lines keep the global batch, and belong right before
    # the outermost loop. If the model is on a GPU, the first line has to run before the model is
    # moved there.
    weights = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frame = _find_frame(weights, loader)
    names = {} if frame is None else _list_names(frame)
    models = _name_models(names, weights | _collect_weights(names)) or [("model",)]
    name = _name_loader(names, loader) or "loader"
    on_gpu = _trains_on_gpu(optimizer)
    device = "; torch.cuda.set_device(torch.distributed.get_node_local_rank())" if on_gpu else ""
    lines = [
        f"torch.distributed.init_process_group(){device}",
        *map(_format_wrapping_line, models),
        *_share_rows(name, loader),
    ]
    place, methods = _describe_changes(frame, name, set(chain.from_iterable(models)))
    first = ", the first one at its top" if on_gpu else ""
    rows = (
        "Its rows don't come from a DataLoader, so make a data set of them. "
        if loader is None
        else ""
    )
    return f"{rows}To train on all of them, add {place}{first}{methods}:" + "".join(
        f"\n    {line}" for line in lines
    )


def _describe_changes(frame: FrameType | None, loader: str, models: Set[str]) -> tuple[str, str]:
    """Return where the DDP code has to be inserted, and which method calls need `.module`.

    Both are phrases for a message; the second is "" if no calls need it. `loader` and `models` are
    the script's names for its loader and its models.
    """
    body = None if frame is None else _parse_file(frame)
    if frame is None or body is None:
        return "before its loop", ""
    line = _find_line(frame, body, loader)
    methods = _describe_methods(frame, body, models, line)
    file = Path(frame.f_code.co_filename).name
    return f"before line {line} of {file}" if line else "before its loop", methods


def _format_wrapping_line(names: Sequence[str]) -> str:
    """Return the line of code that wraps a model in `DistributedDataParallel`.

    `names` are all names of the model in the script.
    """
    return f"{' = '.join(names)} = torch.nn.parallel.DistributedDataParallel({names[0]})"


def _parse_file(frame: FrameType) -> ast.AST | None:
    with suppress(OSError, SyntaxError, ValueError):
        return ast.parse(Path(frame.f_code.co_filename).read_text())
    return None


def _trains_on_gpu(optimizer: Any) -> bool:
    """Return whether any parameter of `optimizer` is on an available accelerator."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    devices = {
        parameter.device.type for group in optimizer.param_groups for parameter in group["params"]
    }
    return gpu is not None and gpu.type in devices


def advise_fastai() -> str:
    """Return the lines of code that make a fastai script train on all devices."""
    return (
        "To train on all of them, with equal shares, as its loaders aren't PyTorch's, write:"
        "\n    with learn.distrib_ctx():"
        "\n        learn.fit(...)  # as it was"
    )


def advise_lightning() -> str:
    """Return the lines of code that make a Lightning script train on all devices."""
    # the lines keep the global batch: each rank's batch size is divided by the number of ranks
    devices = int(os.environ["WORLD_SIZE"])
    lines = (
        f'trainer = L.Trainer(devices={devices}, strategy="ddp", ...)  # the rest as it was',
        f"loader = DataLoader(..., batch_size=batch_size // {devices})",
    )
    return "To train on all of them, write:" + "".join(f"\n    {line}" for line in lines)


def _share_rows(name: str, loader: Any) -> list[str]:
    """Return suggested lines of code that give each rank its own rows, with a `DistributedSampler`.

    `name` is the script's variable for the loader.
    """
    # the lines have placeholders unless `loader` is a DataLoader with a batch size
    data = "torch.utils.data"
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return [
            f"sampler = {data}.DistributedSampler(dataset)",
            f"{name} = {data}.DataLoader(dataset, batch_size, sampler=sampler)",
        ]
    options = [
        f"{each}={name}.{each}"
        for each, usual in _LOADER_OPTIONS.items()
        if getattr(loader, each) != usual
    ]
    shuffles = isinstance(loader.sampler, RandomSampler)
    rows = f"{name}.batch_size // torch.distributed.get_world_size()"
    words = ", ".join([f"{name}.dataset", rows, "sampler=sampler", *options])
    return [
        f"sampler = {data}.DistributedSampler({name}.dataset, shuffle={shuffles})",
        f"{name} = {data}.DataLoader({words})",
    ]


def _find_frame(weights: set[int], loader: Any) -> FrameType | None:
    """Return the script's stack frame whose variables hold a trained model or the loader.

    `weights` are the ids of the optimizer's parameters. The result is None if there is no such
    frame.
    """
    # Frames that have both are preferred to frames that have one of them. Of these, the outermost
    # is returned, because lines inserted there run once, before all epochs.
    best, most = None, 0
    for frame in _list_user_frames():  # later frames are further out
        names = _list_names(frame)
        has_loader = bool(_name_loader(names, loader))
        has_model = any(_count_trained(name, weights) > 0 for name in names.values())
        found = has_loader + has_model
        if found and found >= most:
            best, most = frame, found
    return best


def _collect_weights(names: Mapping[str, Any]) -> set[int]:
    """Return the parameter ids of all optimizers among a frame's variables."""
    # such as one optimizer for each model of a GAN
    optimizers = [name for name in names.values() if isinstance(name, torch.optim.Optimizer)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _name_loader(names: Mapping[str, Any], loader: Any) -> str:
    """Return the name of the script's variable that holds `loader`, or "" if none does."""
    # a DataLoader that is an attribute of a library's object has a name such as
    # "train_loader.loader"
    if loader is None:
        return ""
    for name, each in names.items():
        if each is loader:
            return name
    for name, each in names.items():
        if getattr(each, "__dict__", {}).get("loader") is loader:
            return f"{name}.loader"
    return ""


def _name_models(names: Mapping[str, Any], weights: set[int]) -> list[tuple[str, ...]]:
    """Return each trained model's variable names, the largest model first."""
    # Models inside other models are left out. `weights` are the ids of the optimizers' parameters.
    # `names` are the script's variables; a model may have several. A name like "models[0]" comes
    # first, because the others may be set only in the loop.
    left, found = set(weights), []
    ranked = sorted(
        names, key=lambda name: (-_count_trained(names[name], weights), not name.endswith("]"))
    )
    for name in ranked:
        model = names[name]
        if _count_trained(model, left) > 0:
            left -= {id(parameter) for parameter in model.parameters()}
            found.append(tuple(other for other in ranked if names[other] is model))
    return found


def _list_names(frame: FrameType) -> dict[str, Any]:
    """Return the values that code in this frame can use, by name, such as "model" or "self.model".

    These are the frame's variables, the attributes of those that are objects of the user's classes,
    and the elements of lists.
    """
    # attributes are listed for objects of the script's own classes
    names = {name: value for name, value in frame.f_locals.items() if not name.startswith("__")}
    attributes = {}
    for name, value in names.items():
        held = getattr(value, "__dict__", None)
        is_own = not isinstance(value, type | ModuleType | torch.nn.Module | DataLoader)
        if type(held) is dict and is_own and not is_installed(_find_file(type(value))):
            attributes.update({f"{name}.{each}": inner for each, inner in held.items()})
    listed = {}
    for name, value in (names | attributes).items():
        if type(value) is list:
            items = enumerate(value[:MOST_LISTED])
            listed.update({f"{name}[{place}]": each for place, each in items})
    return names | attributes | listed


def _find_file(kind: type) -> str:
    """Return the file in which a class is defined; torch's own file if there is none."""
    module = sys.modules.get(kind.__module__)
    path: str | None = getattr(module, "__file__", None)
    return path or str(torch.__file__)


def _find_line(frame: FrameType, body: ast.AST, loader: str) -> int:
    """Return the line before which the suggested code belongs; 0 if no training loop was found."""
    # this is the line of the outermost loop around the current line, or an earlier line that
    # creates an iterator over the loader
    first = frame.f_code.co_firstlineno
    loop = _find_loop(body, frame.f_lineno, first)
    return _find_iterator(body, loader, first, loop) or loop


def _describe_methods(frame: FrameType, body: ast.AST, models: Set[str], inserted: int) -> str:
    """Say which calls of the models' own methods have to use DDP's `.module` attribute.

    `body` is the frame's parsed file, and the models are wrapped before line `inserted`. The result
    is "" if there are no such calls.
    """
    # Calls before line `inserted` aren't rewritten. In other functions, a variable with a model's
    # name is taken for the model unless it is assigned there.
    found: dict[str, list[int]] = {}
    scopes = [each for each in ast.walk(body) if isinstance(each, ast.Module | ast.FunctionDef)]
    for scope in scopes:
        nodes = list(_walk_scope(scope))
        is_own = getattr(scope, "name", "<module>") == frame.f_code.co_name
        assigned = {ast.unparse(node) for node in nodes if _is_assigned(node)}
        names = models if is_own else models - assigned
        for name, line in _find_methods(nodes, names):
            if not is_own or line >= inserted:
                found.setdefault(name, []).append(line)
    words = [f"{name} in {_name_lines(lines)}" for name, lines in found.items()]
    return f", and write {', '.join(words)}" if words else ""


def _find_methods(nodes: Iterable[ast.AST], models: Set[str]) -> Iterator[tuple[str, int]]:
    """Yield each use of a model's attribute that DistributedDataParallel lacks, with its line."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and not _is_in_wrapper(node.attr):
            model = ast.unparse(node.value)
            if model in models:
                # as it has to be written, such as "model.module.decode"
                yield f"{model}.module.{node.attr}", node.lineno


def _name_lines(numbers: Iterable[int]) -> str:
    """Return line numbers as text, for example "line 3" or "lines 3, 7"."""
    every = sorted(set(numbers))
    text = ", ".join(map(str, every))
    return f"lines {text}" if len(every) > 1 else f"line {text}"


def _walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a function or module except those inside nested functions."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _walk_scope(node)


def _is_assigned(node: ast.AST) -> bool:
    """Return whether the syntax node is the target of an assignment."""
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _is_in_wrapper(name: str) -> bool:
    """Return whether DistributedDataParallel itself has an attribute with this name."""
    return hasattr(DistributedDataParallel, name) or name in ("module", "training")


def _find_iterator(body: ast.AST, loader: str, first: int, last: int) -> int:
    """Return the first line that calls `iter(loader)`, or 0 if there is none.

    The search begins at line `first` and ends before line `last`.
    """
    found = []
    for node in ast.walk(body):
        if not isinstance(node, ast.Call) or not first <= node.lineno < last:
            continue
        if ast.unparse(node) == f"iter({loader})":
            found.append(node.lineno)
    return min(found, default=0)


def _find_loop(body: ast.AST, line: int, first: int) -> int:
    """Return the first line of the outermost loop around `line`, or 0 if there is none.

    The search begins at line `first`, the first line of the function.
    """
    found: list[int] = []
    for node in ast.walk(body):
        if not isinstance(node, ast.For | ast.While) or not first <= node.lineno <= line:
            continue
        if line <= (node.end_lineno or 0):
            found.append(node.lineno)
    return min(found, default=0)


def _count_trained(value: Any, weights: set[int]) -> int:
    """Return how many parameters of `value` have an id in `weights`; 0 if it isn't a module."""
    if not isinstance(value, torch.nn.Module):
        return 0
    return sum(id(parameter) in weights for parameter in value.parameters())


def _list_user_frames() -> Iterator[FrameType]:
    """Yield the stack frames of the user's own code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not is_installed(frame.f_code.co_filename) and not name.startswith("evener."):
            yield frame
        frame = frame.f_back
