"""The waiting of a rank for others within its passes, where FSDP exchanges in each layer.

Ranks that meet in each layer come to the end of a step together. What a rank computes between two
meetings is its own work: all but the time in which it waits for an exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

_timers: weakref.WeakSet[Any] = weakref.WeakSet()


def time_waits(timer: Any) -> None:
    """Count what a rank waits for in passes as no own work of this timer from now on.

    On a CPU that is waiting for an exchange; on a GPU, where the host doesn't wait, what its stream
    does until another one has exchanged.
    """
    _timers.add(timer)
    _watch(dist.Work, "wait")
    for name in ("wait_event", "wait_stream"):
        _watch(torch.cuda.Stream, name)


def _watch(kind: Any, name: str) -> None:
    original: Callable[..., Any] = getattr(kind, name)
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def wait(*arguments: Any, **keywords: Any) -> Any:
        entered = [each for each in _timers if each.begin_wait()]
        try:
            return original(*arguments, **keywords)
        finally:
            for each in entered:
                each.end_wait()

    setattr(kind, name, wait)
