"""Handle the signals that ask this process to exit: Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the thread that started it exits.

    A child process calls this before it executes its program.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def restored_signals() -> Iterator[None]:
    """Return a context that restores the handlers of Ctrl-C, SIGTERM and SIGHUP on exit."""
    earlier = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, action in earlier.items():
            signal.signal(number, action)


@contextmanager
def handled_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP call `handle` within a `with` block.

    `handle` gets the signal's number. A SIGHUP that is ignored, for example under `nohup`, stays
    ignored. The earlier handlers are restored on exit.
    """
    with restored_signals():
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: handle(number))
        yield


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Keep Ctrl-C, SIGTERM and SIGHUP from ending the process in a `with` block.

    Its value is a list that collects the numbers of received signals.
    """
    caught: list[int] = []
    with handled_signals(caught.append):
        yield caught
