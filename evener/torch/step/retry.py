"""A rank's passes when one runs out of memory: what it holds is dropped, and its rows are computed
in smaller passes.

The other ranks wait in the sum. Nothing is lost or taken twice: gradients, buffers and random
numbers are as they were before the pass, but for gradients that are on their way already, which are
final.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ...errors import DeviceError, RequestError
from ...training.passes import PassLimit, PassQueue
from ...training.retreat import Retreat, says_out_of_memory
from ..audit.randomness import RandomState
from ..rows.structure import each_tensor
from ..sums.collectives import MeetingError, count_foreign
from ..sums.exchange import Exchange
from .loose import LOOSE
from .part import Part


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error says that memory ran out, in PyTorch's allocator or in a library that it
    calls.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def drop_frames(error: BaseException) -> str:
    """Release what the frames of an error hold; returns the error as text, which holds nothing."""
    text = str(error).partition("\n")[0]
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__
    return text or type(error).__name__


SHORT: set[torch.device] = set()  # devices on which a pass of this process has run out of memory


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
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
    return "of {:.1f} GiB the training holds {:.1f}, {:.1f} are free, others hold {:.1f}".format(
        *gib
    )


class Passes:
    """Takes a rank's parts in turn, smaller ones while memory is short.

    `said` is called at each retreat.
    """

    def __init__(self, rank: int, device: torch.device, said: Callable[[Retreat], None]) -> None:
        self._rank, self._device, self._said = rank, device, said
        self.limit = PassLimit(rank)
        self._constant: set[int] = set()  # buffers that passes leave as they are
        # RequestError where parts of so many rows have another gradient than these together
        self.check: Callable[[Part, int], None] | None = None
        self.checked = False
        self._exchanges: list[Exchange] = []
        self._state: PassState | None = None
        self._opened = self._ended = False  # a backward pass of the pass
        self._given: set[Exchange] = set()  # gradients by earlier passes of the batch
        self._part: Part | None = None  # that is computed
        self._before = 0  # collectives of the loop's own before the pass
        self.meets = False  # there are some in a pass
        self.final = (  # why a pass can't be undone where there is no exchange, and what to do
            "others than evener sum its gradients, as FSDP does",
            "Make a plan with smaller passes: evener balance --micro.",
        )
        self.advice = (  # about an error of the loop's own
            "a pass that runs out of memory is computed again in smaller ones where the loop says"
            " split.step(batch, lambda part: loss of part.batch) in place of loss.backward()."
        )

    def advise(self, error: BaseException) -> str:
        """The sentence to follow an error that ends this process, if memory ran out."""
        return self.advice if is_out_of_memory(error) else ""

    def take(
        self,
        parts: Sequence[Part],
        models: Sequence[Any],
        exchanges: Sequence[Exchange],
        begins: bool = True,
        move: bool = True,
    ) -> Iterator[Part]:
        """Each part, on the device for its turn, or its pieces; the models exchange gradients in
        the last one only.

        `begins`: they are the first of a batch; without `move`, the caller sends them to the
        device.
        """
        self._exchanges = list(exchanges)
        self._given = set()
        if begins:
            self.limit.begin_batch(partial(held_by_others, self._device))
        queue = PassQueue([each.rows for each in parts], self.limit)
        turn = queue.take(self._least())
        while turn is not None:
            part = parts[turn.number].at(turn)
            unsynced = () if turn.last else models
            yield from self._turn(part, unsynced, self._device if move else None)
            if part.error:
                # Unless a failed pass is still being made good, gradients that were sent are whole
                # for this part's rows alone.
                queue.retry(all(exchange.held.final is None for exchange in self._exchanges))
                self._retreat(part)
                part.computed, part.error = False, ""
            else:
                part.check_computed()
                self._given |= {each for each in self._exchanges if each.has_gradients()}
                if queue.complete():
                    self._settle()
            turn = queue.take(self._least())
        self._exchanges = []

    def _turn(
        self, part: Part, unsynced: Sequence[Any], device: torch.device | None
    ) -> Iterator[Part]:
        batch, self._opened, self._ended = part.batch, False, False
        self._state = PassState(self._exchanges, self._constant)
        part.passes, self._part, self._before = self, part, count_foreign()
        try:
            with part:  # its rows may find no room
                part.batch = each_tensor(
                    lambda tensor: tensor.to(device, non_blocking=True) if device else tensor, batch
                )
            if part.error:
                return
            with ExitStack() as stack:
                if not part.turn.last:
                    stack.enter_context(LOOSE.no_sync())
                for model in unsynced:
                    if hasattr(model, "no_sync"):
                        stack.enter_context(model.no_sync())
                yield part
            self._look_for_meetings(part)
        finally:
            part.batch, part.passes, self._part = batch, None, None

    def open(self) -> None:
        """Prepare for the backward pass of a part."""
        self._opened = True
        if self._part is not None:
            self._look_for_meetings(self._part)
        dependent = self._state is not None and self._state.is_changed()
        for exchange in self._exchanges:
            if exchange in self._given and not exchange.has_gradients():
                raise RequestError(
                    "The gradients of the batch's earlier passes are gone.",
                    "Call zero_grad() before or after all parts of a batch, not in between.",
                )
            exchange.open(dependent)

    def close(self) -> None:
        """Finish after the backward pass of a part."""
        self._ended = True
        for exchange in self._exchanges:
            exchange.close()

    def note_backward(self) -> None:
        """A loss goes backward; unless the part was opened for it, what it gives can't be
        undone.
        """
        self._ended |= not self._opened

    def _least(self) -> int:
        """Rows that a pass must have; BatchNorm takes no statistics of one."""
        return 1 + any(
            each.training for exchange in self._exchanges for each in exchange.normalizers
        )

    def _settle(self) -> None:
        for exchange in self._exchanges:
            exchange.held.settle()
        if self._state is not None and self.limit.step == 1:
            self._constant |= self._state.unchanged()

    def catch(self, error: BaseException) -> str:
        """The error as text if its pass can be computed again: memory ran out, and no backward pass
        has ended.
        """
        if not is_out_of_memory(error) or self._ended:
            return ""
        if not self._exchanges and self._part is not None:
            raise DeviceError(
                f"Rank {self._rank} ran out of memory in a pass of {self._part.rows} rows"
                f" ({describe_memory(self._device)}), and can't compute it again: {self.final[0]}.",
                self.final[1],
            ) from None
        return drop_frames(error)

    def _retreat(self, part: Part) -> None:
        began = time.monotonic()
        assert self._state is not None
        for exchange in self._exchanges:
            exchange.fail()
        self._state.restore()
        self._state = None
        free_memory(self._device)
        SHORT.add(self._device)
        held = describe_memory(self._device)
        self.limit.count_failure(part.rows, self._least(), held)
        if self.meets:
            raise self._meeting(f"ran out of memory in a pass of {part.rows} rows ({held})")
        self._check_sum(part)
        others = held_by_others(self._device)
        smaller = self.limit.halve(part.rows, self._least(), others)
        seconds = time.monotonic() - began
        self._said(Retreat(self.limit.step, part.rows, smaller, seconds, others))

    def _look_for_meetings(self, part: Part) -> None:
        """Note that the loop has met other ranks in this pass; DeviceError if it is a piece of the
        plan's pass.
        """
        if count_foreign() == self._before:
            return
        self.meets = True
        if part.rows < part.turn.planned and not part.error:
            raise self._meeting(
                f"takes {part.rows} rows at once of a pass of {part.turn.planned}, as memory was "
                f"short"
            )

    def _meeting(self, seen: str) -> DeviceError:
        return DeviceError(
            f"Rank {self._rank} {seen}, and the loop meets other ranks in a pass, by "
            f"torch.distributed or in a layer:"
            " they would wait for each other.",
            (
                "Gather figures after the step, or make a plan with smaller passes: evener "
                "balance --micro."
            ),
        )

    def _check_sum(self, part: Part) -> None:
        """DeviceError unless smaller passes learn the same; checked once."""
        if self.check is None or self.checked or part.rows < 2:
            return
        for rows in (8, 4, 2):
            try:
                self.check(part, rows)
            except MeetingError:
                raise self._meeting(f"ran out of memory in a pass of {part.rows} rows") from None
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
    """Random numbers and buffers before a pass."""

    def __init__(self, exchanges: Sequence[Exchange], constant: set[int]) -> None:
        self._numbers = RandomState()
        normalizers = [each for exchange in exchanges for each in exchange.normalizers]
        self._mixes_rows = any(each.training for each in normalizers)
        self._statistics = {id(buffer) for each in normalizers for buffer in each.buffers()}
        buffers = [each for exchange in exchanges for each in exchange.buffers.all()]
        self._buffers = [
            (each, each._version, None if id(each) in constant else each.detach().clone())
            for each in buffers
        ]

    def unchanged(self) -> set[int]:
        """The buffers that are as they were, by id; BatchNorm changes its own behind PyTorch's
        count of versions.
        """
        same = {
            id(each)
            for each, _, copied in self._buffers
            if copied is not None and torch.equal(each, copied)
        }
        return same - self._statistics

    def is_changed(self) -> bool:
        """True if rows depend on random draws, or on one another, as far as the forward pass
        shows.
        """
        changed = any(each._version != version for each, version, _ in self._buffers)
        return self._mixes_rows or changed or self._numbers.has_changed()

    def restore(self) -> None:
        """Put random numbers and buffers back as they were before the pass."""
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
