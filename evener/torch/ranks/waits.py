"""Time how long a rank waits for others inside a pass, in collectives of FSDP or DeepSpeed."""

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
    """Let `timer` count the time that a pass spends in collectives as waiting.

    Without this, such time would count as the rank's compute time.
    """
    # on a GPU, the host doesn't wait; what is timed is that the computing stream waits for another
    # one
    if all(each() is not timer for each in _timers):
        _timers.append(weakref.ref(timer, _timers.remove))
    _time_waits_in(dist.Work, "wait")
    for name in ("wait_event", "wait_stream"):
        _time_waits_in(torch.cuda.Stream, name, _is_current)


def _is_current(stream: Any) -> bool:
    """Return whether a CUDA stream is this thread's current stream."""
    # FSDP's other streams also wait before they communicate, but that doesn't delay the
    # computation, and timing a wait takes microseconds
    return bool(stream == torch.cuda.current_stream(stream.device))


def _time_waits_in(owner: Any, name: str, is_timed: Callable[[Any], bool] | None = None) -> None:
    """Replace a method of the class `owner`, so that timers count its calls as waiting.

    `is_timed` returns whether to time a call on the given object; None means all of them.
    """
    original: Callable[..., Any] = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def wait(*arguments: Any, **keywords: Any) -> Any:
        if is_timed is not None and not is_timed(arguments[0]):
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

    setattr(owner, name, wait)
