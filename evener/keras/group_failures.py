"""Stops all processes of a group when one fails, and reports why.

Otherwise, the other processes would wait for the failed one in collectives forever. The process
that fails notifies them through TensorFlow's coordination service. If only some processes fail, the
collectives of the others are aborted with the error's text. If all fail, for example because a
model is refused, each raises its own error, and the group stays usable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from ..errors import DeviceError, EvenerError
from .user_errors import find_users_line, first_line

WAIT_S = 5.0  # timeout for errors of the other processes
MARK = "evener: rank "  # prefix of the text that the other processes get
END = " (evener)"


class GroupFailures:
    """Notifies the other processes when this one fails, so that they don't wait forever."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._count = 0  # number of failures of this process
        self._inside = False

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Context manager that reports any exception raised in it to the other processes.

        Raises DeviceError with another process's message if that process failed first. A nested
        context does nothing.
        """
        if self._inside:
            yield
            return
        self._inside = True
        try:
            yield
        except Exception as error:
            text = read_failure(error)
            if text:
                raise DeviceError(text, "Look at the end of that rank's output.") from None
            self._notify_others(error)
            raise
        finally:
            self._inside = False

    def _notify_others(self, error: Exception) -> None:
        """Send this process's error to the other processes, unless all have failed."""
        self._count += 1
        service = context.context()
        try:
            service.set_config_key_value(self._key(self._rank), "failed")
            if not self._all_fail(service):
                service.report_error_to_cluster(tf.errors.ABORTED, self._describe(error))
        except tf.errors.OpError:
            return  # the service has stopped, because another process has exited

    def _all_fail(self, service: Any) -> bool:
        """Return whether all processes report a failure within 5 seconds."""
        end = time.monotonic() + WAIT_S
        for rank in range(self._size):
            left = max(1, int(1000 * (end - time.monotonic())))
            try:
                service.get_config_key_value(self._key(rank), left)
            except tf.errors.DeadlineExceededError:
                return False
        return True

    def _key(self, rank: int) -> str:
        return f"evener/failed/{self._count}/{rank}"

    def _describe(self, error: Exception) -> str:
        kind = "" if isinstance(error, EvenerError) else f"{type(error).__name__}: "
        message = first_line(error).rstrip(".")
        return f"{MARK}{self._rank} has failed{find_users_line(error)}: {kind}{message}.{END}"


def read_failure(error: BaseException) -> str:
    """Return the message about another process's failure that an error contains, or ""."""
    if not isinstance(error, tf.errors.OpError):
        return ""
    _, mark, rest = str(error).partition(MARK)
    if not mark:
        return ""
    return f"Rank {rest.partition(END)[0]}"
