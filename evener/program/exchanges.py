"""Check collectives that the user's script calls: would unequal row counts change their results?

An all-reduced mean or a gathered tensor may change if ranks have different row counts. While shares
are equal, the results of collectives are tracked to find out. Once shares differ, gathered tensors
are padded.
"""

from __future__ import annotations

import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ..errors import RequestError
from ..torch.private import is_view
from .guard import Guard
from .marks import each_tensor_in
from .origins import Origins

# collective -> the names of its input and output arguments
ARGUMENTS = {
    "all_reduce": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_single": ("input_tensor", "output_tensor"),
    "_all_gather_base": ("input_tensor", "output_tensor"),
    "gather": ("tensor", "gather_list"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter_single": ("input", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": ("input", "output"),
    "all_gather_object": ("obj", "object_list"),
    "gather_object": ("obj", "object_gather_list"),
    "broadcast_object_list": ("object_list", "object_list"),
}
# the same for functional collectives, which return their output: its argument's name is ""
FUNCTIONAL = {
    "all_reduce": ("self", ""),
    "broadcast": ("self", ""),
    "all_gather_tensor": ("self", ""),
    "all_gather_tensor_autograd": ("self", ""),
    "all_gather_single": ("self", ""),
    "reduce_scatter_tensor": ("self", ""),
    "reduce_scatter_single": ("self", ""),
    "all_to_all_single": ("self", ""),
}
# collectives whose result depends only on the sending rank
FROM_ONE = {"broadcast", "broadcast_object_list"}
_OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list"}
# collectives that accept tensors of different sizes
_ANY_SIZE = {"all_to_all", "all_to_all_single"}
_MOST_AXES = 8
_SUMMING = {"sum", "avg"}  # operations of an all-reduce that add the ranks' values
_GATHERS = {"all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"}
# libraries whose collectives are known to be harmless
LIBRARIES = {"torch", "accelerate", "transformers", "deepspeed", "evener"}
# modules that may be on the call stack between a program and a collective
_BETWEEN = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn",
    "torch.distributed._functional_collectives",
    "torch.autograd.function",
    "torch.overrides",
    "torch.utils._contextlib",
    "accelerate.utils.operations",
    "accelerate.accelerator",
    "evener.program",
    "evener.torch.audit",
    "evener.torch.rows.structure",
    "wrapt",
    "contextlib",
    "functools",
)


class ExchangeCall(msgspec.Struct, frozen=True):
    """One call of a collective by the user's script, with its arguments."""

    name: str
    line: str  # line in the program's own code, such as train.py:12
    function: Callable[..., Any]
    bound: inspect.BoundArguments
    given: Any  # the input argument
    filled: Any  # the output argument; None if the call returns its result

    @property
    def words(self) -> str:
        """Name of the collective and the line that calls it, such as "all_reduce (train.py:12)"."""
        return f"{self.name} ({self.line})"

    def run(self, **changed: Any) -> Any:
        """Call the collective, with some arguments replaced by those in `changed`."""
        self.bound.arguments.update(changed)
        return self.function(*self.bound.args, **self.bound.kwargs)


