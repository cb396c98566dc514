"""Asks CUDA's own library whether this process has started CUDA."""

from __future__ import annotations

import ctypes
import os

NAME = "libcuda.so.1"
NOT_INITIALIZED = 3  # cuda.h: CUDA_ERROR_NOT_INITIALIZED


def has_started() -> bool:
    """True if this process has started CUDA, or may have."""
    try:
        # only if it is loaded already
        library = ctypes.CDLL(NAME, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    # unlike other calls, this one never starts CUDA
    status: int = library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return status != NOT_INITIALIZED
