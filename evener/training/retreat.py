"""Recognize and report passes that ran out of memory."""

from __future__ import annotations

import re
import sys

import msgspec

_SIGNS = re.compile(  # in error messages of libraries that have no exception type for this
    r"(CUDA|HIP)( error:)? out of memory|CUDA_ERROR_OUT_OF_MEMORY|can't allocate memory"
    r"|BLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)"
    r"|miopenStatusAllocFailed"
)


def says_out_of_memory(text: str) -> bool:
    """Return True if the text of an error says that memory ran out."""
    return bool(_SIGNS.search(text))


class Retreat(msgspec.Struct, frozen=True):
    """A pass that ran out of memory and was retried in smaller passes."""

    step: int
    rows: int  # of the pass
    smaller: int  # rows per pass in the retry
    seconds: float  # time until the retry could begin
    others_bytes: int  # device memory that other processes hold

    def describe(self, device: str) -> str:
        """Return a line of text about the retry. `device` is the device's name."""
        held = (
            f" (others hold {self.others_bytes / 2**30:.0f} GiB)"
            if self.others_bytes >= 2**30
            else ""
        )
        return (
            f"{device} ran out of memory at step {self.step:,}{held}: passes of {self.rows} "
            f"-> {self.smaller} rows,"
            f" {self.seconds:.1f} s"
        )


def print_line(line: str) -> None:
    """Print a line to standard error in a single write, so that processes don't mix their lines."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)
