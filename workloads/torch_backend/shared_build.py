"""Build the user's model in a single thread, so that the process can be forked afterwards.

Each forked child then has the model without building it again. If PyTorch had several threads
before the fork, the child's first parallel operation would hang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .. import user_code
from ..protocol import WorkerSetup
from .driver_free_imports import start_driver
from .user_model import make_recipe
from .workload import Recipe, TorchWorkload

WIDTH = 512  # rows of a matrix whose product libraries compute on several threads
# functions from which a build may learn its rank
ASKS_RANK = ("get_rank", "get_world_size", "is_initialized")


class BuiltRecipe:
    """A recipe that is built before the process has a device or a group.

    A recipe is the user's model, optimizer, loss and data. `finish` makes a workload from it once
    the device and the group are known. If the user's function takes a model from `load_model`, only
    that model is loaded in advance, and `finish` calls the function.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Build the recipe of the user's function `name`; errors of the user's code propagate."""
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)  # as before each build
        self._name = name
        self._function = user_code.find_function(name, settings)
        self._recipe: Recipe | None = None
        if not self._function.takes_model:
            self._recipe = make_recipe(name, self._function.call())
        self._random = torch.get_rng_state()

    def finish(self, setup: WorkerSetup) -> TorchWorkload:
        """Return the workload for a worker's setup.

        PyTorch's random state is the same as after the build. PyTorch uses all its threads again.
        """
        torch.set_num_threads(self._threads)
        return TorchWorkload(setup, self._take)

    def compute_in_copy(self, on_gpu: bool) -> None:
        """Multiply small matrices on all threads, with PyTorch and, if it is imported, with NumPy.

        If `on_gpu`, start CUDA first. This tests a forked copy of the process: if the copy lacks
        threads, the call hangs.
        """
        if on_gpu:
            start_driver()
        torch.set_num_threads(self._threads)
        for make in (torch.ones, getattr(sys.modules.get("numpy"), "ones", torch.ones)):
            square = make((WIDTH, WIDTH))
            square @ square + square

    def _take(self) -> Recipe:
        torch.set_rng_state(self._random)
        return self._recipe or make_recipe(self._name, self._function.call())


@contextmanager
def noting_ranks(noting: Callable[[Callable[..., Any], str], Any]) -> Iterator[None]:
    """In this context, `noting` replaces the functions that return a process's rank.

    `noting` gets each function and its name, and returns the replacement. The replacement can
    record that the user's build asks for its rank; such a build can't be shared by all ranks.
    """
    before = {name: getattr(dist, name) for name in ASKS_RANK}
    for name, function in before.items():
        setattr(dist, name, noting(function, f"torch.distributed.{name}()"))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
