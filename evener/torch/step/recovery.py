"""Recover from a pass that ran out of memory by computing its rows in smaller passes.

`Passes` in step.py uses this module. The memory of the failed pass is freed. Gradients, buffers and
random generators return to their state before the pass, so that no row is lost or counted twice.
Only gradients that were already sent stay, because they are final. The other ranks wait in the
all-reduce meanwhile.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...errors import DeviceError, RequestError
from ...training.passes import PassLimit
from ...training.retreat import Retreat, says_out_of_memory
from ..audit.randomness import RandomState
from ..sums.collectives import CollectiveError, count_foreign
from ..sums.exchange import Exchange
from .part import Part


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out on a GPU or on the host."""
    # libraries' errors are recognized by their messages
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def drop_frames(error: BaseException) -> str:
    """Clear the local variables in an error's traceback, and return the first line of its message.

    Otherwise, these variables would keep the failed pass's tensors in memory. For an error without
    a message, the name of its class is returned.
    """
    # these variables would keep the failed pass's tensors in memory
    text = str(error).partition("\n")[0]
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__
    return text or type(error).__name__


SHORT: set[torch.device] = set()  # devices on which a pass of this process has run out of memory
# devices whose allocator's unused memory is returned before the next step of an optimizer
FREED_NEXT: set[torch.device] = set()


def free_memory(device: torch.device) -> None:
    """Collect garbage, and release the memory that the CUDA allocator has cached."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_before_update(device: torch.device) -> None:
    """Release the CUDA allocator's cached memory just before the next optimizer step."""
    # The first step allocates the optimizer's state. It would fragment blocks that activations have
    # used, and the second step could run out of memory.
    if device.type == "cuda":
        FREED_NEXT.add(device)


def bytes_of_others(device: torch.device) -> int:
    """Return about how many bytes of GPU memory other processes use; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    own = int(torch.cuda.memory_reserved(device)) + 2**29  # half a GiB for the CUDA context
    return max(0, int(total - free) - own)


def describe_memory(device: torch.device) -> str:
    """Return a phrase for messages that says how much memory is used, free, and used by others."""
    if device.type != "cuda":
        return "the memory of this machine's CPU"
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    left = min(free, allowed - reserved)
    gib = [each / 2**30 for each in (allowed, held, reserved - held, left, bytes_of_others(device))]
    return (
        "of {:.1f} GiB the training holds {:.1f}, {:.1f} are unused pieces, {:.1f} are free, others"
        " hold {:.1f}"
    ).format(*gib)


@dataclass
class RunningPass:
    """The pass that is being computed, with the state to restore if it runs out of memory."""

    part: Part
    state: PassState  # before the pass
    collectives: int  # number of collectives before the pass that evener didn't start
    opened: bool = False  # True if `Part.backward` started its backward pass
    ended: bool = False  # True if one of its backward passes is over, and can't be undone

    def has_used_collectives(self) -> bool:
        """Return whether the user's loop has communicated with other ranks during the pass."""
        return count_foreign() != self.collectives


