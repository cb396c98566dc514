"""Audit a training run: check from time to time that unequal shares don't change the gradient.

An audit computes the loss of a few rows twice, once as one batch and once in parts whose sizes
follow the shares, and compares the gradients. This module chooses the steps, compares the ranks'
results, and acts on a difference.
"""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import RequestError
from ..shares.whole_rows import gradient_weight, split_passes
from ..training.audit import (
    AT_ONCE,
    CAUSES,
    EARLY,
    IN_EQUAL_PARTS,
    Action,
    Audits,
    Sketch,
    compare_ranks,
    describe,
    is_audited,
)
from .audit.computations import AuditChange, Computation, Computations, WholeShares
from .audit.compute import GradientSketcher, Piece
from .audit.quick import KnownPasses
from .audit.record import (
    NOT_THIS_BATCH,
    LossRecord,
    Number,
    Recorder,
)
from .audit.replay import Compute, Replayed, audit_record
from .audit.rows import FEWER, ROWS, FewRows, choose_few_rows, fetch_rows
from .audit.settings import LossSettings
from .audit.sketch import name_tensors
from .audit.step import Audited, audit
from .left_out import LeftOutBatches
from .members import Members
from .private import default_store
from .rows.structure import cut_rows, each_tensor, tensors_in
from .step.backward import find_code, listen
from .step.part import OfPart, Part, make_parts
from .step.recovery import drop_frames, free_memory, is_out_of_memory
from .step.weights import WholeBatchLoss
from .step.wrapped import is_sharded
from .sums.collectives import (
    USES_COLLECTIVES,
    CollectiveError,
    count_foreign,
    own_collectives,
    refuse_collectives,
)

_NUMBERS = count()  # numbers the training runs of this process, in the same way on every rank
# number of steps after an audit until ranks read its results, or stop waiting for them
READ_AFTER, GIVE_UP_AFTER = 2, 10
FEW = 2  # maximum rows per pass in an audit, if the plan has passes
CHANGED = (
    "Each training pass changes the model's buffer {}: with shares every device changes its own,"
    " once for each of its passes."
)
NOT_AUDITED = "A loss wasn't checked, as {}."
QUESTION = " Is it a mean over rows?"
PADDED = (
    "its rows are padded to the longest one beside them, and whether it depends on that can't be"
    " seen: the loop reads lengths from its batch"
)
MAY_COUNT = "it uses a number that may be its number of rows, which batch.size(0) returns"
CANT = "its loss can't be computed again to compare it ({}: {})"
AHEAD = 2  # maximum number of batches that a loop fetches before it computes the first of them
LEFT_OUT = (
    "In step {}, {} left out a batch that others learned from: the loss was computed by other"
    " operations than before, and was 0. One device would leave out the whole batch or none of it."
)
LEFT_OUT_REMEDY = "Decide from the whole batch, with split.total(value) or split.mean(value)."
NEAR_NUMBERS = 1e-4  # maximum relative difference between equal numbers, from rounding
OTHER_NUMBERS = (
    "The ranks compute their losses with other numbers: one has {:.6g} where another has {:.6g}"
    " ({}). If they are drawn at random, that is fine. If they are kept from earlier rows, such as"
    " a running mean of losses, a baseline or a multiplier, they make shares learn something else:"
    " compute them over the whole batch, with split.mean(value)."
)


class RankVerdict(msgspec.Struct):
    """Result of one rank's audit, which is sent to the other ranks."""

    message: str = ""  # describes a difference, if any
    remedy: str = ""
    relative: float = 0.0  # relative difference of the gradients
    fine: bool = False  # True if the audit found no difference
    certain: bool = True  # True if a difference can't come from a number that counts rows
    rows: int = 0  # digest of the computed rows
    sketch: Sketch | None = None  # sketch of the reference gradient
    # relative changes of that gradient by rounding, if measured
    noises: dict[str, float] | None = None
    numbers: list[Number] | None = None  # numbers used in a loop's loss
    even: bool = False  # True if all ranks need equal shares from now on


