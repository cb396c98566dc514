"""Count the bytes that a thread has written."""

from __future__ import annotations

import os
from contextlib import suppress

_WRITTEN = b"wchar:"


class ThreadWrites:
    """Counts the bytes written by the thread that creates this object."""

    def __init__(self) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)

    def count_bytes(self) -> int:
        """Return the bytes that the thread has written so far, or 0 if unknown.

        Only bytes that system calls, such as `write`, have written are counted.
        """
        if self._descriptor < 0:
            return 0
        with suppress(OSError, ValueError, IndexError):  # for example, if the thread has ended
            fields = os.pread(self._descriptor, 512, 0).split()
            return int(fields[fields.index(_WRITTEN) + 1])
        return 0

    def __del__(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
