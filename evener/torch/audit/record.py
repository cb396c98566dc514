"""Record the calls that compute the user's loss, so that audits can repeat them on other rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

import evener

from ..private import free_gathered, function_mode
from ..rows.structure import address, tensors_in
from .nested_values import is_arithmetic, leaves_in, map_nested, nested_tensors
from .objects import find_objects, remake, unfold
from .randomness import RandomState
from .state import kept_state

_SIZES = {torch.Tensor.size, torch.Tensor.shape.__get__}
_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__float__,
    torch.Tensor.__array__,
}
# functions that create tensors from Python numbers; their rows aren't rows of the batch
_MAKERS = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray}
# allowed relative difference between a loss and its repetition, by dtype
_AGAIN = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_AGAIN = 3e-2
# folders of libraries, which aren't the program's own code
_LIBRARIES = tuple(str(Path(each).parent) for each in (torch.__file__, evener.__file__))
NOT_THIS_BATCH = "its loss isn't computed from the batch that its loader gave last"
FEW_NUMBERS = 64  # maximum number of values in a tensor that ranks compare
AS_WRITTEN, ROW_COUNTS, MULTIPLES = range(3)  # which numbers in a record are counts of its rows


class RowNumber(int):
    """An int that the user's script read as the number of rows of its batch.

    When the recorded calls are repeated on other rows, it becomes the number of those rows.
    """

    factor = 1

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        if not isinstance(other, int):
            return product
        made = RowNumber(product)
        made.factor = self.factor * int(other)
        return made

    __rmul__ = __mul__


class GeneratorState(msgspec.Struct, frozen=True, eq=False):
    """A PyTorch random generator together with a saved state of it."""

    generator: torch.Generator
    state: torch.Tensor

    def restore(self) -> None:
        self.generator.set_state(self.state)


class WrittenCall(msgspec.Struct, frozen=True, eq=False):
    """A recorded call of a PyTorch function or a model, with its arguments and result."""

    function: Callable[..., Any]
    arguments: Any
    keywords: Any
    result: Any
    autocast: tuple[str, Any] | None  # device and dtype of the active autocast, or None
    # the random generator that the program passed to the call, with its state before the call;
    # None without a generator
    generator: GeneratorState | None = None
    place: str = ""  # the program's file and line, for arithmetic only
    from_model: bool = False  # True if the function is a whole model
    gradients: bool = True  # True if gradients were enabled


class Recorder(TorchFunctionMode):  # type: ignore[misc]  # torch isn't followed
    """Records the calls of PyTorch functions and models that compute the user's loss.

    Recording begins when the object is created and ends with `close`. Arguments:

    - `models`: the models. A model in training mode is recorded as a single call. For other models,
      the calls inside are recorded instead.
    - `batch`: the batch that the loss is computed from.
    - `after`: called after each backward pass with this recorder and the loss.
    - `rows`: row count of the batch; 0 takes it from the batch's first tensor.
    """

    def __init__(
        self,
        models: Iterable[Any],
        batch: Any,
        after: Callable[[Recorder, torch.Tensor], None],
        rows: int = 0,
    ) -> None:
        super().__init__()
        self.models = [model for model in models if model.training]
        self.batch = [tensor for tensor in tensors_in(unfold(batch)) if tensor.ndim]
        self.objects = find_objects(batch)  # outside of containers, with tensors of the batch
        self._kinds = {type(each) for each in self.objects}
        self.rows = rows or (len(self.batch[0]) if self.batch else 0)
        self.losses = 0  # number of losses from which a backward pass started
        # numbers that are used with weights and gradients after the backward pass
        self.uses: tuple[float, ...] = ()
        self.by_hand = False  # True if the caller of backward calls `end_backward` itself
        self.steps = False  # True during an optimizer's step, whose numbers aren't recorded
        # True after a forward pass whose gradients the model all-reduces
        self.exchanges = False
        self.random = RandomState()
        self._after = after
        self._tape: list[WrittenCall] = []
        self._made: dict[int, list[int]] = {}  # tensor id -> the entries that returned the tensor
        self._from_model: set[int] = set()  # ids of tensors computed from a model's output
        # number of entries when a value was first read; only later entries can depend on it
        self._first_read: int | None = None
        self._inside = self._busy = False
        self._given: Any = ((), {})  # arguments of the model whose forward pass is running
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True) for model in self.models
        ]
        self._handles += [
            model.register_forward_hook(self._leave, with_kwargs=True) for model in self.models
        ]
        self.__enter__()

    def close(self) -> None:
        """Stop recording and discard the recorded calls."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._tape, self.batch, self.objects = [], [], [], []
        if function_mode() is self:
            self.__exit__(None, None, None)

    # ------------------------------------------------------------------ writing down

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        given = keywords or {}
        if self._inside or self._busy or not self._handles:
            return function(*arguments, **given)
        if function is torch.Tensor.backward:
            result = function(*arguments, **given)
            if not self.by_hand:
                self.end_backward(arguments[0])
            return result
        if self.losses and not self.steps:
            self._record_scaling(function, (arguments, given))
        generator = _find_generator(given)
        result = function(*arguments, **given)
        self.note_call(function, arguments, given, result)
        if function in _SIZES:
            return self._mark_size(arguments[0], result)
        self._write(function, arguments, given, result, generator=generator)
        return result

    def note_call(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Called after each call of a PyTorch function or a model; for subclasses to override."""

    def take_inner(self, model: Any) -> Any:
        """Return the model inside a wrapper such as DistributedDataParallel, or `model` itself."""
        return getattr(model, "module", model)

    def read_loss(self, loss: torch.Tensor) -> float:
        """Return the value of a loss as a float, or the sum of its elements if it has several."""
        return float(loss.detach().double().sum())

    def end_backward(self, loss: torch.Tensor) -> None:
        """Handle the end of a loss's backward pass by calling the recorder's `after` function."""
        self.losses += 1
        self._busy = True
        try:
            self._after(self, loss)
        finally:
            self._busy = False

    def _enter(self, model: Any, arguments: Any, keywords: Any) -> None:
        # copied, because a model may add results to a dict among its arguments
        self._given = map_nested(lambda each: each, (arguments, keywords))
        self._inside = True
        self.exchanges |= torch.is_grad_enabled() and getattr(
            model, "require_backward_grad_sync", True
        )

    def _leave(self, model: Any, arguments: Any, keywords: Any, result: Any) -> None:
        self._inside = False
        if not self._busy:
            self.note_call(model, arguments, keywords, result)
            given, named = self._given
            self._write(self.take_inner(model), given, named, result, from_model=True)

    def _write(
        self,
        function: Any,
        arguments: Any,
        keywords: Any,
        result: Any,
        from_model: bool = False,
        generator: GeneratorState | None = None,
    ) -> None:
        given = {id(tensor) for tensor in self._tensors((arguments, keywords))}
        gradients = torch.is_grad_enabled()
        led = (from_model and gradients) or bool(given & self._from_model)
        if function in _READS and led and self._first_read is None:
            self._first_read = len(self._tape)
        made = list(nested_tensors(result))
        if not made:
            return
        device = made[0].device.type
        cast = None
        if torch.is_autocast_enabled(device):
            cast = (device, torch.get_autocast_dtype(device))
        for each in made:
            self._made.setdefault(id(each), []).append(len(self._tape))
            if led:
                self._from_model.add(id(each))
        place = _find_user_line() if is_arithmetic(function) else ""
        entry = WrittenCall(
            function, arguments, keywords, result, cast, generator, place, from_model, gradients
        )
        self._tape.append(entry)

    def _tensors(self, data: Any) -> list[torch.Tensor]:
        """Return all tensors in nested data.

        Objects in it whose class also occurs in the batch are searched, too.
        """
        found = nested_tensors(data)
        if self._kinds:
            objects = [each for each in leaves_in(data) if type(each) in self._kinds]
            found += tensors_in(unfold(objects))
        return found

    def _mark_size(self, tensor: Any, result: Any) -> Any:
        """Return a size or shape that the script has read, with a RowNumber as the row count.

        `result` is the size or shape of `tensor`. It is returned unchanged unless `tensor` has one
        entry for each row of the batch.
        """
        known = id(tensor) in self._made or any(each is tensor for each in self.batch)
        sizes = list(result) if isinstance(result, torch.Size) else [result]
        if not known or tensor.ndim == 0 or tensor.shape[0] != self.rows or sizes[0] != self.rows:
            return result
        return (
            torch.Size([RowNumber(sizes[0]), *sizes[1:]])
            if isinstance(result, torch.Size)
            else RowNumber(result)
        )

    def _record_scaling(self, function: Any, arguments: Any) -> None:
        """Record numbers that a call combines with weights or gradients, such as decay rates."""
        # the decay rate is that of a moving average of the weights, for example
        if not is_arithmetic(function):
            return
        every = leaves_in(arguments)
        numbers = [float(each) for each in every if _is_number(each)]
        addresses = {address(each) for each in every if isinstance(each, torch.Tensor)} - {0}
        if numbers and addresses and self._is_weight_at(addresses):
            self.uses += tuple(numbers)

    def _is_weight_at(self, addresses: set[int]) -> bool:
        """Return whether a weight or a gradient is stored at one of these memory addresses."""
        # the addresses are those of the tensors' storages
        weights = (weight for model in self.models for weight in model.parameters())
        own = (each for weight in weights for each in (weight, weight.grad))
        return any(each is not None and address(each) in addresses for each in own)

    # ------------------------------------------------------------------ reading it

    def trace(self, loss: torch.Tensor) -> LossRecord | str:
        """Return the recorded calls that computed a loss.

        If they can't be repeated, return the reason as a phrase for a message.
        """
        needed = self._find_needed(loss)
        if isinstance(needed, str):
            return needed
        numbers = [number for place in needed for number in self._find_numbers(self._tape[place])]
        read = any(self._may_use_read(place) for place in needed)
        entries = [self._tape[place] for place in needed]
        value = self.read_loss(loss)
        models = [self.take_inner(model) for model in self.models]
        return LossRecord(
            models,
            self.batch,
            self.rows,
            entries,
            loss,
            value,
            self.random,
            numbers,
            read,
            self.objects,
        )

    def _find_needed(self, loss: torch.Tensor) -> list[int] | str:
        """Return the indices of the recorded calls that a loss depends on, in order.

        If the calls can't be repeated, return the reason as a phrase for a message.
        """
        indices, reached, is_known = self._find_computing_calls(loss)
        if not is_known:
            return "its loss is computed in a way that can't be followed"
        if id(loss) not in self._from_model:
            return "its loss isn't computed from the output of a wrapped model"
        if not reached:  # the loop prefetches its batches
            return NOT_THIS_BATCH
        if any(self._is_made_of_rows(self._tape[index]) for index in indices):
            return "its loss is computed with rows that aren't tensors of its batch"
        return sorted(indices)

    def _find_computing_calls(self, wanted: torch.Tensor) -> tuple[set[int], bool, bool]:
        """Return the indices of the recorded calls that a tensor depends on, and two flags.

        The first flag is whether the tensor depends on the batch, the second whether all the calls
        that it depends on are known.
        """
        places: set[int] = set()
        # tensors to visit, each with the index of the call that uses it
        queue: list[tuple[Any, int]] = [(wanted, len(self._tape))]
        batch = {id(each) for each in self.batch}
        reached, is_known = False, True
        while queue:
            tensor, taken = queue.pop()
            reached |= id(tensor) in batch
            makers = self._made.get(id(tensor), ())
            if not makers and id(tensor) not in batch:
                rows = tensor.ndim and len(tensor) == self.rows
                lost = tensor.grad_fn is not None or (rows and self._is_after_read(taken))
                is_known = is_known and not lost
            for place in makers:
                if place not in places:
                    places.add(place)
                    entry = self._tape[place]
                    given = self._tensors((entry.arguments, entry.keywords))
                    queue += [(each, place) for each in given]
        return places, reached, is_known

    def _is_made_of_rows(self, entry: WrittenCall) -> bool:
        """Return whether a call turned plain Python values into a tensor with one entry per row."""
        # a replay couldn't replace such rows, because they aren't tensors of the batch
        if entry.function not in _MAKERS or nested_tensors((entry.arguments, entry.keywords)):
            return False
        return any(
            tensor.ndim and len(tensor) == self.rows > 1 for tensor in nested_tensors(entry.result)
        )

    def _is_after_read(self, index: int) -> bool:
        """Return whether the script had read a model's output before a call, such as with `item()`.

        `index` is the index of the recorded call.
        """
        return self._first_read is not None and index >= self._first_read

    def _may_use_read(self, index: int) -> bool:
        """Return whether a recorded call may use a number read from a model's output.

        `index` is the index of the call.
        """
        # the script may have computed the call's number from it
        entry = self._tape[index]
        given = leaves_in(entry.arguments)
        if is_arithmetic(entry.function):
            given += leaves_in(entry.keywords)
        return self._is_after_read(index) and any(isinstance(each, float) for each in given)

    def _find_numbers(self, entry: WrittenCall) -> list[Number]:
        """Return the constants, such as task weights, that a call combines with model outputs."""
        # these are factors, divisors and summands in arithmetic, and summaries of small tensors
        arguments = leaves_in((entry.arguments, entry.keywords))
        if not any(id(argument) in self._from_model for argument in arguments):
            return []
        numbers: list[float] = []
        if is_arithmetic(entry.function):
            plain = [argument for argument in arguments if isinstance(argument, int | float)]
            numbers += [float(each) for each in plain if not isinstance(each, RowNumber)]
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and self._is_user_constant(argument):
                numbers += _summarize(argument)
        return [Number(number, entry.place) for number in numbers]

    def _is_user_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a small constant of the user's script, such as task weights.

        Tensors of the batch and of the models don't count.
        """
        if id(tensor) in self._made or not 0 < tensor.numel() <= FEW_NUMBERS:
            return False
        if not tensor.is_floating_point() or any(tensor is each for each in self.batch):
            return False
        own = (each for model in self.models for each in (*model.parameters(), *model.buffers()))
        return all(tensor is not each for each in own)


def _summarize(tensor: torch.Tensor) -> list[float]:
    """Return a tensor's only value, or two sums of its values: plain, and weighted by position."""
    values = [float(each) for each in tensor.detach().reshape(-1).tolist()]
    if len(values) == 1:
        return values
    # The second sum is weighted by the indices, from 1, so that the order of the values matters.
    return [sum(values), sum(place * value for place, value in enumerate(values, 1))]


class Number(msgspec.Struct, frozen=True):
    """A numeric constant in the user's loss.

    `place` is the file and line where it is used, or "" if unknown.
    """

    value: float
    place: str


class LossRecord:
    """The recorded calls that computed a loss, which can be repeated for other rows.

    Arguments:

    - `models`: the models that the loss is computed with.
    - `batch`: the tensors of the batch.
    - `rows`: row count of the batch.
    - `entries`: the calls, in order.
    - `loss`, `value`: the loss as a tensor and as a number.
    - `random`: state of the random generators before the first call.
    - `numbers`: numeric constants in the calls.
    - `reads`: whether a call may use a number that was read from a model's output.
    - `objects`: objects in the batch that have tensors.
    """

    # numbers that come from the batch or the models aren't in `numbers`

    def __init__(
        self,
        models: Sequence[Any],
        batch: Sequence[torch.Tensor],
        rows: int,
        entries: Sequence[WrittenCall],
        loss: torch.Tensor,
        value: float,
        random: RandomState,
        numbers: Sequence[Number],
        reads: bool,
        objects: Sequence[Any] = (),
    ) -> None:
        self.models = list(models)
        self.batch, self.rows = list(batch), rows
        self.numbers, self.reads = list(numbers), reads
        self._entries, self._loss, self._value = entries, loss, value
        self._random = random
        self.objects = list(objects)

    def compute(self, batch: Any, rows: int, counts: int = AS_WRITTEN) -> torch.Tensor:
        """Compute the loss again for a batch of `rows` rows.

        `counts` says which constants in the calls change with the number of rows: none
        (AS_WRITTEN), the row count itself (ROW_COUNTS), or also its multiples (MULTIPLES). Raises
        ValueError if the tensors in the batch don't correspond to the recorded ones.
        """
        return self._compute(batch, rows, counts, find_objects(batch))

    def _compute(self, batch: Any, rows: int, counts: int, objects: Sequence[Any]) -> torch.Tensor:
        given = [tensor for tensor in tensors_in(unfold(batch)) if tensor.ndim]
        if len(given) != len(self.batch):
            raise ValueError(f"the batch has {len(self.batch)} tensors, these rows {len(given)}")
        pairs = zip(self.batch, given, strict=True)
        known: dict[int, Any] = {id(own): each.to(own.device, copy=True) for own, each in pairs}
        convert_number = partial(_scale_row_count, counts, self.rows, rows)
        replacements = {type(each): _find_only(type(each), objects) for each in self.objects}
        made: torch.Tensor = replay(
            self._entries, known, rows, convert_number, id(self._loss), replacements
        )
        return made

    def may_count_rows(self) -> bool:
        """Return whether a constant in the calls may be the row count or a multiple of it."""
        return any(may_count(self.rows, number.value) for number in self.numbers)

    def has_other_rows(self) -> bool:
        """Return whether a call uses a tensor from outside the batch that has one entry per row.

        Parameters, buffers and results of earlier calls don't count.
        """
        # a replay can't replace the rows of such a tensor
        known = {id(each) for each in self.batch}
        for model in self.models:
            known |= {id(each) for each in (*model.parameters(), *model.buffers())}
        for entry in self._entries:
            given = nested_tensors((entry.arguments, entry.keywords))
            if any(id(each) not in known and self._has_rows(each) for each in given):
                return True
            known |= {id(tensor) for tensor in nested_tensors(entry.result)}
        return False

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.ndim) and len(tensor) == self.rows

    def find_change(self) -> str:
        """Repeat the calls on the same rows, to check that they give the same loss.

        Return a message if the loss differs by more than rounding, or "" if it doesn't.
        """
        kinds = {
            tensor.dtype
            for entry in self._entries
            for tensor in nested_tensors(entry.result)
            if tensor.is_floating_point()
        }
        near = max((_AGAIN.get(kind, HALF_AGAIN) for kind in kinds), default=0.0)
        try:
            with kept_state([torch.nn.ModuleList(self.models)]):
                again = self._compute_again()
        finally:
            free_gathered(self.models)
        first = self._value
        if abs(again - first) <= near * max(abs(first), 1e-30):
            return ""
        return (
            f"its loss changes when the same rows are computed again: {first:.6g}, then {again:.6g}"
        )

    def _compute_again(self) -> float:
        """Repeat the calls on the same rows with the same random numbers, and return the loss."""
        # gradients are enabled only if the loss needs them, for example for a gradient penalty
        for enabled in (False, True):
            self._random.restore()
            try:
                with torch.set_grad_enabled(enabled):
                    made = self._compute(self.batch, self.rows, AS_WRITTEN, self.objects)
                    return float(made.detach().double().sum())
            except RuntimeError as error:
                if enabled or "grad" not in str(error):
                    raise
        raise AssertionError


