"""The losses of a batch and of its parts as PyTorch computes them: the figures from which a loss is
judged.

Computed without gradients, in float32 or better, as in training: BatchNorm takes its running
statistics, and every row draws the same random numbers. Nothing of it is left in the model, the
trainer or the random state.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch.nn.functional import leaky_relu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..training.loss_check import FLOAT32_ROUNDING, FLOAT64_ROUNDING, MIXED_ROUNDING

SEED = 20_260_923


class EvenRandomness(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Draws the same random numbers for every row.

    `draws` counts them in a pass; `kinds` are the types of what was computed, single figures apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.draws = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
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
    names = [each.name for each in function._schema.arguments]
    # fused attention and recurrent layers take the rate as an argument
    for place, own in enumerate(names):
        if own in ("dropout", "dropout_p"):
            if place < len(arguments):
                arguments[place] = 0.0
            elif own in keywords:
                keywords[own] = 0.0
    _seed_torch(seed)
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


MOST_ITEMS = 10_000  # of a list or dict that is looked into; longer ones are data, not counters
_CONTAINERS = (dict, list, deque, set)


@contextmanager
def kept_attributes(*holders: Any) -> Iterator[None]:
    """Put back what all holders have, in place, when the block ends: counters, lists of figures,
    buffers, metrics.

    Parameters aren't copied, but for those that a model moves itself, as a momentum encoder's.
    """
    put_back, frozen = keep_attributes(*holders), _copy_frozen(holders)
    try:
        yield
    finally:
        put_back()
        for each, was in frozen:
            _put_back(each, was)


def _copy_frozen(holders: Iterable[Any]) -> list[Any]:
    """Weights that nothing trains, and what puts each back; none where they are more than those
    that are trained.
    """
    every = [
        each
        for holder in holders
        for each in vars(holder).get("_parameters", {}).values()
        if each is not None
    ]
    frozen = [each for each in every if not each.requires_grad]
    few = 2 * sum(map(torch.numel, frozen)) <= sum(map(torch.numel, every))
    return [(each, (each._version, each.detach().clone())) for each in frozen if few]


def keep_attributes(*holders: Any, apart: Iterable[Any] = ()) -> Callable[[], None]:
    """Note what all holders have, but for what `apart` refers to; the function that puts it back,
    in place.
    """
    memo: dict[int, Any] = {id(each): None for each in apart}  # what needn't be looked into
    for each in holders:
        memo |= {
            id(vars(each).get(name)): None for name in ("_parameters", "_modules")
        }  # FSDP exchanges parameters
    kept = [(vars(each), _copy(vars(each), memo)) for each in holders]

    def put_back() -> None:
        for holder, was in kept:
            _put_back(holder, was)

    return put_back


@contextmanager
def kept_state(holders: Iterable[Any] = ()) -> Iterator[None]:
    """Put back the attributes of all holders and of their modules, and the random state, when the
    block ends.
    """
    modules = [
        part
        for each in holders
        for part in (each.modules() if isinstance(each, torch.nn.Module) else [each])
    ]
    numbers = RandomState()
    try:
        with kept_attributes(*modules):
            yield
    finally:
        numbers.restore()


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
    _seed_torch(seed)


def _seed_torch(seed: int) -> None:
    """Seed PyTorch's random numbers of the CPU and of the current GPU; torch.manual_seed takes all
    GPUs.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """The data that put a value back in place; None for a value that is only referred to."""
    if id(value) in memo:
        return None
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch.nn.Parameter) or value.requires_grad or value.is_inference():
            return None
        memo[id(value)] = value
        return value._version, value.detach().clone()
    if (type(value) not in _CONTAINERS and not isinstance(value, _CONTAINERS)) or len(
        value
    ) > MOST_ITEMS:
        return None
    memo[id(value)] = value
    if not value:  # as most of a module's are
        return ()
    if isinstance(value, set):
        return set(value)
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(key, item, _copy(item, memo)) for key, item in items]


def _put_back(value: Any, was: Any) -> None:
    if was is None or (was == () and not value):
        return
    if isinstance(value, torch.Tensor):
        version, copied = was
        with torch.no_grad():  # one that was changed by its data alone has its version still
            (value.data if value._version == version else value).copy_(copied)
        return
    if isinstance(value, set):
        value.clear()
        value.update(was)
        return
    for _, item, inner in was:
        _put_back(item, inner)
    same = list(value.items() if isinstance(value, dict) else enumerate(value))
    if [(key, id(item)) for key, item in same] != [(key, id(item)) for key, item, _ in was]:
        value.clear()
        if isinstance(value, dict):
            value.update({key: item for key, item, _ in was})
        else:
            value.extend(item for _, item, _ in was)


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
            _seed_torch(SEED)
            stack.enter_context(_full_precision(self._model))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self._model.modules():
                module.training = training and not isinstance(module, _BatchNorm)
            yield self

    def compute(self, function: Compute, batch: Any, seed: int = SEED) -> float:
        """The loss of a batch; NaN where it has none. Errors of the user's own code are raised."""
        seed_all(seed)
        self.randomness.draws = 0  # each pass has the numbers of every other
        with kept_attributes(*self._model.modules()):  # each pass begins as the first one did
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
    """Moved weights, of 16 bits as float32, no autocast, no TF32."""
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