class Recovery:
    """Undoes passes that run out of memory, so that their rows can be computed in smaller passes.

    Arguments:

    - `rank`: this rank.
    - `device`: the device whose memory may run out.
    - `report_retry`: called when a failed pass was undone, before its rows are computed again.
    """

    def __init__(
        self, rank: int, device: torch.device, report_retry: Callable[[Retreat], None]
    ) -> None:
        self._rank, self._device, self._report_retry = rank, device, report_retry
        self._bytes_of_others = partial(bytes_of_others, device)
        self.limit = PassLimit(rank)
        self._constant: set[int] = set()  # ids of buffers that passes don't change
        # raises RequestError if parts of this many rows have another gradient than the whole part
        self.check: Callable[[Part, int], None] | None = None
        self.checked = False
        self.uses_collectives = False  # True if the loop communicates with other ranks in a pass
        # why a pass can't be undone if evener doesn't sum its gradients, and the remedy
        self.final = (
            "something other than evener sums its gradients, such as FSDP",
            "Make a plan with smaller passes: evener balance --micro.",
        )
        self.advice = (  # printed after the loop's error
            "a pass that runs out of memory is computed again in smaller ones where the loop says"
            " split.step(batch, lambda part: loss of part.batch) in place of loss.backward()."
        )

    def advise(self, error: BaseException) -> str:
        """Return advice to print for an out-of-memory error, or "" for other errors."""
        return self.advice if is_out_of_memory(error) else ""

    def begin_batch(self) -> None:
        """Update the maximum number of rows per pass, which may rise if memory has become free."""
        self.limit.begin_batch(self._bytes_of_others)

    def open(self, part: Part, exchanges: Sequence[Exchange]) -> RunningPass:
        """Save the state that a pass may change, and return a RunningPass with the saved state.

        This is called right before the pass is computed.
        """
        return RunningPass(part, PassState(exchanges, self._constant), count_foreign())

    def catch(
        self, error: BaseException, running: RunningPass, exchanges: Sequence[Exchange]
    ) -> str:
        """Return the message of an out-of-memory error, or "" for an error that can't be handled.

        Raises DeviceError if memory ran out and another library sums the gradients, because the
        pass then can't be undone.
        """
        if not is_out_of_memory(error) or running.ended:
            return ""
        if not exchanges:
            raise DeviceError(
                f"Rank {self._rank} ran out of memory in a pass of {running.part.rows} rows"
                f" ({describe_memory(self._device)}), and can't compute it again: {self.final[0]}.",
                self.final[1],
            ) from None
        return drop_frames(error)

    def undo(self, running: RunningPass, exchanges: Sequence[Exchange], min_rows: int) -> None:
        """Undo a failed pass, and lower the maximum number of rows per pass.

        `min_rows` is the smallest number of rows that a pass may have. Raises DeviceError if
        smaller passes are impossible or would give different gradients.
        """
        began = time.monotonic()
        part, rows = running.part, running.part.rows
        for exchange in exchanges:
            exchange.fail()
        running.state.restore()
        free_memory(self._device)
        SHORT.add(self._device)
        held = describe_memory(self._device)
        self.limit.count_failure(rows, min_rows, held)
        if self.uses_collectives:
            raise self._collective_error(f"ran out of memory in a pass of {rows} rows ({held})")
        self._check_smaller(running)
        others = bytes_of_others(self._device)
        smaller = self.limit.halve(rows, min_rows, others)
        seconds = time.monotonic() - began
        self._report_retry(Retreat(self.limit.step, part.rows, smaller, seconds, others))

    def forget(self, running: RunningPass, exchanges: Sequence[Exchange]) -> None:
        """Forget the failed attempts at a pass, once all of its rows have been computed."""
        # the first batch also shows which buffers passes don't change; later passes don't copy
        # these
        for exchange in exchanges:
            exchange.held.forget_failure()
        if self.limit.step == 1:
            self._constant |= running.state.unchanged()

    def look_for_collectives(self, running: RunningPass) -> None:
        """Check whether the user's loop has communicated with other ranks during a pass.

        Raises DeviceError if it has, and if the pass is a smaller one, run because memory ran out.
        This rank would then run a different number of collectives than the other ranks.
        """
        # ranks would then run different numbers of collectives
        if not running.has_used_collectives():
            return
        self.uses_collectives = True
        part = running.part
        if part.is_piece and not part.error:
            raise self._collective_error(
                f"takes {part.rows} rows at once of a pass of {part.turn.planned}, as memory was "
                f"short"
            )

    def _collective_error(self, seen: str) -> DeviceError:
        return DeviceError(
            f"Rank {self._rank} {seen}, and the loop communicates with other ranks in a pass, by "
            f"torch.distributed or in a layer:"
            " they would wait for each other.",
            (
                "Gather values after the step, or make a plan with smaller passes: evener "
                "balance --micro."
            ),
        )

    def _check_smaller(self, running: RunningPass) -> None:
        """Raise DeviceError if smaller passes would give different gradients, or may do so."""
        # the gradients of up to 8 rows are compared, as many as fit in memory, until a comparison
        # succeeds
        part = running.part
        if self.check is None or self.checked or part.rows < 2:
            return
        for rows in (8, 4, 2):
            try:
                self.check(part, rows)
            except CollectiveError:
                raise self._collective_error(
                    f"ran out of memory in a pass of {part.rows} rows"
                ) from None
            except RequestError as error:
                raise DeviceError(
                    f"Rank {self._rank} ran out of memory in a pass of {part.rows} rows, and "
                    f"smaller passes would learn"
                    f" something else. {error.message}",
                    (
                        "Take a smaller global batch, or a loss that is a mean over rows, or over "
                        "what count= counts."
                    ),
                ) from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                drop_frames(error)
                free_memory(self._device)
            else:
                self.checked = True
                return
        raise DeviceError(
            f"Rank {self._rank} ran out of memory in a pass of {part.rows} rows, and there is "
            f"no memory left to check"
            " whether smaller passes learn the same.",
            "Make a plan with smaller passes (evener balance --micro).",
        )


class PassState:
    """Saves random generators and buffers before a pass, to restore them if memory runs out.

    `constant_buffers` has the ids of buffers that passes don't change; these aren't copied.
    """

    def __init__(self, exchanges: Sequence[Exchange], constant_buffers: set[int]) -> None:
        self._numbers = RandomState()
        normalizers = [normalizer for exchange in exchanges for normalizer in exchange.normalizers]
        self._mixes_rows = any(normalizer.training for normalizer in normalizers)
        self._statistics = {
            id(buffer) for normalizer in normalizers for buffer in normalizer.buffers()
        }
        buffers = [each for exchange in exchanges for each in exchange.buffers.all()]
        self._buffers = [
            (each, each._version, None if id(each) in constant_buffers else each.detach().clone())
            for each in buffers
        ]

    def unchanged(self) -> set[int]:
        """Return the ids of copied buffers that have the same values as before the pass."""
        # without BatchNorm's statistics, which change without a new version
        same = {
            id(each)
            for each, _, copied in self._buffers
            if copied is not None and torch.equal(each, copied)
        }
        return same - self._statistics

    def may_differ(self) -> bool:
        """Return whether repeating the pass may give different results.

        It may if the pass uses BatchNorm, has drawn random numbers or has changed buffers.
        """
        changed = any(each._version != version for each, version, _ in self._buffers)
        return self._mixes_rows or changed or self._numbers.has_changed()

    def restore(self) -> None:
        """Restore the random generators and the buffers.

        Raises DeviceError if a buffer that wasn't copied has changed.
        """
        self._numbers.restore()
        if any(
            copied is None and each._version != version for each, version, copied in self._buffers
        ):
            raise DeviceError(
                "Memory ran out in a pass that changed a buffer for the first time, and it "
                "can't be put back.",
                "Train on from the last checkpoint.",
            )
        with torch.no_grad():
            for each, _, copied in self._buffers:
                if copied is not None:
                    each.copy_(copied)
