"""Check the user's own loss on one batch: would unequal shares change what is learned?

This check, an audit, runs before shares become unequal, and at intervals afterwards. It records the
function calls that compute the loss in the user's script. Then it runs these functions and their
backward pass twice on a few rows. The first run has equal parts, like the script's own launcher.
The second has parts in proportion to the shares. The script's own code runs only once, and its
state is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec
import torch

from ..errors import RequestError
from ..torch.audit.computations import Computations
from ..torch.audit.compute import GradientSketcher
from ..torch.audit.nested_values import is_arithmetic, leaves_in, nested_tensors
from ..torch.audit.objects import unfold
from ..torch.audit.record import (
    AS_WRITTEN,
    ROW_COUNTS,
    LossRecord,
    Recorder,
    RowNumber,
    WrittenCall,
    may_count,
    replay,
)
from ..torch.audit.replay import NOT_A_NUMBER, Compute, audit_record
from ..torch.audit.row_numbers import find_loss_by_rows
from ..torch.audit.rows import FewRows, choose_few_rows
from ..torch.audit.sketch import name_tensors
from ..torch.audit.state import kept_state
from ..torch.audit.step import compare_losses
from ..torch.rows.structure import address, cut_rows, tensors_in
from ..torch.training_audits import (
    add_unweighted,
    make_launcher_computations,
    make_share_computations,
    weigh_gradients,
)
from ..training.audit import IN_EQUAL_PARTS, describe
from .origins import Origins

ROUNDING = 1e-5  # largest difference of equal sums, relative to their largest element
LATER_CALLS = 100  # maximum number of calls recorded after the backward pass
LOOK_AGAIN = 4  # factor between the steps at which a guard checks again
SINGLE_ROW = "each rank has a single row at a time, which can't be divided to compare losses"
CANT = "its loss can't be computed again to compare it"
PART = (  # although the loss of all rows was computed again
    "its loss can't be computed for a part of its rows, as where each row is compared with the "
    "others of its batch, or where the program cuts its batch itself"
)
LOCAL_USE = (
    "a value of each rank's own rows changes its gradients or weights after the backward pass, and "
    "unequal shares would change it"
)
LIMITED = (
    "its loss can't be computed for more rows than a rank has now, as where a tensor was made for "
    "that many of them ({})"
)
RANDOM_COUNT = (
    "its loss isn't a mean over rows, as where it is divided by a count that depends on random "
    "numbers: the same rows give {} in equal parts and {} in the parts of shares"
)
UNSEEN = "no backward pass was seen in its first step"
MakeSketcher = Callable[..., GradientSketcher]  # creates a GradientSketcher for models


class Guard(Recorder):
    """Records how a batch's loss is computed, and checks whether unequal shares would change it.

    The check runs when the first backward pass begins. Afterwards, `fault` says why unequal shares
    would change the training, or why that is unknown; it is "" if they wouldn't change it.
    `measured` is True if the check has computed different gradients or losses. `are_sums` is True
    if losses are sums over rows.

    - `fetch_few`: returns a few rows of the batch, collated by the loader. If it is None or returns
      None, rows are cut from the batch itself.
    - `rows`: number of rows in the batch, for batches whose tensors differ in length.
    - `origins`: tracks values that ranks exchange; None ignores such values.
    - `sketcher`: creates a GradientSketcher; by default, one that only sees the models' gradients.
    - `step`: number of the training step, for messages.
    - `agree`: exchanges error messages with all ranks, and returns the first one. Pass it if ranks
      communicate inside the model, as under FSDP; then losses are compared instead of gradients.
    - `are_sums`: whether losses are sums over rows; None if the guard has to find out.
    """

    def __init__(
        self,
        models: Iterable[Any],
        batch: Any,
        fetch_few: Callable[[], FewRows | None] | None = None,
        rows: int = 0,
        origins: Origins | None = None,
        sketcher: MakeSketcher | None = None,
        step: int = 1,
        agree: Callable[[str], str] | None = None,
        are_sums: bool | None = False,
    ) -> None:
        self.fault = UNSEEN
        self.are_sums = bool(are_sums)
        self._finds_sums = are_sums is None
        self.local_use = ""  # why a value of this rank's own rows changes gradients or weights
        self.has_asked_length = False  # True if the program has called len() on rows
        self.measured = False
        self.entered = ""  # the collective whose values are in the loss
        # numbers used in computing the loss, other than the batch and the models
        self.numbers: tuple[float, ...] | None = None
        # True if rows are padded with their rank's other rows, whose effect can't be recomputed
        self.padded = False
        self._fetch_few = fetch_few
        self._collated: list[FewRows | None] = []
        self._origins = origins
        self._make_sketcher = sketcher or make_sketcher
        self._step = step
        self._agree = agree
        self._before: dict[int, torch.Tensor] = {}  # values overwritten by an exchange, by address
        self._most: int | None = None  # limit of tape entries, set after the backward pass
        self._with_gradients = False
        self._kind = type(batch).__name__
        lengths = {len(tensor) for tensor in tensors_in(unfold(batch)) if tensor.ndim}
        # an item of the data set may also be several rows, of every tensor
        self._is_ragged = len(lengths) > 1 or (
            rows > 0 and any(length % rows for length in lengths)
        )
        super().__init__(models, batch, _judge, rows if self._is_ragged else 0)

    @property
    def done(self) -> bool:
        """Whether the batch's loss has been seen, or recording has ended."""
        return self.losses > 0 or not self._handles

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if self.losses and self.steps:
            return function(*arguments, **(keywords or {}))
        return super().__torch_function__(function, types, arguments, keywords)

    def note_call(self, function: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Record whether a function call in the script uses other ranks' values or the row count.

        A call of `len(batch)` shows that the script uses the row count.
        """
        self.has_asked_length |= function is torch.Tensor.__len__ and result == self.rows
        if self._origins is not None:
            self._origins.follow(function, arguments, keywords, result, self)

    def read_loss(self, loss: torch.Tensor) -> float:
        """Return the loss's value.

        If a collective has overwritten the loss, the result is the value from before the
        collective.
        """
        # only the earlier value can be compared with what the recorded calls compute
        return super().read_loss(self._before.get(address(loss), loss))

    def _write(self, *arguments: Any, **options: Any) -> None:
        if self._most is None or len(self._tape) < self._most:
            super()._write(*arguments, **options)

    def _is_user_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a small constant of the script, such as task weights.

        Totals over all ranks' rows don't count, because they are computed from the data.
        """
        totals = self._origins.totals if self._origins is not None else None
        is_total = totals is not None and bool(totals.find(tensor))
        return super()._is_user_constant(tensor) and not is_total

    def _record_scaling(self, function: Any, arguments: Any) -> None:
        """Record a call that scales gradients or weights by a number that only this rank has.

        Such a number was computed from this rank's rows or from their count.
        """
        super()._record_scaling(function, arguments)
        if self.local_use or not is_arithmetic(function):
            return
        every = nested_tensors(arguments)
        own = [each for each in every if each.numel() == 1 and id(each) in self._made]
        if not any(map(self.depends_on_rows, own)):
            return
        if self._is_weight_at({address(each) for each in every} - {0}):
            self.local_use = LOCAL_USE

    def _enter(self, model: Any, arguments: Any, keywords: Any) -> None:
        super()._enter(model, arguments, keywords)
        self._with_gradients = torch.is_grad_enabled()

    # ------------------------------------------------------------------ what ranks exchange

    @property
    def is_inside(self) -> bool:
        """Whether a model's forward pass with gradients is running."""
        return self._inside and self._with_gradients and not self._busy

    @property
    def is_replaying(self) -> bool:
        """Whether the guard is repeating recorded calls; hooks should ignore these calls."""
        return self._busy

    def save_scalar(self, tensor: torch.Tensor) -> None:
        """Keep a copy of a one-element tensor that a collective is about to overwrite."""
        # larger tensors can't be a loss
        if tensor.numel() == 1:
            self._before.setdefault(address(tensor), tensor.detach().clone())

    def treat_as_input(self, tensor: torch.Tensor) -> None:
        """Forget how the tensor was computed, because a collective has filled it.

        Nothing happens if the tensor has a gradient function.
        """
        # the recorded calls that computed its previous contents no longer apply
        if tensor.grad_fn is None:
            self._made.pop(id(tensor), None)

    def comes_from_batch(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is known to be computed from the batch."""
        return self._find_computing_calls(tensor)[1]

    def depends_on_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is known to depend on the batch or on its row count."""
        places, reached, _ = self._find_computing_calls(tensor)
        return reached or any(
            isinstance(each, RowNumber)
            for place in places
            for each in leaves_in((self._tape[place].arguments, self._tape[place].keywords))
        )

    def is_sum_over_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a sum over the rows of this rank's batch.

        The result is False if the tensor requires a gradient, or if it can't be computed again from
        fewer rows.
        """
        # the calls are repeated for a few rows, at once and in two parts, to see whether the parts
        # add up
        places, _, is_known = self._find_computing_calls(tensor)
        entries = [self._tape[place] for place in sorted(places)]
        meets = self._agree is not None and any(entry.from_model for entry in entries)
        if not entries or not is_known or meets or self.rows < 2 or tensor.requires_grad:
            return False
        record = LossRecord(
            [self.take_inner(model) for model in self.models],
            self.batch,
            self.rows,
            entries,
            tensor,
            0.0,
            self.random,
            (),
            False,
            self.objects,
        )
        self._busy = True
        try:
            with suppress(Exception), torch.no_grad(), kept_state([self._join_models()]):
                return self._do_parts_add_up(record, tensor)
            return False  # the functions don't work with fewer rows
        finally:
            self._busy = False

    def _do_parts_add_up(self, record: LossRecord, tensor: torch.Tensor) -> bool:
        """Check whether the tensor is a sum over rows, by computing it again for a few rows.

        Returns True if its values for two parts of these rows add up to its value for all of them.
        """
        # The whole batch must give the tensor again, and two parts of a few rows must add up. A sum
        # of 0 proves nothing.
        few = next(iter(self._list_rows()), None)
        if few is None or not _are_near(record.compute(self.batch, self.rows), tensor):
            return False
        whole = record.compute(few.whole, few.rows)
        parts = [record.compute(*each) for each in zip(few.parts, few.sizes, strict=True)]
        is_alike = {part.shape for part in parts} == {whole.shape}
        return is_alike and bool(whole.count_nonzero()) and _are_near(sum(parts), whole)

    def _join_models(self) -> torch.nn.Module:
        return torch.nn.ModuleList(getattr(model, "module", model) for model in self.models)

    def is_flag(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a single integer or boolean that is 0 or 1.

        The result is False if the tensor was computed from the batch.
        """
        # programs exchange such a flag, for example to stop all ranks together
        if tensor.numel() != 1 or tensor.is_floating_point() or tensor.is_complex():
            return False
        return int(tensor.detach()) in (0, 1) and not self.comes_from_batch(tensor)

    def size_depends_on_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor would have a different size if the batch had fewer rows.

        The result is also True if the tensor was computed from the batch, but can't be computed
        again from fewer rows.
        """
        if not self.rows or not tensor.ndim or len(tensor) % self.rows:
            return False
        places, reached, _ = self._find_computing_calls(tensor)
        if not reached:
            return False
        if any(tensor is each for each in self.batch) or self._agree is not None:
            return True
        entries = [self._tape[place] for place in sorted(places)]
        self._busy = True
        try:
            # some functions work only with gradients enabled, or only without
            for gradients in (False, True):
                with suppress(Exception), torch.set_grad_enabled(gradients):
                    return bool(
                        self._compute_from_fewer_rows(entries, tensor).shape != tensor.shape
                    )
            return True  # the functions don't work with fewer rows
        finally:
            self._busy = False

    def _compute_from_fewer_rows(
        self, entries: list[WrittenCall], tensor: torch.Tensor
    ) -> torch.Tensor:
        """Compute the tensor again, from only three quarters of the batch's rows.

        `entries` are the recorded calls that computed it.
        """
        rows = max(1, self.rows * 3 // 4)
        batch = cut_rows(self.batch, 0, rows, self.rows)
        known = dict(zip(map(id, self.batch), batch, strict=True))
        with kept_state([self._join_models()]):
            made: torch.Tensor = replay(entries, known, rows, lambda number: number, id(tensor))
            return made

    # ------------------------------------------------------------------ judging

    def take_inner(self, model: Any) -> Any:
        """Return the module inside a wrapper such as DistributedDataParallel.

        If ranks communicate in the model's layers, as under FSDP, the wrapper itself is returned.
        """
        return model if self._agree is not None else super().take_inner(model)

    def judge(self, loss: torch.Tensor) -> str:
        """Return why unequal shares would change the model's training, or "" if they wouldn't.

        If that can't be determined, the result says why.
        """
        # Shares change nothing if they give the same gradient as the program's own launcher. If
        # ranks communicate in the models' layers, losses are compared instead of gradients.
        record = self._find_record(loss)
        if self._agree is not None:
            return self._judge_on_all_ranks(record, self._agree)
        if isinstance(record, str):
            return record
        try:
            return record.find_change() or self._find_limit(record) or self._audit(record)
        except RequestError as error:
            return error.message
        except Exception as error:
            return _describe_error(error)

    def _find_record(self, loss: torch.Tensor) -> LossRecord | str:
        """Return the recorded calls that computed the loss, or why they can't be repeated."""
        if not self.batch:
            return f"its batch is a {self._kind}, not tensors in tuples, lists or dicts"
        if self.rows < 2:
            return SINGLE_ROW
        if self._is_ragged and not self._collate_few():
            return "not every tensor of its batch has a row for each sample"
        record = self.trace(loss)
        if isinstance(record, str):
            return record
        if record.reads:
            return "its loss is computed with a number that the program has read from a tensor"
        self.numbers = tuple(number.value for number in record.numbers)
        return record

    def _judge_on_all_ranks(self, record: LossRecord | str, agree: Callable[[str], str]) -> str:
        """Together with all ranks, compare the loss of a few rows as a batch and in unequal parts.

        Every rank has to call this. Returns the first rank's error message, or "" if there is none.
        """
        few = choose_few_rows(self.batch, self.rows)
        fault = record if isinstance(record, str) else ""
        if few is None:
            fault = fault or "its batch can't be cut into rows"
        fault = agree(fault)
        if fault or few is None or isinstance(record, str):
            return fault
        try:
            limit = self._find_limit(record)  # by all ranks, as they communicate in the model
            fault = self._compare_losses(record, few) or limit
        except Exception as error:
            fault = _describe_error(error)
        own = self._collate_few()
        self.padded = own is not None and own.pads
        return agree(fault)

    def _compare_losses(self, record: LossRecord, few: FewRows) -> str:
        sketcher = self._make_sketcher(record.models, losses_only=True)
        fault = record.find_change()
        # every rank runs the same passes, even with few rows: the whole and two parts
        computations = make_share_computations(
            few, lambda part: record.compute(part.batch, part.rows)
        )
        if self.are_sums:
            computations = add_unweighted(computations)
        found = compare_losses(sketcher, computations)
        if fault or found is None or self._detect_sum(record, found[1]):
            return fault
        self.measured = True
        difference, cause = found
        return describe(difference, cause, few.sizes, self._step)

    def _audit(self, record: LossRecord) -> str:
        def computations(few: FewRows, compute: Compute) -> Computations:
            made = make_launcher_computations(few, lambda part: compute(part.batch, part.rows))
            # `_find_random_count` looks for a random count
            made = msgspec.structs.replace(made, shares=None)
            if self.are_sums:
                made = add_unweighted(made)
            return weigh_gradients(made, few.rows / (2 * record.rows))

        used: list[GradientSketcher] = []

        def sketcher() -> GradientSketcher:
            used.append(self._make_sketcher(record.models))
            return used[-1]

        rows, first = self._list_rows(), self._step == 1
        counts = AS_WRITTEN
        found = audit_record(record, rows, sketcher, computations, (AS_WRITTEN,), first)
        if found.audited is None and found.fault != NOT_A_NUMBER:
            # the calls don't support fewer rows, for example if a shape contains the batch size
            counts = ROW_COUNTS
            counted = audit_record(record, rows, sketcher, computations, (ROW_COUNTS,), first)
            found = found if counted.audited is None else counted
        if found.audited is None:
            return found.fault.replace(CANT, PART)
        self.padded = found.cut
        difference = found.audited.difference
        if difference is None:
            fault = found.audited.fault
            if fault:
                return f"its gradient can't be compared: {fault}"
            draws = any(each.draws for each in used)
            return self._find_random_count(record, counts) if draws else ""
        audited = found.audited
        if self._detect_sum(record, audited.cause):
            return ""
        self.measured = True
        return describe(difference, audited.cause, audited.sizes, self._step, IN_EQUAL_PARTS)

    def _find_random_count(self, record: LossRecord, counts: int) -> str:
        """Return an error message if the loss is divided by a random count, or "".

        An example is the number of tokens that the user's script has masked at random. `counts`
        says which constants change with the row count: none, the row count itself, or also its
        multiples (see `LossRecord.compute`).
        """
        # the audit has drawn the same numbers for every row, so that all rows count equally
        few = None if self._is_ragged else choose_few_rows(self.batch, self.rows)
        if few is None:
            return ""
        computations = make_launcher_computations(
            few, lambda part: record.compute(part.batch, part.rows, counts)
        )
        if self.are_sums:
            computations = add_unweighted(computations)
        try:
            losses = find_loss_by_rows(
                self._make_sketcher(record.models, losses_only=True), computations, few
            )
        except Exception:  # the usual audit could compute the loss, and found no difference
            return ""
        if losses is None:
            return ""
        self.measured = True
        return RANDOM_COUNT.format(*(f"{loss:.6g}" for loss in losses))

    def _find_limit(self, record: LossRecord) -> str:
        """Return why the loss can't be computed for a batch with one more row, or "" if it can.

        With unequal shares, some ranks get more rows than in the current batch.
        """
        # Only a tensor with an entry per row that isn't in the batch can be a reason. Then the loss
        # of one more row is tried.
        if not self._finds_sums or self._is_ragged or not record.has_other_rows():
            return ""
        more = [
            torch.cat([each, each[:1]]) if len(each) == self.rows else each for each in self.batch
        ]
        try:
            with torch.no_grad(), kept_state([self._join_models()]):
                record.compute(more, self.rows + 1)
        except Exception as error:
            return LIMITED.format(f"{type(error).__name__}: {error}".partition("\n")[0])
        return ""

    def _detect_sum(self, record: LossRecord, cause: str) -> bool:
        """Return whether gradients differ only because the loss is a sum over rows, not a mean.

        If so, set `are_sums` to True. `cause` is the likely cause of the difference, as an audit
        has found it; it is "sum" for such a loss.
        """
        # a number that counts rows, such as len() of a list, would make a mean look like a sum
        if not self._finds_sums or cause != "sum" or record.may_count_rows():
            return False
        self.are_sums = True
        return True

    @property
    def divides_sums(self) -> bool:
        """Whether losses are sums, and the script scales gradients by a possible row count."""
        return self.are_sums and any(may_count(self.rows, each) for each in self.uses)

    def _collate_few(self) -> FewRows | None:
        """Return a few rows of the batch, collated by the loader; None if that isn't possible."""
        # The collate function must do more than stack rows, reproduce the batch, and make as many
        # tensors as the batch has. The rows are fetched on the first call only.
        if not self._collated and self._fetch_few is not None:
            few = self._fetch_few()
            batches = [] if few is None else [few.whole, *few.parts]
            is_alike = all(_count_tensors(batch) == len(self.batch) for batch in batches)
            self._collated = [few if is_alike else None]
        return self._collated[0] if self._collated else None

    def _list_rows(self) -> list[FewRows]:
        """Return alternative sets of a few rows that the audit may compute, the best first."""
        # collated again by the loader, then cut from the batch and chosen to differ, then cut in
        # order
        every = [self._collate_few()]
        every += [choose_few_rows(self.batch, self.rows, in_order) for in_order in (False, True)]
        return [each for each in every if each is not None]


def _are_near(one: Any, other: Any) -> bool:
    """Return whether the tensors are equal except for rounding."""
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    largest = float(other.abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=0, atol=ROUNDING * largest)
    )


def _count_tensors(batch: Any) -> int:
    return len([tensor for tensor in tensors_in(unfold(batch)) if tensor.ndim])


def _describe_error(error: Exception) -> str:
    """Return why the loss couldn't be computed again, with the error's first line."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"{CANT} ({text})"


def _judge(guard: Any, loss: torch.Tensor) -> None:
    """Run the guard's check for the step's first loss, at the beginning of the backward pass."""
    if guard.losses > 1:
        return
    if guard._origins is not None:
        guard.entered = guard._origins.find_source_collective(loss)
    guard.fault = guard.judge(loss)
    guard._most = len(guard._tape) + LATER_CALLS


def make_sketcher(models: Iterable[Any], losses_only: bool = False) -> GradientSketcher:
    """Return a GradientSketcher for the gradients of all models.

    With `losses_only`, only the losses are summarized.
    """
    every = list(models)
    return GradientSketcher(every, name_tensors(every), losses_only=losses_only)