class TrainingAudits:
    """Checks from time to time in a training run that unequal shares give the correct gradient.

    An audit computes a few rows again, as one batch and in parts. `training` is the
    PlannedTraining. Ranks compare their results, so all of them have to call the same methods in
    each step.
    """

    def __init__(self, training: Any) -> None:
        self._training = weakref.proxy(training)
        self.judge = Audits(strict=training.strict)
        self._members: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()
        self._batch: Any = None  # the last counted batch
        self._due = False
        # True if the last loss was computed by other operations than earlier losses
        self._changed = False
        # operations of losses whose batch isn't counted yet, as in a library's first step
        self._first_losses: set[tuple[Any, ...]] = set()
        self._known = KnownPasses()
        self._doubted: list[Sketch] = []  # ranks' sketches whose difference may be rounding
        self._compared = False  # ranks have compared their results of an audit
        self._measures_until = -1  # last step in which audits measure rounding
        self._pending: Replayed | None = None  # a part's audit, until results are sent
        self._parted: Any = None  # the last batch whose parts were computed
        self._number = next(_NUMBERS)  # the same on every rank
        self._left_out = LeftOutBatches(f"evener/left out/{self._number}", training.rank)
        # keys of the ranks' results in the store, by step
        self._published: dict[int, list[str]] = {}
        self._go_even: Callable[[str], None] | None = None
        # the question to ask if nothing could be audited, and the remedy for each cause, in the
        # trainer's terms
        self.question = QUESTION
        self.remedies = {name: each.remedy for name, each in CAUSES.items()}
        self._warned: set[str] = set()
        self._settings = LossSettings()
        self._is_loops = False  # True if the user's own loop calls backward
        self._recorder: Recorder | None = None  # records the user's own loop
        self._waited = 0  # number of batches since the recorder began
        # number of the program's collectives before the recorder began
        self._met_before: Any = None
        # stops the calls of `note_loss`
        self.release: Callable[[], Any] = lambda: None
        if training.world > 1:
            self.release = listen(self)

    @property
    def is_due(self) -> bool:
        """Whether the gradients of the current step have to be audited."""
        return self._due

    @property
    def follows_change(self) -> bool:
        """Whether the current step is audited although the schedule doesn't require it.

        The usual cause is that the loss is computed in a new way, or that the set of trained
        parameters has changed.
        """
        return self._due and not is_audited(self.judge.step)

    @property
    def have_agreed(self) -> bool:
        """Whether the ranks have compared an audit at least once, and their gradients agreed."""
        # a difference that may come from rounding is confirmed by the next audits
        return self._compared and not self._doubted

    @property
    def _measures_rounding(self) -> bool:
        """Whether the current step's audit also measures the effect of rounding on a gradient."""
        return not self.judge.over and self.judge.step <= self._measures_until

    def report(self, fault: str) -> None:
        """Send the result of an audit to the other ranks.

        `fault` says why gradients differ; it is "" if they agree. If any rank reports a difference,
        all ranks continue with equal shares.
        """
        self._publish(RankVerdict(fault, even=bool(fault)))

    def begin(self, batch: Any) -> bool:
        """Begin a batch, and return whether its gradients have to be audited.

        Calling it again with the same batch returns the same answer. It also acts on the ranks'
        results of earlier audits, and raises RequestError if gradients differ.
        """
        # a single device that computes a batch at once needs no audit
        if self._is_single_device:
            return False
        if batch is not self._batch or batch is None:
            self._batch = batch
            self._compare_verdicts()
            self._compare_left_out()
            due = self.judge.begin(self._hash_trained()) or self._changed
            self.judge.thorough |= self._changed
            self._due = due or self._measures_rounding
            self._changed = False
        return self._due

    def note_loss(self, loss: Any, operations: tuple[Any, ...], caller: FrameType) -> None:
        """Called before each backward pass, to find out if the loss is computed in a new way.

        If it is, an audit becomes due. `operations` are the last operations that computed the loss,
        and `caller` is the frame that called `backward`.
        """
        if self.judge.over:
            return
        if self._batch is None:
            self._first_losses.add(operations)
            return
        self._left_out.note(loss, operations)
        changed = self.judge.add_signature(operations)
        code = find_code(caller) if self._is_loops else None
        if code is not None:
            with suppress(ReferenceError):  # this training run is over; another one calls backward
                models = self._training.weights.models
                changed |= (
                    self._settings.have_changed(models, code=code) and self.judge.plan_audits()
                )
        self._changed |= changed and not self._due

    def follow_launcher(self, go_even: Callable[[str], None]) -> None:
        """Compare unequal shares with equal shares from now on, instead of with a single device.

        This is for scripts that would train with equal shares without evener. If gradients differ,
        `go_even` is called with a message, on every rank in the same step.
        """
        self._go_even = go_even
        self.question = ""
        self.judge = Audits(makes_even=True, strict=self._training.strict)

    @property
    def follows_launcher(self) -> bool:
        """Whether audits compare unequal shares with equal shares, instead of with one device."""
        return self._go_even is not None

    def find_difference(self, find: Callable[[], Audited | None]) -> str:
        """Run an audit, and return how gradients differ or why it failed, or "" if they agree.

        `find` runs the audit, or returns None if there is nothing to compare.
        """
        fault = ""

        def note_fault() -> Audited | None:
            nonlocal fault
            try:
                return find()
            except CollectiveError:
                fault = USES_COLLECTIVES
            except RequestError as error:
                fault = error.message
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                fault = describe_error(error)
            return None

        found = self._try_audit(note_fault)
        return fault if found is None else self._judge_result(found).message

    def after_batch(
        self,
        find: Callable[[bool], Audited | None],
        function: Callable[..., Any],
        holders: Sequence[Any] = (),
    ) -> None:
        """Audit the loss of a batch that a library's trainer has computed, if an audit is due.

        Arguments:

        - `find`: runs the audit; its argument is whether this is the first audit.
        - `function`: the loss function; if its variables change, an audit is due.
        - `holders`: objects whose attributes are watched for changes, too.

        Every rank has to call this in each step, before its optimizer uses the gradients. Raises
        RequestError if gradients differ.
        """
        if self._is_single_device:
            return
        due = self.begin(object())
        while self._first_losses:  # this audit is theirs
            self.judge.add_signature(self._first_losses.pop())
        if not self.judge.over:
            models = self._training.weights.models
            changed = self._settings.have_changed(models, function, holders=holders)
            due |= changed and self.judge.plan_audits()
        # so that `note_loss` can make the next audit due
        self._due = False
        if due and not self._is_exempt():
            first = self.judge.step == 1
            self._share_result(Replayed(self._try_audit(lambda: find(first))))

    def expect_function(self) -> None:
        """Record that the user's loop passes its loss function to `split.step`.

        Such a loop doesn't call `backward` itself.
        """
        self._is_loops = False

    def after_step(self, batch: Any, compute: OfPart, counted: OfPart | None) -> None:
        """Audit the loss of a batch that `split.step` has computed, if an audit is due.

        `compute` returns the mean loss of a part. `counted` returns the denominator of this mean;
        None means the row count. Every rank has to call this after the batch's passes. Raises
        RequestError if gradients differ.
        """
        training = self._training
        self.close()
        if self._is_single_device:
            return
        taken = training.weights.current
        code = getattr(compute, "__code__", type(compute))
        due = self.begin(taken)
        # the function, or whether it comes with a count, may have changed
        if self.judge.add_signature((code, counted is None)):
            due = True
        if not self.judge.over:
            changed = self._settings.have_changed(training.weights.models, compute)
            due |= changed and self.judge.plan_audits()
        if not due or self._is_exempt():
            return

        def find() -> Audited | None:
            few = self._take_rows(batch, taken)
            if few is None:
                return None
            first = self.judge.step == 1 or not training.passes.recovery.checked
            sketcher = self._sketcher(compute, is_sharded_model(training.weights.models))
            return audit(sketcher, self.make_computations(few, compute, counted), add_noise=first)

        self._share_result(Replayed(self._try_audit(find)), survives=True)

    def audit_part(
        self,
        compute: OfPart,
        part: Part,
        rows: int,
        make_sketcher: Callable[[], GradientSketcher] | None = None,
    ) -> None:
        """Check that up to `rows` rows give the same gradient in one pass and in smaller passes.

        `compute` returns the loss of a part. `make_sketcher` creates the GradientSketcher; None
        means one for the models that are trained. Raises RequestError if gradients differ, or if
        the rows can't be divided.
        """
        most = min(rows, part.rows)
        few = self._move_rows(choose_few_rows(cut_rows(part.batch, 0, most, part.rows), most))
        if few is None:
            raise RequestError("The rows of the pass can't be cut apart.", "Make smaller passes.")
        computations = make_share_computations(few, refuse_collectives(compute), part.count)
        sketcher = self._sketcher(compute) if make_sketcher is None else make_sketcher()
        try:
            verdict = self._judge_result(audit(sketcher, computations, add_noise=True))
        except WholeBatchLoss:
            raise RequestError(
                "split.loss and split.gather are of a whole batch.", "Return a mean over rows."
            ) from None
        if verdict.message:
            raise RequestError(verdict.message, verdict.remedy)

    # ------------------------------------------------------------------ a loop of one's own

    def watch_loop(self, batch: Any) -> None:
        """Record how the user's loop computes its next loss, if an audit is due."""
        weights = self._training.weights
        due = self.begin(weights.current)
        self._is_loops = True
        if self._recorder is not None and (due or self._recorder.losses):
            self.close()
        if self._recorder is not None:
            self._waited += 1  # the loop prefetches batches
            if self._waited > AHEAD:
                self.close()
            return
        taken = weights.current
        several = self._training.world > 1
        if not due or not several or self._is_exempt() or taken.origin.loader() is None:
            return
        self._waited, self._met_before = 0, count_foreign()
        rows = taken.sizes[self._training.rank]
        self._recorder = Recorder(weights.models, batch, self._after_backward, rows)

    def close(self) -> None:
        """Stop recording the user's loss."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def watch_part(self, part: Part, counted: OfPart | None) -> None:
        """Record how the loss of a batch's first part is computed, if an audit is due."""
        weights = self._training.weights
        self.close()
        first = weights.current is not self._parted
        self._parted = weights.current
        if first and self.begin(weights.current) and not self._is_exempt():
            self._waited, self._met_before = AHEAD, count_foreign()
            self._pending = Replayed(None)
            recorder = Recorder(weights.models, part.batch, partial(self._after_part, counted))
            recorder.rows, recorder.by_hand = part.rows, True
            part.after = recorder.end_backward
            self._recorder = recorder

    def _after_backward(self, recorder: Recorder, loss: torch.Tensor) -> None:
        """Audit the recorded loss of a user's loop, after the loop has called `backward`.

        Raises RequestError if gradients differ.
        """
        weights = self._training.weights
        if not weights.is_loops:
            return  # computed with split.loss, split.gather or a pass of the split
        factor = self._training.world * weights.weight if weights.by_loss else 1.0
        found = Replayed(None)
        numbers = None
        if recorder.rows > 1:
            record = self._trace_loss(recorder, loss)
            if record == NOT_THIS_BATCH and self._waited < AHEAD:
                recorder.losses = 0
                return
            if isinstance(record, str):
                found = Replayed(None, record)
            else:
                numbers = [number for number in record.numbers if number.value != factor]
                found = self._audit_record(record, None, factor)
        self._warn_of_fault(found)
        self._share_result(found, numbers, survives=True)

    def _after_part(self, counted: OfPart | None, recorder: Recorder, loss: torch.Tensor) -> None:
        """Audit the recorded loss of a part.

        `end_parts` sends the result to the other ranks later.
        """
        if recorder.losses > 1 or recorder.rows < 2:
            return
        record = self._trace_loss(recorder, loss)
        if isinstance(record, str):
            self._pending = Replayed(None, record)
        else:
            self._pending = self._audit_record(record, counted, 1.0)

    def _warn_of_fault(self, replayed: Replayed) -> None:
        """Warn if a loss couldn't be audited, or if padding limits what the audit can show."""
        # with that padding, the audit can't show whether other padding would change the loss
        fault = replayed.fault
        if replayed.cut and replayed.audited is not None and replayed.audited.difference is None:
            fault = PADDED
        if fault:
            self._warn_once(NOT_AUDITED.format(fault) + self.question)

    def end_parts(self) -> None:
        """After a batch's last part, send the audit result of its first part to the other ranks."""
        # not earlier, because other ranks may still wait in the all-reduce of gradients
        self.close()
        found, self._pending = self._pending, None
        if found is not None:
            self._share_result(found, survives=True)

    def _trace_loss(self, recorder: Recorder, loss: torch.Tensor) -> LossRecord | str:
        """Return the recorded calls that computed a loss, or why they can't be repeated."""
        if count_foreign() != self._met_before:
            return "its ranks exchange values before its backward pass"
        record = recorder.trace(loss)
        if isinstance(record, str):
            return record
        try:
            with self._training.weights.auditing(), self._paused_exchanges():
                fault = record.find_change()
        except Exception as error:
            fault = describe_error(error)
        return fault or record

    def _audit_record(self, record: LossRecord, counted: OfPart | None, factor: float) -> Replayed:
        """Audit a loss by repeating the recorded calls that computed it, on a few rows.

        The user's script multiplied the loss by `factor` on this rank; the audit undoes this.
        `counted` returns the denominator of a part's mean loss; None means the row count.
        """

        weights = self._training.weights

        def computations(few: FewRows, compute: Compute) -> Computations:
            def loss(part: Part) -> Any:
                return compute(part.batch, part.rows) / factor

            made = self.make_computations(few, loss, counted)
            weighs_gradients = self._is_loops and not weights.by_loss
            rows = sum(weights.current.sizes)
            if self.follows_launcher:  # the rows of two ranks with equal shares
                rows = 2 * rows // self._training.world
            return weigh_gradients(made, few.rows / rows) if weighs_gradients else made

        def sketcher() -> GradientSketcher:
            return self._sketcher(None, is_sharded_model(record.models))

        try:
            rows = self._list_rows(record)
            return audit_record(
                record, rows, sketcher, computations, add_noise=self.judge.step == 1
            )
        except RequestError as error:
            return Replayed(None, error.message.rstrip("."))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            drop_frames(error)
            free_memory(self._training.device)
            return Replayed(None)

    def _list_rows(self, record: LossRecord) -> list[FewRows]:
        """Return alternative selections of rows for an audit, the preferred one first."""
        # rows are fetched from the data set if possible, and also cut from the batch
        taken = self._training.weights.current
        every = [self._take_rows(None, taken, record)]
        if not taken.origin.by_length:
            every += [
                self._move_rows(
                    choose_few_rows(record.batch, record.rows, in_order, self._max_rows)
                )
                for in_order in (False, True)
            ]
        return [each for each in every if each is not None]

    # ------------------------------------------------------------------ what is computed

    def _hash_trained(self) -> int:
        """Return a hash of the set of trained parameters; if it changes, another audit is due."""
        models = self._training.weights.models
        for model in models:
            if model not in self._members:
                self._members[model] = Members(model)
        return hash(tuple(self._members[model].trained() for model in models))

    @property
    def _is_single_device(self) -> bool:
        """Whether a single device computes each batch in one pass."""
        training = self._training
        return training.world == 1 and not training.ranks.in_passes

    def _is_exempt(self) -> bool:
        """Return whether this training run needs no audits, or can't be audited."""
        # that is so if one device computes each batch in one pass, if ranks synchronize in each
        # pass, or if there is no model
        weights = self._training.weights
        return self._is_single_device or weights.equal_passes or not weights.models

    def _take_rows(
        self, batch: Any, taken: Any, record: LossRecord | None = None
    ) -> FewRows | None:
        """Return a few rows of the current batch for an audit, on this rank's device.

        The rows are fetched from the data set if possible. Otherwise they are cut from `batch`, or
        from the batch of `record`. The result is None if this fails, too. `taken` is the batch that
        the loader yielded, or None without a loader.
        """
        # fetched rows are the same on every rank
        loader = None if taken is None else taken.origin.loader()
        given = list(map(id, tensors_in(batch)))
        same = record is not None or (
            taken is not None and [id(tensor()) for tensor in taken.tensors] == given
        )
        few = None
        if loader is not None and same:
            with suppress(Exception):  # from the program's data set, which is read again
                few = fetch_rows(
                    loader.dataset, loader.collate_fn, loader.prefetched_rows(), self._max_rows
                )
        if few is None and taken is not None and not taken.origin.by_length:
            rows = taken.sizes[self._training.rank]
            own = record.batch if record is not None else batch
            few = choose_few_rows(own, rows, max_rows=self._max_rows)
        return self._move_rows(few)

    def _move_rows(self, few: FewRows | None) -> FewRows | None:
        """Copy an audit's rows to this rank's device; if `few` is None, return None."""
        if few is None:
            return None
        device = self._training.device
        # the host waits neither for a copy nor for earlier work of the GPU
        at_once = device.type != "cuda"

        def move(rows: Any) -> Any:
            return each_tensor(lambda tensor: tensor.to(device, non_blocking=not at_once), rows)

        parts = move(few.parts)
        return msgspec.structs.replace(
            few,
            whole=move(few.whole),
            parts=parts,
            cut=parts if few.cut is few.parts else move(few.cut),
            even=move(few.even),
            even_cut=move(few.even_cut),
        )

    def _sketcher(
        self, compute: Callable[..., Any] | None, losses_only: bool = False
    ) -> GradientSketcher:
        return self.make_sketcher(
            self._training.weights.models, function=compute, losses_only=losses_only
        )

    def make_sketcher(
        self, models: Iterable[Any], optimizers: Iterable[Any] = (), **options: Any
    ) -> GradientSketcher:
        """Create a GradientSketcher, which reduces the models' gradients to sketches for audits.

        Tensors that `optimizers` train are included. `options` are further arguments of
        GradientSketcher.
        """
        every = list(models)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        others = [parameter for group in groups for parameter in group["params"]]
        contexts = [
            self._training.weights.auditing,
            self._paused_exchanges,
            *options.pop("contexts", ()),
        ]
        if self.judge.thorough:
            self._known = KnownPasses()
        return GradientSketcher(
            every,
            name_tensors(every, others),
            contexts=contexts,
            measures_rounding=self._measures_rounding,
            known_passes=self._known,
            **options,
        )

    @property
    def _max_rows(self) -> int:
        """Maximum number of rows that the next audit computes."""
        return ROWS if self.judge.thorough or self.judge.step <= EARLY else FEWER

    def take_rows(self, dataset: Any, collate: Any, indices: Sequence[int]) -> FewRows | None:
        """Fetch a few of the rows with these indices for an audit.

        They are moved to this rank's device. The result is None for fewer than two indices.
        """
        return self._move_rows(fetch_rows(dataset, collate, indices, self._max_rows))

    @contextmanager
    def _paused_exchanges(self) -> Iterator[None]:
        """Context manager in which gradients aren't all-reduced."""
        exchanges = self._training.weights.list_exchanges()
        for exchange in exchanges:
            exchange.resting = True
        try:
            with own_collectives():
                yield
        finally:
            for exchange in exchanges:
                exchange.resting = False

    def make_computations(
        self, few: FewRows, compute: OfPart, counted: OfPart | None
    ) -> Computations:
        """Return what an audit compares: the gradient of a few rows as one batch and in parts.

        `compute` returns the mean loss of a part, and `counted` its denominator; None means the row
        count. With `follows_launcher`, two equal parts are used instead of the one batch.
        """
        in_passes = self._training.ranks.in_passes
        loss = refuse_collectives(compute)
        if self._training.world > 1:
            make = make_launcher_computations if self.follows_launcher else make_share_computations
            made = make(few, loss, counted, FEW if in_passes else 0)
            return add_unweighted(made) if self._training.weights.are_sums else made
        whole = _make_computation(loss, counted, [few.whole], [few.rows], 0)
        trained = _make_computation(loss, counted, [few.whole], [few.rows], FEW)
        changes = {"sum": AuditChange(_unweighted(trained))}
        sizes = split_passes(few.rows, FEW)
        return Computations(whole, trained, changes, sizes, few.digest)

    # ------------------------------------------------------------------ what follows

    def _try_audit(self, find: Callable[[], Audited | None]) -> Audited | None:
        """Run an audit and return its result.

        If the audit fails, warn and return None.
        """
        try:
            return find()
        except WholeBatchLoss:
            return None  # each rank has the whole batch's loss, which is exact
        except RequestError as error:
            # a warning tells why, unless memory ran out
            self._warn_once(NOT_AUDITED.format(error.message.rstrip(".")) + self.question)
        except Exception as error:
            if is_out_of_memory(error):
                drop_frames(error)
                free_memory(self._training.device)
            else:
                fault = describe_error(error)
                self._warn_once(NOT_AUDITED.format(fault + _describe_line(error)) + self.question)
        return None

    def _share_result(
        self, replayed: Replayed, numbers: list[Number] | None = None, survives: bool = False
    ) -> None:
        """Send this rank's audit result to the other ranks, and act on a difference.

        If gradients differ, it warns, raises RequestError, or switches to equal shares. `numbers`
        are the constants in the loss, if known. `survives` is whether passes are computed again if
        memory runs out.
        """
        # This doesn't wait for the other ranks' results. A pass that is computed again needs no
        # further check if this audit found no difference.
        own = RankVerdict() if replayed.audited is None else self._judge_result(replayed.audited)
        own.numbers, own.certain = numbers, replayed.certain
        if not (replayed.certain and replayed.closed):
            # if the count of rows was guessed, or rows come from outside the batch
            own.sketch = None
        if own.fine and survives:
            self._training.passes.recovery.checked = True
        action = self.judge.decide_by(bool(own.message) and own.certain)
        if action is Action.GO_EVEN:
            own.even = True
            self.judge.over = False  # until all ranks have read this verdict
        self._publish(own)
        self._apply(action, own)

    def _apply(self, action: Action, verdict: RankVerdict) -> None:
        if action is Action.REFUSE:
            raise RequestError(verdict.message, verdict.remedy)
        if action is Action.WARN:
            self._warn_once(f"{verdict.message} {verdict.remedy}")

    def _publish(self, own: RankVerdict) -> None:
        """Write this rank's audit result to the process group's store.

        All ranks read it there a few steps later.
        """
        # ranks usually audit the same step, so all verdicts on it can be compared
        training = self._training
        if not self._can_exchange:
            return
        place = f"evener/audits/{self._number}/{self.judge.step}"
        store = default_store()
        with suppress(dist.DistError):  # the rank that hosts the store has exited
            store.set(f"{place}/{training.rank}", msgspec.msgpack.encode(own))
        self._published[self.judge.step] = [f"{place}/{each}" for each in range(training.world)]

    @property
    def _can_exchange(self) -> bool:
        """Whether ranks can exchange audit results, through the default process group's store."""
        world: int = self._training.world
        return world > 1 and dist.is_initialized() and dist.get_world_size() == world

    def _compare_left_out(self) -> None:
        """Look for a batch that only some ranks skipped, and warn about it.

        With `strict`, RequestError is raised. Under `evener run`, shares become equal for the rest
        of the training run instead.
        """
        if self.judge.over or not self._can_exchange:
            return
        found = self._left_out.begin(self.judge.step + 1, self._training.ranks.batches)
        if found is None:
            return
        # all ranks do the following in the same step; with the program's own launcher as the
        # reference, shares become equal instead
        step, ranks = found
        message = LEFT_OUT.format(step, _list_ranks(ranks))
        if self._go_even is not None:
            self.judge.over = True
            self._go_even(message)
        else:
            strict = self._training.strict
            verdict = RankVerdict(message, LEFT_OUT_REMEDY)
            self._apply(Action.REFUSE if strict else Action.WARN, verdict)

    def _compare_verdicts(self) -> None:
        """Read all ranks' results of audits from a few steps ago, and act on them."""
        # READ_AFTER steps after an audit, all ranks have written: each step in between has an
        # all-reduce, which no rank completes before the others take part
        for step, keys in list(self._published.items()):
            if self.judge.step < step + READ_AFTER:
                continue
            every = _read_verdicts(keys)
            if every:
                del self._published[step]
                self._compare_results(every, step)
            elif self.judge.step > step + GIVE_UP_AFTER:
                del self._published[step]

    def _compare_results(self, every: Sequence[RankVerdict], step: int) -> None:
        """Act on the results of all ranks for the audit in step number `step`.

        If gradients differ, it warns, raises RequestError or makes shares equal.
        """
        if self.judge.over:
            return
        self._compared = True
        self._compare_numbers([each.numbers for each in every if each.numbers is not None])
        self._warn_of_guesses(every)
        differing = self._compare_ranks(every, step)
        worst = next((each for each in every if each.even), differing)
        if worst is None:
            return
        self.judge.over = True
        if self._go_even is not None:
            self._go_even(worst.message)
            return
        strict = self._training.strict or step <= EARLY
        self._apply(Action.REFUSE if strict else Action.WARN, worst)

    def _warn_of_guesses(self, every: Sequence[RankVerdict]) -> None:
        """Warn if the loss couldn't be audited because a constant in it may be a row count."""
        guessed = any(each.message and not each.certain for each in every)
        if guessed and not any(each.fine for each in every):
            self._warn_once(NOT_AUDITED.format(MAY_COUNT) + self.question)

    def _judge_result(self, audited: Audited) -> RankVerdict:
        """Convert an audit's result to this rank's verdict, with a message if gradients differ."""
        if audited.changed:
            self._warn_once(CHANGED.format(audited.changed[0]))
        if audited.fault:
            self._warn_once(f"The gradient couldn't be audited: {audited.fault}.{self.question}")
            return RankVerdict()
        if not audited.finite:
            return RankVerdict()
        verdict = RankVerdict(
            sketch=audited.sketch, rows=audited.rows, fine=audited.difference is None
        )
        verdict.noises = None if audited.noises is None else dict(audited.noises)
        if audited.difference is not None:
            reference = IN_EQUAL_PARTS if self.follows_launcher else AT_ONCE
            verdict.message = describe(
                audited.difference, audited.cause, audited.sizes, max(1, self.judge.step), reference
            )
            verdict.remedy = self.remedies[audited.cause]
            verdict.relative = audited.difference.relative
        return verdict

    def _compare_ranks(self, every: Sequence[RankVerdict], step: int) -> RankVerdict | None:
        """Return a verdict if ranks computed different gradients of the same rows, else None."""
        # for a difference that may come from rounding, the next audits measure rounding
        if len({each.rows for each in every}) > 1:
            return None
        sketches = [each.sketch for each in every if each.sketch is not None]
        noises = [each.noises for each in every if each.sketch and each.noises is not None]
        difference = compare_ranks(sketches, noises)
        if sketches and len(noises) == len(sketches):
            difference = compare_ranks(self._doubted, noises) or difference
            self._doubted = []
        elif difference is not None:
            self._doubted = sketches
            # on every rank, for the current batch and prefetched batches
            self._measures_until = self.judge.step + 1 + AHEAD
            return None
        if difference is None:
            return None
        message = describe(difference, "state", (), step)
        return RankVerdict(message, self.remedies["state"], difference.relative)

    def _compare_numbers(self, every: Sequence[list[Number]]) -> None:
        """Warn if the ranks' losses have different constants, such as running means.

        `every` has each rank's constants, in the order in which its loss uses them.
        """
        # not compared if some ranks have used more constants than others
        if len({len(each) for each in every}) != 1:
            return
        for line in zip(*every, strict=True):
            values = [each.value for each in line]
            low, high = min(values), max(values)
            if high - low > NEAR_NUMBERS * max(abs(low), abs(high)):
                self._warn_once(OTHER_NUMBERS.format(low, high, line[0].place or "unknown"))
                return

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(words, stacklevel=2)


