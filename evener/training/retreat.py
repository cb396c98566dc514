"""Recognize passes that ran out of memory, and print the line that reports their retry."""

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
    """True if an error message says that a GPU or CPU ran out of memory."""
    return bool(_SIGNS.search(text))


class Retreat(msgspec.Struct, frozen=True):
    """A pass that ran out of memory, and the smaller passes that replaced it.

    The terminal, the monitor and the journal report it.
    """

    step: int
    rows: int  # of the pass
    smaller: int  # rows per pass in the retry
    seconds: float  # time until the retry could begin
    others_bytes: int  # device memory that other processes hold

    def describe(self, device: str) -> str:
        """Return a line for the terminal about a retry on the device `device`."""
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
    """Print a line to stderr at once, so that ranks' lines don't mix."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)
