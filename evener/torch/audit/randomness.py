"""Random numbers while a few rows are computed several times: the same for a row wherever it is
computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn.functional import leaky_relu
from torch.utils._python_dispatch import TorchDispatchMode

SEED = 20_260_923


# Operations whose results a disturbance changes: those that add up many terms, by the place of the
# arguments whose sizes say how many.
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
_CONVOLUTIONS = {"convolution", "convolution_backward"}
_ATTENTION = "_scaled_dot_product"  # how the names of fused attention begin
_SUMS = {"native_layer_norm_backward", "native_group_norm_backward", "embedding_dense_backward"}
SUM_TERMS = 32  # which are added up in pairs, so the error hardly grows with their number


class EvenRandomness(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Draws the same random numbers for every row.

    `draws` counts them in a pass, and `shaped` those of them whose values depend on how many are
    drawn at once, as padding makes more of them; `kinds` are the types of what was computed, single
    figures apart. With a `disturbance`, a seed, sums of many terms differ as they might if they
    were added up in another order.
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
        if self._disturbance:
            self._disturb(function.overloadpacket.__name__, arguments, result)
        return result

    def _disturb(self, name: str, arguments: Any, result: Any) -> None:
        """Change each row of a result by the rounding errors that sums of this length have.

        Where n terms of any sign are added up one after the other, each addition rounds a partial
        sum by half a unit u; the errors' deviation is u * sqrt(n / 2) of the sums' own (Higham,
        Accuracy and Stability of Numerical Algorithms, section 4.2, with independent errors).
        """
        results = result if isinstance(result, tuple | list) else (result,)
        for place, each in enumerate(results):
            if not isinstance(each, torch.Tensor) or each.layout != torch.strided:
                continue
            if not each.is_floating_point():
                continue
            terms = _count_terms(name, arguments, place)
            if terms and each.numel() > 1:
                self._add_errors(each, terms, apart=1 if name in _CONVOLUTIONS else each.dim() - 1)

    def _add_errors(self, result: torch.Tensor, terms: int, apart: int) -> None:
        """Add rounding errors, by the size of each row: of what shares its place in the axes before
        `apart`.
        """
        device = result.device
        if device not in self._generators:
            made = torch.Generator(device).manual_seed(SEED + self._disturbance)
            self._generators[device] = made
        axes = tuple(range(apart, result.dim()))
        size = result.detach().float().square().mean(axes, keepdim=True).sqrt_()
        size.nan_to_num_(0.0, 0.0)
        unit = torch.finfo(result.dtype).eps / 2
        errors = torch.randn(result.shape, generator=self._generators[device], device=device)
        result.add_(errors.mul_(size).mul_(unit * math.sqrt(terms / 2)))


def _count_terms(name: str, arguments: Any, place: int) -> int:
    """How many terms each value of an operation's result adds up; 0 for others.

    `place`: which of the operation's results.
    """
    if name in _PRODUCTS:
        return int(arguments[_PRODUCTS[name]].shape[-1])
    if name == "convolution":
        return int(arguments[1][0].numel())
    if name == "convolution_backward":
        gradient, _, weight = arguments[:3]
        of_input = place == 0
        return int(weight.numel() // weight.shape[1] if of_input else gradient[:, 0].numel())
    if name.startswith(_ATTENTION):
        shapes = [each.shape for each in arguments[:4] if isinstance(each, torch.Tensor)]
        return max(int(max(shape[-2:])) for shape in shapes if len(shape) > 1)
    return SUM_TERMS if name in _SUMS else 0


# that are the same for any number of values: dropout keeps all of them
_EVEN = {"native_dropout", "_cudnn_init_dropout_state"}


def _draw(function: Any, arguments: list[Any], keywords: dict[str, Any], seed: int) -> Any:
    name = function.overloadpacket.__name__
    if name == "_cudnn_init_dropout_state":  # which no layer uses without dropout
        return function(*arguments, **keywords)
    keywords.pop("generator", None)  # the user's own stays where it is
    names = [each.name for each in function._schema.arguments]
    _turn_dropout_off(names, arguments, keywords)
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


def _turn_dropout_off(names: list[str], arguments: list[Any], keywords: dict[str, Any]) -> None:
    """Set the rate to 0 that fused attention and recurrent layers take as an argument."""
    for place, name in enumerate(names):
        if name not in ("dropout", "dropout_p"):
            continue
        if place < len(arguments):
            arguments[place] = 0.0
        elif name in keywords:
            keywords[name] = 0.0


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