def describe_error(error: Exception) -> str:
    """Return a phrase that says why a loss can't be computed again, given the error raised."""
    return CANT.format(type(error).__name__, str(error).partition("\n")[0])


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _read_verdicts(keys: Sequence[str]) -> list[RankVerdict]:
    """Read all ranks' audit results from the store; return [] if one is missing."""
    # also if the rank that hosts the store has exited
    store = default_store()
    try:
        if not store.check(keys):
            return []
        return [msgspec.msgpack.decode(store.get(key), type=RankVerdict) for key in keys]
    except dist.DistError:
        return []


def is_sharded_model(models: Iterable[Any]) -> bool:
    """Return whether FSDP2 shards any of the models."""
    return any(map(is_sharded, models))


def make_share_computations(
    few: FewRows, loss: OfPart, counted: OfPart | None = None, micro: int = 0
) -> Computations:
    """Return what an audit compares: the gradient of a few rows as one batch and in unequal parts.

    Arguments:

    - `few`: the rows.
    - `loss`: returns the mean loss of a part.
    - `counted`: returns the denominator of this mean; None means the row count.
    - `micro`: maximum rows per pass; 0 means one pass per part.
    """
    computation = partial(_make_computation, loss, counted)
    whole = computation([few.whole], [few.rows], 0)
    trained = computation(few.parts, few.sizes, micro)
    changes = {"sum": AuditChange(_unweighted(trained))}
    if micro:
        changes["passes"] = AuditChange(computation(few.parts, few.sizes, 0))
    if counted is not None:
        changes["count"] = AuditChange(_make_computation(loss, None, few.parts, few.sizes, micro))
    if few.cut is not None and few.cut is not few.parts:
        changes["collation"] = AuditChange(computation(few.cut, few.sizes, micro))
    cut = few.parts if few.cut is None else few.cut
    shares = WholeShares(whole, (few.rows,), computation(cut, few.sizes, 0), few.sizes)
    return Computations(whole, trained, changes, few.sizes, few.digest, few.pads, shares)


