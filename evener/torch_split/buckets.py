"""Flat buckets of gradients: each gradient is a view of one, so that a sum over ranks is one call for many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import RequestError

FIRST_BYTES = 1 << 20  # the first bucket is small, so that it goes early


class Bucket:
    """The gradients of some parameters, one behind the other, and a figure for each that says whether there is one.

    `places` are the parameters' numbers in their model; `left` counts those whose gradient the pass hasn't given yet.
    """

    def __init__(self, places: Sequence[int], parameters: Sequence[Any]) -> None:
        self.places, self._parameters = tuple(places), tuple(parameters)
        first = parameters[0]
        sizes = [each.numel() for each in parameters]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self._views = _cut(self.flat, parameters)
        self._flags = self.flat[sum(sizes) :]
        self._patterns: dict[bytes, torch.Tensor] = {}
        self._hold: torch.Tensor | None = None  # gradients of earlier batches, weighted already
        self._held_views: list[torch.Tensor] = []
        self._absent: list[int] = []  # when it was sent
        self.left = len(sizes)
        self.work: Any = None

    def gather(self) -> None:
        """Make gradients views of the bucket, also where zero_grad had set them to None."""
        views: list[torch.Tensor] = []
        fresh: list[torch.Tensor] = []
        for place, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = parameter.grad
            if gradient is view or gradient is None:
                continue
            if gradient.requires_grad or gradient.is_sparse:
                _refuse(gradient)
            views.append(view)
            fresh.append(gradient)
            parameter.grad = view
            self._forget(place)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, fresh)

    def fold(self, weight: float) -> None:
        """Keep what is there with this weight: what comes now weighs differently."""
        self.gather()
        self.weigh(weight)
        self._hold = self.flat.clone()
        self._held_views = _cut(self._hold, self._parameters)
        self.flat.zero_()

    def weigh(self, weight: float) -> None:
        """Multiply by the weight of this rank; a weight of 0 keeps infinities out."""
        present = bytes(parameter.grad is not None for parameter in self._parameters)
        self._absent = [place for place, there in enumerate(present) if not there]
        with torch.no_grad():
            if not self._absent:
                self._flags.fill_(1)
            else:
                for place in self._absent:
                    self._views[place].zero_()
                    self._forget(place)
                self._flags.copy_(self._pattern(present))
            if weight == 0.0:
                self.flat.zero_()
            elif weight != 1.0:
                self.flat.mul_(weight)
            if self._hold is not None:
                self.flat.add_(self._hold)
                self._hold, self._held_views = None, []

    def receive(self) -> None:
        """Wait for the sum. A parameter that only other ranks used has a gradient too; one that none used has none."""
        self.work.wait()
        self.work = None
        if self._absent:
            used = self._flags.tolist()
            for place in self._absent:
                if used[place] > 0:
                    self._parameters[place].grad = self._views[place]

    def _forget(self, place: int) -> None:
        """The loop dropped this gradient: what was held of it counts no more."""
        if self._hold is not None:
            self._held_views[place].zero_()

    def _pattern(self, present: bytes) -> torch.Tensor:
        if present not in self._patterns:
            self._patterns[present] = torch.tensor(list(present), dtype=self.flat.dtype, device=self.flat.device)
        return self._patterns[present]


def make_buckets(parameters: Sequence[Any], order: Iterable[int], most_bytes: int) -> list[Bucket]:
    """Buckets of one type and device each, in the order in which they are full."""
    made: list[Bucket] = []
    open_: dict[Any, list[int]] = {}
    for place in order:
        kind = parameters[place].dtype, parameters[place].device
        places = open_.setdefault(kind, [])
        places.append(place)
        size = sum(parameters[each].numel() * parameters[each].element_size() for each in places)
        if size >= (most_bytes if made else min(FIRST_BYTES, most_bytes)):
            made.append(Bucket(places, [parameters[each] for each in places]))
            del open_[kind]
    return made + [Bucket(places, [parameters[each] for each in places]) for places in open_.values()]


def _cut(flat: torch.Tensor, parameters: Sequence[Any]) -> list[torch.Tensor]:
    views, start = [], 0
    for each in parameters:
        part = flat[start : start + each.numel()]
        start += each.numel()
        dense = any(each.is_contiguous(memory_format=kind) for kind in _FORMATS.get(each.ndim, ()))
        views.append(part.as_strided(each.shape, each.stride()) if dense else part.view(each.shape))
    return views


_FORMATS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def _refuse(gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise RequestError(
            "A gradient was computed with create_graph=True, and its sum over ranks can't be differentiated again.",
            "Use torch.autograd.grad(..., create_graph=True) for the inner gradient, and a plain backward() last.",
        )
    raise RequestError(
        "A gradient is sparse, as of Embedding(sparse=True), and a plan weighs dense ones.", "Leave sparse=True out."
    )
