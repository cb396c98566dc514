"""Quick passes, without looking at each operation; and passes without dropout.

EvenRandomness is called for each of PyTorch's operations, which takes as long as the operations
themselves where these are small. A pass that draws no random numbers but dropout's doesn't need it.
Whether a pass has drawn any is seen by the generators' state after it.
"""

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
_IN_PLACE = 3  # the place of an argument of the dropout functions in torch.nn.functional
_ATTENTION = "scaled_dot_product_attention"
_RATE, _RATE_PLACE = "dropout_p", 4  # of attention
# cuDNN's dropout has random numbers of its own, whose state can't be read
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class KnownPasses(msgspec.Struct):
    """What is known of a training's passes from its audits so far.

    `computed` are the types that they compute in. `draws` is True if they draw random numbers
    other than dropout's, and None if that isn't known.
    """

    computed: set[torch.dtype] = set()
    draws: bool | None = None


class QuickPass:
    """A context; `has_drawn` is True after it if random numbers were drawn in it.

    Rows may have other numbers then in a batch of another size.
    """

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
    """Enter a context without dropout, as far as functions of PyTorch's Python modules drop values.

    Passes of both kinds are computed in it, so that they have equal results.
    """
    with ExitStack() as stack:
        for owner, name, function in _list_replacements():
            stack.enter_context(replaced(owner, name, function))
        yield


def _list_replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return functions that drop nothing, each with the module and the name of the original."""
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
    """Compute a recurrent layer; its only argument that is a float is the dropout rate."""
    return recur(*(0.0 if isinstance(each, float) else each for each in arguments))
