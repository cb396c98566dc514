"""Random numbers that are the same for every row, so that a loss with dropout or noise can be compared with its parts.

PyTorch tags its operations that draw random numbers. While the mode is on, each of them draws along the last axis only,
from a seed that is its number in the pass: a row gets the same numbers alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import leaky_relu
from torch.utils._python_dispatch import TorchDispatchMode

SEED = 20_260_923


class EvenRandomness(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Draws the same random numbers for every row.

    `draws` counts them in a pass; `kinds` are the types of what was computed, single figures apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.draws = 0

    def begin(self) -> None:
        """A pass begins: its numbers are those of every other pass."""
        self.draws = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = dict(keywords or {})
        if torch.Tag.nondeterministic_seeded not in function.tags:
            result = function(*arguments, **given)
        else:
            self.draws += 1
            result = _draw(function, list(arguments), given, SEED + self.draws)
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            self.kinds.add(result.dtype)
        return result


def _draw(function: Any, arguments: list[Any], keywords: dict[str, Any], seed: int) -> Any:
    name = function.overloadpacket.__name__
    if name == "_cudnn_init_dropout_state":  # which no layer uses without dropout
        return function(*arguments, **keywords)
    keywords.pop("generator", None)  # the user's own stays where it is
    _leave_dropout_out(function, arguments, keywords)
    torch.manual_seed(seed)
    if name == "randperm":
        return torch.arange(*arguments, **keywords)
    if name in _DISTRIBUTIONS:
        return _DISTRIBUTIONS[name](*arguments)
    if name == "native_dropout":
        return arguments[0].clone(), torch.ones_like(arguments[0], dtype=torch.bool)
    names = [each.name for each in function._schema.arguments]
    if "size" in names:
        return _new_rows(function, arguments, keywords, names.index("size"))
    if name == "bernoulli_" and len(arguments) < 2:
        arguments.append(keywords.pop("p", 0.5))
    if name == "bernoulli_" and not isinstance(arguments[1], torch.Tensor) and arguments[1] >= 0.5:
        return arguments[0].fill_(1)  # dropout keeps all
    if sum(isinstance(each, torch.Tensor) for each in arguments) != 1:
        return function(*arguments, **keywords)
    if function._schema.is_mutable:
        return arguments[0].copy_(_one_row(function, arguments, keywords))
    if name.endswith("_like"):
        return _one_row(function, arguments, keywords).expand_as(arguments[0]).clone()
    return function(*arguments, **keywords)


def _leave_dropout_out(function: Any, arguments: list[Any], keywords: dict[str, Any]) -> None:
    """Fused attention and recurrent layers take the rate as an argument."""
    for place, each in enumerate(function._schema.arguments):
        if each.name in ("dropout", "dropout_p"):
            if place < len(arguments):
                arguments[place] = 0.0
            elif each.name in keywords:
                keywords[each.name] = 0.0


def _new_rows(function: Any, arguments: list[Any], keywords: dict[str, Any], place: int) -> Any:
    shape = list(arguments[place])
    arguments[place] = shape[-1:] if len(shape) > 1 else [1] * len(shape)
    return function(*arguments, **keywords).expand(shape).clone()


def _one_row(function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    like = arguments[0]
    return function(torch.empty_like(_last_axis(like)), *arguments[1:], **keywords)


def _last_axis(tensor: Any) -> Any:
    """The first line of a tensor along its last axis if it has two axes or more, otherwise one value."""
    return tensor[(0,) * (tensor.ndim - 1)] if tensor.ndim > 1 else tensor[:1] if tensor.ndim else tensor


def _draw_normal(mean: Any, deviation: Any = 1.0, *_: Any) -> Any:
    like = mean if isinstance(mean, torch.Tensor) else deviation
    return mean + deviation * torch.randn_like(_last_axis(like))


def _draw_bernoulli(chances: Any, *_: Any) -> Any:
    return (chances > 0.5).to(chances.dtype)


def _draw_places(chances: Any, count: int, *_: Any) -> Any:
    return chances.topk(min(count, chances.shape[-1])).indices


_DISTRIBUTIONS: dict[str, Callable[..., Any]] = {  # whose arguments differ from row to row: a value that each row has
    "normal": _draw_normal,
    "bernoulli": _draw_bernoulli,
    "poisson": lambda rates, *_: rates.round(),
    "_standard_gamma": lambda shapes, *_: shapes.clone(),
    "multinomial": _draw_places,
    "rrelu_with_noise": lambda inputs, _, lower, upper, *__: leaky_relu(inputs, (lower + upper) / 2),
}
