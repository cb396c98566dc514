"""Instrument the programs that benchmarks.installed_programs starts.

Each Python process of such a program imports this module: it records the weights, moves the shares,
and makes random numbers depend on rows only.

OBSERVED is the folder for the weights that the first rank's optimizers train, before the first step
of each optimizer and after its last. With MOVED, evener's shares change from even to 3:1, 1:3 and
so on, every five steps. With OLD_TORCH, comparisons give contiguous tensors, as older scripts
expect. With TINY_PICTURES, torchvision's data sets are a few random pictures. With BY_ROW, random
numbers that a program draws in the training process are the same for all rows, and those drawn by
its data set follow from a row's index, so a row has the same ones on every rank. Otherwise a
program with dropout or augmentation would draw other numbers with other shares, as with another
seed.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import sys
import weakref
import zlib
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from wrapt import register_post_import_hook, wrap_function_wrapper

# a line is printed after this many steps; evener must explain equal shares before it
LATEST_STEP = 8
_before: list[list[Any]] = []
_after: list[list[Any]] = []
_places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_steps = [0]
_modes: list[Any] = []
_auditing = [0]
_in_fetch = [False]  # whether a row of the data set is being read


def _copy(optimizer: Any) -> list[Any]:
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in weights]
    return [each.detach().clone() for each in local]


def _is_first_rank() -> bool:
    dist = sys.modules["torch"].distributed
    has_group = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if has_group else int(os.environ.get("RANK", "0"))) == 0


def _begin_step(optimizer: Any, *_: Any) -> None:
    if optimizer not in _places and _is_first_rank():
        _places[optimizer] = len(_before)
        _before.append(_copy(optimizer))
        _after.append([])


def _end_step(optimizer: Any, *_: Any) -> None:
    place = _places.get(optimizer)
    if place is None:
        return
    _after[place] = _copy(optimizer)
    if place == 0:
        _steps[0] += 1
        if _steps[0] == LATEST_STEP:
            sys.stderr.write(f"\nobserved: {LATEST_STEP} steps\n")


def _save() -> None:
    if _after and any(_after):
        path = os.path.join(os.environ["OBSERVED"], "weights.pt")
        kept = {"before": _before, "after": _after, "steps": _steps[0]}
        sys.modules["torch"].save(kept, path)


def _watch_torch(torch: Any) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    torch.manual_seed(1)  # for programs that set no seed
    random.seed(1)
    register_optimizer_step_pre_hook(_begin_step)
    register_optimizer_step_post_hook(_end_step)
    wrap_function_wrapper(torch.nn.parallel, "DistributedDataParallel.__init__", _drop_ids)
    atexit.register(_save)
    if multiprocessing.parent_process() is not None:  # atexit doesn't run in such a process
        Finalize(None, _save, exitpriority=2)
    if os.environ.get("BY_ROW"):
        _draw_by_row(torch)
    if os.environ.get("ON_CPU"):
        _stay_on_cpu(torch)
    if os.environ.get("OLD_TORCH"):
        wrap_function_wrapper(torch, "Tensor.eq", _compare_contiguously)


def _drop_ids(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> None:
    if any(getattr(each, "type", "cpu") == "cpu" for each in keywords.get("device_ids") or ()):
        # DistributedDataParallel accepts them for GPUs only
        keywords.pop("device_ids")
        keywords.pop("output_device", None)
    wrapped(*arguments, **keywords)


def _compare_contiguously(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Compare tensors, and lay out the result as PyTorch did before 1.7, so that `view` works."""
    return wrapped(*arguments, **keywords).contiguous()


def _draw_by_row(torch: Any) -> None:
    """Once a model is wrapped, draw the same random numbers for each row, and disable dropout."""
    wrap_function_wrapper(torch.nn.parallel, "DistributedDataParallel.__init__", _begin_draws)
    wrap_function_wrapper(torch.utils.data._utils.fetch, "_MapDatasetFetcher.fetch", _fetch)


