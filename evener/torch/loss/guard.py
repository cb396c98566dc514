"""A guard before shares leave even: the program's own loss of a batch, beside the losses of unequal
parts of it.

What the program computes from a batch to its loss is written down, function by function, and
computed again for parts of the rows: nothing of the program's own code runs twice, and nothing of
it is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ...errors import RequestError
from ...training.loss_check import describe, judge
from ..audit.nested_values import is_arithmetic, leaves_in, map_nested, nested_tensors
from ..audit.randomness import RandomState
from ..audit.record import GeneratorState, RowNumber, WrittenCall
from ..audit.state import kept_state
from ..rows.structure import address, cut_rows, tensors_in
from .check import CheckBatch, LossCheck
from .measure import LossMeasure
from .origins import Origins

_SIZES = {torch.Tensor.size, torch.Tensor.shape.__get__}
_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__float__,
    torch.Tensor.__array__,
}
_AGAIN = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}  # by how much a loss may differ that is computed again
HALF_AGAIN = 3e-2
_PART = (
    "its loss can't be computed for a part of its rows, as where each row is compared with the "
    "others of its batch"
)
LATER_CALLS = 100  # after the backward pass, that are written down
LOOK_AGAIN = 4  # times as many steps until a guard looks once more


class Guard(TorchFunctionMode):  # type: ignore[misc]  # torch isn't followed
    """Writes down a batch's way to its loss; at its first backward pass `fault` says why shares
    would change it.

    The fault is empty where the loss is a mean over rows. `repad` collates the first rows of the
    batch and the others by themselves, where they are padded less then. `rows` are the batch's,
    unless its first tensor says so. Where ranks meet in the models' layers, all compute the same
    passes: `agree` says before whether one has a fault, its own one given.
    """

    def __init__(
        self,
        models: Iterable[Any],
        batch: Any,
        repad: Callable[[int], list[Any]] | None = None,
        rows: int = 0,
        origins: Origins | None = None,
        agree: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self.fault, self.done = "no backward pass was seen in its first step", False
        self._repad = repad
        self._agree = agree
        self._models = [each for each in models if each.training]
        self._batch = [each for each in tensors_in(batch) if each.ndim]
        self._rows = rows or (len(self._batch[0]) if self._batch else 0)
        self._tape: list[WrittenCall] = []
        self._made: dict[int, list[int]] = {}  # id of a tensor -> the entries that returned it
        self._from_model: set[int] = set()  # tensors that a model's output led to
        # the entry before which a figure was first read: only entries after it can depend on it
        self._first_read: int | None = None
        self._most = -1  # entries of the tape, once the backward pass is over
        self._replays = False  # something is computed again
        self._origins = origins
        self.entered = ""  # the call by which ranks exchanged something that is in the loss
        self._inside = self._with_gradients = False
        self._before: dict[int, torch.Tensor] = {}  # figures, by address, that were overwritten
        self.measured = False  # the fault: parts don't add up
        # that the loss is computed with, beside the batch and the models
        self.numbers: tuple[float, ...] | None = None
        self.uses: tuple[
            float, ...
        ] = ()  # that weights and gradients are used with after the backward pass
        self.steps = False  # an optimizer, of which nothing is noted
        # with its rank's other rows, and what that makes of the loss can't be computed again
        self.padded = False
        # its models exchange gradients, as far as was seen until it was closed
        self.exchanges = False
        self._random = RandomState()
        self._given: Any = ((), {})  # to the model that computes
        self._handles = [
            each.register_forward_pre_hook(self._enter, with_kwargs=True) for each in self._models
        ]
        self._handles += [
            each.register_forward_hook(self._leave, with_kwargs=True) for each in self._models
        ]
        self.__enter__()

    def close(self) -> None:
        """Write down no more."""
        self.done = True
        for handle in self._handles:
            handle.remove()
        self._handles, self._tape, self._batch = [], [], []
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    # ------------------------------------------------------------------ writing down

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        given = keywords or {}
        if self._passes_through():
            return function(*arguments, **given)
        if function is torch.Tensor.backward:
            return self._run_backward(function, arguments, given)
        if self.done:
            self._note_use(function, (arguments, given))
        draw = _find_draw(given)
        result = function(*arguments, **given)
        if self._origins is not None:
            self._origins.follow(function, arguments, given, result)
        if function in _SIZES:
            return self._mark(arguments[0], result)
        if not self.done or len(self._tape) < self._most:
            self._write(function, arguments, given, result, draw=draw)
        return result

    def _passes_through(self) -> bool:
        """True where nothing is noted: in a model, in an optimizer, and once this is closed."""
        over = self.done and (self.steps or not self._handles)
        return over or self._inside or self._replays

    def _run_backward(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Run a backward pass; the first one's loss is judged before."""
        loss = arguments[0]
        if self._origins is not None and not self.entered:
            self.entered = self._origins.find_made(loss)
        if not self.done:
            self.done = True
            self.fault = self.judge(loss)
            self._most = len(self._tape) + LATER_CALLS
        return function(*arguments, **keywords)

    @property
    def is_inside(self) -> bool:
        """True while a model that trains computes, with gradients."""
        return self._inside and self._with_gradients and not self._replays

    @property
    def is_replaying(self) -> bool:
        """True while something of the program's is computed again."""
        return self._replays

    def keep_figure(self, tensor: torch.Tensor) -> None:
        """Note a figure that ranks are about to overwrite with one that they exchange."""
        if tensor.numel() == 1:
            self._before.setdefault(address(tensor), tensor.detach().clone())

    def forget_making(self, tensor: torch.Tensor) -> None:
        """Take a tensor as given from now on: ranks have exchanged what is in it."""
        if tensor.grad_fn is None:
            self._made.pop(id(tensor), None)

    def comes_from_batch(self, tensor: torch.Tensor) -> bool:
        """True if the tensor was computed from the batch, as far as is known."""
        return self._trace(tensor)[1]

    def goes_by_rows(self, tensor: torch.Tensor) -> bool:
        """True if the tensor has another size where the batch has fewer rows; or if that can't be
        found out though the tensor was computed from the batch.
        """
        if not self._rows or not tensor.ndim or len(tensor) % self._rows:
            return False
        places, reached, _ = self._trace(tensor)
        if not reached:
            return False
        if any(tensor is each for each in self._batch) or self._agree is not None:
            return True
        rows = max(1, self._rows * 3 // 4)
        entries = [self._tape[place] for place in sorted(places)]
        model = torch.nn.ModuleList(getattr(each, "module", each) for each in self._models)
        batch = cut_rows(self._batch, 0, rows, self._rows)
        self._replays = True
        try:
            for gradients in (False, True):  # which some functions take
                with suppress(Exception), kept_state([model]), torch.set_grad_enabled(gradients):
                    known = dict(zip(map(id, self._batch), batch, strict=True))
                    made = _replay(entries, known, rows, id(tensor))
                    return bool(made.shape != tensor.shape)
            return True  # functions that don't take fewer rows
        finally:
            self._replays = False

    def _enter(self, model: Any, arguments: Any, keywords: Any) -> None:
        # a model may add what it computes to a dict that it is given
        self._given = map_nested(lambda each: each, (arguments, keywords))
        self._inside, self._with_gradients = True, torch.is_grad_enabled()
        self.exchanges |= torch.is_grad_enabled() and getattr(
            model, "require_backward_grad_sync", True
        )

    def _leave(self, model: Any, arguments: Any, keywords: Any, result: Any) -> None:
        self._inside = False
        if self._origins is not None:
            self._origins.follow(model, arguments, keywords, result)
        if not self.done and torch.is_grad_enabled():
            # DistributedDataParallel's own forward pass meets the other ranks
            inner = model if self._agree is not None else getattr(model, "module", model)
            given, named = self._given
            self._write(inner, given, named, result, from_model=True)

    def _write(
        self,
        function: Any,
        arguments: Any,
        keywords: Any,
        result: Any,
        from_model: bool = False,
        draw: GeneratorState | None = None,
    ) -> None:
        given = {id(each) for each in nested_tensors((arguments, keywords))}
        from_model = from_model or bool(given & self._from_model)
        if function in _READS and from_model and self._first_read is None:
            self._first_read = len(self._tape)
        made = list(nested_tensors(result))
        if not made:
            return
        device = made[0].device.type
        cast = (
            (device, torch.get_autocast_dtype(device))
            if torch.is_autocast_enabled(device)
            else None
        )
        for each in made:
            self._made.setdefault(id(each), []).append(len(self._tape))
            if from_model:
                self._from_model.add(id(each))
        self._tape.append(WrittenCall(function, arguments, keywords, result, cast, draw))

    def _mark(self, tensor: Any, result: Any) -> Any:
        """The size as it was asked for; the number of rows of what comes from the batch as one that
        is followed.
        """
        known = id(tensor) in self._made or any(each is tensor for each in self._batch)
        sizes = list(result) if isinstance(result, torch.Size) else [result]
        if not known or tensor.ndim == 0 or tensor.shape[0] != self._rows or sizes[0] != self._rows:
            return result
        return (
            torch.Size([RowNumber(sizes[0]), *sizes[1:]])
            if isinstance(result, torch.Size)
            else RowNumber(result)
        )

    def _note_use(self, function: Any, given: Any) -> None:
        """Note the numbers that weights or gradients are used with, as in an average of the weights
        of all steps.
        """
        every = leaves_in(given) if is_arithmetic(function) else []
        numbers = [
            float(each)
            for each in every
            if isinstance(each, int | float) and not isinstance(each, bool)
        ]
        if numbers and (
            places := {address(each) for each in every if isinstance(each, torch.Tensor)} - {0}
        ):
            own = (
                each
                for model in self._models
                for weight in model.parameters()
                for each in (weight, weight.grad)
            )
            if any(each is not None and address(each) in places for each in own):
                self.uses += tuple(numbers)

    # ------------------------------------------------------------------ judging

    def judge(self, loss: torch.Tensor) -> str:
        """The fault of this loss; empty if it is a mean over rows."""
        fault = self._find_batch_fault()
        if fault:
            return fault if self._agree is None else self._agree(fault)
        self._replays = True
        try:
            needed = self._find_needed(loss)
            if self._agree is not None:
                return self._compare_together(loss, needed, self._agree)
            return needed if isinstance(needed, str) else self._compare(loss, needed)
        except RequestError as error:
            self.measured = True
            return error.message
        except Exception as error:
            return _describe_error(error)
        finally:
            self._replays = False

    def _find_batch_fault(self) -> str:
        """Why its batch can't be divided; empty if it can."""
        if self._rows < 2:
            return "each rank has a single row at a time, which can't be divided to compare losses"
        if {len(each) for each in self._batch} != {self._rows}:
            return "not every tensor of its batch has a row for each sample"
        return ""

    def _find_needed(self, loss: torch.Tensor) -> list[WrittenCall] | str:
        """What led to the loss, in its order; or why that isn't known."""
        places, reached, is_known = self._trace(loss)
        if not is_known:
            return "its loss is computed in a way that can't be followed"
        if id(loss) not in self._from_model:
            return "its loss isn't computed from the output of a wrapped model"
        if not reached:  # the loop fetches its batches ahead of their turn
            return "its loss isn't computed from the batch that its loader gave last"
        if any(self._may_use_read(place) for place in places):
            return "its loss is computed with a figure that the program has read from a tensor"
        return [self._tape[place] for place in sorted(places)]

    def _trace(self, wanted: torch.Tensor) -> tuple[set[int], bool, bool]:
        """The entries that led to a tensor, whether they begin with the batch, and whether nothing
        between is missing.
        """
        places: set[int] = set()
        # each with the entry that takes it
        queue: list[tuple[Any, int]] = [(wanted, len(self._tape))]
        batch = {id(each) for each in self._batch}
        reached, is_known = False, True
        while queue:
            tensor, taken = queue.pop()
            reached |= id(tensor) in batch
            makers = self._made.get(id(tensor), ())
            if not makers and id(tensor) not in batch:
                rows = tensor.ndim and len(tensor) == self._rows
                lost = tensor.grad_fn is not None or (rows and self._is_after_read(taken))
                is_known = is_known and not lost
            for place in makers:
                if place not in places:
                    places.add(place)
                    entry = self._tape[place]
                    given = nested_tensors((entry.arguments, entry.keywords))
                    queue += [(each, place) for each in given]
        return places, reached, is_known

    def _is_after_read(self, place: int) -> bool:
        """True if a figure had been read from what a model computed, before this entry."""
        return self._first_read is not None and place >= self._first_read

    def _may_use_read(self, place: int) -> bool:
        """True if a number of this call may be made of a figure that was read."""
        entry = self._tape[place]
        given = leaves_in(entry.arguments)
        if is_arithmetic(entry.function):
            given += leaves_in(entry.keywords)
        return self._is_after_read(place) and any(isinstance(each, float) for each in given)

    def _compare_together(
        self, loss: torch.Tensor, needed: list[WrittenCall] | str, agree: Callable[[str], str]
    ) -> str:
        """As `_compare`, by the same passes on every rank, and with one answer for all."""
        fault = agree(needed if isinstance(needed, str) else "")
        if fault or isinstance(needed, str):
            return fault
        try:
            fault = self._compare_once(loss, needed)
        except Exception as error:
            fault = _describe_error(error)
        return agree(fault)

    def _compare_once(self, loss: torch.Tensor, needed: list[WrittenCall]) -> str:
        """The fault of this loss, by three passes whatever they give."""
        self.numbers = tuple(number for entry in needed for number in self._find_numbers(entry))
        model = torch.nn.ModuleList(self._models)
        fault = self._compare_again(loss, needed, model)
        check = self._cut_batch()
        compute = partial(self._compute, needed, id(loss))
        try:
            figures = LossCheck(LossMeasure(model, moves=False), check, lambda _: {}).figures(
                compute
            )
        except (IndexError, RuntimeError) as error:
            text = f"{_PART} ({type(error).__name__}: {error})"
            return text.split("\n")[0]
        self.padded = self._repad is not None and bool(self._repad(check.rows[0]))
        if fault or "rows" in judge(figures).mean_over:
            return fault
        self.measured = True
        return describe(figures)

    def _compute(self, needed: list[WrittenCall], loss: int, batch: Any) -> Any:
        """The loss of other rows, by the calls that led to it."""
        known = dict(zip(map(id, self._batch), batch, strict=True))
        return _replay(needed, known, len(batch[0]), loss)

    def _cut_batch(self) -> CheckBatch:
        """The batch, and its first three quarters and the rest as parts."""
        cut = max(1, self._rows * 3 // 4)
        parts = (
            cut_rows(self._batch, 0, cut, self._rows),
            cut_rows(self._batch, cut, self._rows, self._rows),
        )
        return CheckBatch(self._batch, parts, (cut, self._rows - cut))

    def _compare_again(
        self, loss: torch.Tensor, needed: list[WrittenCall], model: torch.nn.Module
    ) -> str:
        """Why the loss of the same rows is another when it is computed again; empty if it isn't."""

        def compute_as_it_was(batch: Any) -> Any:
            self._random.restore()
            return self._compute(needed, id(loss), batch)

        with kept_state([model]):
            same = LossMeasure(model, randomness=nullcontext()).call(compute_as_it_was, self._batch)
            again = float(same.detach().double().sum())
        first = float(self._before.get(address(loss), loss).detach().double().sum())
        kinds = {
            each.dtype
            for entry in needed
            for each in nested_tensors(entry.result)
            if each.is_floating_point()
        }
        near = max((_AGAIN.get(kind, HALF_AGAIN) for kind in kinds), default=0.0)
        if not abs(again - first) <= near * max(abs(first), 1e-30):
            return (
                f"its loss of the same rows is another when it is computed again: {first:.6g}, "
                f"then {again:.6g}"
            )
        return ""

    def _compare(self, loss: torch.Tensor, needed: list[WrittenCall]) -> str:
        """Empty if the loss is a mean over rows; RequestError where it isn't."""
        self.numbers = tuple(number for entry in needed for number in self._find_numbers(entry))
        model = torch.nn.ModuleList(getattr(each, "module", each) for each in self._models)
        fault = self._compare_again(loss, needed, model)
        if fault:
            return fault
        compute = partial(self._compute, needed, id(loss))
        check = self._cut_batch()
        try:
            LossCheck(LossMeasure(model), check, lambda _: {}).find_meaning(compute, {"rows"})
        except (IndexError, RuntimeError) as error:  # the whole was computed again
            text = f"{_PART} ({type(error).__name__}: {error})"
            return text.split("\n")[0]
        if self._repad is not None and (padded := self._repad(check.rows[0])):
            others = tuple(
                [each.to(own.device) for each, own in zip(part, self._batch, strict=True)]
                for part in padded
            )
            check = CheckBatch(self._batch, others, check.rows, check.parts)
            try:
                LossCheck(LossMeasure(model), check, lambda _: {}).find_meaning(compute, {"rows"})
            except RequestError:
                raise
            except Exception:  # of a length that the program has read from its batch
                self.padded = True
        return ""

    def _find_numbers(self, entry: WrittenCall) -> list[float]:
        """The numbers that a call multiplies, divides or adds to what comes from a model."""
        arguments = leaves_in((entry.arguments, entry.keywords))
        if not is_arithmetic(entry.function) or not any(
            id(each) in self._from_model for each in arguments
        ):
            return []
        constant = [
            each
            for each in arguments
            if isinstance(each, torch.Tensor) and id(each) not in self._made
        ]
        plain = [
            each
            for each in arguments
            if isinstance(each, int | float) and not isinstance(each, RowNumber)
        ]
        return [
            *map(float, plain),
            *(float(each.detach()) for each in constant if each.numel() == 1),
        ]


def _describe_error(error: Exception) -> str:
    """The fault of a loss whose parts can't be computed."""
    text = f"its loss can't be computed again to compare it ({type(error).__name__}: {error})"
    return text.split("\n")[0]


def _find_draw(keywords: Any) -> GeneratorState | None:
    """The generator that a call is about to draw from, if the program gives one of its own."""
    generator = keywords.get("generator")
    if not isinstance(generator, torch.Generator):
        return None
    return GeneratorState(generator, generator.get_state())


def _replay(entries: list[WrittenCall], known: dict[int, Any], rows: int, wanted: int) -> Any:
    """The wanted tensor as these functions make it of other rows."""
    draws = [each.draw for each in entries if each.draw is not None]
    now = [GeneratorState(each.generator, each.generator.get_state()) for each in draws]
    try:
        _replay_entries(entries, known, rows)
    finally:
        for each in now:
            each.restore()
    return known[wanted]


def _replay_entries(entries: list[WrittenCall], known: dict[int, Any], rows: int) -> None:
    """Call these functions again, and add what they make of other rows to `known`."""
    for entry in entries:
        if entry.draw is not None:
            entry.draw.restore()
        now = partial(_now, known, rows, set(map(id, nested_tensors(entry.result))))
        under = (
            nullcontext()
            if entry.autocast is None
            else torch.autocast(entry.autocast[0], entry.autocast[1])
        )
        with under:
            made = entry.function(
                *map_nested(now, entry.arguments), **map_nested(now, entry.keywords)
            )
        known.update(
            (id(was), each)
            for was, each in zip(nested_tensors(entry.result), nested_tensors(made), strict=True)
        )


def _now(known: dict[int, Any], rows: int, changed: set[int], each: Any) -> Any:
    """The value that stands for one of the batch's; what the program has changed in place stays as
    it is.
    """
    if isinstance(each, RowNumber):
        return each.each * rows
    if id(each) in known or not isinstance(each, torch.Tensor):
        return known.get(id(each), each)
    return each.clone() if id(each) in changed else each
