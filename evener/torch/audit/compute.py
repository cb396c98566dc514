"""Compute the gradient of a few rows in several ways, without side effects on the training.

Computation is in the precision of the weights, without autocast. Every row gets the same random
numbers wherever it is computed. Batch normalization uses its running statistics, as statistics of a
device's own rows differ by design.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from ...training.audit import Sketch
from ..private import BatchNorm, free_gathered, unwrap_compiled
from .closures import keep_closure
from .precision import full_precision
from .quick import KnownPasses, QuickPass, without_dropout
from .randomness import (
    SEED,
    EvenRandomness,
    RandomState,
    digest_draws,
    seed_all,
    seed_torch,
)
from .sketch import SIGNS, GradientSums
from .state import keep_with_frozen

HOST_ROOM = 1 << 29  # bytes
MOVE = 0.01  # the standard deviation of what is added to weights that are all equal


class Piece(msgspec.Struct, frozen=True, eq=False):
    """Some rows that are computed at once: their loss, and its weight in the gradient.

    The backward pass begins with `scale` times the loss, and what comes out is multiplied by what
    is left of the weight. With None, it begins with the weighted loss.
    """

    loss: Callable[[], Any]
    weight: Any = 1.0
    scale: float | None = None


class Bench:
    """Computes gradients of the models' weights and of `tensors`, by name, within `open`.

    `holders` are other objects that computing a loss changes, such as a trainer; what they hold
    in `apart`, such as its data, isn't restored. `function` is code of the program's own that
    is called. `around` are contexts that suppress the effects of a step, such as the exchange
    of gradients. `losses_only` is True if gradients can't be taken, as they are sharded; a
    sketch has only the loss then. `measures` is True if an audit always measures how rounding
    changes the gradient. `known` is what earlier audits have seen of such passes, and is changed by
    this one; None stands for a single audit.

    `changed` are the names of buffers that a pass changes, `draws` is the number of PyTorch's
    random draws that affect the result. `drawn` are digests of the state of Python's and NumPy's
    random numbers after each piece of the last sketch.
    """

    def __init__(
        self,
        models: Iterable[Any],
        tensors: Mapping[str, Any],
        holders: Sequence[Any] = (),
        apart: Sequence[Any] = (),
        function: Callable[..., Any] | None = None,
        around: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
        losses_only: bool = False,
        measures: bool = False,
        known: KnownPasses | None = None,
    ) -> None:
        self._models = list(models)
        self._modules = [
            module for each in self._models for module in each.modules() if module is not None
        ]
        self._tensors = tensors
        self._holders = holders
        self._apart = [each for each in apart if each is not None]
        self._function = function
        self._around = around
        self.losses_only = losses_only
        self.measures = measures
        self._known = KnownPasses() if known is None else known
        self.changed: set[str] = set()
        self.draws = 0
        self.drawn: set[int] = set()
        self._adds: Callable[..., None] | None = None  # set within a piece
        self._restores: list[Callable[[], None]] = []  # set while open
        self._at_once = False

    @contextmanager
    def open(self, moves: bool = False) -> Iterator[Bench]:
        """Enter a context in which `sketch` has no side effects.

        With `moves`, weights whose values are all equal, such as a head that is initialized to
        zero, are changed a little meanwhile, as they hide what other weights' gradients depend on.
        """
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for each in self._around:
                stack.enter_context(each())
            stack.callback(free_gathered, self._models)
            stack.callback(RandomState().restore)
            stack.enter_context(full_precision())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for model in self._models:
                stack.enter_context(_bare(model))
            stack.enter_context(_fixed_statistics(self._modules))
            self._restores = [
                keep_closure(self._function),
                keep_with_frozen(*self._modules, *self._holders, apart=self._apart),
            ]
            if moves:
                stack.enter_context(_moved(self._tensors.values()))
            self._at_once = _has_room(self._tensors.values())
            yield self

    def sketch(self, way: Sequence[Piece], disturbance: int = 0, seed: int = SEED) -> Sketch:
        """Return the gradient of some rows, computed in this way.

        Errors of the program's own code propagate. With a `disturbance` above 0, the gradient
        differs by as much as rounding may cause, in a way that depends on this number. Random
        numbers start from `seed` in each piece.
        """
        sums = GradientSums(self._tensors, SIGNS, self._at_once)
        computed: set[torch.dtype] = set()
        self.drawn = set()
        draws = 0
        for piece in way:
            randomness = EvenRandomness(disturbance, seed)
            self._compute(piece, sums, randomness, seed)
            draws += randomness.random
            computed |= randomness.kinds
        self.draws += draws
        self._known.draws = draws > 0 or bool(self._known.draws)
        self._known.computed |= computed
        return sums.sketch(computed)

    @property
    def is_quick(self) -> bool:
        """True if `sum_quickly` may give a result."""
        return self._known.draws is False and not (self.losses_only or self.measures)

    def sum_quickly(self, way: Sequence[Piece]) -> GradientSums | None:
        """Return the sums of some rows' gradients, or None if their passes draw random numbers.

        `read` makes a sketch of them. The host doesn't wait for a GPU before that.
        """
        sums = GradientSums(self._tensors, SIGNS, self._at_once)
        for piece in way:
            quick = QuickPass()
            self._compute(piece, sums, quick, SEED)
            if quick.has_drawn:
                self._known.draws = True
                return None
        return sums

    def read(self, sums: GradientSums) -> Sketch:
        """Return the sketch of sums by quick passes."""
        return sums.sketch(self._known.computed)

    def _compute(self, piece: Piece, sums: GradientSums, mode: Any, seed: int) -> None:
        """Add the gradient of a piece to the sums, computed in a mode of PyTorch's functions."""
        seed_all(seed)
        before = self._list_buffers()
        self._adds = partial(
            sums.add, weight=piece.weight, scale=piece.scale, loss_only=self.losses_only
        )
        try:
            with without_dropout(), mode, torch.set_grad_enabled(not self.losses_only):
                loss = piece.loss()
                self.drawn.add(digest_draws())
                self._note_changes(before)
                if isinstance(loss, torch.Tensor):
                    self.add(loss)
        finally:  # each pass begins as the first one did
            for restore in self._restores:
                restore()

    def add(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradient of a loss to the piece that is being computed.

        For code that takes several backward passes; `options` are those of torch.autograd.grad.
        """
        assert self._adds is not None
        self._adds(loss, **options)

    def _list_buffers(self) -> dict[str, tuple[int, int]]:
        """Return the identity and version of each buffer.

        Those of batch normalization don't change here.
        """
        return {
            name: (id(buffer), buffer._version)
            for model in self._models
            for name, buffer in model.named_buffers()
        }

    def _note_changes(self, before: Mapping[str, tuple[int, int]]) -> None:
        now = self._list_buffers()
        self.changed |= {name for name, state in now.items() if before.get(name) != state}


def _has_room(tensors: Iterable[torch.Tensor]) -> bool:
    """True if all gradients of these tensors fit into memory at once.

    On a GPU they have to fit twice into what the step has used at most and has freed, so that an
    audit doesn't raise the peak. They are projected beside each other.
    """
    sizes: dict[torch.device, int] = {}
    for each in tensors:
        if each.requires_grad:
            sizes[each.device] = sizes.get(each.device, 0) + each.nbytes
    return all(2 * size <= _measure_room(device) for device, size in sizes.items())


def _measure_room(device: torch.device) -> int:
    """Return the bytes that a device's tensors may take more than now."""
    if device.type != "cuda":
        return HOST_ROOM
    return int(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """Enter a context in which a model in DistributedDataParallel is called without the wrapper.

    The wrapper's reduction belongs to the training step.
    """
    inner = unwrap_compiled(model)
    if not isinstance(inner, DistributedDataParallel):
        yield
        return
    before = vars(inner).get("forward")
    vars(inner)["forward"] = inner.module
    try:
        yield
    finally:
        del vars(inner)["forward"]
        if before is not None:
            vars(inner)["forward"] = before


@contextmanager
def _fixed_statistics(modules: Iterable[Any]) -> Iterator[None]:
    """Enter a context in which batch normalization uses its running statistics."""
    fixed = [
        (each, each.training)
        for each in modules
        if isinstance(each, BatchNorm) and each.track_running_stats
    ]
    for each, _ in fixed:
        each.training = False
    try:
        yield
    finally:
        for each, training in fixed:
            each.training = training


@contextmanager
def _moved(tensors: Iterable[Any]) -> Iterator[None]:
    """Enter a context in which weights whose values are all equal are changed a little.

    Nothing is copied, as a single number restores them.
    """
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    seed_torch(SEED)
    try:
        for data, value in _list_equal(tensors):
            moved.append((data, value))
            data.add_(torch.randn_like(data), alpha=MOVE)
        yield
    finally:
        for data, value in moved:
            data.fill_(value)


def _list_equal(tensors: Iterable[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors whose values are all equal, each with that value."""
    plain = [each.data for each in tensors if type(each.data) is torch.Tensor]
    several = [each for each in plain if each.is_floating_point() and each.numel() > 1]
    values = [each.reshape(-1)[0].clone() for each in several]
    # all are compared before the host waits for the first result
    equal = [(each == value).all() for each, value in zip(several, values, strict=True)]
    return [
        (each, value)
        for each, value, same in zip(several, values, equal, strict=True)
        if bool(same)
    ]
