"""A rank's passes when one runs out of memory: what it holds is dropped, and its rows are computed in smaller passes.

The other ranks wait in the sum. Nothing is lost or taken twice: gradients, buffers and random numbers are as they were
before the pass, but for gradients that are on their way already, which are final.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import msgspec
import numpy
import torch

from ..errors import DeviceError, RequestError
from .exchange import Exchange
from .memory import describe_memory, drop_frames, free_memory, held_by_others, is_out_of_memory, say
from .model_checks import is_sharded
from .nested_batch import each_tensor
from .parts import Part

CLEAN_STEPS = 200  # after which a pass of twice the rows is tried again
MOST_FAILURES = 20  # of one row, in a row


class Retreat(msgspec.Struct, frozen=True):
    """A pass that didn't fit, and what was done."""

    step: int
    rows: int  # of the pass
    smaller: int  # rows of those that follow
    seconds: float  # until they could begin
    others_bytes: int  # that other processes hold of the device

    def describe(self, device: str) -> str:
        """A line for the terminal."""
        held = f" (others hold {self.others_bytes / 2**30:.0f} GiB)" if self.others_bytes >= 2**30 else ""
        return (
            f"{device} ran out of memory at step {self.step:,}{held}: passes of {self.rows} -> {self.smaller} rows,"
            f" {self.seconds:.1f} s"
        )


