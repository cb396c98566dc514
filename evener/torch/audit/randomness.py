"""Random numbers while a few rows are computed several times: the same for a row wherever it is
computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn.functional import leaky_relu
from torch.utils._python_dispatch import TorchDispatchMode

SEED = 20_260_923


# whose results a disturbance changes: those that add up many products
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "convolution", "convolution_backward"}
DISTURBANCE = 4.0  # of the precision of a type: as much as other orders of adding up make


class EvenRandomness(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Draws the same random numbers for every row.

    `draws` counts them in a pass, and `shaped` those of them whose values depend on how many are
    drawn at once, as padding makes more of them; `kinds` are the types of what was computed, single
    figures apart. With a `disturbance`, a seed, products differ by a little of their precision.
    """

    def __init__(self, disturbance: int = 0) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.draws = self.shaped = 0
        self._disturbance = disturbance
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        given = dict(keywords or {})
        if torch.Tag.nondeterministic_seeded not in function.tags:
            result = function(*arguments, **given)
        else:
            self.draws += 1
            self.shaped += function.overloadpacket.__name__ not in _EVEN
            result = _draw(function, list(arguments), given, SEED + self.draws)
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            self.kinds.add(result.dtype)
        if self._disturbance and function.overloadpacket.__name__ in _PRODUCTS:
            for each in result if isinstance(result, tuple | list) else (result,):
                self._disturb(each)
        return result

    def _disturb(self, result: Any) -> None:
        """Change each value by up to DISTURBANCE times its precision."""
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return
        device = result.device
        if device not in self._generators:
            made = torch.Generator(device).manual_seed(SEED + self._disturbance)
            self._generators[device] = made
        part = torch.rand(result.shape, generator=self._generators[device], device=device)
        precision = DISTURBANCE * torch.finfo(result.dtype).eps
        result.mul_((2.0 * part.double() - 1.0).mul_(precision).add_(1.0))


# that are the same for any number of values: dropout keeps all of them
_EVEN = {"native_dropout", "_cudnn_init_dropout_state"}


def _draw(function: Any, arguments: list[Any], keywords: dict[str, Any], seed: int) -> Any:
    name = function.overloadpacket.__name__
    if name == "_cudnn_init_dropout_state":  # which no layer uses without dropout
        return function(*arguments, **keywords)
    keywords.pop("generator", None)  # the user's own stays where it is
    names = [each.name for each in function._schema.arguments]
    # fused attention and recurrent layers take the rate as an argument
    for place, own in enumerate(names):
        if own in ("dropout", "dropout_p"):
            if place < len(arguments):
                arguments[place] = 0.0
            elif own in keywords:
                keywords[own] = 0.0
    seed_torch(seed)
    if name == "randperm":
        return torch.arange(*arguments, **keywords)
    if _needs_generator(function):
        keywords["generator"] = None  # PyTorch's own
    if name in _DISTRIBUTIONS and not isinstance(arguments[0], float):
        return _DISTRIBUTIONS[name](*arguments)
    if name == "native_dropout":
        return arguments[0].clone(), torch.ones_like(arguments[0], dtype=torch.bool)
    if "size" in names:
        place = names.index("size")
        shape = list(arguments[place])
        arguments[place] = shape[-1:] if len(shape) > 1 else [1] * len(shape)
        return function(*arguments, **keywords).expand(shape).clone()
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


def _needs_generator(function: Any) -> bool:
    """True for an overload such as randn.generator, which can't be called without the argument."""
    for each in function._schema.arguments:
        if each.name == "generator":
            return not each.has_default_value()
    return False


def _one_row(function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    like = arguments[0]
    return function(torch.empty_like(_last_axis(like)), *arguments[1:], **keywords)


def _last_axis(tensor: Any) -> Any:
    """The first line of a tensor along its last axis if it has two axes or more, otherwise one
    value.
    """
    return (
        tensor[(0,) * (tensor.ndim - 1)]
        if tensor.ndim > 1
        else tensor[:1]
        if tensor.ndim
        else tensor
    )


def _draw_normal(mean: Any, deviation: Any = 1.0, *_: Any) -> Any:
    like = mean if isinstance(mean, torch.Tensor) else deviation
    return mean + deviation * torch.randn_like(_last_axis(like))


_DISTRIBUTIONS: dict[
    str, Callable[..., Any]
] = {  # whose arguments differ from row to row: a value that each row has
    "normal": _draw_normal,
    "bernoulli": lambda chances, *_: (chances > 0.5).to(chances.dtype),
    "poisson": lambda rates, *_: rates.round(),
    "_standard_gamma": lambda shapes, *_: shapes.clone(),
    "multinomial": lambda chances, count, *_: chances.topk(min(count, chances.shape[-1])).indices,
    "rrelu_with_noise": lambda inputs, _, lower, upper, *__: leaky_relu(
        inputs, (lower + upper) / 2
    ),
}


class RandomState:
    """The state of Python's, NumPy's and PyTorch's random numbers, of the current GPU too if one is
    in use.
    """

    def __init__(self) -> None:
        numbers: Any = numpy.random.get_state()
        self._python, self._numpy, self._torch = random.getstate(), numbers, torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def has_changed(self) -> bool:
        """True if some were drawn since."""
        now = RandomState()
        same = torch.equal(self._torch, now._torch) and (
            self._gpu is None or torch.equal(self._gpu, now._gpu)
        )
        places = [(int(state[1][0]), int(state[2])) for state in (self._numpy, now._numpy)]
        return not same or self._python != now._python or places[0] != places[1]

    def restore(self) -> None:
        """Put the state back."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)


def seed_all(seed: int) -> None:
    """Seed what a RandomState keeps."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed PyTorch's random numbers of the CPU and of the current GPU; torch.manual_seed takes all
    GPUs.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