def make_launcher_computations(
    few: FewRows, loss: OfPart, counted: OfPart | None = None, micro: int = 0
) -> Computations:
    """Return what an audit compares: the gradient of a few rows in two equal and two unequal parts.

    Arguments:

    - `few`: the rows.
    - `loss`: returns the mean loss of a part.
    - `counted`: returns the denominator of this mean; None means the row count.
    - `micro`: maximum rows per pass; 0 means one pass per part.
    """
    made = make_share_computations(few, loss, counted, micro)
    if few.sizes == few.even_sizes:  # two rows can only be cut in one way
        return made

    mean = 1.0 / len(few.even)

    def as_launched(parts: Sequence[Any]) -> Computation:
        return [
            Piece(each.loss, mean)
            for each in _make_computation(loss, None, parts, few.even_sizes, 0)
        ]

    changes = dict(made.changes)
    changes["sum"] = AuditChange([Piece(each.loss, mean) for each in made.trained])
    if "collation" in changes and few.even_cut is not None:
        trained = changes["collation"].trained
        changes["collation"] = AuditChange(trained, as_launched(few.even_cut))
    even = few.even if few.even_cut is None else few.even_cut
    cut = few.parts if few.cut is None else few.cut
    trained = _make_computation(loss, counted, cut, few.sizes, 0)
    shares = WholeShares(as_launched(even), few.even_sizes, trained, few.sizes)
    return msgspec.structs.replace(
        made, reference=as_launched(few.even), changes=changes, shares=shares
    )


