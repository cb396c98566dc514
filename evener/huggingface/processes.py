"""The number of training processes, as transformers and accelerate see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate.state import PartialState


@contextmanager
def processes(accelerator: Any, number: int) -> Iterator[None]:
    """A context in which transformers, accelerate and torch see `number` training processes."""
    states = [accelerator.state.__dict__, PartialState._shared_state]
    before, asked = [state["num_processes"] for state in states], dist.get_world_size
    try:
        for state in states:
            state["num_processes"] = number
        dist.get_world_size = lambda *_: number
        yield
    finally:
        dist.get_world_size = asked
        for state, were in zip(states, before, strict=True):
            state["num_processes"] = were
