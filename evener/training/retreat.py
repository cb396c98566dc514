"""Passes that ran out of memory: what was done, and how many rows a pass may have from then on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import msgspec

from ..errors import DeviceError

CLEAN_STEPS = 200  # after which a pass of twice the rows is tried again
LOOK_STEPS = 10  # between looks whether other processes have given memory back
MOST_FAILURES = 20  # of one row, in a row
_SIGNS = re.compile(  # of frameworks' and libraries' errors that aren't of a type for it
    r"(CUDA|HIP)( error:)? out of memory|CUDA_ERROR_OUT_OF_MEMORY|can't allocate memory"
    r"|BLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)"
    r"|miopenStatusAllocFailed"
)


def says_out_of_memory(text: str) -> bool:
    """True if an error's text says that memory ran out, on a device or on the CPU."""
    return bool(_SIGNS.search(text))


class Retreat(msgspec.Struct, frozen=True):
    """A pass that didn't fit, and what was done."""

    step: int
    rows: int  # of the pass
    smaller: int  # rows of those that follow
    seconds: float  # until they could begin
    others_bytes: int  # that other processes hold of the device

    def describe(self, device: str) -> str:
        """A line for the terminal."""
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


class PassLimit:
    """The rows that a pass of this rank may have: fewer after one that didn't fit, more again after
    clean steps.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.step = 0  # batches so far
        self.most: int | None = None  # rows of a pass; None: as the plan has it
        self._clean = 0  # batches since the last retreat
        self._failures = 0  # of passes that can't be smaller, in a row
        self._others_bytes = 0  # that other processes held at the last retreat

    def begin(self, others_bytes: Callable[[], int] = int) -> None:
        """A batch begins; `others_bytes` says what other processes hold of the device: 0 where that
        isn't known.
        """
        self.step += 1
        self._clean += 1
        if self.most is None:
            return
        if (
            self._others_bytes >= 2**30
            and self._clean % LOOK_STEPS == 0
            and others_bytes() < self._others_bytes / 2
        ):
            self.most = None
        elif self._clean > CLEAN_STEPS:
            self.most, self._clean = 2 * self.most, 0

    def settle(self) -> None:
        """A pass is complete."""
        self._failures = 0

    def fail(self, rows: int, least: int, held: str) -> None:
        """A pass of these rows didn't fit; DeviceError, with what memory held, if the `least` rows
        keep failing.
        """
        self._failures += rows < 2 * least
        if self._failures >= MOST_FAILURES:
            raise DeviceError(
                f"Rank {self._rank} ran out of memory {self._failures} times in a row with a "
                f"pass of {rows} rows"
                f" that can't be smaller: {held}.",
                (
                    "Take a smaller model, shorter rows or activation checkpointing, or leave the "
                    "device out of the plan."
                ),
            )

    def shrink(self, rows: int, least: int, others_bytes: int = 0) -> int:
        """Rows of a pass that may fit where one of these rows didn't, while other processes hold
        this much.
        """
        self.most, self._clean, self._others_bytes = max(least, rows // 2), 0, others_bytes
        return self.most


def say(line: str) -> None:
    """A line for the terminal."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)
