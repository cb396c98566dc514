"""Which models exchange gradients in the last pass of a batch: a look at each that computes in its passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evener.errors import RequestError
from evener.torch_split.model_checks import check_first_gradient


class PassExchange:
    """The models of one batch's passes, where ranks take different numbers of them; PyTorch takes no others there."""

    def __init__(self) -> None:
        self._models: set[int] | None = None  # ids, while passes are computed
        self._awaited: set[int] = set()  # those whose gradients the last pass is to exchange

    def begin(self, models: Iterable[Any]) -> None:
        """The passes of a batch, in the last of which these exchange gradients."""
        self._models = {id(getattr(each, "_orig_mod", each)) for each in models}

    def end(self) -> None:
        """They are computed, or left."""
        self._models = None
        self._awaited.clear()

    def forward(self, model: Any) -> None:
        """One of several models computes with gradients; RequestError if each pass would exchange them."""
        if self._models is None:
            return
        if id(model) not in self._models:
            raise RequestError(
                "A wrapped model computes in split.parts, but isn't among its models=, so each pass would exchange"
                " gradients.",
                "Leave models= out, which then are all that are wrapped, or compute under torch.no_grad().",
            )
        if getattr(model, "require_backward_grad_sync", False):
            self._awaited.add(id(model))
            check_first_gradient(model, lambda: self._awaited.discard(id(model)))

    def check(self) -> None:
        """RequestError if a model that computed in the last pass has no gradients: its next pass would exchange."""
        if self._awaited:
            raise RequestError(
                "In split.parts a wrapped model computed with gradients, but no backward pass went through it.",
                "Write with torch.no_grad(): around it, as in with torch.no_grad(): fake = generator(noise).",
            )
