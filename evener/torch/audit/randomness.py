"""Make random operations in an audit give every row the same numbers, in any batch."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy
import torch
from torch.nn.functional import leaky_relu
from torch.utils._python_dispatch import TorchDispatchMode

SEED = 20_260_923
LONGEST = 4096  # all rows of up to this length start with the same random numbers


# Operations that sum many terms, so a disturbance changes their results. Each has the index of the
# argument whose last dimension is the number of terms.
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
_CONVOLUTIONS = {"convolution", "convolution_backward"}
_ATTENTION = "_scaled_dot_product"  # prefix of fused attention's names
_SUMS = {"native_layer_norm_backward", "native_group_norm_backward", "embedding_dense_backward"}
SUM_TERMS = 32  # for _SUMS, which add in pairs, so the error hardly grows with the number of terms


_DROPOUT_BACKWARD = torch.ops.aten.native_dropout_backward


# A context in which operations don't call dispatch modes, which take longer than many operations.
without_modes: Callable[[], Any] = torch._C._DisableTorchDispatch


class EvenRandomness(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Context manager in which random operations give each row of a batch the same numbers.

    Dropout keeps all values. If `disturbance` isn't 0, it is the seed of random errors that are
    added to the results of operations; they are as large as rounding errors.
    """

    # the errors are added to sums of many terms

    def __init__(self, disturbance: int = 0, seed: int = SEED) -> None:
        super().__init__()
        self._seed = seed
        # dtypes of computed tensors with more than one value
        self.kinds: set[torch.dtype] = set()
        # Numbers of random operations in a pass: all, and those with random results. Dropout isn't
        # among the latter, because it keeps all values in this context.
        self.draws = self.random = 0
        self._disturbance = disturbance
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that random operations are also intercepted in compiled code."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if _is_plain(function):
            result = function(*arguments, **(keywords or {}))
        else:
            result = self._run_equal_per_row(function, arguments, dict(keywords or {}))
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            self.kinds.add(result.dtype)
        if self._disturbance:
            self._add_rounding_errors(function.overloadpacket.__name__, arguments, result)
        return result

    def _run_equal_per_row(self, function: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Run an operation without dropout, and with the same random numbers for each row."""
        # called only for operations that may drop values or draw random numbers
        rates = _find_dropout(function)
        if rates:  # without dropout, these draw nothing
            return function(*_turn_dropout_off(rates, arguments, keywords), **keywords)
        if function.overloadpacket is _DROPOUT_BACKWARD:
            return arguments[0].clone()  # all values were kept, and none was scaled
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*arguments, **keywords)
        self.draws += 1
        result, random = self._draw(function, list(arguments), keywords)
        self.random += random
        return result

    def _draw(self, function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Run a random operation; return its result, and whether the result depends on the seed."""
        return draw_equal_rows(function, arguments, keywords, self._seed + self.draws)

    def _add_rounding_errors(self, name: str, arguments: Any, result: Any) -> None:
        """Add random errors to an operation's results, as large as its rounding errors."""
        # If n terms of random sign are added one after the other, the error has a standard
        # deviation of u * sqrt(n / 2) times that of the sum, where u is the unit roundoff (Higham,
        # Accuracy and Stability of Numerical Algorithms, section 4.2, with independent errors).
        for index, each in enumerate(_as_sequence(result)):
            if not isinstance(each, torch.Tensor) or each.layout != torch.strided:
                continue
            if not each.is_floating_point():
                continue
            terms = _count_terms(name, arguments, index)
            if terms and each.numel() > 1:
                self._add_relative_errors(
                    each, terms, first_axis=1 if name in _CONVOLUTIONS else each.dim() - 1
                )

    def _add_relative_errors(self, result: torch.Tensor, terms: int, first_axis: int) -> None:
        """Add normally distributed errors to a result, in proportion to the values of each row.

        Each value is the sum of `terms` terms. A row consists of the values with the same indices
        on all axes before `first_axis`.
        """
        # a row's magnitude is its root mean square
        device = result.device
        if device not in self._generators:
            made = torch.Generator(device).manual_seed(SEED + self._disturbance)
            self._generators[device] = made
        axes = tuple(range(first_axis, result.dim()))
        size = result.detach().float().square().mean(axes, keepdim=True).sqrt_()
        size.nan_to_num_(0.0, 0.0)
        unit = torch.finfo(result.dtype).eps / 2
        errors = torch.randn(result.shape, generator=self._generators[device], device=device)
        result.add_(errors.mul_(size).mul_(unit * math.sqrt(terms / 2)))


def _as_sequence(result: Any) -> Sequence[Any]:
    """Return an operation's results as a sequence, even if there is only one."""
    return result if isinstance(result, tuple | list) else (result,)


def _count_terms(name: str, arguments: Any, index: int) -> int:
    """Return how many terms an operation adds up for each value of a result.

    `index` is the index of the result, if the operation has several. The result is 0 if it doesn't
    compute sums.
    """
    if name in _PRODUCTS:
        return int(arguments[_PRODUCTS[name]].shape[-1])
    if name == "convolution":
        return int(arguments[1][0].numel())
    if name == "convolution_backward":
        gradient, _, weight = arguments[:3]
        of_input = index == 0
        return int(weight.numel() // weight.shape[1] if of_input else gradient[:, 0].numel())
    if name.startswith(_ATTENTION):
        shapes = [
            argument.shape for argument in arguments[:4] if isinstance(argument, torch.Tensor)
        ]
        return max(int(max(shape[-2:])) for shape in shapes if len(shape) > 1)
    # 0 for operations that don't sum
    return SUM_TERMS if name in _SUMS else 0


_RATES = {"dropout", "dropout_p"}
_CUDNN = "_cudnn_init_dropout_state"  # its result isn't used without dropout


class _Draw(msgspec.Struct, frozen=True, eq=False):
    """A call of an operation that draws random numbers."""

    function: Any
    arguments: list[Any]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.function.overloadpacket.__name__)

    def names(self) -> list[str]:
        """Return the names of the operation's parameters."""
        return [argument.name for argument in self.function._schema.arguments]

    def call(self) -> Any:
        return self.function(*self.arguments, **self.keywords)


def draw_equal_rows(
    function: Any, arguments: list[Any], keywords: dict[str, Any], seed: int
) -> Any:
    """Run a random operation so that it gives every row the same values.

    Return its result, and whether the result depends on `seed`.
    """
    # Dropout keeps all values, and a permutation moves each entry by one place, so their results
    # aren't random.
    draw = _Draw(function, arguments, keywords)
    if draw.name == _CUDNN:
        return draw.call(), False
    keywords.pop("generator", None)  # the user's own generator isn't advanced
    made = _fixed_instead_of_random(draw)
    if made is not None:
        return made, False
    if _needs_generator(function):
        keywords["generator"] = None  # PyTorch's own
    seed_torch(seed)
    for rule in (_draw_by_arguments, _draw_size, _fill_equal_rows):
        made = rule(draw)
        if made is not None:
            return made, True
    return draw.call(), True


def _fixed_instead_of_random(draw: _Draw) -> Any:
    """Return a fixed result for a permutation or dropout; return None for other operations."""
    # A permutation moves each entry to the place before it. Dropout keeps all values. A mask from
    # bernoulli_(1 - p) is filled with 1 - p, if that is at least 0.5. If rows are mixed with others
    # of their batch, as by mixup, the permutation gives a row other partners in a part than in the
    # whole batch, so the audit finds the difference. Layers that drop by a mask divide the other
    # values by 1 - p; the filled mask cancels this division.
    arguments = draw.arguments
    if draw.name == "randperm":
        return torch.arange(*arguments, **draw.keywords).roll(-1)
    if draw.name == "native_dropout":
        return arguments[0].clone(), torch.ones_like(arguments[0], dtype=torch.bool)
    if draw.name == "bernoulli_":
        chance = arguments[1] if len(arguments) > 1 else draw.keywords.get("p", 0.5)
        if not isinstance(chance, torch.Tensor) and chance >= 0.5:
            return arguments[0].fill_(chance if arguments[0].is_floating_point() else 1)
    return None


def _draw_by_arguments(draw: _Draw) -> Any:
    """Draw from a distribution whose parameters are tensors; return None for other operations."""
    # parameters, such as means, may differ from row to row
    if draw.name in _DISTRIBUTIONS and not isinstance(draw.arguments[0], float):
        return _DISTRIBUTIONS[draw.name](*draw.arguments)
    return None


def _draw_size(draw: _Draw) -> Any:
    """Draw one row and repeat it, for an operation with a `size` parameter.

    The result is None for other operations.
    """
    names = draw.names()
    if "size" not in names:
        return None
    index = names.index("size")
    shape = list(draw.arguments[index])
    if len(shape) < 2:
        draw.arguments[index] = [1] * len(shape)
        return draw.call().expand(shape).clone()
    draw.arguments[index] = [_drawn_length(shape[-1])]
    return draw.call()[: shape[-1]].expand(shape).clone()


def _fill_equal_rows(draw: _Draw) -> Any:
    """Draw one row and repeat it, for an operation that fills a tensor or returns one like it.

    Examples are `normal_` and `rand_like`. The result is None for other operations.
    """
    # A new tensor has the argument's shape. With several tensor arguments, the result depends on
    # all of them.
    arguments = draw.arguments
    if sum(isinstance(argument, torch.Tensor) for argument in arguments) != 1:
        return None
    if draw.function._schema.is_mutable:
        return arguments[0].copy_(_draw_row(draw))
    if draw.name.endswith("_like"):
        return _draw_row(draw).expand_as(arguments[0]).clone()
    return None


@cache
def _find_dropout(function: Any) -> tuple[tuple[int, str], ...]:
    """Return the index and the name of each parameter of an operation that is a dropout rate."""
    # fused attention and recurrent layers have such arguments, and so do their backward passes
    if function.overloadpacket.__name__ == _CUDNN:
        return ()
    names = [argument.name for argument in function._schema.arguments]
    return tuple((index, name) for index, name in enumerate(names) if name in _RATES)


@cache
def _is_plain(function: Any) -> bool:
    """Return whether an operation has no dropout and draws no random numbers."""
    drops = bool(_find_dropout(function)) or function.overloadpacket is _DROPOUT_BACKWARD
    return not drops and torch.Tag.nondeterministic_seeded not in function.tags


def _turn_dropout_off(
    rates: Sequence[tuple[int, str]], arguments: Sequence[Any], keywords: dict[str, Any]
) -> list[Any]:
    """Return an operation's positional arguments with dropout rates of 0.

    `rates` has the index and the name of each dropout rate. Rates in `keywords` are set to 0 in
    place.
    """
    changed = list(arguments)
    for index, name in rates:
        if index < len(changed):
            changed[index] = 0.0
        elif name in keywords:
            keywords[name] = 0.0
    return changed


def _needs_generator(function: Any) -> bool:
    """Return whether an operation has a `generator` parameter without a default."""
    for argument in function._schema.arguments:
        if argument.name == "generator":
            return not argument.has_default_value()
    return False


def _draw_row(draw: _Draw) -> Any:
    """Run a random operation for a single row of its tensor argument."""
    # a row extends along the last axis; with fewer than two axes, each row is a single value
    like, *others = draw.arguments
    return _shorten(draw.function(_empty_row(like), *others, **draw.keywords), like)


def _empty_row(like: Any) -> Any:
    """Return an uninitialized tensor that can hold the random values for one row of `like`."""
    # The rows are those of `like`, along its last axis. The returned tensor has as many values as
    # `_drawn_length` returns for a row, or a single value if `like` has fewer than two axes.
    if like.ndim < 2:
        return torch.empty_like(like[:1] if like.ndim else like)
    return like.new_empty(_drawn_length(like.shape[-1]))


def _shorten(line: Any, like: Any) -> Any:
    return line[: like.shape[-1]] if like.ndim > 1 else line


def _drawn_length(length: int) -> int:
    """Return how many random values to draw for a row of `length` values.

    The same number is drawn for all rows of up to 4096 values. Rows of different lengths then begin
    with the same random values.
    """
    # PyTorch's random values depend on how many are drawn at once
    return max(LONGEST, length)


def _draw_normal(mean: Any, deviation: Any = 1.0, *_: Any) -> Any:
    like = mean if isinstance(mean, torch.Tensor) else deviation
    return mean + deviation * _shorten(torch.randn_like(_empty_row(like)), like)


def _draw_slopes(inputs: Any, slopes: Any, lower: float, upper: float, *_: Any) -> Any:
    """Compute a randomized leaky ReLU with its mean slope; store each input's slope in `slopes`.

    The mean slope is halfway between `lower` and `upper`.
    """
    # the backward pass uses `slopes`
    middle = (lower + upper) / 2
    slopes.copy_(torch.where(inputs < 0, middle, 1.0))
    return leaky_relu(inputs, middle)


_DISTRIBUTIONS: dict[
    str, Callable[..., Any]
] = {  # a fixed value per row, because arguments differ from row to row
    "normal": _draw_normal,
    "bernoulli": lambda chances, *_: (chances > 0.5).to(chances.dtype),
    "poisson": lambda rates, *_: rates.round(),
    "_standard_gamma": lambda shapes, *_: shapes.clone(),
    "multinomial": lambda chances, count, *_: chances.topk(min(count, chances.shape[-1])).indices,
    "rrelu_with_noise": _draw_slopes,
}


class RandomState:
    """State of the global random generators of Python, NumPy and PyTorch.

    Of the GPUs' generators, it includes only the current GPU's.
    """

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _NUMPY.read()
        self._torch = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def has_changed(self) -> bool:
        """Return whether random numbers have been drawn since this state was saved."""
        return (
            not torch.equal(self._torch, torch.get_rng_state())
            or not (self._gpu is None or torch.equal(self._gpu, torch.cuda.get_rng_state()))
            or not _NUMPY.is_at(self._numpy)
            or _python_position(self._python) != _python_position(random.getstate())
        )

    def restore(self) -> None:
        """Restore the state of all generators."""
        random.setstate(self._python)
        _NUMPY.restore(self._numpy)
        torch.set_rng_state(self._torch)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)