def _begin_draws(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> None:
    from evener.torch.audit.randomness import EvenRandomness

    wrapped(*arguments, **keywords)

    class ByRow(EvenRandomness):
        """Draws numbers as in an audit, except for the order of rows and in the data set."""

        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            is_order = function.overloadpacket.__name__ == "randperm"
            if _in_fetch[0] or _auditing[0] or is_order:
                return function(*arguments, **(keywords or {}))
            return super().__torch_dispatch__(function, types, arguments, keywords)

    if not _modes:
        _modes.append(ByRow())
        _modes[0].__enter__()
        # evener's recomputations draw the same numbers
        home = "evener.torch.audit.randomness"
        wrap_function_wrapper(home, "RandomState.__init__", _keep_draws)
        wrap_function_wrapper(home, "RandomState.restore", _restore_draws)
        wrap_function_wrapper(home, "EvenRandomness.__enter__", partial(_count_audits, 1))
        wrap_function_wrapper(home, "EvenRandomness.__exit__", partial(_count_audits, -1))


def _count_audits(change: int, wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Count the audits in progress, which draw their own numbers."""
    _auditing[0] += change
    return wrapped(*arguments, **keywords)


def _keep_draws(wrapped: Any, state: Any, arguments: Any, keywords: Any) -> None:
    wrapped(*arguments, **keywords)
    state.draws = _modes[0].draws


def _restore_draws(wrapped: Any, state: Any, arguments: Any, keywords: Any) -> None:
    wrapped(*arguments, **keywords)
    _modes[0].draws = state.draws


def _stay_on_cpu(torch: Any) -> None:
    """Redirect calls for a GPU to the CPU, as older programs require a GPU."""

    def is_gpu(given: Any) -> bool:
        return (type(given) is int) or str(given).startswith("cuda")

    def to(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        if arguments and is_gpu(arguments[0]):
            arguments = ("cpu", *arguments[1:])
        if is_gpu(keywords.get("device", "cpu")):
            keywords["device"] = "cpu"
        return wrapped(*arguments, **keywords)

    def begin(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        if arguments[:1] == ("nccl",):
            arguments = ("gloo", *arguments[1:])
        if keywords.get("backend") == "nccl":
            keywords["backend"] = "gloo"
        return wrapped(*arguments, **keywords)

    def itself(_: Any, own: Any, __: Any, ___: Any) -> Any:
        return own

    def nothing(*_: Any) -> None:
        pass

    def make(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        if is_gpu(keywords.get("device", "cpu")):
            keywords["device"] = "cpu"
        return wrapped(*arguments, **keywords)

    for name in ("Tensor", "nn.Module"):
        wrap_function_wrapper(torch, f"{name}.to", to)
        wrap_function_wrapper(torch, f"{name}.cuda", itself)
    wrap_function_wrapper(torch, "Tensor.pin_memory", itself)
    for name in ("tensor", "empty", "zeros", "ones", "arange", "rand", "randn", "randint", "full"):
        wrap_function_wrapper(torch, name, make)
    for name in ("set_device", "synchronize", "empty_cache"):
        wrap_function_wrapper(torch.cuda, name, nothing)
    wrap_function_wrapper(torch.cuda, "device_count", lambda *_: 2)
    wrap_function_wrapper(torch.cuda, "is_available", _is_available)
    wrap_function_wrapper(torch.cuda, "max_memory_allocated", lambda *_: 0)
    wrap_function_wrapper(torch.distributed, "init_process_group", begin)
    _pretend_accelerator(torch)


def _pretend_accelerator(torch: Any) -> None:
    """Give scripts that ask torch.accelerator the CPU, under the name of a GPU."""
    accelerator = torch.accelerator

    def current(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        return torch.device("cuda") if _asks_for_script() else wrapped(*arguments, **keywords)

    wrap_function_wrapper(accelerator, "is_available", _is_available)
    wrap_function_wrapper(accelerator, "current_accelerator", current)
    wrap_function_wrapper(accelerator, "set_device_index", lambda *_: None)


def _is_available(wrapped: Any, _: Any, arguments: Any, __: Any) -> bool:
    """Return True to the script itself, which would otherwise use no process group or exit."""
    return _asks_for_script() or bool(wrapped(*arguments))


def _asks_for_script() -> bool:
    """True if the script itself calls the wrapped function whose wrapper calls this one."""
    asks = sys._getframe(2).f_globals.get("__name__")
    return asks in ("__main__", "__mp_main__")


def _fetch(_: Any, fetcher: Any, arguments: Any, __: Any) -> Any:
    """Fetch rows one by one, each with its index as the random seed."""
    import numpy
    import torch

    _in_fetch[0] = True
    state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    rows = []
    indices = arguments[0] if fetcher.auto_collation else [arguments[0]]
    for index in indices:
        seed = index if isinstance(index, int) else zlib.crc32(str(index).encode())
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        rows.append(fetcher.dataset[index])
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    _in_fetch[0] = False
    return fetcher.collate_fn(rows if fetcher.auto_collation else rows[0])


def _shrink(datasets: Any) -> None:
    """Replace data sets of torchvision, which would be downloaded, by a few random pictures."""
    import numpy
    from PIL import Image

    class Pictures:
        """64 pictures of a class each, made of their number."""

        shape: tuple[int, ...] = (28, 28)

        def __init__(self, *_: Any, transform: Any = None, **__: Any) -> None:
            self.transform = transform

        def __len__(self) -> int:
            return 64

        def __getitem__(self, row: int) -> Any:
            drawn = numpy.random.default_rng(row).integers(0, 256, self.shape).astype("uint8")
            picture = Image.fromarray(drawn)
            return (picture if self.transform is None else self.transform(picture)), row % 10

    class Colors(Pictures):
        shape = 32, 32, 3

    datasets.MNIST = datasets.FashionMNIST = Pictures
    datasets.CIFAR10 = datasets.CIFAR100 = Colors


class _Moved:
    """Moves shares back and forth; replaces a Rebalancer."""

    windows_needed = windows_seen = 1

    def observe(self, step: int, _: Any, rows: Any, **__: Any) -> Any:
        from evener.training.rebalance import Change

        total, large = sum(rows), max(1, sum(rows) * 3 // 4)
        first = large if rows[0] <= total / 2 else total - large
        return Change(
            (first, total - first), (first, total - first), f"a script, at step {step}", 0.1
        )


def _move(module: Any) -> None:
    module.MOST_STEPS, module.EXCHANGED_WINDOWS = module.FEWEST_STEPS, 1
    wrap_function_wrapper(module, "Rebalancing._make_rule", lambda *_: _Moved())


register_post_import_hook(_watch_torch, "torch")
register_post_import_hook(lambda numpy: numpy.random.seed(1), "numpy")
if os.environ.get("TINY_PICTURES"):
    register_post_import_hook(_shrink, "torchvision.datasets")
if os.environ.get("MOVED"):
    register_post_import_hook(_move, "evener.torch.rebalancing")
