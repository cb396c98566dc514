"""Handle the signals that end a process."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def restored_signals() -> Iterator[None]:
    """Context manager: restore the handlers of SIGINT, SIGTERM and SIGHUP at the end."""
    earlier = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, action in earlier.items():
            signal.signal(number, action)


@contextmanager
def handled_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Context manager: call `handle` with the number of each SIGINT, SIGTERM or SIGHUP.

    SIGHUP stays ignored if it was, as under nohup.
    """
    with restored_signals():
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: handle(number))
        yield


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Context manager: collect the SIGINT, SIGTERM and SIGHUP that arrive, in a list.

    They don't end the process meanwhile.
    """
    caught: list[int] = []
    with handled_signals(caught.append):
        yield caught