class Passes:
    """Takes a rank's parts in turn, smaller ones while memory is short.

    `said` is called at each retreat.
    """

    def __init__(self, rank: int, device: torch.device, said: Callable[[Retreat], None]) -> None:
        self._rank, self._device, self._said = rank, device, said
        self._step = 0  # batches so far
        self.most: int | None = None  # rows of a pass; None: as the plan has it
        self.total = 0  # passes that didn't fit
        self._clean = 0  # batches since then
        self._failures = 0  # of single rows, in a row
        self._constant: set[int] = set()  # buffers that passes leave as they are
        self.check: Callable[[Part, int], None] | None = None  # RequestError where parts of some rows don't add up
        self.checked = False
        self._exchanges: list[Exchange] = []
        self._state: PassState | None = None
        self._opened = self._ended = False  # a backward pass of the pass

    def take(
        self, parts: Iterable[Part], models: Sequence[Any], exchanges: Sequence[Exchange], begins: bool = True
    ) -> Iterator[Part]:
        """Each part, on the device for its turn, or its pieces; the models exchange gradients in the last one only.

        `begins`: they are the first of a batch.
        """
        self._exchanges = list(exchanges)
        queue = deque(parts)
        self._clean += begins
        self._step += begins
        if self.most is not None and self._clean > CLEAN_STEPS:
            self.most, self._clean = 2 * self.most, 0
        while queue:
            part = queue.popleft()
            pieces = [part] if self.most is None or part.rows <= self.most else part.cut(self.most, self._least())
            if len(pieces) > 1:
                queue.extendleft(reversed(pieces))
                continue
            yield from self._turn(part, models if queue else ())
            if not part.error:
                part.check_computed()
                if part.origin is None or not queue or queue[0].origin is not part.origin:
                    self._settle()
                continue
            if not any(exchange.held.is_final for exchange in self._exchanges):
                part.origin = part  # gradients that become final from now on are so for this part's rows alone
            self._retreat(part, models)
            part.computed, part.error = False, ""
            queue.appendleft(part)
        self._exchanges = []

    def _turn(self, part: Part, unsynced: Sequence[Any]) -> Iterator[Part]:
        batch, self._opened, self._ended = part.batch, False, False
        self._state = PassState(self._exchanges, self._device, self._constant)
        part.passes = self
        try:
            part.batch = each_tensor(lambda tensor: tensor.to(self._device, non_blocking=True), batch)
            with ExitStack() as stack:
                for model in unsynced:
                    if hasattr(model, "no_sync"):
                        stack.enter_context(model.no_sync())
                yield part
        finally:
            part.batch, part.passes = batch, None

    def open(self) -> None:
        """Prepare for the backward pass of a part."""
        self._opened = True
        dependent = self._state is not None and self._state.is_changed()
        for exchange in self._exchanges:
            exchange.open(dependent)

    def close(self) -> None:
        """Finish after the backward pass of a part."""
        self._ended = True
        for exchange in self._exchanges:
            exchange.close()

    def note_backward(self) -> None:
        """A loss goes backward; unless the part was opened for it, what it gives can't be undone."""
        self._ended |= not self._opened

    def _least(self) -> int:
        """Rows that a pass must have; BatchNorm takes no statistics of one."""
        return 1 + any(each.training for exchange in self._exchanges for each in exchange.normalizers)

    def _settle(self) -> None:
        self._failures = 0
        for exchange in self._exchanges:
            exchange.held.settle()
        if self._state is not None and self._step == 1:
            self._constant |= self._state.unchanged()

    def catch(self, error: BaseException) -> str:
        """The error as text if its pass can be computed again: memory ran out, and no backward pass has ended."""
        if not is_out_of_memory(error) or self._ended or not self._exchanges:
            return ""
        return drop_frames(error)

    def _retreat(self, part: Part, models: Sequence[Any]) -> None:
        began = time.monotonic()
        assert self._state is not None
        for exchange in self._exchanges:
            exchange.fail()
        self._state.restore()
        self._state = None
        free_memory(self._device)
        self._check_left(part, models)
        self._check_sum(part)
        self.most, self._clean = max(self._least(), part.rows // 2), 0
        self.total += 1
        seconds = time.monotonic() - began
        self._said(Retreat(self._step, part.rows, self.most, seconds, held_by_others(self._device)))

    def _check_left(self, part: Part, models: Sequence[Any]) -> None:
        """DeviceError where nothing smaller is left, or where ranks meet in each pass."""
        self._failures += part.rows < 2 * self._least()
        held = describe_memory(self._device)
        if self._failures >= MOST_FAILURES:
            raise DeviceError(
                f"Rank {self._rank} ran out of memory {self._failures} times in a row with a pass of {part.rows} rows"
                f" that can't be smaller: {held}.",
                "Take a smaller model, shorter rows or activation checkpointing, or leave the device out of the plan.",
            )
        if any(map(meets_in_passes, models)):
            raise DeviceError(
                f"Rank {self._rank} ran out of memory in a pass of {part.rows} rows ({held}), and ranks meet in each"
                " pass of FSDP or SyncBatchNorm.",
                "Make a plan with smaller passes: evener balance --micro.",
            )

    def _check_sum(self, part: Part) -> None:
        """DeviceError unless smaller passes learn the same; looked at once."""
        if self.check is None or self.checked or part.rows < 2:
            return
        for rows in (8, 4, 2):
            try:
                self.check(part, rows)
            except RequestError as error:
                raise DeviceError(
                    f"Rank {self._rank} ran out of memory in a pass of {part.rows} rows, and smaller passes would learn"
                    f" something else. {error.message}",
                    "Take a smaller global batch, or a loss that is a mean over rows, or over what count= counts.",
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
            f"Rank {self._rank} ran out of memory in a pass of {part.rows} rows, and there is no room to look whether"
            " smaller passes learn the same.",
            "Make a plan with smaller passes (evener balance --micro), or in a loop of your own call"
            " split.check(loader, ...) before the first step.",
        )


class PassState:
    """Random numbers and buffers before a pass."""

    def __init__(self, exchanges: Sequence[Exchange], device: torch.device, constant: set[int]) -> None:
        self._numbers = random.getstate(), numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._device = device
        normalizers = [each for exchange in exchanges for each in exchange.normalizers]
        self._mixes_rows = any(each.training for each in normalizers)
        self._statistics = {id(buffer) for each in normalizers for buffer in each.buffers()}
        buffers = [each for exchange in exchanges for each in exchange.buffers()]
        self._buffers = [
            (each, each._version, None if id(each) in constant else each.detach().clone()) for each in buffers
        ]

    def unchanged(self) -> set[int]:
        """The buffers that are as they were, by id; BatchNorm changes its own behind PyTorch's count of versions."""
        same = {id(each) for each, _, copied in self._buffers if copied is not None and torch.equal(each, copied)}
        return same - self._statistics

    def is_changed(self) -> bool:
        """True if rows depend on random draws, or on one another, as far as the forward pass shows."""
        if self._mixes_rows or any(each._version != version for each, version, _ in self._buffers):
            return True
        if not torch.equal(self._torch, torch.get_rng_state()):
            return True
        if self._gpu is not None and not torch.equal(self._gpu, torch.cuda.get_rng_state(self._device)):
            return True
        return self._numbers[0] != random.getstate() or _position(self._numbers[1]) != _position(
            numpy.random.get_state()
        )

    def restore(self) -> None:
        """Put random numbers and buffers back as they were before the pass."""
        random.setstate(self._numbers[0])
        numpy.random.set_state(self._numbers[1])
        torch.set_rng_state(self._torch)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)
        if any(copied is None and each._version != version for each, version, copied in self._buffers):
            raise DeviceError(
                "Memory ran out in a pass that changed a buffer for the first time, and it can't be put back.",
                "Train on from the last checkpoint.",
            )
        with torch.no_grad():
            for each, _, copied in self._buffers:
                if copied is not None:
                    each.copy_(copied)


def _position(state: Any) -> tuple[int, int]:
    return int(state[1][0]), int(state[2])


def meets_in_passes(model: Any) -> bool:
    """True if a rank waits for others within a pass of this model."""
    return is_sharded(model) or any(isinstance(each, torch.nn.SyncBatchNorm) for each in model.modules())


@cache
def explain_at_exit() -> None:
    """Let an out-of-memory error that ends the program be followed by the line that would have gone on."""
    shown = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        shown(kind, error, trace)
        if is_out_of_memory(error):
            say(
                "evener: a pass that runs out of memory is computed again in smaller ones where the loop says"
                " split.step(batch, lambda part: loss of part.batch) in place of loss.backward()."
            )

    sys.excepthook = explain