def add_unweighted(computations: Computations) -> Computations:
    """Return an audit's computations, changed for a loss that is a sum over rows.

    In the result, all parts have the same weight, whatever their row counts are.
    """
    # causes that only apply to a mean are left out
    trained = computations.changes["sum"].trained
    changes = {"sum": AuditChange(trained)}
    collated = computations.changes.get("collation")
    if collated is not None:
        weight = trained[0].weight
        cut = [msgspec.structs.replace(each, weight=weight) for each in collated.trained]
        changes["collation"] = AuditChange(cut, collated.reference)
    return msgspec.structs.replace(computations, trained=trained, changes=changes, shares=None)


def weigh_gradients(computations: Computations, scale: float) -> Computations:
    """Return an audit's computations with losses multiplied by `scale` before the backward pass."""
    changes = {
        name: _scale_losses_of_change(change, scale)
        for name, change in computations.changes.items()
    }
    changes["size"] = AuditChange(
        _scale_losses_by_weight(computations.trained, scale),
        _scale_losses_by_weight(computations.reference, scale),
    )
    return msgspec.structs.replace(
        computations,
        reference=_scale_losses(computations.reference, scale),
        trained=_scale_losses(computations.trained, scale),
        changes=changes,
    )


def _scale_losses_of_change(change: AuditChange, scale: float) -> AuditChange:
    reference = None if change.reference is None else _scale_losses(change.reference, scale)
    return AuditChange(_scale_losses(change.trained, scale), reference)


