"""Sketches of a loss's gradient: a few random sums of each tensor's gradient.

Gradients are taken by torch.autograd.grad, which runs none of the hooks that accumulate gradients:
the step's own gradients stay unchanged, and no exchange between ranks is triggered. A hook on each
tensor computes the sums as soon as the gradient arrives and returns an empty gradient, so that the
memory is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch

from ...training.audit import LOSS, MIXED, PROJECTIONS, Sketch
from .randomness import SEED

WIDTH = 4096  # values in each of the lines into which a gradient is cut
BLOCK = 1 << 24  # values that are converted at once


class Signs:
    """Random signs: the sign of a value is the product of its line's sign and its column's sign.

    Sums with such signs have the gradient's norm as standard deviation, like sums with an
    independent sign for each value, but only need the product of a matrix with a few columns.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[Any, ...], torch.Tensor] = {}

    def take(self, count: int, which: int, like: torch.Tensor) -> torch.Tensor:
        """Return signs for `count` lines (which = 0) or columns (1).

        Their shape is (count, PROJECTIONS).
        """
        length = 1 << max(12, (count - 1).bit_length())
        key = which, length, like.device, like.dtype
        if key not in self._pools:
            # drawn by NumPy, as PyTorch's draws are replaced while rows are computed
            drawn = numpy.random.default_rng(SEED + which).integers(0, 2, (length, PROJECTIONS))
            self._pools[key] = torch.from_numpy(2 * drawn - 1).to(like)
        return self._pools[key][:count]


SIGNS = Signs()  # shared by all sketches, so that they can be compared


def project(gradient: torch.Tensor, signs: Signs) -> torch.Tensor:
    """Return PROJECTIONS random sums of a gradient, as float64."""
    if gradient.is_sparse:
        return _project_sparse(gradient.coalesce(), signs)
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    flat = gradient.detach().reshape(-1)
    total = torch.zeros(PROJECTIONS, dtype=torch.float64, device=flat.device)
    width = min(WIDTH, max(1, flat.numel()))
    whole = flat.numel() // width
    lines = max(1, BLOCK // width)
    for first in range(0, whole, lines):
        count = min(lines, whole - first)
        block = _widen(flat[first * width : (first + count) * width].view(count, width))
        sums = block @ signs.take(width, 1, block)
        total += (sums * signs.take(whole, 0, block)[first : first + count]).sum(0)
    rest = _widen(flat[whole * width :])
    if rest.numel():
        total += signs.take(width, 1, rest)[: rest.numel()].T @ rest
    return total


def _widen(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _project_sparse(gradient: torch.Tensor, signs: Signs) -> torch.Tensor:
    """Return the sums over the stored lines of a sparse gradient, each line with its own sign."""
    lines = torch.zeros(gradient._nnz(), dtype=torch.long, device=gradient.device)
    for index, size in zip(gradient.indices(), gradient.shape, strict=False):
        lines = lines * size + index
    values = _widen(gradient.values().reshape(len(lines), -1))
    most = int(lines.max()) + 1 if len(lines) else 1
    sums = values @ signs.take(values.shape[1], 1, values)
    return (sums * signs.take(most, 0, values)[lines]).sum(0).double()


class GradientSums:
    """The random sums of these tensors' gradients, over all losses that are added."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], signs: Signs) -> None:
        self._tensors = tensors
        self._signs = signs
        self._sums: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, torch.dtype] = {}  # types of sums that aren't a tensor's gradient
        self._loss = 0.0

    def add(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor = 1.0,
        loss_only: bool = False,
        retain_graph: bool | None = None,
    ) -> None:
        """Add the gradient of a loss, times its weight; with `loss_only`, add the loss itself."""
        scaled = loss * weight
        value = scaled.detach().double().sum()
        self._loss += float(value)
        if loss_only:
            before = self._sums.get(LOSS, torch.zeros_like(value).expand(PROJECTIONS))
            self._sums[LOSS] = before + value
            self._kinds[LOSS] = loss.dtype
            return
        trained = {name: each for name, each in self._tensors.items() if each.requires_grad}
        if not scaled.requires_grad or not trained:
            return
        with ExitStack() as stack:
            for name, each in trained.items():
                stack.enter_context(_only_hook(each, partial(self._take, name)))
            torch.autograd.grad(
                scaled.sum(), list(trained.values()), retain_graph=retain_graph, allow_unused=True
            )

    def _take(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            sums = project(gradient, self._signs)
            before = self._sums.get(name)
            self._sums[name] = sums if before is None else before + sums
            if gradient.is_sparse:
                return torch.sparse_coo_tensor(size=gradient.shape).to(gradient)
            return gradient.new_zeros(()).expand(gradient.shape)

    def sketch(self, computed: Collection[torch.dtype] = ()) -> Sketch:
        """Return the sums so far, on the host.

        `computed` are the types that the losses were computed in.
        """
        made = Sketch(loss=self._loss)
        names = sorted(self._sums)
        for device in {self._sums[name].device for name in names}:
            own = [name for name in names if self._sums[name].device == device]
            lines = torch.stack([self._sums[name] for name in own]).tolist()
            for name, line in zip(own, lines, strict=True):
                kind = self._kinds[name] if name in self._kinds else self._tensors[name].dtype
                made.add(name, _name_kind(kind, computed), line)
        return made


def _name_kind(kind: torch.dtype, computed: Collection[torch.dtype]) -> str:
    """Return the type by whose precision a gradient is judged.

    It is the type of its tensor, or a coarser one that the loss was computed in.
    """
    for coarse in (torch.bfloat16, torch.float16):
        if coarse in computed:
            return str(coarse).removeprefix("torch.")
    if kind == torch.float64 and torch.float32 in computed:
        return MIXED
    return str(kind).removeprefix("torch.")


@contextmanager
def _only_hook(tensor: torch.Tensor, function: Callable[[Any], Any]) -> Iterator[None]:
    """Enter a context in which only `function` gets a tensor's gradient, not the step's hooks."""
    own = dict(tensor._backward_hooks or {})
    if own:
        tensor._backward_hooks.clear()
    handle = tensor.register_hook(function)
    try:
        yield
    finally:
        handle.remove()
        if own:
            tensor._backward_hooks.update(own)


def _plain(name: str) -> str:
    """Return a weight's name in the model itself, without the prefixes of wrappers."""
    for wrapper in ("_orig_mod.", "module.", "_orig_mod."):
        name = name.removeprefix(wrapper)
    return name


def name_tensors(models: Iterable[Any], others: Iterable[torch.Tensor] = ()) -> dict[str, Any]:
    """Return the trained tensors by name.

    A model's parameters have their own names; `others`, an optimizer's tensors, are numbered.
    """
    found: dict[str, Any] = {}
    known: set[int] = set()
    several = list(models)
    for place, model in enumerate(several):
        for name, each in model.named_parameters():
            if each.requires_grad and id(each) not in known:
                known.add(id(each))
                plain = _plain(name)
                found[f"{plain} of model {place + 1}" if len(several) > 1 else plain] = each
    for place, each in enumerate(others):
        if each.requires_grad and each.is_leaf and id(each) not in known:
            known.add(id(each))
            found[f"tensor {place} of an optimizer, of shape {tuple(each.shape)}"] = each
    return found
