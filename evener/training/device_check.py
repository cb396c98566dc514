"""Computes a little on this process' device: `python -m evener.training.device_check gpu`, exit code 0 if that works.

It needs no framework: CUDA's driver is enough, which takes a second where importing PyTorch may take ten.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

WORDS = 1 << 20
VALUE = 0x5EED


def main() -> None:
    """Check a CPU slice by its cores, on which start_rank has put this process; a GPU by its own computation."""
    sound = check_gpu(ctypes.CDLL("libcuda.so.1")) if sys.argv[1:] == ["gpu"] else sum(range(WORDS)) == 549755289600
    sys.exit(0 if sound else 1)


def check_gpu(cuda: ctypes.CDLL) -> bool:
    """True if the first visible GPU sets and returns 4 MiB."""
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
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
    main()
