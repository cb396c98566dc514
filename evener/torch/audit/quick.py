"""Quick passes: without dropout, and without looking at each operation.

EvenRandomness is called for each of PyTorch's operations, which takes as long as the operations
themselves where these are small. A pass that draws no random numbers but dropout's doesn't need it.
Whether a pass has drawn any is seen by the generators' state after it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .randomness import RandomState

_DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"),
    *("alpha_dropout", "feature_alpha_dropout"),
}
_DROPOUTS |= {f"{name}_" for name in _DROPOUTS}
# functions with a dropout rate, and the rate's place
_RATES = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}
_RATE = "dropout_p"
# cuDNN's dropout has random numbers of its own, whose state can't be read
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class KnownPasses(msgspec.Struct):
    """What is known of a training's passes from its audits so far.

    `computed` are the types that they compute in. `draws` is True if they draw random numbers
    other than dropout's, and None if that isn't known.
    """

    computed: set[torch.dtype] = set()
    draws: bool | None = None


class QuickPass(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """Leaves out dropout. `has_drawn` is True after it if random numbers were drawn anyway.

    `kinds` are the types of tensors that functions have returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.has_drawn = False
        self._state: RandomState | None = None

    def __enter__(self) -> QuickPass:
        self._state = RandomState()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.has_drawn |= self._state is None or self._state.has_changed()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        given = keywords or {}
        name = getattr(function, "__name__", "")
        if name in _DROPOUTS:
            return _leave_out(name, arguments, given)
        if function in _RATES:
            arguments, given = _without_rate(_RATES[function], arguments, given)
        elif name in _RECURRENT:  # their only argument that is a float is the dropout rate
            arguments = [0.0 if isinstance(each, float) else each for each in arguments]
        self.has_drawn |= given.get("generator") is not None
        result = function(*arguments, **given)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.kinds.add(result.dtype)
        return result


def _leave_out(name: str, arguments: Any, keywords: Any) -> Any:
    """Return what a dropout function returns if it drops nothing."""
    given = arguments[0] if arguments else keywords["input"]
    in_place = name.endswith("_") or keywords.get("inplace") or arguments[3:4] == (True,)
    return given if in_place else given.clone()


def _without_rate(place: int, arguments: Any, keywords: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a function with a dropout rate of 0."""
    own, named = list(arguments), dict(keywords)
    if place < len(own):
        own[place] = 0.0
    elif _RATE in named:
        named[_RATE] = 0.0
    return own, named