def _python_position(state: Any) -> tuple[Any, ...]:
    """Return a few values of the state of Python's generator, which change if numbers are drawn."""
    # The index of the next number in the block of 624 numbers, the block's first number, and a
    # normally distributed value saved for the next draw. Comparing the whole block would take
    # longer.
    return state[1][-1], state[1][0], state[2]


class _NumpyState:
    """Caches the state of NumPy's global random generator, because copying it is slow."""

    # NumPy takes 0.1 ms to copy the state. So the generator's memory is first compared with its
    # content at the last copy, through the `ctypes` interface that NumPy documents. The memory
    # lacks a normally distributed number saved for the next draw: while there is one, the state is
    # copied each time.

    BYTES = 4 * (624 + 1)  # of the Mersenne Twister: its numbers, and the index of the next one

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory = b""
        self._state: Any = None

    def read(self) -> Any:
        """Return the state of NumPy's generator."""
        generator: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined] # in no stub
        if not isinstance(generator, numpy.random.MT19937):
            self._generator = None
            return numpy.random.get_state(legacy=False)
        memory = ctypes.string_at(generator.ctypes.state_address, self.BYTES)
        same = generator is self._generator and memory == self._memory and not self._state[3]
        if not same:
            self._generator, self._memory = generator, memory
            self._state = numpy.random.get_state()
        return self._state

    def is_at(self, state: Any) -> bool:
        """Return whether NumPy's generator still has the given state."""
        now = self.read()
        if now is state:
            return True
        if isinstance(now, dict) or isinstance(state, dict):
            return repr(now) == repr(state)
        return bool(now[1][0] == state[1][0] and now[2:] == state[2:])

    def restore(self, state: Any) -> None:
        numpy.random.set_state(state)
        self._generator = None  # later draws could produce the compared memory again


_NUMPY = _NumpyState()


def hash_random_states() -> int:
    """Return a hash of the states of Python's and NumPy's global random generators."""
    drawn: Any = numpy.random.get_state()
    return hash((random.getstate(), drawn[1].tobytes(), drawn[2]))


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators on the CPU and the current GPU."""
    # torch.manual_seed would seed the generators of all GPUs
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