def _scale_losses(computation: Computation, scale: float) -> Computation:
    """Return passes whose losses are multiplied by `scale` before the backward pass."""
    return [msgspec.structs.replace(piece, scale=scale) for piece in computation]


def _scale_losses_by_weight(computation: Computation, scale: float) -> Computation:
    """Return passes whose losses are multiplied by `scale` times the weight of the pass."""
    return [msgspec.structs.replace(piece, scale=scale * piece.weight) for piece in computation]


def _make_computation(
    loss: OfPart, counted: OfPart | None, batches: Sequence[Any], sizes: Sequence[int], micro: int
) -> Computation:
    """Return the weighted passes that compute the gradient of several batches together.

    `sizes` has the row counts of the batches, and `micro` is the maximum rows per pass; 0 means one
    pass per batch. Losses are weighted by rows, or by what `counted` returns.
    """
    parts: list[Part] = []
    for rank, (batch, rows) in enumerate(zip(batches, sizes, strict=True)):
        own = make_parts(batch, rows, micro or rows, _unscaled)
        for part in own:
            part.weight *= gradient_weight(sizes, rank)
        parts += own
    if counted is not None:
        counts = [float(torch.as_tensor(counted(part)).detach()) for part in parts]
        total = sum(counts) or 1.0
        for part, own_count in zip(parts, counts, strict=True):
            part.weight = own_count / total
    return [Piece(partial(_compute, loss, part), part.weight) for part in parts if part.weight]


def _unweighted(computation: Computation) -> Computation:
    return [Piece(each.loss) for each in computation]


def _unscaled(loss: Any) -> Any:
    return loss


def _describe_line(error: BaseException) -> str:
    """Return the file and line of the user's code in an error's traceback, in parentheses.

    The result is "" if there is none.
    """
    own = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in each.filename
        and not each.filename.startswith(sys.prefix)
        and "evener" not in each.filename
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _compute(loss: OfPart, part: Part) -> Any:
    """Call the loss function with a copy of a part, because the function may change the part."""
    # a part is computed more than once, and the program may remove items from the batch
    own = copy.copy(part)
    own.batch = each_tensor(lambda tensor: tensor, part.batch)
    return loss(own)