class Exchanges:
    """Checks each collective that the user's script calls during training.

    `fault` says why one of them rules out unequal shares; it is "" if none does. `note` is called
    with the `ExchangeCall` of each collective.
    """

    def __init__(self, note: Callable[[ExchangeCall], None]) -> None:
        self.fault = ""
        self._note = note
        self.origins = Origins()
        self._nested = False  # True inside a collective
        self._knows_rows = False  # True inside a call that handles different numbers of rows

    def check_and_run(
        self,
        wrapped: Callable[..., Any],
        arguments: Any,
        keywords: Any,
        guard: Guard | None,
        line: str,
        is_uneven: bool,
        checks: bool = True,
    ) -> Any:
        """Check whether a collective rules out unequal shares, then run it and return its result.

        If the result may depend on the ranks' rows, it is marked as coming from other ranks.

        - `wrapped`, `arguments`, `keywords`: the collective and the arguments of the call.
        - `guard`: records the current step; if it is None, nothing is checked or marked.
        - `line`: the script's line that calls the collective.
        - `is_uneven`: whether ranks may have different row counts. If so, gathered tensors are
          padded for the call; RequestError is raised on every rank if they can't be.
        - `checks`: if False, nothing is checked or marked either, but the guard records which
          tensors the call overwrites.
        """
        call = make_call(wrapped, arguments, keywords, line)
        self._note(call)
        if guard is not None and not checks:
            _prepare_guard(call, guard)
            _forget_filled(call, guard)
            guard = None
        if guard is None:
            return self._run(call, is_uneven)
        is_total = _sums_rows(call, guard)
        if not is_total:
            self._look(call, guard)
        _prepare_guard(call, guard)
        depends_on_rows = _depends_on_rows(call, guard)
        result = self._run(call, is_uneven)
        if is_total:
            self._mark_total(call, guard, result)
        elif depends_on_rows:
            self._mark(call, result)
        else:
            _forget_filled(call, guard)
        return result

    def find_line(self, guard: Guard | None) -> str:
        """Return the line of the user's code that called the collective, such as "train.py:12".

        The result is "" if a known library called it, if the call is part of another collective, or
        if the guard is repeating it.
        """
        if self._nested or (guard is not None and guard.is_replaying):
            return ""
        return find_caller(sys._getframe(1))

    def _run(self, call: ExchangeCall, is_uneven: bool) -> Any:
        """Call the collective, with padding if the ranks' row counts may differ."""
        with self._within():
            return run_compared(call) if is_uneven and not self._knows_rows else call.run()

    def note_entered(self, collective: str, affected: str) -> None:
        """Record that a collective's result affects something, so shares have to stay equal.

        `collective` describes the collective, such as "all_reduce (train.py:12)"; if it is "",
        nothing is recorded. `affected` names what is affected, for example "its loss". The first
        such record becomes `fault`.
        """
        if collective and not self.fault:
            self.fault = (
                f"what its ranks exchange by {collective} goes into {affected}, and unequal shares "
                f"would change it"
            )

    @contextmanager
    def handling_rows(self) -> Iterator[None]:
        """Context manager for library code that handles ranks' different row counts itself.

        Inside it, collectives run without padding, and exchanging rows isn't a reason to keep
        shares equal.
        """
        before, self._knows_rows = self._knows_rows, True
        try:
            yield
        finally:
            self._knows_rows = before

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._nested = True
        try:
            yield
        finally:
            self._nested = False

    def _look(self, call: ExchangeCall, guard: Guard) -> None:
        if guard.is_inside and call.name not in FROM_ONE:
            self.note_entered(call.words, "its model")
        if self._knows_rows or self.fault:
            return
        if any(map(guard.size_depends_on_rows, _tensors(call))):
            self.fault = (
                f"its ranks exchange rows by {call.words}, and with unequal shares they would have "
                f"different numbers of them"
            )
        elif not guard.losses and call.name not in FROM_ONE and _sends_row_count(call, guard.rows):
            self.fault = (
                f"its ranks exchange their numbers of rows by {call.words}, as where each weighs "
                f"its loss by them itself"
            )
        elif call.name not in FROM_ONE and any(map(guard.is_flag, _tensors(call))):
            self.fault = (
                f"its ranks exchange a flag by {call.words}, as where one of them decides to stop, "
                f"and that may depend on its own rows"
            )

    def _mark_total(self, call: ExchangeCall, guard: Guard, result: Any) -> None:
        """Mark a collective's result as a total over all rows.

        Such a total is the same whatever the shares are. The result of a gather is marked as values
        that add up to a total.
        """
        _forget_filled(call, guard)
        filled = result if call.filled is None else call.filled
        if call.name in _GATHERS:
            self.origins.write_gathered(filled, call.words)
        else:
            self.origins.write_totals(filled, call.words)

    def _mark(self, call: ExchangeCall, result: Any) -> None:
        filled = result if call.filled is None else call.filled
        if call.name in _OBJECTS:
            self.origins.write_objects(filled, call.words)
        else:
            self.origins.write(filled, call.words)


def sends_flag(call: ExchangeCall) -> bool:
    """Return whether the call sends a single 0 or 1, such as a flag for early stopping."""
    single = [tensor for tensor in _tensors(call) if tensor.numel() == 1]
    return any(not tensor.is_complex() and float(tensor.detach()) in (0, 1) for tensor in single)


