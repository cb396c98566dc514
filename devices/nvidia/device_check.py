"""A program that checks whether the first visible GPU works, by writing and reading its memory.

It exits with 0 if the GPU works. Only the CUDA driver is called, so no framework has to be loaded.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

WORDS = 1 << 20
VALUE = 0x5EED


def check_gpu(cuda: ctypes.CDLL) -> bool:
    """Fill 4 MiB of the first visible GPU's memory, and return True if it reads back correctly.

    `cuda` is the driver's library.
    """
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    memory = ctypes.c_uint64()
    found = (ctypes.c_uint32 * WORDS)()
    calls: tuple[tuple[Any, ...], ...] = (
        (cuda.cuInit, 0),
        (cuda.cuDeviceGet, ctypes.byref(device), 0),
        (cuda.cuCtxCreate_v2, ctypes.byref(context), 0, device),
        (cuda.cuMemAlloc_v2, ctypes.byref(memory), ctypes.c_size_t(4 * WORDS)),
        (cuda.cuMemsetD32_v2, memory, VALUE, ctypes.c_size_t(WORDS)),
        (cuda.cuMemcpyDtoH_v2, found, memory, ctypes.c_size_t(4 * WORDS)),
    )
    return all(call(*arguments) == 0 for call, *arguments in calls) and set(found) == {VALUE}


if __name__ == "__main__":
    sys.exit(0 if check_gpu(ctypes.CDLL("libcuda.so.1")) else 1)
