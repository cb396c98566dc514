"""Run an audit's passes faster, without intercepting PyTorch's random operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch.nn import functional

from ...system.replaced import replaced
from ..private import recurrent_functions
from .randomness import RandomState

_DROPOUTS = [
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout"),
    *("feature_alpha_dropout", "dropout_", "feature_dropout_", "alpha_dropout_"),
    "feature_alpha_dropout_",
]
_IN_PLACE = 3  # index of `inplace` in the arguments of dropout in torch.nn.functional
_ATTENTION = "scaled_dot_product_attention"
_RATE, _RATE_PLACE = "dropout_p", 4  # name and index of attention's dropout rate
# names of recurrent functions; cuDNN's dropout has random numbers whose state can't be read
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class KnownPasses(msgspec.Struct):
    """What earlier audits found out about the passes that compute a loss.

    `computed` has the dtypes that they compute in. `draws` is whether they draw random numbers; it
    is None until that is known.
    """

    computed: set[torch.dtype] = set()
    draws: bool | None = None


class QuickPass:
    """Context manager for a pass whose random operations aren't intercepted.

    On exit, it sets `has_drawn` to whether random numbers were drawn inside. If so, the pass has to
    be repeated with EvenRandomness.
    """

    # a row's random numbers may otherwise depend on the size of its batch

    def __init__(self) -> None:
        self.has_drawn = False
        self._state = RandomState()

    def __enter__(self) -> QuickPass:
        self._state = RandomState()
        return self

    def __exit__(self, *_: Any) -> None:
        self.has_drawn = self._state.has_changed()


@contextmanager
def without_dropout() -> Iterator[None]:
    """Context manager in which PyTorch's Python functions for dropout keep all values."""
    # it is used in quick passes and in passes with EvenRandomness, so that their results are equal
    with ExitStack() as stack:
        for owner, name, function in _list_replacements():
            stack.enter_context(replaced(owner, name, function))
        yield


def _list_replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return (owner, name, replacement) for each PyTorch function that uses dropout.

    The replacements don't drop values.
    """
    made: list[tuple[Any, str, Callable[..., Any]]] = [
        (owner, name, partial(_drop_nothing, name.endswith("_")))
        for owner in (functional, torch)
        for name in _DROPOUTS
        if hasattr(owner, name)
    ]
    made.append((functional, _ATTENTION, partial(_attend, getattr(functional, _ATTENTION))))
    functions = recurrent_functions
    made += [(functions, name, partial(_recur, getattr(functions, name))) for name in _RECURRENT]
    return made


def _drop_nothing(in_place: bool, *arguments: Any, **keywords: Any) -> Any:
    given = arguments[0] if arguments else keywords["input"]
    in_place |= bool(keywords.get("inplace")) or arguments[_IN_PLACE:] == (True,)
    return given if in_place else given.clone()


def _attend(attend: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    own = list(arguments)
    if len(own) > _RATE_PLACE:
        own[_RATE_PLACE] = 0.0
    elif _RATE in keywords:
        keywords[_RATE] = 0.0
    return attend(*own, **keywords)


def _recur(recur: Callable[..., Any], *arguments: Any) -> Any:
    """Call a recurrent layer's function with a dropout rate of 0."""
    # the dropout rate is its only float argument
    return recur(*(0.0 if isinstance(argument, float) else argument for argument in arguments))
