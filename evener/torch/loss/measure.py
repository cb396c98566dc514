"""The losses of a batch and of its parts as PyTorch computes them: the figures from which a loss is
judged.

Computed without gradients, in float32 or better, as in training: BatchNorm takes its running
statistics, and every row draws the same random numbers. Nothing of it is left in the model, the
trainer or the random state.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from ...training.loss_check import FLOAT32_ROUNDING, FLOAT64_ROUNDING, MIXED_ROUNDING
from ..audit.randomness import SEED, EvenRandomness, seed_all, seed_torch
from ..audit.state import kept_attributes, kept_state

# where 16-bit floats can't be kept out, as with weights in 4 or 8 bits, or layers that cast
HALF_ROUNDING = 4e-3
_HALF = {torch.float16, torch.bfloat16}
Compute = Callable[[Any], Any]  # of a batch: its loss, a number or a tensor of one


class LossMeasure:
    """Computes losses within `open`; `rounding` is the part of a loss by which two computations may
    differ.

    `model` is what trains; `holders` are other objects that computing a loss changes, such as a
    trainer. `changed` are the names of buffers that a pass changes. Every row draws the same
    numbers, unless `randomness` is another context.
    """

    def __init__(
        self, model: torch.nn.Module, holders: Sequence[Any] = (), randomness: Any = None
    ) -> None:
        self.rounding = FLOAT32_ROUNDING
        self.changed: set[str] = set()
        self._model, self._holders = model, holders
        self.randomness = EvenRandomness() if randomness is None else randomness
        self._with_gradients = False

    @contextmanager
    def open(self, training: bool = True) -> Iterator[LossMeasure]:
        """A context in which `compute` leaves no trace; `training`: models compute as in training.

        The weights are moved a little: those that are all zero give every row the same loss, until
        they have learned.
        """
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(kept_state([self._model, *self._holders]))
            seed_torch(SEED)
            stack.enter_context(_full_precision(self._model))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self._model.modules():
                module.training = training and not isinstance(module, _BatchNorm)
            yield self

    def compute(self, function: Compute, batch: Any, seed: int = SEED) -> float:
        """The loss of a batch; NaN where it has none. Errors of the user's own code are raised."""
        seed_all(seed)
        self.randomness.draws = 0  # each pass has the numbers of every other
        # each pass begins as the first one did
        with kept_attributes(*self._model.modules(), *self._holders):
            before = self._list_states()
            loss = self.call(function, batch)
            self.changed |= {
                name for name, state in self._list_states().items() if before.get(name) != state
            }
        if loss is None:
            return float("nan")
        self.rounding = self._find_rounding(loss)
        return (
            float(loss.detach().double().sum()) if isinstance(loss, torch.Tensor) else float(loss)
        )

    def _list_states(self) -> dict[str, tuple[int, int]]:
        """The identity and version of each buffer, by name, to find changed ones; BatchNorm's don't
        change here.
        """
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def _find_rounding(self, loss: Any) -> float:
        kinds = self.randomness.kinds
        if kinds & _HALF:
            return HALF_ROUNDING
        if getattr(loss, "dtype", None) != torch.float64:
            return FLOAT32_ROUNDING
        return MIXED_ROUNDING if torch.float32 in kinds else FLOAT64_ROUNDING

    def call(self, function: Compute, batch: Any) -> Any:
        """The loss that the function returns for a batch, without gradients unless it takes some
        itself.
        """
        if not self._with_gradients:
            try:
                with torch.no_grad(), self.randomness:
                    return function(batch)
            except RuntimeError as error:
                if "grad" not in str(error):
                    raise
                self._with_gradients = True  # a loss of gradients, such as a gradient penalty
        with torch.enable_grad(), self.randomness:
            return function(batch)


@contextmanager
def _full_precision(model: torch.nn.Module) -> Iterator[None]:
    """Moved weights, of 16 bits as float32; no autocast, no TF32."""
    swapped: list[tuple[Any, Any]] = []
    entered = torch.amp.autocast_mode.autocast.__enter__, torch.amp.autocast_mode.autocast.__exit__
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    kept = _find_padding(model)
    try:
        for tensor in [*model.parameters(), *model.buffers()]:
            moved = tensor.requires_grad and tensor.is_floating_point()
            if (moved or tensor.dtype in _HALF) and type(tensor.data) is torch.Tensor:
                swapped.append((tensor, tensor.data))
                tensor.data = _move(tensor.data, kept.get(tensor)) if moved else tensor.data.float()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.amp.autocast_mode.autocast.__enter__ = lambda self: self
        torch.amp.autocast_mode.autocast.__exit__ = lambda *_: None
        yield
    finally:
        torch.amp.autocast_mode.autocast.__enter__, torch.amp.autocast_mode.autocast.__exit__ = (
            entered
        )
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
        for tensor, data in swapped:
            tensor.data = data


def _find_padding(model: torch.nn.Module) -> WeakIdKeyDictionary:
    """The row of each embedding that stands for padding, and is never trained as no other layer has
    its weight.
    """
    users = Counter(
        id(each) for module in model.modules() for each in module.parameters(recurse=False)
    )
    found = WeakIdKeyDictionary()
    for module in model.modules():
        row = getattr(module, "padding_idx", None)
        embeds = (
            isinstance(module, torch.nn.Embedding) and module.weight.ndim == 2
        )  # a shard has one dimension
        if row is not None and embeds and users[id(module.weight)] == 1:
            found[module.weight] = row
    return found


def _move(data: torch.Tensor, kept: int | None) -> torch.Tensor:
    """The data moved by a tenth of their spread, except for a row that is kept."""
    whole = data.float() if data.dtype in _HALF else data
    spread = whole.std() if whole.numel() > 1 else whole.abs().sum()
    moved = whole + torch.randn_like(whole) * (0.1 * spread + 0.01)
    if kept is not None:
        moved[kept] = whole[kept]
    return moved
