"""An order of rows of the user's own: a sampler, a list, or a function of the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

import torch

from ..errors import RequestError

Order = Iterable[int] | Callable[[int], Sequence[int]]


class RowOrder:
    """The rows of each epoch in the order that the user's `order` gives, drawn anew from `seed` and the epoch.

    RequestError if it gives something else than as many rows of 0 to `rows` - 1 in each epoch.
    """

    def __init__(self, order: Order, rows: int, seed: int) -> None:
        self._order = order
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._drawn = self._draw(0)
        self._digest: int | None = None

    def __len__(self) -> int:
        return len(self._drawn)

    def draw(self, epoch: int) -> torch.Tensor:
        """The epoch's rows, (rows,) of int64."""
        if epoch != self._epoch:
            drawn = self._draw(epoch)
            if len(drawn) != len(self._drawn):
                raise RequestError(
                    f"The order has {len(drawn)} rows in epoch {epoch} and {len(self._drawn)} in epoch {self._epoch}.",
                    "Give one with as many rows in every epoch.",
                )
            self._epoch, self._drawn, self._digest = epoch, drawn, None
        return self._drawn

    def digest(self, epoch: int) -> int:
        """A digest that tells one epoch's order from another."""
        drawn = self.draw(epoch)
        if self._digest is None:
            self._digest = crc32(drawn.numpy().tobytes())
        return self._digest

    def _draw(self, epoch: int) -> torch.Tensor:
        order: Any = self._order
        seed = mix_seed(self._seed, epoch)
        with torch.random.fork_rng(devices=[]):  # the loop's own random numbers stay as they were
            torch.default_generator.manual_seed(seed)
            if isinstance(getattr(order, "generator", None), torch.Generator):
                order.generator.manual_seed(seed)
            if callable(order):
                rows = order(epoch)
            else:
                if hasattr(order, "set_epoch"):
                    order.set_epoch(epoch)
                rows = list(order)
        return self._check(rows)

    def _check(self, rows: Any) -> torch.Tensor:
        try:
            drawn = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            drawn = torch.empty(0)
        whole = drawn.ndim == 1 and len(drawn) and not (drawn.is_floating_point() or drawn.dtype == torch.bool)
        if not whole or drawn.min() < 0 or drawn.max() >= self._rows:
            raise RequestError(
                f"order={type(self._order).__name__} doesn't give row numbers from 0 to {self._rows - 1}.",
                "Give a sampler, a list of row numbers, or a function of the epoch that returns one; no batch sampler.",
            )
        return drawn.to("cpu", torch.int64, copy=True)


def mix_seed(seed: int, epoch: int) -> int:
    """A seed for the random numbers of one epoch."""
    return (seed * 1_000_003 + epoch) % (1 << 63)
