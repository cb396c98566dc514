"""Out of memory: the errors that say so, the release of memory, and its use."""

from __future__ import annotations

import gc
import sys
import traceback

import torch

_SIGNS = (  # of errors of other types that mean the same
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "can't allocate memory",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error says that memory ran out, in PyTorch's allocator or in a library that it calls."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def drop_frames(error: BaseException) -> str:
    """Release what the frames of an error hold; returns the error as text, which holds nothing."""
    text = str(error).partition("\n")[0]
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__
    return text or type(error).__name__


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_by_others(device: torch.device) -> int:
    """Bytes of the device that other processes hold; 0 where that isn't known."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    own = int(torch.cuda.memory_reserved(device)) + 2**29  # half a GiB for the context
    return max(0, int(total - free) - own)


def describe_memory(device: torch.device) -> str:
    """The use of the device's memory, as a part of a sentence."""
    if device.type != "cuda":
        return "the memory of this machine's CPU"
    own, (free, total) = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)
    gib = [each / 2**30 for each in (total, own, free, held_by_others(device))]
    return "of {:.1f} GiB the training holds {:.1f}, {:.1f} are free, others hold {:.1f}".format(*gib)


def say(line: str) -> None:
    """A line for the terminal."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)
