"""The last words of a rank that ends by an error: its own, or which other rank has ended, and why."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch.distributed as dist

from ..training.retreat import say
from .retry import is_out_of_memory

ENDED, LOST = "evener/ended", "evener/lost"  # keys in the group's store: a rank's own error; it has lost the others
_IN_LOOPS = (
    "a pass that runs out of memory is computed again in smaller ones where the loop says"
    " split.step(batch, lambda part: loss of part.batch) in place of loss.backward()."
)
_advice = [_IN_LOOPS]  # what to do about out-of-memory
WAIT_SECONDS = 3.0  # for what the other ranks have to say
_SIGNS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")  # of lost ranks


def advise(sentence: str) -> None:
    """Change the sentence that follows an error of memory that ends this process."""
    _advice[0] = sentence


@cache
def explain_at_exit() -> None:
    """Let an error that ends the program be followed by what the person can do, or by the rank that it came from."""
    shown = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        shown(kind, error, trace)
        if is_out_of_memory(error):
            say(f"evener: {_advice[0]}")
        if isinstance(error, Exception) and dist.is_initialized() and dist.get_world_size() > 1:
            _explain_ranks(error)

    sys.excepthook = explain


def _explain_ranks(error: Exception) -> None:
    """Note this rank's own error for the others, or say whose error is behind it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lost = any(map(_is_lost, _chain(error)))
    try:
        store = dist.distributed_c10d._get_default_store()
        if lost:
            say(f"evener: {_find_ended(store, rank, world)}")
        else:
            line = str(error).strip().partition("\n")[0]
            store.set(f"{ENDED}/{rank}", f"{type(error).__name__}: {line}".rstrip(": ."))
    except (RuntimeError, ValueError):  # of a store that has gone with the process that it was in
        if lost and rank:
            say("evener: rank 0 ended, and this rank can't go on without it: it was killed, or its output says why.")


def _find_ended(store: Any, rank: int, world: int) -> str:
    store.set(f"{LOST}/{rank}", "")
    silent, words, deadline = set(range(world)) - {rank}, dict[int, str](), time.monotonic() + WAIT_SECONDS
    while silent and time.monotonic() < deadline:  # the store may be in this process: not before all have answered
        for each in sorted(silent):
            if store.check([f"{ENDED}/{each}"]):
                words[each] = store.get(f"{ENDED}/{each}").decode()
            if each in words or store.check([f"{LOST}/{each}"]):
                silent.discard(each)
        time.sleep(0.05)
    if words:
        first = min(words)
        return f"rank {first} ended, and this rank can't go on without it: {words[first]}."
    if silent:
        names = " and ".join(map(str, sorted(silent)))
        return (
            f"rank {names} doesn't answer, and this rank can't go on without it: it was killed, ended early, or its"
            " machine is gone."
        )
    return "all ranks answer, but have lost their connections: the network between them failed."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_lost(error: BaseException) -> bool:
    """True if the error is that of a rank which other ranks have left."""
    text = str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(s in text for s in _SIGNS))
