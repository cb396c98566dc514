"""Handle signals that ask a process to end."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def restored_signals() -> Iterator[None]:
    """A context manager that restores the handlers of SIGINT, SIGTERM and SIGHUP at its end."""
    earlier = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, action in earlier.items():
            signal.signal(number, action)


@contextmanager
def handled_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """A context manager that calls `handle` with the number of each SIGINT, SIGTERM and SIGHUP.

    If SIGHUP was ignored, for example because of nohup, it stays ignored.
    """
    with restored_signals():
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: handle(number))
        yield


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """A context manager that yields a list of the SIGINT, SIGTERM and SIGHUP signals received.

    Inside the context, these signals don't end the process.
    """
    caught: list[int] = []
    with handled_signals(caught.append):
        yield caught
