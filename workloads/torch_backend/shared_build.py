"""Build a user's model once, and copy it to several probe processes by forking.

It is built on a single thread, because a forked process has none of its parent's other threads and
would wait for them forever.
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
from .driver_free_imports import initialize_driver
from .user_model import make_recipe
from .workload import Recipe, TorchWorkload

WIDTH = 512  # rows of a matrix whose product libraries compute on several threads
# functions from which a build may learn its rank
ASKS_RANK = ("get_rank", "get_world_size", "is_initialized")


def ask_driver() -> None:
    """Ask for the number of GPUs, without initializing CUDA.

    Call it before a build. PyTorch asks the driver's management library, which opens files when it
    is first asked in a forked process. They would be mistaken for files that the build left open.
    """
    torch.cuda.device_count()


class BuiltRecipe:
    """A recipe that is built in this process, to be used here or in forks of the process."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Build the recipe on one thread, so that the process can be forked.

        If the user's file has `load_model`, only that is called, and the rest of the recipe is
        built in each copy. Exceptions of the user's code are passed on.
        """
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
        """Return the workload for this process.

        The random state is reset to what it was after the build.
        """
        torch.set_num_threads(self._threads)
        return TorchWorkload(setup, self._take)

    def compute_in_copy(self, on_gpu: bool) -> None:
        """Run a small computation on several threads, to find out whether a forked process works.

        With `on_gpu`, CUDA is initialized too.
        """
        if on_gpu:
            initialize_driver()
        torch.set_num_threads(self._threads)
        for make in (torch.ones, getattr(sys.modules.get("numpy"), "ones", torch.ones)):
            square = make((WIDTH, WIDTH))
            square @ square + square

    def _take(self) -> Recipe:
        torch.set_rng_state(self._random)
        return self._recipe or make_recipe(self._name, self._function.call())


@contextmanager
def wrap_rank_functions(make_wrapper: Callable[[Callable[..., Any], str], Any]) -> Iterator[None]:
    """Context manager that wraps the functions of torch.distributed that return the rank.

    `make_wrapper` is called with each function and its name, and returns the wrapper.
    """
    before = {name: getattr(dist, name) for name in ASKS_RANK}
    for name, function in before.items():
        setattr(dist, name, make_wrapper(function, f"torch.distributed.{name}()"))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
