"""Check whether CUDA is initialized in this process, without initializing it."""

from __future__ import annotations

import ctypes
import os

NAME = "libcuda.so.1"
NOT_INITIALIZED = 3  # cuda.h: CUDA_ERROR_NOT_INITIALIZED


def has_started() -> bool:
    """Return True if this process has loaded and initialized the CUDA driver."""
    try:
        # only if it is loaded already
        library = ctypes.CDLL(NAME, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    # unlike other calls, this one never starts CUDA
    status: int = library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return status != NOT_INITIALIZED