def make_call(
    wrapped: Callable[..., Any], arguments: Any, keywords: Any, line: str
) -> ExchangeCall:
    """Return the `ExchangeCall` of an intercepted collective, without calling the collective.

    The collective has to be in ARGUMENTS or FUNCTIONAL. `line` is the script's line that calls it,
    such as "train.py:12".
    """
    bound = _signature(wrapped).bind(*arguments, **keywords)
    bound.apply_defaults()
    name = wrapped.__name__
    input_name, output_name = (FUNCTIONAL if "self" in bound.arguments else ARGUMENTS)[name]
    # a deprecated alias of the function may lack this argument
    output = bound.arguments.get(output_name) if output_name else None
    return ExchangeCall(name, line, wrapped, bound, bound.arguments.get(input_name), output)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _depends_on_rows(call: ExchangeCall, guard: Guard) -> bool:
    """Return whether the collective's result may depend on how rows are divided among ranks."""
    return call.name not in FROM_ONE or any(map(guard.comes_from_batch, _tensors(call)))


def _sums_rows(call: ExchangeCall, guard: Guard) -> bool:
    """Return whether the call adds up or gathers the ranks' sums over rows.

    Each value in the call has to be a sum over the rows of this rank's batch.
    """
    every = _tensors(call)
    if call.name == "all_reduce":
        is_sum = _name_operation(call) in _SUMMING
    else:
        is_sum = call.name in _GATHERS and all(each.numel() == 1 for each in every)
    group = call.bound.arguments.get("group")
    is_all = group in (None, dist.group.WORLD)
    return is_sum and is_all and bool(every) and all(map(guard.is_sum_over_rows, every))


def _name_operation(call: ExchangeCall) -> str:
    """Return the name of the call's reduce operation, such as "sum"; "" if it has none."""
    given = call.bound.arguments
    operation = given.get("op", given.get("reduceOp", ""))
    return str(operation).rpartition(".")[2].lower()


def _prepare_guard(call: ExchangeCall, guard: Guard) -> None:
    """Save one-element tensors that the call will overwrite; one of them may be the loss."""
    for tensor in each_tensor_in(call.filled):
        guard.save_scalar(tensor)


def _forget_filled(call: ExchangeCall, guard: Guard) -> None:
    """Treat the tensors that the collective has filled as inputs of the step from now on."""
    for tensor in each_tensor_in(call.filled):
        guard.treat_as_input(tensor)


def _sends_row_count(call: ExchangeCall, rows: int) -> bool:
    """Return whether the call sends this rank's row count to other ranks."""
    # many other values equal 1
    numbers = [each for each in _tensors(call) if each.numel() == 1 and not each.is_complex()]
    return rows > 1 and any(float(number.detach()) == rows for number in numbers)


def _tensors(call: ExchangeCall) -> list[torch.Tensor]:
    return list(each_tensor_in(call.given))


def find_caller(frame: FrameType | None) -> str:
    """Return file and line of the user's code that called a collective, such as "train.py:12".

    The result is "" if a known library called it.
    """
    # the frame is the hook's caller
    while frame is not None and is_between(frame):
        frame = frame.f_back
    if frame is None or name_package(frame) in LIBRARIES:
        return ""
    own: FrameType | None = frame
    while own is not None and is_installed(own.f_code.co_filename):
        own = own.f_back
    chosen = own or frame
    return f"{Path(chosen.f_code.co_filename).name}:{chosen.f_lineno}"


def name_package(frame: FrameType) -> str:
    """Return the top-level package that a stack frame's code belongs to."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_between(frame: FrameType) -> bool:
    """Return whether a stack frame is wrapper code between the user's script and a collective."""
    return _is_module_between(str(frame.f_globals.get("__name__", "")))


@cache  # a step of a sharded model has hundreds of collectives, each with several such frames
def _is_module_between(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _BETWEEN)