def _find_user_line() -> str:
    """Return the file and line of the user's code that is running, or "" if there is none."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")) and "site-packages" not in name:
            return f"{name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def _scale_row_count(counts: int, old_rows: int, new_rows: int, number: Any) -> Any:
    """Scale a number that may be a row count, from a batch of `old_rows` rows to one of `new_rows`.

    `counts` says which numbers are scaled: none (AS_WRITTEN), the row count and its reciprocal
    (ROW_COUNTS), or also multiples of these (MULTIPLES). Others are returned unchanged.
    """
    is_plain = _is_number(number)
    if counts == AS_WRITTEN or not is_plain or not number or old_rows < 2:
        return number
    for ratio, scaled in (
        (number / old_rows, number * new_rows / old_rows),
        (1 / number / old_rows, number * old_rows / new_rows),
    ):
        whole = abs(ratio - round(ratio)) < 1e-9 * abs(ratio) and round(ratio) >= 1
        if whole and (counts == MULTIPLES or round(ratio) == 1):
            exact = isinstance(number, int) and scaled == int(scaled)
            return int(scaled) if exact else scaled
    return number


def may_count(rows: int, value: float) -> bool:
    """Return whether a number may be a row count, or a multiple or fraction of it."""
    return bool(_scale_row_count(MULTIPLES, rows, 2 * rows, value) != value)


def _find_generator(keywords: Any) -> GeneratorState | None:
    """Return the random generator among a call's keyword arguments with its state, or None."""
    generator = keywords.get("generator")
    if not isinstance(generator, torch.Generator):
        return None
    return GeneratorState(generator, generator.get_state())


