"""Buckets: flat tensors that collect gradients of several parameters for one all-reduce."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Collection, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch

from ...errors import RequestError
from ..members import Members
from ..private import add_each, copy_each, gradient_hooks

FIRST_BYTES = 1 << 20  # size of the first bucket, which is small so that it is sent early
# minimum mean size of a gradient, in values, for weighting during the copy to be faster
FUSED = {"cpu": 1 << 12, "cuda": 1 << 21}
MOST_PATTERNS = 64  # maximum number of flag patterns that a bucket caches
MOST_KEPT = 64 << 20  # maximum bytes of buffers that are compared with a copy
SAMPLED = 8  # number of weights that ranks compare at a time
TAIL = 3 + SAMPLED  # length of the tail at the end of a bucket, after the flags
# maximum difference between ranks' weights, in units of the dtype's rounding; devices of
# different kinds reach 4 units in 600 steps
APART = 1e4
MOST_APART = 0.1  # the same relative to the weights, for 16-bit dtypes

GRADIENT, _IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")


class Bucket:
    """Flat tensor with the gradients of several parameters, which a single all-reduce sums.

    After the gradients, it has a flag for each parameter, which is 0 if the parameter has no
    gradient. The last elements (the tail) are values that ranks compare.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters, self.last = tuple(parameters), parameters[-1]
        self.ids = set(map(id, parameters))
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(
            sum(sizes) + len(sizes) + TAIL, dtype=self.last.dtype, device=self.last.device
        )
        self._views = _cut(self.flat.data, parameters)  # with their own version counters
        self.gradients, self._flags = self.flat[: sum(sizes)], self.flat[sum(sizes) :]
        self.tail, self._targets = self.flat[-TAIL:], [*self._views, self._flags]
        self._sent = [torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat]
        self._patterns: dict[tuple[int, ...], torch.Tensor] = {}  # cached flags and tails
        self._hold: torch.Tensor | None = None  # weighted gradients of earlier batches
        self._held_views: list[torch.Tensor] = []
        # indices of parameters without a gradient in the last `gather`
        self._absent: list[int] = []
        mean = self.gradients.numel() / len(sizes)
        # multiplies during the copy, so that memory is read once
        self._fuses = mean > FUSED.get(self.flat.device.type, math.inf)
        self._work: Any = None
        self._version = 0  # version of the gradients when they were sent

    def has_all_gradients(self, computed: set[int] | None) -> bool:
        """Return whether the gradients of all the bucket's parameters have been computed.

        `computed` has the ids of parameters with a new gradient; None means those whose `.grad` is
        set.
        """
        if computed is None:
            return all(map(is_not, map(GRADIENT, self._parameters), repeat(None)))
        return self.ids <= computed

    def check_sent(self) -> None:
        """Raise a RequestError if a gradient has changed after the bucket was sent."""
        # the sum that is being computed would lack the change
        if self._views[0]._version != self._version:
            raise RequestError(
                "A parameter got a second gradient in one backward pass, unlike in the first: "
                "its sum has already begun.",
                "Use torch.utils.checkpoint with use_reentrant=False.",
            )

    def gather(self) -> None:
        """Copy the parameters' gradients into the bucket, and make each `.grad` a view of it."""
        # needed again after zero_grad has set gradients to None
        gradients = list(map(GRADIENT, self._parameters))
        self._absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        pairs = enumerate(zip(gradients, self._views, strict=True))
        indices = [index for index, (each, view) in pairs if each is not view and each is not None]
        if indices:
            self._copy_weighted(
                [self._views[each] for each in indices], [gradients[each] for each in indices]
            )
        for index in indices:
            self._parameters[index].grad = self._views[index]
            self._drop_folded(index)

    def _gather_new(self, gradients: list[Any], flags: torch.Tensor, weight: float) -> None:
        """Fill the bucket with weighted gradients and `flags`, and make each `.grad` a view of it.

        This is for gradients that aren't views of the bucket yet. `flags` has all values that are
        stored after the gradients: a flag for each parameter, then the tail, which ranks compare.
        """
        # calls as few functions of PyTorch as possible
        if self._fuses and weight not in (0.0, 1.0):
            self._copy_weighted(self._views, gradients, weight)
            self._flags.copy_(flags)
        else:
            self._copy_weighted(self._targets, [*gradients, flags])
            self._multiply(weight)
        _set_gradients(self._parameters, self._views)

    def _copy_weighted(
        self, views: list[torch.Tensor], gradients: list[Any], weight: float = 1.0
    ) -> None:
        """Copy gradients to views of the bucket, multiplied by `weight`.

        Raises RequestError for gradients that are sparse, have another dtype, or were computed with
        `create_graph=True`.
        """
        if torch.is_grad_enabled() and any(each.requires_grad for each in gradients):
            raise RequestError(
                "A gradient was computed with create_graph=True, and its sum over ranks can't "
                "be differentiated again.",
                (
                    "Use torch.autograd.grad(..., create_graph=True) for the inner gradient, and "
                    "a plain backward() last."
                ),
            )
        if gradients[0].dtype is not self.flat.dtype:
            raise RequestError(
                "The model has changed its type since it was wrapped.",
                "Call double(), half() or bfloat16() before split.wrap.",
            )
        if any(map(_IS_SPARSE, gradients)):
            raise RequestError(
                "A gradient is sparse, as of Embedding(sparse=True), and a plan weighs dense ones.",
                "Leave sparse=True out.",
            )
        if weight == 1.0:
            copy_each(views, gradients)
            return
        # a Python number would take longer in each call
        factor = torch.tensor(weight, dtype=torch.float64)
        for view, gradient in zip(views, gradients, strict=True):
            torch.mul(gradient, factor, out=view)

    def _multiply(self, weight: float) -> None:
        """Multiply the bucket's gradients by a weight.

        A weight of 0 sets all of them to 0, including infinities and NaN.
        """
        if weight == 0.0:
            self.gradients.zero_()
        elif weight != 1.0:
            self.gradients.mul_(weight)

    def fold(self, weight: float) -> None:
        """Set aside the gradients computed so far, multiplied by `weight`.

        They are added in the next all-reduce. Gradients that are computed later can then have
        another weight.
        """
        # must be called before the weight changes
        self.weigh(weight, 0)
        self._hold = self.flat.clone()
        self._held_views = _cut(self._hold, self._parameters)
        self.flat.zero_()

    def weigh(self, weight: float, batch_number: int) -> None:
        """Prepare the all-reduce: write gradients times `weight`, flags and the tail to the bucket.

        The tail includes `batch_number`, the number of the batch, which ranks compare.
        """
        gradients = list(map(GRADIENT, self._parameters))
        if all(map(is_not, gradients, self._views)) and all(map(is_not, gradients, repeat(None))):
            self._absent, self._hold = [], None
            self._gather_new(gradients, self._make_flags(batch_number, weight != 0.0), weight)
            return
        self.gather()
        for index in self._absent:
            self._views[index].zero_()
            self._drop_folded(index)
        self._multiply(weight)
        self._flags.copy_(self._make_flags(batch_number, weight != 0.0))
        self._add_folded()

    def _add_folded(self) -> None:
        """Add the gradients that `fold` has set aside to the bucket."""
        if self._hold is not None:
            self.flat.add_(self._hold)
            self._hold, self._held_views = None, []

    def send(self, group: Any) -> None:
        """Start the bucket's all-reduce over the ranks of a process group."""
        self._version = self._views[0]._version
        self._work = group.allreduce(self._sent)  # dist.all_reduce would take longer to start it

    def receive(self) -> None:
        """Wait for the all-reduce, and set `.grad` of parameters that only other ranks used."""
        self._work.wait()
        self._work = None
        if self._absent:
            used = self._flags.tolist()
            for index in self._absent:
                if used[index] != 0:  # `!=` also works for complex numbers
                    self._parameters[index].grad = self._views[index]

    def _drop_folded(self, index: int) -> None:
        """Set one parameter's gradient to 0 in the gradients that `fold` has set aside.

        `index` is the parameter's index in the bucket.
        """
        # the user's loop may have cleared the parameter's gradient in the meantime
        if self._hold is not None:
            self._held_views[index].zero_()

    def _make_flags(self, batch_number: int, has_weight: bool) -> torch.Tensor:
        """Return the values to store after the gradients: a flag for each parameter, then the tail.

        The tail has values that ranks compare, such as `batch_number`. `has_weight` is False if
        this rank's weight is 0.
        """
        key = (batch_number, has_weight, *self._absent)
        if key not in self._patterns:
            if len(self._patterns) >= MOST_PATTERNS:
                self._patterns.clear()
            flags = torch.full(
                (len(self._parameters) + TAIL,), float(has_weight), dtype=self.flat.dtype
            )
            flags[self._absent] = 0
            flags[-TAIL:] = 0
            flags[1 - TAIL] = batch_number
            self._patterns[key] = flags.to(self.flat.device)
        return self._patterns[key]


