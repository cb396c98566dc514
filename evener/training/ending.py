"""End a process whose main thread is stuck, and find the error that ends a process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from threading import Event, Thread, current_thread, main_thread
from typing import Any, NoReturn

from .retreat import print_line

STUCK_SECONDS = 10.0  # after Ctrl-C; a launcher would wait for 30 s


def end_process(code: int) -> NoReturn:
    """Exit at once, from any thread, after flushing the log and the standard streams."""
    # exit handlers would wait for the main thread, which is stuck
    with suppress(Exception):  # the user's handler may fail
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream may be closed
            stream.flush()
    os._exit(code)


def last_error() -> BaseException | None:
    """Return the uncaught exception that ends this process, or None if there is none.

    Call it in an exit handler. In an interactive session, the result is always None.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


_installed = Event()  # set once a thread of this process watches for Ctrl-C


def install_interrupt_watchdog() -> None:
    """Make Ctrl-C end this process even if it is stuck in a library call.

    If the process's own handler doesn't run within ten seconds, the process exits with code 130.
    Does nothing outside the main thread.
    """
    # Python runs the handler only once a library call returns, and an NCCL call that waits for
    # other ranks' GPUs may never return. The watchdog can't be installed outside the main thread,
    # or beside another library that uses Python's wakeup file descriptor; a later call then tries
    # again.
    user_handler = signal.getsignal(signal.SIGINT)
    if _installed.is_set() or current_thread() is not main_thread() or not callable(user_handler):
        return
    handled_at = [0.0]

    def handle(number: int, frame: Any) -> Any:
        handled_at[0] = time.monotonic()
        return user_handler(number, frame)

    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    if before != -1:  # another library handles the wakeup
        signal.set_wakeup_fd(before)
        os.close(read_fd)
        os.close(write_fd)
        return
    _installed.set()
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGINT, handle)

    def is_ours() -> bool:
        return signal.getsignal(signal.SIGINT) is handle

    def watch() -> None:
        while number := os.read(read_fd, 1):
            arrived_at = time.monotonic()
            if number[0] != signal.SIGINT or not is_ours():  # another handler handles this signal
                continue
            time.sleep(STUCK_SECONDS)
            # One run of the handler may cover two signals, and may begin just before this thread.
            if handled_at[0] < arrived_at - 1.0 and is_ours():
                print_line(
                    f"evener: ended, as a call didn't come back for {STUCK_SECONDS:g} s after "
                    f"Ctrl-C."
                )
                end_process(130)

    Thread(target=watch, name="evener-ctrl-c", daemon=True).start()