def replay(
    entries: Sequence[WrittenCall],
    known: dict[int, Any],
    rows: int,
    convert_number: Callable[[Any], Any],
    wanted: int,
    replacements: Mapping[type, Any] = MappingProxyType({}),
) -> Any:
    """Repeat recorded calls on new rows; return the new value of the tensor whose id is `wanted`.

    Arguments:

    - `entries`: the recorded calls.
    - `known`: the tensors that replace recorded ones, by the id of the recorded tensor. The
      results of the calls are added to it.
    - `rows`: row count of the new rows.
    - `convert_number`: called with each number among the arguments; returns the number to use.
    - `replacements`: objects that replace recorded ones, by class; None for a class whose object
      can't be replaced.

    Raises ValueError if a call returns a different number of tensors than when it was recorded.
    """
    # Numbers are converted because they may be row counts. The random generators that the script
    # passes to calls have the same states afterwards as before.
    states = [entry.generator for entry in entries if entry.generator is not None]
    now = [GeneratorState(state.generator, state.generator.get_state()) for state in states]
    try:
        _replay_entries(entries, known, rows, convert_number, replacements)
    finally:
        for each in now:
            each.restore()
    return known[wanted]


def _replay_entries(
    entries: Sequence[WrittenCall],
    known: dict[int, Any],
    rows: int,
    convert_number: Callable[[Any], Any],
    replacements: Mapping[type, Any],
) -> None:
    """Repeat recorded calls in order, and add their results to `known`.

    Arguments:

    - `known`: the tensors that replace recorded ones, by the id of the recorded tensor.
    - `rows`: row count of the new rows.
    - `convert_number`: called with each number among the arguments; returns the number to use.
    - `replacements`: objects that replace recorded ones, by class; None for a class whose object
      can't be replaced.

    Raises ValueError if a call returns a different number of tensors than when it was recorded.
    """
    for entry in entries:
        if entry.generator is not None:
            entry.generator.restore()
        counted = _same if entry.from_model else convert_number
        changed = set(map(id, nested_tensors(entry.result)))
        now = partial(_replace_argument, known, rows, counted, changed, replacements)
        under = (
            nullcontext()
            if entry.autocast is None
            else torch.autocast(entry.autocast[0], entry.autocast[1])
        )
        enabled = torch.is_grad_enabled() and entry.gradients
        with under, torch.set_grad_enabled(enabled):
            made = entry.function(
                *map_nested(now, entry.arguments), **map_nested(now, entry.keywords)
            )
        recorded, repeated = list(nested_tensors(entry.result)), list(nested_tensors(made))
        if len(recorded) != len(repeated):
            name = getattr(entry.function, "__name__", "a call")
            raise ValueError(f"{name} returns {len(repeated)} tensors, not {len(recorded)}")
        known.update((id(was), made) for was, made in zip(recorded, repeated, strict=True))