@cache
def is_installed(path: str) -> bool:
    """Return whether `path` belongs to Python itself or to an installed package."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return path.startswith("<frozen") or any(path.startswith(f"{folder}/") for folder in folders)


# ---------------------------------------------------------------------- once shares are unequal


def run_compared(call: ExchangeCall) -> Any:
    """Call a collective, with tensors padded if the ranks' row counts differ.

    Every rank of the group has to call this. Raises RequestError on all of them if the tensors
    can't be padded: other dimensions differ, the collective isn't a gather, or any rank's output
    can't be resized.
    """
    group, own = call.bound.arguments.get("group"), call.given
    single = isinstance(own, torch.Tensor) and own.ndim > 0 and call.name not in _ANY_SIZE
    if not single or not _is_member(group):
        return call.run()
    shapes = exchange_shapes(own, group)
    if len(set(shapes)) == 1:
        return call.run()
    gathers = {
        "all_gather": _gather_to_list,
        "gather": _gather_to_one,
        "all_gather_into_tensor": _gather_to_tensor,
        "all_gather_single": _gather_to_tensor,
        "_all_gather_base": _gather_to_tensor,
    }
    same_rows = len({shape[1:] for shape in shapes}) == 1 and own.ndim == len(shapes[0])
    if call.name not in gathers or not same_rows or not _can_all_fill(call):
        raise RequestError(
            f"Since shares have differed, ranks have tensors of different sizes to exchange by "
            f"{call.words}: {', '.join(map(str, shapes))}.",
            "Start it with its own launcher.",
        )
    gathers[call.name](call, [shape[0] for shape in shapes])
    return _Complete() if call.bound.arguments.get("async_op") else None


class _Complete:
    """Finished `Work` handle, returned for an async collective that has been run at once."""

    def wait(self, *_: Any) -> bool:
        """Return True at once, because the collective has finished."""
        return True

    def is_completed(self) -> bool:
        return True


def _can_all_fill(call: ExchangeCall) -> bool:
    """Return whether all ranks can resize the tensors that receive the collective's output.

    Every rank of the group has to call this.
    """
    # a view can't be resized to other ranks' numbers of rows
    can = not any(map(is_view, each_tensor_in(call.filled)))
    every = torch.tensor(int(can), device=call.given.device)
    dist.all_reduce(every, dist.ReduceOp.MIN, group=call.bound.arguments.get("group"))
    return bool(every)


def _is_member(group: Any) -> bool:
    """Return whether this rank belongs to the process group."""
    known = group is None or isinstance(group, dist.ProcessGroup)
    return known and dist.get_rank(group) >= 0


def exchange_shapes(tensor: torch.Tensor, group: Any = None) -> list[tuple[int, ...]]:
    """Return the tensor's shape on every rank of `group`, in rank order.

    Every rank of the group has to call this; None is the default group. Dimensions after the eighth
    are left out.
    """
    axes = list(tensor.shape)[:_MOST_AXES]
    numbers = [len(axes), *axes, *[0] * (_MOST_AXES - len(axes))]
    own = torch.tensor(numbers, device=tensor.device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    found = (each.tolist() for each in every)
    return [tuple(sizes[:count]) for count, *sizes in found]


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the tensor with zeros appended along its first dimension, up to `rows` rows."""
    return pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, rows - len(tensor))).contiguous()


def _gather_all(call: ExchangeCall, counts: list[int]) -> list[torch.Tensor]:
    """Gather tensors whose row counts differ between ranks, and return one tensor per rank.

    `counts` has each rank's row count. The tensors are padded to the largest one for the exchange.
    """
    padded = pad_rows(call.given.detach(), max(counts))
    every = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(every, padded, group=call.bound.arguments.get("group"))
    return [each[:count].clone() for each, count in zip(every, counts, strict=True)]


def _gather_to_list(call: ExchangeCall, counts: list[int]) -> None:
    for output, rows in zip(call.filled, _gather_all(call, counts), strict=True):
        _fill(output, rows)


def _gather_to_one(call: ExchangeCall, counts: list[int]) -> None:
    every = _gather_all(call, counts)
    if call.filled:
        for output, rows in zip(call.filled, every, strict=True):
            _fill(output, rows)


def _gather_to_tensor(call: ExchangeCall, counts: list[int]) -> None:
    rows = torch.cat(_gather_all(call, counts))
    flat = call.filled.ndim == 1
    _fill(call.filled, rows.flatten() if flat else rows)


def _fill(output: torch.Tensor, rows: torch.Tensor) -> None:
    """Make the tensor `output` use the storage of `rows`, which may have a different shape."""
    with torch.no_grad():
        output.set_(rows)
