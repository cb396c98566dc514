"""Signals that ask this process to end, caught for a block: Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when the thread that started it ends; for a child
    before its program.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def restored_signals() -> Iterator[None]:
    """A context that restores the handlers of these signals at its end."""
    earlier = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, action in earlier.items():
            signal.signal(number, action)


@contextmanager
def handled_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each signal. An ignored SIGHUP, as under `nohup`, stays
    ignored.
    """
    with restored_signals():
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: handle(number))
        yield


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The numbers of the signals that came, for who looks now and then."""
    caught: list[int] = []
    with handled_signals(caught.append):
        yield caught
