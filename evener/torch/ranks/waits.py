"""Time a rank's waits for others inside a pass, where FSDP or DeepSpeed calls the collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

# a WeakSet takes as long to iterate over as the rest of a short wait
_timers: list[weakref.ref[Any]] = []


def time_waits(timer: Any) -> None:
    """Count waits for collectives inside a pass as waiting, not as the rank's compute time."""
    # On a GPU, the host doesn't wait for collectives. The excluded time is that in which the
    # computing stream waits for another stream, which runs the collectives.
    if all(each() is not timer for each in _timers):
        _timers.append(weakref.ref(timer, _timers.remove))
    _time_waits_in(dist.Work, "wait")
    for name in ("wait_event", "wait_stream"):
        _time_waits_in(torch.cuda.Stream, name, _is_current)


def _is_current(stream: Any) -> bool:
    """Return whether a CUDA stream is the one on which this thread computes."""
    # FSDP's other streams also wait before they communicate, but that doesn't delay the
    # computation, and timing a wait takes microseconds
    return bool(stream == torch.cuda.current_stream(stream.device))


def _time_waits_in(kind: Any, name: str, counts: Callable[[Any], bool] | None = None) -> None:
    """Replace a method of a class, so that timers count each of its calls as waiting."""
    # `kind` is the method's class. `counts` returns False for an object whose waits aren't timed;
    # None times all. The method is replaced by one that notifies timers when it begins and ends.
    # `counts` is called with the method's object.
    original: Callable[..., Any] = getattr(kind, name)
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def wait(*arguments: Any, **keywords: Any) -> Any:
        if counts is not None and not counts(arguments[0]):
            return original(*arguments, **keywords)
        entered = []
        for reference in _timers:
            timer = reference()
            if timer is not None and timer.begin_wait():
                entered.append(timer)
        if not entered:
            return original(*arguments, **keywords)
        try:
            return original(*arguments, **keywords)
        finally:
            for timer in entered:
                timer.end_wait()

    setattr(kind, name, wait)