def _find_only(wanted: type, objects: Sequence[Any]) -> Any:
    """Return the only object of exactly this class, or None if there isn't exactly one."""
    found = [each for each in objects if type(each) is wanted]
    return found[0] if len(found) == 1 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(number: Any) -> Any:
    return number


def _replace_argument(
    known: dict[int, Any],
    rows: int,
    convert_number: Callable[[Any], Any],
    changed: set[int],
    replacements: Mapping[type, Any],
    argument: Any,
) -> Any:
    """Return what a repeated call gets in place of a recorded argument.

    Arguments:

    - `known`: the tensors that replace recorded ones, by the id of the recorded tensor.
    - `rows`: row count of the new rows.
    - `convert_number`: called with a number; returns the number to use.
    - `changed`: ids of the tensors that the call changes in place, which are copied.
    - `replacements`: objects that replace recorded ones, by class; None for a class whose object
      can't be replaced.

    Raises ValueError for an object that can't be replaced.
    """
    if isinstance(argument, RowNumber):
        return argument.factor * rows
    if type(argument) in replacements:
        if replacements[type(argument)] is None:
            raise ValueError(f"a {type(argument).__name__} can't be cut into rows")
        return remake(replacements[type(argument)], argument, known)
    if id(argument) in known or not isinstance(argument, torch.Tensor):
        return known[id(argument)] if id(argument) in known else convert_number(argument)
    return argument.clone() if id(argument) in changed else argument
