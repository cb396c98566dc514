"""A CUDA error ends the process by SIGABRT, after its traceback, so that its launcher can tell it from other errors.

After such an error nothing more can be computed in the process, on a device that may be sound.
"""

from __future__ import annotations

import os
import re
import sys
from types import TracebackType

from .launched import launched_device

_FAILED = re.compile(r"CUDA (driver )?error|unhandled cuda error|Cuda failure|CUDNN_STATUS_EXECUTION_FAILED")
_OF_THE_SCRIPT = re.compile(r"out of memory|device-side assert")


def abort_on_device_error() -> None:
    """Abort on a device's error from now on, in a process of evener launch."""
    if launched_device():
        sys.excepthook = _end_process


def is_device_error(error: BaseException) -> bool:
    """True if the device, and not the script, is the likely cause of an error."""
    text = str(error)
    return bool(_FAILED.search(text)) and not _OF_THE_SCRIPT.search(text)


def _end_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    if is_device_error(error):
        sys.stdout.flush()
        sys.stderr.flush()
        os.abort()
