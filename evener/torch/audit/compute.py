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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ...training.audit import Sketch
from .closures import kept_closure
from .precision import full_precision
from .randomness import SEED, EvenRandomness, digest_draws, seed_all, seed_torch
from .sketch import SIGNS, GradientSums
from .state import kept_attributes, kept_state

MOVE = 0.01  # the standard deviation of what is added to weights that are all equal


class Piece(msgspec.Struct, frozen=True, eq=False):
    """Some rows that are computed at once: their loss, and its weight in the gradient."""

    loss: Callable[[], Any]
    weight: Any = 1.0


class Bench:
    """Computes gradients of the models' weights and of `tensors`, by name, within `open`.

    `holders` are other objects that computing a loss changes, such as a trainer; what they hold
    in `apart`, such as its data, isn't restored. `function` is code of the program's own that
    is called. `around` are contexts that suppress the effects of a step, such as the exchange
    of gradients. `losses_only` is True if gradients can't be taken, as they are sharded; a
    sketch has only the loss then. `measures` is True if an audit always measures how rounding
    changes the gradient.

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
        self.changed: set[str] = set()
        self.draws = 0
        self.drawn: set[int] = set()
        self._adds: Callable[..., None] | None = None  # set within a piece

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
            stack.enter_context(kept_state([*self._models, *self._holders], self._apart))
            stack.enter_context(full_precision())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for model in self._models:
                stack.enter_context(_bare(model))
            for module in self._modules:
                if isinstance(module, _BatchNorm) and module.track_running_stats:
                    module.training = False
            if moves:
                stack.enter_context(_moved(self._tensors.values()))
            yield self

    def sketch(self, way: Sequence[Piece], disturbance: int = 0, seed: int = SEED) -> Sketch:
        """Return the gradient of some rows, computed in this way.

        Errors of the program's own code propagate. With a `disturbance` above 0, the gradient
        differs by as much as rounding may cause, in a way that depends on this number. Random
        numbers start from `seed` in each piece.
        """
        sums = GradientSums(self._tensors, SIGNS)
        computed: set[torch.dtype] = set()
        self.drawn = set()
        for piece in way:
            seed_all(seed)
            randomness = EvenRandomness(disturbance, seed)
            # each pass begins as the first one did
            kept = kept_attributes(*self._modules, *self._holders, apart=self._apart)
            with kept, kept_closure(self._function):
                before = self._list_buffers()
                self._adds = partial(sums.add, weight=piece.weight, loss_only=self.losses_only)
                with randomness, torch.set_grad_enabled(not self.losses_only):
                    loss = piece.loss()
                    self.drawn.add(digest_draws())
                    self._note_changes(before)
                    if isinstance(loss, torch.Tensor):
                        self.add(loss)
            self.draws += randomness.random
            computed |= randomness.kinds
        return sums.sketch(computed)

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


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """Enter a context in which a model in DistributedDataParallel is called without the wrapper.

    The wrapper's reduction belongs to the training step.
    """
    inner = getattr(model, "_orig_mod", model)
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
def _moved(tensors: Iterable[Any]) -> Iterator[None]:
    """Enter a context in which weights whose values are all equal are changed a little.

    Nothing is copied, as a single number restores them.
    """
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    seed_torch(SEED)
    try:
        for each in tensors:
            data = each.data
            if type(data) is not torch.Tensor or not data.is_floating_point() or data.numel() < 2:
                continue
            value = data.reshape(-1)[0].clone()
            if bool((data == value).all()):
                moved.append((data, value))
                data.add_(torch.randn_like(data), alpha=MOVE)
        yield
    finally:
        for data, value in moved:
            data.fill_(value)
