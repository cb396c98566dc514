"""How a process ends whose own thread can't: it waits in a library's call that never comes back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from threading import Event, Thread, current_thread, main_thread
from typing import Any, NoReturn

from .retreat import say

STUCK_SECONDS = 10.0  # after Ctrl-C: a launcher would wait for 30


def end_process(code: int) -> NoReturn:
    """End this process from any thread, once what it has written and logged is out.

    Handlers at exit aren't run: they would wait for the thread that is stuck.
    """
    with suppress(Exception):  # of a handler of the user's
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed
            stream.flush()
    os._exit(code)


def last_error() -> BaseException | None:
    """The error that has ended the program, for a handler at exit; None for an end without one.

    A session in which a person types has had errors that ended nothing.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


_listens = Event()  # set once this process hears of Ctrl-C by a thread


def end_when_stuck() -> None:
    """Let Ctrl-C end this process also where it waits for other ranks in a library's call that
    doesn't hear of it.

    Python's own handler runs once the call is over, and that of NCCL on the other ranks' GPUs never
    is. Where it can't be done now, off the main thread or beside another library that listens, a
    later call tries again.
    """
    hears, heard = signal.getsignal(signal.SIGINT), [0.0]
    if _listens.is_set() or current_thread() is not main_thread() or not callable(hears):
        return

    def hear(number: int, frame: Any) -> Any:
        heard[0] = time.monotonic()
        return hears(number, frame)

    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    if before != -1:  # another library listens
        signal.set_wakeup_fd(before)
        os.close(ear)
        os.close(mouth)
        return
    _listens.set()
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGINT, hear)

    def is_ours() -> bool:
        return signal.getsignal(signal.SIGINT) is hear

    def listen() -> None:
        while number := os.read(ear, 1):
            came = time.monotonic()
            if number[0] != signal.SIGINT or not is_ours():  # another handler takes it
                continue
            time.sleep(STUCK_SECONDS)
            if heard[0] < came - 1.0 and is_ours():  # one call may stand for two signals
                say(
                    f"evener: ended, as a call didn't come back for {STUCK_SECONDS:g} s after "
                    f"Ctrl-C."
                )
                end_process(130)

    Thread(target=listen, name="evener-ctrl-c", daemon=True).start()
