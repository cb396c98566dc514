"""Reduce a loss's gradient to a sketch: a few random projections of each tensor's gradient.

A random projection is the sum of a gradient's values, each multiplied by a random sign. To compute
it, the gradient is reshaped to a matrix, whose rows are called lines here. Small gradients wait
until several can be projected together. A GPU projects many of them in the time that it takes to
launch the kernels for one.

torch.autograd.grad computes the gradients. It runs none of the hooks that accumulate gradients, so
the step's own gradients stay unchanged, and no all-reduce starts. If memory is short, a hook on
each tensor adds its gradient to the sums at once, and returns an expanded zero in its place, which
frees the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy
import torch

from ...training.audit import LOSS, MIXED, PROJECTIONS, Sketch
from .randomness import SEED, without_modes

WIDTH = 4096  # number of values in each line of a large gradient
NARROW = 256  # number of values in each line of a gradient of up to SMALL values
SMALL = 1 << 16
JOINED = 1 << 23  # maximum values of a gradient that is projected together with others
MOST_WAITING = 1 << 25  # maximum values of all gradients that wait to be projected together
# the same limits with little memory, so that gradients are freed one by one
JOINED_SINGLY, MOST_WAITING_SINGLY = SMALL, 1 << 22
MOST_LAYOUTS = 256  # maximum number of cached layouts
BLOCK = 1 << 24  # number of values that are converted at once


class Signs:
    """Random signs (1 or -1) that gradients are multiplied by before they are summed.

    All gradients are multiplied by the same signs, so that their sums can be compared.
    """

    # A value's sign is the product of its line's sign and its column's sign. The standard deviation
    # of the gradient's sum with such signs is the gradient's norm, just as if each value had an
    # independent sign. But computing the sum takes only a matrix product with few columns.

    def __init__(self) -> None:
        self._pools: dict[tuple[Any, ...], torch.Tensor] = {}
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def take(self, count: int, axis: int, like: torch.Tensor) -> torch.Tensor:
        """Return random signs for `count` lines (`axis` 0) or columns (`axis` 1).

        A line is a row of the matrix that a gradient is reshaped to. The result has shape (count,
        PROJECTIONS), and the device and dtype of `like`.
        """
        length = 1 << max(12, (count - 1).bit_length())
        key = axis, length, like.device, like.dtype
        if key not in self._pools:
            # drawn by NumPy, because PyTorch's draws are replaced while rows are computed
            drawn = numpy.random.default_rng(SEED + axis).integers(0, 2, (length, PROJECTIONS))
            self._pools[key] = torch.from_numpy(2 * drawn - 1).to(like, non_blocking=like.is_cuda)
        return self._pools[key][:count]

    def lay_out(self, sizes: tuple[int, ...], width: int, like: torch.Tensor) -> _Layout:
        """Return how to arrange gradients in a matrix with `width` columns.

        `sizes` are the gradients' numbers of elements. `like` is a tensor with the device and dtype
        of the matrix.
        """
        key = sizes, width, like.device, like.dtype
        if key not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._make_layout(sizes, width, like)
        return self._layouts[key]

    def _make_layout(self, sizes: tuple[int, ...], width: int, like: torch.Tensor) -> _Layout:
        counts = [-(-size // width) for size in sizes]
        signs = self.take(max(counts), 0, like)
        zeros = like.new_zeros(width)
        return _Layout(
            paddings=[zeros[: -size % width] for size in sizes],
            signs=torch.cat([signs[:count] for count in counts]),
            counts=counts,
        )


class _Layout(msgspec.Struct, frozen=True, eq=False):
    """How several gradients are arranged as the rows of one matrix."""

    # a row of the matrix is called a line; the gradients follow one another

    paddings: list[torch.Tensor]  # zeros that pad each gradient's last line
    signs: torch.Tensor  # signs of each line
    counts: list[int]  # number of lines of each gradient


class LineSums(msgspec.Struct, frozen=True, eq=False):
    """Random projections of several gradients, one set for each line (row of a gradient's matrix).

    `counts` has each gradient's number of lines. `lines` has shape (lines, PROJECTIONS), in
    float64, with the lines of all gradients in order.
    """

    # the host adds up a gradient's lines, because a GPU takes 65 ms to load the operation

    counts: list[int]
    lines: torch.Tensor


SIGNS = Signs()  # shared by all sketches, so that they can be compared


@contextmanager
def _caught_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """Context manager that collects what backward passes inside it add to the tensors' `.grad`.

    It yields a list. On exit, the list gets each tensor's gradient, or None without one, and each
    `.grad` is restored. Reversible layers call `backward` in their own backward pass, which adds to
    `.grad` even under torch.autograd.grad.
    """
    before = [tensor.grad for tensor in tensors]
    inner: list[torch.Tensor | None] = []
    for tensor in tensors:
        tensor.grad = None
    try:
        yield inner
    finally:
        inner += [tensor.grad for tensor in tensors]
        for tensor, gradient in zip(tensors, before, strict=True):
            tensor.grad = gradient


def project(gradient: torch.Tensor, signs: Signs) -> torch.Tensor:
    """Reduce a gradient to a few random projections, in float64."""
    if gradient.is_sparse:
        return _project_sparse(gradient.coalesce(), signs)
    if gradient.numel() <= JOINED:
        return (
            sum_lines([gradient], signs).lines.sum(0) if gradient.numel() else _zero_sums(gradient)
        )
    flat = _flatten(gradient)
    lines = flat.numel() // WIDTH
    own = signs.take(lines + 1, 0, _widen(flat[:1]))
    at_once = BLOCK // WIDTH if flat.dtype.itemsize < 4 else lines
    total = _zero_sums(gradient)
    for first in range(0, lines, at_once):
        last = min(first + at_once, lines)
        block = _widen(flat[first * WIDTH : last * WIDTH].view(-1, WIDTH))
        sums = (block @ signs.take(WIDTH, 1, block)).mul_(own[first:last])
        total += sums.sum(0, dtype=torch.float64)
    rest = _widen(flat[lines * WIDTH :])
    if rest.numel():
        total += (signs.take(WIDTH, 1, rest)[: rest.numel()].T @ rest) * own[lines]
    return total


def _zero_sums(gradient: torch.Tensor) -> torch.Tensor:
    return torch.zeros(PROJECTIONS, dtype=torch.float64, device=gradient.device)


def sum_lines(gradients: Sequence[torch.Tensor], signs: Signs) -> LineSums:
    """Reshape each gradient to a matrix, and return random projections of its rows (lines).

    The gradients must have the same device and dtype.
    """
    # a gradient's sums don't depend on the other gradients
    flat = [_flatten(gradient) for gradient in gradients]
    width = _line_width(flat[0])
    layout = signs.lay_out(tuple(each.numel() for each in flat), width, _widen(flat[0][:1]))
    pieces = [part for pair in zip(flat, layout.paddings, strict=True) for part in pair]
    lines = _widen(torch.cat(pieces)).view(-1, width)
    sums = (lines @ signs.take(width, 1, lines)).mul_(layout.signs).double()
    return LineSums(layout.counts, sums)


def add_lines(sums: Sequence[LineSums]) -> list[list[float]]:
    """Add up the random projections of each gradient's lines; return a list of totals per gradient.

    A line is a row of the matrix that a gradient is reshaped to.
    """
    # all sums are copied to the host together
    lines = torch.cat([each.lines for each in sums]).cpu().numpy()
    counts = [count for each in sums for count in each.counts]
    starts = numpy.cumsum([0, *counts[:-1]])
    added: list[list[float]] = numpy.add.reduceat(lines, starts, axis=0).tolist()
    return added


def _line_width(gradient: torch.Tensor) -> int:
    values = gradient.numel() * (2 if gradient.is_complex() else 1)
    return NARROW if values <= SMALL else WIDTH


def _flatten(gradient: torch.Tensor) -> torch.Tensor:
    plain = gradient.detach()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)


def _widen(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _project_sparse(gradient: torch.Tensor, signs: Signs) -> torch.Tensor:
    """Reduce a sparse gradient to the same random projections as the equivalent dense gradient."""
    # Each stored row of the gradient is one line. A line's sign depends on its index in the dense
    # gradient, not on the other stored lines.
    lines = torch.zeros(gradient._nnz(), dtype=torch.long, device=gradient.device)
    for index, size in zip(gradient.indices(), gradient.shape, strict=False):
        lines = lines * size + index
    values = _widen(gradient.values().reshape(len(lines), -1))
    most = int(lines.max()) + 1 if len(lines) else 1
    sums = values @ signs.take(values.shape[1], 1, values)
    return (sums * signs.take(most, 0, values)[lines]).sum(0).double()


class GradientSums:
    """Adds up the random projections of gradients over several passes.

    Arguments:

    - `tensors`: trained tensors by name.
    - `signs`: the random signs.
    - `at_once`: whether all gradients fit in memory at the same time.
    """

    # Without `at_once`, each gradient is summed and freed as soon as it is computed. The host waits
    # for the GPU only in `sketch`.

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], signs: Signs, at_once: bool = False
    ) -> None:
        self._tensors = tensors
        self._signs = signs
        self._at_once = at_once
        self._joined = JOINED if at_once else JOINED_SINGLY
        self._most_waiting = MOST_WAITING if at_once else MOST_WAITING_SINGLY
        # names of tensors, and the sums of their gradients
        self._sums: list[tuple[list[str], LineSums]] = []
        self._waiting: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
        self._size = 0  # number of values that wait
        self._zeros: dict[tuple[Any, ...], torch.Tensor] = {}
        self._kinds: dict[str, torch.dtype] = {}  # dtypes of sums other than gradients
        self._losses: list[torch.Tensor] = []
        self._factor: float | torch.Tensor = 1.0  # multiplies the sums that are being added

    def add(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor = 1.0,
        scale: float | None = None,
        loss_only: bool = False,
        retain_graph: bool | None = None,
    ) -> None:
        """Add the gradients of a loss, multiplied by `weight`.

        Arguments:

        - `scale`: factor of the loss in its backward pass. The gradients are multiplied by
          `weight / scale` afterwards. None means `weight`.
        - `loss_only`: whether to add the loss instead of its gradients.
        - `retain_graph`: as in `torch.autograd.grad`.
        """
        scaled = loss * (weight if scale is None else scale)
        value = (loss * weight).detach().double().sum()
        self._factor = 1.0 if scale is None else weight / scale
        self._losses.append(value)
        if loss_only:
            self._sums.append(([LOSS], LineSums([1], value.expand(1, PROJECTIONS))))
            self._kinds[LOSS] = loss.dtype
            return
        trained = {name: each for name, each in self._tensors.items() if each.requires_grad}
        if not scaled.requires_grad or not trained:
            return
        self.add_gradients(self._differentiate(scaled.sum(), trained, retain_graph))

    def add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to the sums; `gradients` maps the names of tensors to their gradients."""
        with torch.no_grad(), without_modes():
            for name, gradient in gradients.items():
                self._take(name, gradient)
            self._project_waiting()

    def _differentiate(
        self, loss: torch.Tensor, trained: Mapping[str, torch.Tensor], retain_graph: bool | None
    ) -> dict[str, torch.Tensor]:
        """Compute the gradients of a loss, and return them by name.

        If memory is short, the result is {}, because gradient hooks have added each gradient to the
        sums and freed it.
        """
        with ExitStack() as stack:
            for name, each in trained.items():
                if each._backward_hooks or not self._at_once:
                    hook = None if self._at_once else partial(self._exchange, name)
                    stack.enter_context(_only_hook(each, hook))
            tensors = list(trained.values())
            inner = stack.enter_context(_caught_gradients(tensors))
            found = torch.autograd.grad(loss, tensors, retain_graph=retain_graph, allow_unused=True)
        # the hooks have summed and freed each gradient
        if not self._at_once:
            return {}
        gradients: dict[str, torch.Tensor] = {}
        for name, *parts in zip(trained, found, inner, strict=True):
            given = [part for part in parts if part is not None]
            if given:
                gradients[name] = given[0] if len(given) == 1 else given[0] + given[1]
        return gradients

    def _exchange(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient hook that adds a gradient to the sums and returns zeros, to free its memory."""
        # the zeros are expanded from a single element, so that the gradient's memory is freed
        with torch.no_grad(), without_modes():
            self._take(name, gradient)
            if gradient.is_sparse:
                return torch.sparse_coo_tensor(size=gradient.shape).to(gradient)
            kind = gradient.device, gradient.dtype
            if kind not in self._zeros:
                self._zeros[kind] = gradient.new_zeros(())
            return self._zeros[kind].expand(gradient.shape)

    def _take(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient to the sums, or set it aside to project several small ones together."""
        if gradient.is_sparse or not 0 < gradient.numel() <= self._joined:
            self._add([name], LineSums([1], project(gradient, self._signs)[None]))
            return
        key = gradient.device, gradient.dtype, _line_width(gradient)
        self._waiting.setdefault(key, []).append((name, gradient))
        self._size += gradient.numel()
        if self._size > self._most_waiting:
            self._project_waiting()

    def _add(self, names: list[str], sums: LineSums) -> None:
        self._sums.append((names, LineSums(sums.counts, sums.lines * self._factor)))

    def _project_waiting(self) -> None:
        for pairs in self._waiting.values():
            sums = sum_lines([gradient for _, gradient in pairs], self._signs)
            self._add([name for name, _ in pairs], sums)
        self._waiting.clear()
        self._size = 0

    def sketch(self, computed_dtypes: Collection[torch.dtype] = ()) -> Sketch:
        """Return all sums as a Sketch.

        `computed_dtypes` has the dtypes in which the loss was computed.
        """
        made = Sketch(loss=math.fsum(read_scalars(self._losses)))
        for device in {sums.lines.device for _, sums in self._sums}:
            own = [(names, sums) for names, sums in self._sums if sums.lines.device == device]
            every_name = [name for names, _ in own for name in names]
            added = add_lines([sums for _, sums in own])
            for name, each in zip(every_name, added, strict=True):
                kind = self._kinds[name] if name in self._kinds else self._tensors[name].dtype
                made.add(name, _name_precision(kind, computed_dtypes), each)
        return made


def read_scalars(values: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalar tensors as floats.

    Tensors on the same device are copied to the host together.
    """
    if len({value.device for value in values}) == 1:
        return list(torch.stack(list(values)).tolist())
    return [float(value) for value in values]


def _name_precision(dtype: torch.dtype, computed_dtypes: Collection[torch.dtype]) -> str:
    """Return the name of the lowest precision that was used to compute a gradient.

    `dtype` is the gradient's own dtype, and `computed_dtypes` are those of the computation.
    """
    # The result is bfloat16 or float16 if that is in `computed_dtypes`, and otherwise `dtype`. For
    # a float64 gradient of a loss that was computed in float32, it is MIXED.
    for coarse in (torch.bfloat16, torch.float16):
        if coarse in computed_dtypes:
            return str(coarse).removeprefix("torch.")
    if dtype == torch.float64 and torch.float32 in computed_dtypes:
        return MIXED
    return str(dtype).removeprefix("torch.")


@contextmanager
def _only_hook(tensor: torch.Tensor, function: Callable[[Any], Any] | None) -> Iterator[None]:
    """Context manager that replaces all gradient hooks of a tensor with `function`.

    If `function` is None, the tensor has no hooks inside the context.
    """
    # the tensor's own hooks belong to the training step, and are restored on exit
    own = dict(tensor._backward_hooks or {})
    if own:
        tensor._backward_hooks.clear()
    handle = None if function is None else tensor.register_hook(function)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        if own:
            tensor._backward_hooks.update(own)


def _unwrapped_name(name: str) -> str:
    """Return a weight's name without the prefixes of torch.compile and DistributedDataParallel."""
    for wrapper in ("_orig_mod.", "module.", "_orig_mod."):
        name = name.removeprefix(wrapper)
    return name


def name_tensors(models: Iterable[Any], others: Iterable[torch.Tensor] = ()) -> dict[str, Any]:
    """Return all trained tensors by name: the models' parameters, and tensors in `others`.

    Tensors in `others`, which an optimizer trains, are named by index and shape.
    """
    # with several models, the model's number, counted from 1, is appended to a parameter's name
    found: dict[str, Any] = {}
    known: set[int] = set()
    every_model = list(models)
    for number, model in enumerate(every_model):
        for name, each in model.named_parameters():
            if each.requires_grad and id(each) not in known:
                known.add(id(each))
                plain = _unwrapped_name(name)
                found[f"{plain} of model {number + 1}" if len(every_model) > 1 else plain] = each
    for number, tensor in enumerate(others):
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in known:
            known.add(id(tensor))
            found[f"tensor {number} of an optimizer, of shape {tuple(tensor.shape)}"] = tensor
    return found
