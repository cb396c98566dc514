"""Build the user's model in a single thread, so that processes can be forked with it.

A forked child's first parallel operation hangs if PyTorch had several threads before the fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..protocol import WorkerSetup
from .user_model import load_recipe
from .workload import Recipe, TorchWorkload

# functions from which a build may learn its rank
ASKS_RANK = ("get_rank", "get_world_size", "is_initialized")


class BuiltRecipe:
    """A recipe that was built before its process knew its device or its group."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Build the recipe; exceptions of the user's code propagate."""
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)  # as before each build
        self._recipe = load_recipe(name, settings)
        self._random = torch.get_rng_state()

    def finish(self, setup: WorkerSetup) -> TorchWorkload:
        """Return the workload for a worker's setup.

        Random numbers continue as after the build, and all threads are used again.
        """
        torch.set_num_threads(self._threads)
        return TorchWorkload(setup, self._take)

    def _take(self) -> Recipe:
        torch.set_rng_state(self._random)
        return self._recipe


@contextmanager
def noting_ranks(noting: Callable[[Callable[..., Any], str], Any]) -> Iterator[None]:
    """Replace the functions that return a rank by the results of `noting`."""
    before = {name: getattr(dist, name) for name in ASKS_RANK}
    for name, function in before.items():
        setattr(dist, name, noting(function, f"torch.distributed.{name}()"))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