def make_buckets(parameters: Sequence[Any], max_bytes: int) -> list[Bucket]:
    """Divide parameters among buckets of about `max_bytes` bytes.

    `parameters` are in the order in which their gradients are computed, and buckets keep that
    order. The first bucket is smaller, so that it is sent early. All parameters of a bucket have
    the same dtype and device.
    """
    made: list[Bucket] = []
    open_: dict[Any, list[Any]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        own = open_.setdefault(kind, [])
        own.append(parameter)
        size = sum(one.numel() * one.element_size() for one in own)
        if size >= (max_bytes if made else min(FIRST_BYTES, max_bytes)):
            made.append(Bucket(own))
            del open_[kind]
    return made + list(map(Bucket, open_.values()))


def _cut(flat: torch.Tensor, parameters: Sequence[Any]) -> list[torch.Tensor]:
    views, start = [], 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        start += parameter.numel()
        dense = any(
            parameter.is_contiguous(memory_format=kind) for kind in _FORMATS.get(parameter.ndim, ())
        )
        views.append(
            part.as_strided(parameter.shape, parameter.stride())
            if dense
            else part.view(parameter.shape)
        )
    return views


def _set_gradients(parameters: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    # `deque` calls `setattr` faster than a loop would
    deque(map(setattr, parameters, repeat("grad"), gradients), maxlen=0)


_FORMATS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def warn_of_hooks(parameters: Sequence[Any], own: set[int]) -> None:
    """Warn if the user has registered a hook on a parameter's gradient.

    `own` has the ids of evener's own hooks.
    """
    if any(set(gradient_hooks(parameter)) - own for parameter in parameters):
        warnings.warn(
            "A parameter has a hook on its gradient, which gets that of this rank's rows "
            "alone: masks and factors are"
            " exact, clamping isn't. Change gradients after backward().",
            stacklevel=2,
        )


class HostCopy:
    """Copies a GPU tensor to the host without making the host wait for the GPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        self._event = torch.cuda.Event() if values.is_cuda else None
        if self._event is not None:
            self._event.record()

    def is_complete(self) -> bool:
        """Return whether the copy is complete."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[Any]:
        """Wait for the copy and return its values."""
        if self._event is not None:
            self._event.synchronize()
        return list(self._values.tolist())


class TailReader:
    """Reads the values at the end of a bucket that show whether ranks have diverged.

    They come from the weights, the buffers and the batch numbers of all ranks.
    """

    # on a GPU, all tails but the first are read one step late, so that the host doesn't wait

    def __init__(self) -> None:
        self._copied: HostCopy | None = None
        self._expected = 0  # the expected sum of batch numbers for the copied tail

    def read(self, tail: torch.Tensor, expected: int) -> bool:
        """Check the summed tail of a bucket, and return whether any rank's buffers have changed.

        On a GPU, this checks the previous step's tail, so that the host doesn't wait. `expected` is
        the expected sum of batch numbers. Raises RequestError if the ranks' weights or batch
        numbers differ.
        """
        copied, self._copied = self._copied, HostCopy(tail) if tail.is_cuda else None
        read, wanted = (
            (tail.tolist(), expected) if copied is None else (copied.read(), self._expected)
        )
        (changed, number, *weights), self._expected = read, expected
        if sum(map(abs, weights[:-1])) > min(APART * torch.finfo(tail.dtype).eps, MOST_APART) * abs(
            weights[-1]
        ):
            raise RequestError(
                "The ranks' weights aren't the same any more: a rank has changed its own by "
                "what the others don't have,"
                " such as a rate that follows the loss of its rows, or random numbers.",
                "Decide by values that all ranks have, as of split.mean(loss), and draw what "
                "changes weights from a"
                " torch.Generator that has the same seed on every rank.",
            )
        if number != wanted:
            raise RequestError(
                "The ranks sum gradients of different batches: one has left a batch out or "
                "taken one more, as a loop"
                " does that goes on after a loss of NaN, or an error, on this rank alone.",
                (
                    "Leave a batch out on all ranks or on none: decide by split.total(...), which "
                    "all have."
                ),
            )
        return bool(changed)


class Buffers:
    """A module's buffers, such as BatchNorm's averages, with copies that show whether they change.

    `ignored` has the names of buffers to leave out.
    """

    def __init__(self, module: Any, ignored: Collection[str] = ()) -> None:
        self._members, self._ignored = Members(module), ignored
        self._kept_at = -1  # `Members.buffers_at` when the values were copied
        self._places: list[tuple[int, int]] = []
        # for each device: the bytes and their copy
        self._known: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def all(self) -> list[torch.Tensor]:
        """Return all buffers, without duplicates."""
        every = self._members.buffers()
        return list({id(each): each for name, each in every if name not in self._ignored}.values())

    def keep(self) -> bool:
        """Copy the buffers' values, to detect later changes.

        Return False if the buffers are too large to be copied.
        """
        self._kept_at = self._members.buffers_at()
        self._places = self._find_places()
        self._known = []
        buffers = self.all()
        if sum(buffer.numel() * buffer.element_size() for buffer in buffers) > MOST_KEPT:
            return False
        for device in {buffer.device for buffer in buffers}:
            own = [_bytes_of(buffer) for buffer in buffers if buffer.device == device]
            self._known.append((own, torch.cat(own)))
        return True

    def flag_changes(self, flag: torch.Tensor) -> None:
        """Increase `flag`, a tensor with one number, if a buffer has changed or was replaced.

        Buffers are compared with their state at the last call of `keep`.
        """
        # Values are compared, because PyTorch's version counter misses changes by BatchNorm and
        # through `buffer.data`. If `may_differ` is false, there are no buffers.
        may_differ = self._places or self._kept_at != self._members.buffers_at()
        if may_differ and self._find_places() != self._places:
            flag.add_(1)
            return
        for own, kept in self._known:
            now = torch.cat(own)
            if kept.is_cuda:
                flag.add_((now != kept).any().to(flag.device, non_blocking=True))
            elif not torch.equal(now, kept):
                flag.add_(1)

    def _find_places(self) -> list[tuple[int, int]]:
        return [(id(each), each.data_ptr()) for each in self.all()]


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of a buffer's memory as a tensor of bytes."""
    last = sum(
        (size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
    return buffer.detach().as_strided((last + 1 if buffer.numel() else 0,), (1,)).view(torch.uint8)


class EarlierGradients:
    """Protects the gradients of a batch's earlier passes while a pass that may fail is running."""

    # If rows' results depend on random draws or on one another, a retry computes other results.
    # Then all gradients of the failed pass are dropped, and `late` is True. It is also True in a
    # retry with `final` gradients.

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        # ids of parameters whose gradients of a failed pass are complete
        self.final: set[int] | None = None
        self._kept: list[Any] | None = None  # gradients from before the pass, set aside
        self.opened = self.late = self.apart = False

    def open(self, dependent: bool) -> None:
        """Begin a gradient-accumulation pass that may fail.

        `dependent` is whether the results of its rows depend on random draws or on each other.
        """
        self.opened, self.late = True, dependent or self.final is not None
        self.apart = self.late and (
            self.final is not None
            or any(parameter.grad is not None for parameter in self._parameters)
        )
        if self.apart:
            self._kept = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def merge(self) -> None:
        """Add the gradients of earlier passes to those of the pass that has just succeeded."""
        if self._kept is None:
            return
        kept = [
            pair for pair in zip(self._parameters, self._kept, strict=True) if pair[1] is not None
        ]
        final, self._kept = self.final or (), None
        added = [
            (old, each.grad)
            for each, old in kept
            if each.grad is not None and id(each) not in final
        ]
        for parameter, old in kept:
            parameter.grad = old
        if added:
            with torch.no_grad():
                add_each(*map(list, zip(*added, strict=True)))

    def close(self) -> None:
        """End a pass; its changes to the gradients can't be undone any more."""
        self.opened = self.late = self.apart = False

    def forget_failure(self) -> None:
        """Forget that a pass failed, now that its rows have been computed again."""
        self.final = None

    def fail(self, computed: set[int]) -> None:
        """Undo the changes that a failed pass has made to the gradients.

        `computed` has the ids of parameters whose gradients it had completed.
        """
        if self._kept is not None:
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                parameter.grad = kept
            self._kept = None
        elif self.late:
            for parameter in self._parameters:
                if id(parameter) in computed:
                    parameter.grad = None
        elif self.opened:
            self.final = set(computed)
        self.close()
