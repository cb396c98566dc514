"""Compute a gradient for an audit, and leave the training run's state as it was."""

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
    hash_random_states,
    seed_all,
    seed_torch,
)
from .sketch import SIGNS, GradientSums
from .state import keep_with_frozen

HOST_ROOM = 1 << 29  # bytes of host memory that an audit may allocate at once
MOVE = 0.01  # standard deviation of the noise added to weights that are all equal
# largest number of values of a tensor that the host compares, and values copied of larger ones
COPIED, SAMPLED = 1 << 14, 64


class Piece(msgspec.Struct, frozen=True, eq=False):
    """One forward and backward pass of an audit, with the weight of its gradient."""

    loss: Callable[[], Any]  # returns the loss of the pass
    weight: Any = 1.0  # factor of the pass's gradient in the sum
    # factor of the loss before the backward pass; the gradients are then multiplied by
    # `weight / scale`. None multiplies the loss by `weight` instead.
    scale: float | None = None


class GradientSketcher:
    """Computes gradients for audits, and reduces each gradient to a sketch of random projections.

    Sketches are computed inside the context of `open`. Arguments:

    - `models`: the models, whose state is restored after each pass.
    - `tensors`: trained tensors by name.
    - `holders`: further objects whose attributes are restored.
    - `excluded`: objects that are neither copied nor restored.
    - `function`: the loss function, whose variables are restored.
    - `contexts`: functions that return context managers, in which gradients are computed.
    - `losses_only`: whether to compare losses instead of gradients.
    - `keeps_autocast`: whether passes run in the autocast of the training run.
    - `measures_rounding`: whether to measure the effect of rounding even if no gradient differs.
    - `known_passes`: what earlier audits found out about the passes, or None.
    """

    def __init__(
        self,
        models: Iterable[Any],
        tensors: Mapping[str, Any],
        holders: Sequence[Any] = (),
        excluded: Sequence[Any] = (),
        function: Callable[..., Any] | None = None,
        contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
        losses_only: bool = False,
        keeps_autocast: bool = False,
        measures_rounding: bool = False,
        known_passes: KnownPasses | None = None,
    ) -> None:
        self._models = list(models)
        self._named = [pair for model in self._models for pair in model.named_modules()]
        self._modules = [module for _, module in self._named]
        self._tensors = tensors
        self._holders = holders
        self._excluded = [each for each in excluded if each is not None]
        self._function = function
        self._contexts = contexts
        self.losses_only = losses_only
        self._keeps_autocast = keeps_autocast
        self.measures_rounding = measures_rounding
        self._known = KnownPasses() if known_passes is None else known_passes
        self.changed: set[str] = set()  # names of buffers that a pass changes
        # number of random operations of PyTorch in all sketches so far, without dropout
        self.draws = 0
        # digests of the states of Python's and NumPy's random generators after each piece of the
        # last sketch
        self.drawn: set[int] = set()
        self._adds: Callable[..., None] | None = None  # set within a piece
        self._restores: list[Callable[[], None]] = []  # set while open
        self._at_once = False

    @contextmanager
    def open(self, add_noise: bool = False) -> Iterator[GradientSketcher]:
        """Context manager to compute gradients in, with full precision and without dropout.

        With `add_noise`, noise is added to weights whose values are all the same, such as a head
        initialized to zero, and to trained embeddings of padding. On exit, everything is restored.
        """
        # weights with only equal values, as in a head initialized to zero, can make the gradients
        # of other weights zero; an embedding of padding that is zero only before the first step can
        # make padding look like the end of a row
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for each in self._contexts:
                stack.enter_context(each())
            stack.callback(free_gathered, self._models)
            stack.callback(RandomState().restore)
            stack.enter_context(full_precision(self._keeps_autocast))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for model in self._models:
                stack.enter_context(_without_ddp(model))
            stack.enter_context(_fixed_statistics(self._modules))
            self._restores = [
                keep_closure(self._function),
                keep_with_frozen(*self._modules, *self._holders, excluded=self._excluded),
            ]
            if add_noise:
                padding = _list_trained_padding(self._modules)
                stack.enter_context(_with_noisy_weights([*self._tensors.values(), *padding]))
            self._at_once = _has_room(self._tensors.values())
            yield self

    def sketch(
        self,
        computation: Sequence[Piece],
        disturbance: int = 0,
        seed: int = SEED,
        modes: Sequence[EvenRandomness] = (),
    ) -> Sketch:
        """Return the sketch of a gradient that is summed over some passes.

        Arguments:

        - `computation`: the passes.
        - `disturbance`: seed of random errors as large as rounding errors; 0 adds none.
        - `seed`: seed of the random numbers that the passes draw.
        - `modes`: context managers that replace random operations, one for each pass; by default a
          new EvenRandomness.
        """
        # errors that the user's own code raises aren't caught
        sums = GradientSums(self._tensors, SIGNS, self._at_once)
        computed: set[torch.dtype] = set()
        self.drawn = set()
        draws = 0
        # `modes` are the contexts of the pieces, if they aren't the usual ones
        contexts = modes or [EvenRandomness(disturbance, seed) for _ in computation]
        for piece, randomness in zip(computation, contexts, strict=True):
            self._compute_piece(piece, sums, randomness, seed)
            draws += randomness.random
            computed |= randomness.kinds
        self.draws += draws
        self._known.draws = draws > 0 or bool(self._known.draws)
        self._known.computed |= computed
        return sums.sketch(computed)

    @property
    def may_be_quick(self) -> bool:
        """Whether `sum_quickly` may be used for the next passes."""
        # not if passes draw random numbers, only losses can be compared, or rounding is always
        # measured
        return not (self._known.draws or self.losses_only or self.measures_rounding)

    def sum_quickly(self, computation: Sequence[Piece]) -> GradientSums | None:
        """Compute a gradient faster, without intercepting random operations, and return its sums.

        This works only for passes that draw no random numbers. For others, the result is None.
        """
        # A row's random numbers must be the same in any batch, which needs interception. If nothing
        # is known about the passes, the first one is intercepted to find out.
        sums = GradientSums(self._tensors, SIGNS, self._at_once)
        for piece in computation:
            if self._known.draws is None:
                randomness = EvenRandomness()
                self._compute_piece(piece, sums, randomness, SEED)
                self._known.computed |= randomness.kinds
                self._known.draws = randomness.random > 0
            else:
                quick = QuickPass()
                self._compute_piece(piece, sums, quick, SEED)
                self._known.draws = quick.has_drawn
            if self._known.draws:
                return None
        return sums

    def sketch_fast(self, computation: Sequence[Piece]) -> Sketch:
        """Return a gradient's sketch, using `sum_quickly` if possible."""
        # the faster passes take about half the time
        sums = None if self._known.draws else self.sum_quickly(computation)
        return self.sketch(computation) if sums is None else self.read(sums)

    def read(self, sums: GradientSums) -> Sketch:
        """Convert the sums that `sum_quickly` returned to a sketch."""
        return sums.sketch(self._known.computed)

    def _compute_piece(self, piece: Piece, sums: GradientSums, mode: Any, seed: int) -> None:
        """Compute a pass inside the context manager `mode`, and add its gradients to `sums`.

        The global random generators are seeded with `seed` first.
        """
        # `mode` is an EvenRandomness or a QuickPass
        seed_all(seed)
        before = self._list_buffers()
        self._adds = partial(
            sums.add, weight=piece.weight, scale=piece.scale, loss_only=self.losses_only
        )
        try:
            with without_dropout(), mode, torch.set_grad_enabled(not self.losses_only):
                loss = piece.loss()
                self.drawn.add(hash_random_states())
                self._note_changes(before)
                if isinstance(loss, torch.Tensor):
                    self.add(loss)
        finally:  # each pass begins in the same state as the first one
            for restore in self._restores:
                restore()

    def add(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients of a loss to those of the running pass.

        A pass that runs several backward passes calls this for each of their losses, instead of
        returning a loss. `options` are the keyword arguments of `GradientSums.add`.
        """
        assert self._adds is not None
        self._adds(loss, **options)

    def _list_buffers(self) -> dict[str, tuple[int, int]]:
        """Return the id and the version counter of each buffer by name, to detect changes."""
        # a pass that replaces or changes a buffer changes one of them
        return {
            f"{name}.{own}" if name else own: (id(buffer), buffer._version)
            for name, module in self._named
            for own, buffer in module._buffers.items()
            if buffer is not None
        }

    def _note_changes(self, before: Mapping[str, tuple[int, int]]) -> None:
        now = self._list_buffers()
        self.changed |= {name for name, state in now.items() if before.get(name) != state}


def _has_room(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the gradients of all tensors fit in memory at the same time."""
    # twice their size is needed, because they are copied to be projected together
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.requires_grad:
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
    return all(2 * size <= _measure_room(device) for device, size in sizes.items())


def _measure_room(device: torch.device) -> int:
    """Return how many bytes an audit may allocate on a device."""
    # on a GPU, the peak usage minus the current usage, so that an audit doesn't raise the peak
    if device.type != "cuda":
        return HOST_ROOM
    # max_memory_allocated and memory_allocated would each flatten all statistics, in about 1 ms
    allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return int(allocated["peak"] - allocated["current"])


@contextmanager
def _without_ddp(model: Any) -> Iterator[None]:
    """Context manager in which a DistributedDataParallel runs its module without an all-reduce."""
    # an audit must not trigger the wrapper's all-reduce, which belongs to the training step
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
    """Context manager in which BatchNorm layers use their running statistics."""
    fixed = [
        (module, module.training)
        for module in modules
        if isinstance(module, BatchNorm) and module.track_running_stats
    ]
    for each, _ in fixed:
        each.training = False
    try:
        yield
    finally:
        for each, training in fixed:
            each.training = training


@contextmanager
def _with_noisy_weights(tensors: Iterable[Any]) -> Iterator[None]:
    """Context manager that adds noise to weights whose values are all the same."""
    # Each weight is refilled with its single value on exit, so no copies are needed.
    moved: list[tuple[torch.Tensor, float]] = []
    seed_torch(SEED)
    try:
        for data, value in _list_constant_tensors(tensors):
            moved.append((data, value))
            data.add_(torch.randn_like(data), alpha=MOVE)
        yield
    finally:
        for data, value in moved:
            data.fill_(value)


def _list_trained_padding(modules: Iterable[Any]) -> list[torch.Tensor]:
    """Return the vectors of padding tokens that training changes, as views of embedding weights.

    An embedding layer gives its `padding_idx` no gradient. Training changes that row only if
    another layer uses the same weight, such as a language model's head.
    """
    padded: list[torch.nn.Embedding | torch.nn.EmbeddingBag] = []
    others: set[int] = set()
    for module in modules:
        is_embedding = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if is_embedding and module.padding_idx is not None:
            padded.append(module)
        else:
            others |= set(map(id, module._parameters.values()))
    shared = [each for each in padded if id(each.weight) in others and each.weight.requires_grad]
    return [
        each.weight.data[each.padding_idx]
        for each in shared
        if type(each.weight.data) is torch.Tensor and each.weight.ndim == 2
    ]


def _list_constant_tensors(tensors: Iterable[Any]) -> list[tuple[torch.Tensor, float]]:
    """Return each tensor whose values are all the same, together with that value."""
    # Only floating-point tensors with several elements count, and no subclasses of Tensor. The host
    # compares small tensors and the first values of others, because a GPU needs 50 ms to load the
    # operations. A large tensor is compared on its device only if its first values are equal.
    plain = [tensor.data for tensor in tensors if type(tensor.data) is torch.Tensor]
    several = [each for each in plain if each.is_floating_point() and each.numel() > 1]
    found = []
    for each, first in zip(several, _copy_first_values(several), strict=True):
        value = float(first[0])
        is_equal = bool((first == value).all())
        if is_equal and len(first) < each.numel():
            is_equal = bool((each == value).all())
        if is_equal:
            found.append((each, value))
    return found


def _copy_first_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first values of each tensor, copied to the CPU.

    The host waits only once for each device and dtype.
    """
    # all values of a tensor with up to COPIED values, and SAMPLED values of any other
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: dict[int, torch.Tensor] = {}
    for places in kinds.values():
        counts = [tensors[place].numel() for place in places]
        counts = [count if count <= COPIED else SAMPLED for count in counts]
        pairs = zip(places, counts, strict=True)
        joined = torch.cat([tensors[place].reshape(-1)[:count] for place, count in pairs])
        found.update(zip(places, joined.cpu().split(counts), strict=True))
    return [found[place] for place in range(len(tensors))]
