"""The audits of a training by a plan: gradients of some rows, on one device and in parts.

An audit runs after the step's own backward pass, when its activations are freed, and before the
optimizer uses the gradients, which stay as they are.
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
from .audit.compute import Bench, Piece
from .audit.quick import KnownPasses
from .audit.record import (
    NOT_THIS_BATCH,
    LossRecord,
    Number,
    Recorder,
)
from .audit.replay import Compute, Replayed, audit_record
from .audit.rows import FEWER, ROWS, FewRows, cut_few, fetch_rows
from .audit.settings import LossSettings
from .audit.sketch import name_tensors
from .audit.step import AuditChange, Audited, Way, Ways, audit
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
    MEETS,
    MeetingError,
    count_foreign,
    own_collectives,
    refuse_meeting,
)

_NUMBERS = count()  # of this process's trainings, the same on every rank
HEAR_AFTER, GIVE_UP_AFTER = (
    2,
    10,
)  # steps after an audit: ranks read its results, or stop waiting for them
FEW = 2  # rows of a pass in an audit, where the plan has passes
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
MAY_COUNT = "it has a number that may be its rows, which batch.size(0) says"
CANT = "its loss can't be computed again to compare it ({}: {})"
AHEAD = 2  # batches that a loop may take before it computes the first of them
LEFT_OUT = (
    "In step {}, {} left out a batch that others learned from: the loss was computed by other"
    " operations than before, and was 0. One device would leave out the whole batch or none of it."
)
LEFT_OUT_REMEDY = "Decide by the whole batch, with split.total(value) or split.mean(value)."
NEAR_NUMBERS = 1e-4  # relative difference of equal numbers that are rounded differently
OTHER_NUMBERS = (
    "The ranks compute their losses with other numbers: one has {:.6g} where another has {:.6g}"
    " ({}). Drawn at random, that is as it should be. Noted of earlier rows, such as a running mean"
    " of losses, a baseline or a multiplier, it makes shares learn something else: note it of the"
    " whole batch, by split.mean(value)."
)


class RankVerdict(msgspec.Struct):
    """A rank's result of an audit, as it is sent to the other ranks."""

    message: str = ""  # of a difference
    remedy: str = ""
    relative: float = 0.0
    fine: bool = False  # both ways agree
    certain: bool = True  # a difference can't come from a number that counts rows
    rows: int = 0  # a digest of the rows that were computed
    sketch: Sketch | None = None  # of the reference gradient
    noises: dict[str, float] | None = None  # how far rounding changes it, if measured
    numbers: list[Number] | None = None  # numbers that a loop's loss is computed with
    even: bool = False  # shares have to become equal


class TrainingAudits:
    """The audits of one rank's training; all ranks have to call each method equally often."""

    def __init__(self, training: Any) -> None:
        self._training = weakref.proxy(training)
        self.judge = Audits(strict=training.strict)
        self._members: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()
        self._batch: Any = None  # the batch that was counted last
        self._due = False
        self._changed = False  # a loss is made of other operations than earlier losses
        self._known = KnownPasses()
        self._doubted: list[Sketch] = []  # ranks' sketches, which differ by rounding or by more
        self._measures_until = 0  # the last step that is audited to measure rounding
        self._pending: Replayed | None = None  # the audit of a part, until the ranks meet
        self._parted: Any = None  # the batch whose parts were computed last
        self._number = next(_NUMBERS)  # the same on every rank
        self._left_out = LeftOutBatches(f"evener/left out/{self._number}", training.rank)
        self._told: dict[int, list[str]] = {}  # by step: the store's keys of each rank's result
        self._go_even: Callable[[str], None] | None = None
        # the question to ask if nothing could be audited, and the remedy for each cause, in the
        # trainer's terms
        self.question = QUESTION
        self.remedies = {name: each.remedy for name, each in CAUSES.items()}
        self._said: set[str] = set()
        self._settings = LossSettings()
        self._is_loops = False  # the user's own loop calls backward
        self._recorder: Recorder | None = None  # records the user's own loop
        self._waited = 0  # batches since the recorder began
        self._met_before: Any = None  # collectives of the program until then
        # stops listening to losses
        self.release: Callable[[], Any] = lambda: None
        if training.world > 1:
            self.release = listen(self)

    @property
    def is_due(self) -> bool:
        """True if the current batch is audited, which takes time."""
        return self._due

    @property
    def follows_change(self) -> bool:
        """True if the current batch is audited because something changed before it."""
        return self._due and not is_audited(self.judge.step)

    @property
    def _measures(self) -> bool:
        """True if audits have to measure how far rounding changes the gradient."""
        return not self.judge.over and self.judge.step <= self._measures_until

    def report(self, fault: str) -> None:
        """Send the other ranks the result of a check that was made elsewhere.

        `fault` says why shares have to become equal; it is empty if they don't.
        """
        self._tell(RankVerdict(fault, even=bool(fault)))

    def begin(self, batch: Any) -> bool:
        """Count a batch, unless it is counted already; return True if an audit is due.

        None ever is on a single device that computes a batch at once.
        """
        if self._is_alone:
            return False
        if batch is not self._batch or batch is None:
            self._batch = batch
            self._hear()
            self._compare_left_out()
            due = self.judge.begin(self._trained()) or self._changed
            self.judge.thorough |= self._changed
            self._due = due or self._measures
            self._changed = False
        return self._due

    def note_loss(self, loss: Any, made_of: tuple[Any, ...], caller: FrameType) -> None:
        """Audit the next loss if this one is made of new operations, or by changed code.

        Called as the program calls backward on a loss; `caller` is the frame that does.
        """
        if self._batch is None or self.judge.over:
            return
        self._left_out.note(loss, made_of)
        changed = self.judge.sees(made_of)
        code = find_code(caller) if self._is_loops else None
        if code is not None:
            with suppress(ReferenceError):  # the training is over, and another one goes on
                models = self._training.weights.models
                changed |= self._settings.have_changed(models, code=code) and self.judge.changes()
        self._changed |= changed and not self._due

    def follow_launcher(self, go_even: Callable[[str], None]) -> None:
        """Compare with the program's own launcher, which gives all ranks equal rows, from now on.

        `go_even` is called on every rank in the same step, with the reason why shares have
        to become equal.
        """
        self._go_even = go_even
        self.question = ""
        self.judge = Audits(evens=True, strict=self._training.strict)

    @property
    def follows_launcher(self) -> bool:
        """True if the reference is the program's own launcher instead of one device."""
        return self._go_even is not None

    def find_difference(self, find: Callable[[], Audited | None]) -> str:
        """Return the message of an audit made before the first step; empty if nothing differs.

        There is a message, too, if the loss of a few rows can't be computed to compare it.
        """
        fault = ""

        def note_fault() -> Audited | None:
            nonlocal fault
            try:
                return find()
            except MeetingError:
                fault = MEETS
            except RequestError as error:
                fault = error.message
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                fault = describe_error(error)
            return None

        found = self._run(note_fault)
        return fault if found is None else self._judge(found).message

    def after_batch(
        self,
        find: Callable[[bool], Audited | None],
        function: Callable[..., Any],
        holders: Sequence[Any] = (),
    ) -> None:
        """Audit the batch that a library's trainer has computed, if an audit is due.

        Every rank has to call it in each step, before its optimizer uses the gradients. `find`
        makes the audit; its argument says whether to move weights that are all equal while it runs.
        `function` is the program's function that computes the loss, and `holders` are objects whose
        attributes it reads. Raises RequestError if the gradients differ.
        """
        if self._is_alone:
            return
        due = self.begin(object())
        if not self.judge.over:
            models = self._training.weights.models
            changed = self._settings.have_changed(models, function, holders=holders)
            due |= changed and self.judge.changes()
        # so that `note_loss` notes a change in a backward pass before the next call
        self._due = False
        if due and not self._is_apart():
            first = self.judge.step == 1
            self._act(Replayed(self._run(lambda: find(first))))

    def expect_function(self) -> None:
        """Note that the batch's loss is computed by a function, which `after_step` gets."""
        self._is_loops = False

    def after_step(self, batch: Any, compute: OfPart, counted: OfPart | None) -> None:
        """Audit the loss `compute(part)` of a batch, if an audit is due.

        Every rank has to call it after the batch's passes. Raises RequestError if
        the gradients differ.
        """
        training = self._training
        self.close()
        if self._is_alone:
            return
        taken = training.weights.current
        code = getattr(compute, "__code__", type(compute))
        due = self.begin(taken)
        # the function is another one, or has another count
        if self.judge.sees((code, counted is None)):
            due = True
        if not self.judge.over:
            changed = self._settings.have_changed(training.weights.models, compute)
            due |= changed and self.judge.changes()
        if not due or self._is_apart():
            return

        def find() -> Audited | None:
            few = self._take_rows(batch, taken)
            if few is None:
                return None
            first = self.judge.step == 1 or not training.passes.recovery.checked
            bench = self._bench(compute, is_sharded_model(training.weights.models))
            return audit(bench, self.make_ways(few, compute, counted), moves=first)

        self._act(Replayed(self._run(find)), survives=True)

    def audit_part(
        self,
        compute: OfPart,
        part: Part,
        rows: int,
        make_bench: Callable[[], Bench] | None = None,
    ) -> None:
        """Check that a pass which ran out of memory may be divided into parts of up to `rows` rows.

        Raises RequestError on this rank unless the parts together have the gradient of the whole.
        `make_bench` makes the bench if a library's trainer computes the pass.
        """
        most = min(rows, part.rows)
        few = self._move(cut_few(cut_rows(part.batch, 0, most, part.rows), most))
        if few is None:
            raise RequestError("The rows of the pass can't be cut apart.", "Make smaller passes.")
        ways = devices_ways(few, refuse_meeting(compute), part.count)
        bench = self._bench(compute) if make_bench is None else make_bench()
        try:
            verdict = self._judge(audit(bench, ways, moves=True))
        except WholeBatchLoss:
            raise RequestError(
                "split.loss and split.gather are of a whole batch.", "Return a mean over rows."
            ) from None
        if verdict.message:
            raise RequestError(verdict.message, verdict.remedy)

    # ------------------------------------------------------------------ a loop of one's own

    def watch_loop(self, batch: Any) -> None:
        """Record how the loop computes its loss of this batch, if that is to be audited."""
        weights = self._training.weights
        due = self.begin(weights.current)
        self._is_loops = True
        if self._recorder is not None and (due or self._recorder.losses):
            self.close()
        if self._recorder is not None:
            self._waited += 1  # the loop fetches batches ahead of their turn
            if self._waited > AHEAD:
                self.close()
            return
        taken = weights.current
        several = self._training.world > 1
        if not due or not several or self._is_apart() or taken.origin.loader() is None:
            return
        self._waited, self._met_before = 0, count_foreign()
        rows = taken.sizes[self._training.rank]
        self._recorder = Recorder(weights.models, batch, self._after_backward, rows)

    def close(self) -> None:
        """Stop recording the loop's batch."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def watch_part(self, part: Part, counted: OfPart | None) -> None:
        """Record how the loop computes the loss of the first part of a batch."""
        weights = self._training.weights
        self.close()
        first = weights.current is not self._parted
        self._parted = weights.current
        if first and self.begin(weights.current) and not self._is_apart():
            self._waited, self._met_before = AHEAD, count_foreign()
            self._pending = Replayed(None)
            recorder = Recorder(weights.models, part.batch, partial(self._after_part, counted))
            recorder.rows, recorder.by_hand = part.rows, True
            part.after = recorder.end_backward
            self._recorder = recorder

    def _after_backward(self, recorder: Recorder, loss: torch.Tensor) -> None:
        """Audit a loss on which a loop has called backward.

        Raises RequestError if the gradients differ.
        """
        weights = self._training.weights
        if not weights.is_loops:
            return  # the split takes part in this loss
        factor = self._training.world * weights.weight if weights.by_loss else 1.0
        found = Replayed(None)
        numbers = None
        if recorder.rows > 1:
            record = self._trace(recorder, loss)
            if record == NOT_THIS_BATCH and self._waited < AHEAD:
                recorder.losses = 0
                return
            if isinstance(record, str):
                found = Replayed(None, record)
            else:
                numbers = [each for each in record.numbers if each.value != factor]
                found = self._audit_record(record, None, factor)
        self._note_fault(found)
        self._act(found, numbers, survives=True)

    def _after_part(self, counted: OfPart | None, recorder: Recorder, loss: torch.Tensor) -> None:
        """Audit the loss of a batch's first part; ranks exchange results after the last part."""
        if recorder.losses > 1 or recorder.rows < 2:
            return
        record = self._trace(recorder, loss)
        if isinstance(record, str):
            self._pending = Replayed(None, record)
        else:
            self._pending = self._audit_record(record, counted, 1.0)

    def _note_fault(self, found: Replayed) -> None:
        """Warn why a loss couldn't be audited, or what couldn't be seen of it."""
        fault = found.fault
        if found.cut and found.audited is not None and found.audited.difference is None:
            fault = PADDED
        if fault:
            self._say(NOT_AUDITED.format(fault) + self.question)

    def end_parts(self) -> None:
        """Send the other ranks the result of a part's audit, after the batch's last pass.

        Before that, some ranks still wait in the exchange of gradients.
        """
        self.close()
        found, self._pending = self._pending, None
        if found is not None:
            self._act(found, survives=True)

    def _trace(self, recorder: Recorder, loss: torch.Tensor) -> LossRecord | str:
        """Return the record of a loss.

        If it can't be computed again, return why, as a part of a message.
        """
        if count_foreign() != self._met_before:
            return "its ranks exchange figures before its backward pass"
        record = recorder.trace(loss)
        if isinstance(record, str):
            return record
        try:
            with self._training.weights.checking(), self._resting():
                fault = record.find_change()
        except Exception as error:
            fault = describe_error(error)
        return fault or record

    def _audit_record(self, record: LossRecord, counted: OfPart | None, factor: float) -> Replayed:
        """Audit a recorded loss, which the rank has multiplied by `factor`."""

        weights = self._training.weights

        def ways(few: FewRows, compute: Compute) -> Ways:
            def loss(part: Part) -> Any:
                return compute(part.batch, part.rows) / factor

            made = self.make_ways(few, loss, counted)
            weighs_gradients = self._is_loops and not weights.by_loss
            rows = sum(weights.current.sizes)
            if self.follows_launcher:  # two ranks' equal rows
                rows = 2 * rows // self._training.world
            return weigh_gradients(made, few.rows / rows) if weighs_gradients else made

        def bench() -> Bench:
            return self._bench(None, is_sharded_model(record.models))

        try:
            rows = self._list_rows(record)
            return audit_record(record, rows, bench, ways, moves=self.judge.step == 1)
        except RequestError as error:
            return Replayed(None, error.message.rstrip("."))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            drop_frames(error)
            free_memory(self._training.device)
            return Replayed(None)

    def _list_rows(self, record: LossRecord) -> list[FewRows]:
        """Return some rows of the current batch, from the data set and cut from the batch."""
        taken = self._training.weights.current
        every = [self._take_rows(None, taken, record)]
        if not taken.origin.dealt:
            every += [
                self._move(cut_few(record.batch, record.rows, in_order, self._most_rows))
                for in_order in (False, True)
            ]
        return [each for each in every if each is not None]

    # ------------------------------------------------------------------ what is computed

    def _trained(self) -> int:
        """Return a digest of which weights are trained."""
        models = self._training.weights.models
        for each in models:
            if each not in self._members:
                self._members[each] = Members(each)
        return hash(tuple(self._members[each].trained() for each in models))

    @property
    def _is_alone(self) -> bool:
        """True if a single device computes a batch at once, as without a plan."""
        training = self._training
        return training.world == 1 and not training.ranks.in_passes

    def _is_apart(self) -> bool:
        """True if nothing can be audited.

        That is so with one device and a single pass, with a sharded model, or without a model.
        """
        weights = self._training.weights
        return self._is_alone or weights.equal_passes or not weights.models

    def _take_rows(
        self, batch: Any, taken: Any, record: LossRecord | None = None
    ) -> FewRows | None:
        """Return some rows of the current batch, from the data set or cut from the batch.

        Rows from the data set are the same on every rank.
        """
        loader = None if taken is None else taken.origin.loader()
        given = list(map(id, tensors_in(batch)))
        same = record is not None or (
            taken is not None and [id(each()) for each in taken.tensors] == given
        )
        few = None
        if loader is not None and same:
            with suppress(Exception):  # from the program's data set, which is read again
                few = fetch_rows(
                    loader.dataset, loader.collate_fn, loader.rows_at_hand(), self._most_rows
                )
        if few is None and taken is not None and not taken.origin.dealt:
            rows = taken.sizes[self._training.rank]
            own = record.batch if record is not None else batch
            few = cut_few(own, rows, most=self._most_rows)
        return self._move(few)

    def _move(self, few: FewRows | None) -> FewRows | None:
        """Return the rows on this rank's device."""
        if few is None:
            return None
        device = self._training.device
        moved = {
            name: each_tensor(lambda tensor: tensor.to(device), getattr(few, name))
            for name in ("whole", "parts", "cut", "even")
        }
        return msgspec.structs.replace(few, **moved)

    def _bench(self, compute: Callable[..., Any] | None, losses_only: bool = False) -> Bench:
        return self.make_bench(
            self._training.weights.models, function=compute, losses_only=losses_only
        )

    def make_bench(
        self, models: Iterable[Any], optimizers: Iterable[Any] = (), **options: Any
    ) -> Bench:
        """Return a Bench for these models and for the other tensors that their optimizers train.

        It computes gradients of a few rows for an audit, which don't count as part of a step.
        `options` are those of Bench.
        """
        every = list(models)
        groups = [group for each in optimizers for group in each.param_groups]
        others = [each for group in groups for each in group["params"]]
        around = [self._training.weights.checking, self._resting, *options.pop("around", ())]
        if self.judge.thorough:
            self._known = KnownPasses()
        return Bench(
            every,
            name_tensors(every, others),
            around=around,
            measures=self._measures,
            known=self._known,
            **options,
        )

    @property
    def _most_rows(self) -> int:
        """The number of rows that an audit of this step computes, or fewer."""
        return ROWS if self.judge.thorough or self.judge.step <= EARLY else FEWER

    def take_rows(self, dataset: Any, collate: Any, numbers: Sequence[int]) -> FewRows | None:
        """Return some of these rows of a data set, on this rank's device; None if too few."""
        return self._move(fetch_rows(dataset, collate, numbers, self._most_rows))

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Enter a context in which exchanges ignore what is computed."""
        exchanges = self._training.weights.list_exchanges()
        for each in exchanges:
            each.resting = True
        try:
            with own_collectives():
                yield
        finally:
            for each in exchanges:
                each.resting = False

    def make_ways(self, few: FewRows, compute: OfPart, counted: OfPart | None) -> Ways:
        """Return the ways to compute the reference gradient and that of two devices.

        The reference is one device's gradient, or that of equal parts, as the program's own
        launcher computes it. The two devices compute in passes if the plan has passes.
        """
        in_passes = self._training.ranks.in_passes
        loss = refuse_meeting(compute)
        if self._training.world > 1:
            make = launchers_ways if self.follows_launcher else devices_ways
            return make(few, loss, counted, FEW if in_passes else 0)
        whole = _make_way(loss, counted, [few.whole], [few.rows], 0)
        trained = _make_way(loss, counted, [few.whole], [few.rows], FEW)
        changes = {"sum": AuditChange(_unweighted(trained))}
        sizes = split_passes(few.rows, FEW)
        return Ways(whole, trained, changes, sizes, few.digest)

    # ------------------------------------------------------------------ what follows

    def _run(self, find: Callable[[], Audited | None]) -> Audited | None:
        """Return the audit; if it can't be made, warn why and return None."""
        try:
            return find()
        except WholeBatchLoss:
            return None  # each rank has the whole batch's loss, which is exact
        except RequestError as error:
            self._say(NOT_AUDITED.format(error.message.rstrip(".")) + self.question)
        except Exception as error:
            if is_out_of_memory(error):
                drop_frames(error)
                free_memory(self._training.device)
            else:
                fault = describe_error(error)
                self._say(NOT_AUDITED.format(fault + _place(error)) + self.question)
        return None

    def _act(
        self, found: Replayed, numbers: list[Number] | None = None, survives: bool = False
    ) -> None:
        """Send this rank's result to the other ranks without waiting for them, and act on it.

        With `survives`, if both ways agree, a pass that runs out of memory may be computed again
        in smaller passes.
        """
        own = RankVerdict() if found.audited is None else self._judge(found.audited)
        own.numbers, own.certain = numbers, found.certain
        if not (found.certain and found.closed):
            own.sketch = (
                None  # if the count of rows was guessed, or rows come from outside the batch
            )
        if own.fine and survives:
            self._training.passes.recovery.checked = True
        action = self.judge.decide_by(bool(own.message) and own.certain)
        if action is Action.GO_EVEN:
            own.even = True
            self.judge.over = False  # until all ranks know of it
        self._tell(own)
        self._follow(action, own)

    def _follow(self, action: Action, verdict: RankVerdict) -> None:
        if action is Action.REFUSE:
            raise RequestError(verdict.message, verdict.remedy)
        if action is Action.WARN:
            self._say(f"{verdict.message} {verdict.remedy}")

    def _tell(self, own: RankVerdict) -> None:
        """Leave this rank's verdict in the store for the other ranks.

        They usually audit the same step, so that the verdicts can be compared.
        """
        training = self._training
        if not self._is_together:
            return
        place = f"evener/audits/{self._number}/{self.judge.step}"
        store = default_store()
        with suppress(dist.DistError):  # the store has gone with the rank that ended first
            store.set(f"{place}/{training.rank}", msgspec.msgpack.encode(own))
        self._told[self.judge.step] = [f"{place}/{each}" for each in range(training.world)]

    @property
    def _is_together(self) -> bool:
        """True if this rank can exchange results with others through the group's store."""
        world: int = self._training.world
        return world > 1 and dist.is_initialized() and dist.get_world_size() == world

    def _compare_left_out(self) -> None:
        """Act on a batch that some ranks alone have left out; every rank does in the same step."""
        if self.judge.over or not self._is_together:
            return
        found = self._left_out.begin(self.judge.step + 1, self._training.ranks.batches)
        if found is None:
            return
        step, ranks = found
        message = LEFT_OUT.format(step, _list_ranks(ranks))
        if self._go_even is not None:
            self.judge.over = True
            self._go_even(message)
        else:
            strict = self._training.strict
            verdict = RankVerdict(message, LEFT_OUT_REMEDY)
            self._follow(Action.REFUSE if strict else Action.WARN, verdict)

    def _hear(self) -> None:
        """Compare the results of all ranks in an audit, once every rank has left its result.

        That is two steps later: no rank gets past the exchange of that step before all
        results are there.
        """
        for step, keys in list(self._told.items()):
            if self.judge.step < step + HEAR_AFTER:
                continue
            every = _read_verdicts(keys)
            if every:
                del self._told[step]
                self._compare(every, step)
            elif self.judge.step > step + GIVE_UP_AFTER:
                del self._told[step]

    def _compare(self, every: Sequence[RankVerdict], step: int) -> None:
        """Compare the results of all ranks in a step; every rank does so in the same step."""
        if self.judge.over:
            return
        self._compare_numbers([each.numbers for each in every if each.numbers is not None])
        self._tell_of_guesses(every)
        differing = self._compare_ranks(every, step)
        worst = next((each for each in every if each.even), differing)
        if worst is None:
            return
        self.judge.over = True
        if self._go_even is not None:
            self._go_even(worst.message)
            return
        strict = self._training.strict or step <= EARLY
        self._follow(Action.REFUSE if strict else Action.WARN, worst)

    def _tell_of_guesses(self, every: Sequence[RankVerdict]) -> None:
        """Warn of a difference that may come from a number that counts rows."""
        guessed = any(each.message and not each.certain for each in every)
        if guessed and not any(each.fine for each in every):
            self._say(NOT_AUDITED.format(MAY_COUNT) + self.question)

    def _judge(self, found: Audited) -> RankVerdict:
        """Return this rank's own verdict on an audit."""
        if found.changed:
            self._say(CHANGED.format(found.changed[0]))
        if found.fault:
            self._say(f"The gradient couldn't be audited: {found.fault}.{self.question}")
            return RankVerdict()
        if not found.finite:
            return RankVerdict()
        made = RankVerdict(sketch=found.sketch, rows=found.rows, fine=found.difference is None)
        made.noises = None if found.noises is None else dict(found.noises)
        if found.difference is not None:
            reference = IN_EQUAL_PARTS if self.follows_launcher else AT_ONCE
            made.message = describe(
                found.difference, found.cause, found.sizes, max(1, self.judge.step), reference
            )
            made.remedy = self.remedies[found.cause]
            made.relative = found.difference.relative
        return made

    def _compare_ranks(self, every: Sequence[RankVerdict], step: int) -> RankVerdict | None:
        """Return a verdict if ranks compute different gradients of the same rows, else None.

        If the difference may come from rounding, the next audits measure rounding first.
        """
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
            # on every rank, for the current batch and those that a loop fetches ahead
            self._measures_until = self.judge.step + 1 + AHEAD
            return None
        if difference is None:
            return None
        message = describe(difference, "state", (), step)
        return RankVerdict(message, self.remedies["state"], difference.relative)

    def _compare_numbers(self, every: Sequence[list[Number]]) -> None:
        """Warn if a number that the losses are computed with differs between ranks."""
        if len({len(each) for each in every}) != 1:
            return
        for line in zip(*every, strict=True):
            values = [each.value for each in line]
            low, high = min(values), max(values)
            if high - low > NEAR_NUMBERS * max(abs(low), abs(high)):
                self._say(OTHER_NUMBERS.format(low, high, line[0].place or "unknown"))
                return

    def _say(self, words: str) -> None:
        """Print a warning unless it was printed before."""
        if words not in self._said:
            self._said.add(words)
            warnings.warn(words, stacklevel=2)


def describe_error(error: Exception) -> str:
    """Return why a loss can't be compared after an error of its code, as a part of a message."""
    return CANT.format(type(error).__name__, str(error).partition("\n")[0])


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _read_verdicts(keys: Sequence[str]) -> list[RankVerdict]:
    """Return the verdicts that ranks have left under these keys of the store.

    Empty until all ranks have left one, and if the store ended with the rank that ended first.
    """
    store = default_store()
    try:
        if not store.check(keys):
            return []
        return [msgspec.msgpack.decode(store.get(each), type=RankVerdict) for each in keys]
    except dist.DistError:
        return []


def is_sharded_model(models: Iterable[Any]) -> bool:
    """True if another library shards the weights of a model, and so its gradients."""
    return any(map(is_sharded, models))


def devices_ways(few: FewRows, loss: OfPart, counted: OfPart | None = None, micro: int = 0) -> Ways:
    """Return the ways to compute a few rows' gradient on one device and on two.

    Each way has passes of up to `micro` rows; 0 means a single pass.
    """
    way = partial(_make_way, loss, counted)
    whole = way([few.whole], [few.rows], 0)
    trained = way(few.parts, few.sizes, micro)
    changes = {"sum": AuditChange(_unweighted(trained))}
    if micro:
        changes["passes"] = AuditChange(way(few.parts, few.sizes, 0))
    if counted is not None:
        changes["count"] = AuditChange(_make_way(loss, None, few.parts, few.sizes, micro))
    if few.cut is not None and few.cut is not few.parts:
        changes["collation"] = AuditChange(way(few.cut, few.sizes, micro))
    return Ways(whole, trained, changes, few.sizes, few.digest, few.pads)


def launchers_ways(
    few: FewRows, loss: OfPart, counted: OfPart | None = None, micro: int = 0
) -> Ways:
    """Return the ways to compute a few rows' gradient, by the program's launcher and by shares.

    The launcher's gradient is the mean over equal parts.
    """
    made = devices_ways(few, loss, counted, micro)
    if few.sizes == few.even_sizes:  # two rows can only be cut in one way
        return made

    mean = 1.0 / len(few.even)

    def as_launched(parts: Sequence[Any]) -> Way:
        return [Piece(each.loss, mean) for each in _make_way(loss, None, parts, few.even_sizes, 0)]

    changes = dict(made.changes)
    changes["sum"] = AuditChange([Piece(each.loss, mean) for each in made.trained])
    if "collation" in changes and few.even_cut is not None:
        trained = changes["collation"].trained
        changes["collation"] = AuditChange(trained, as_launched(few.even_cut))
    return msgspec.structs.replace(made, reference=as_launched(few.even), changes=changes)


def weigh_gradients(ways: Ways, scale: float) -> Ways:
    """Return the ways with gradients that are weighted after the backward pass, not before it.

    So loops of one's own compute them. `scale` is the audited part of a batch's rows: with it, a
    row counts in a backward pass as much as in the training.
    """

    def weigh(way: Way) -> Way:
        return [msgspec.structs.replace(each, scale=scale) for each in way]

    def weigh_loss(way: Way) -> Way:
        return [msgspec.structs.replace(each, scale=scale * each.weight) for each in way]

    changes = {
        name: AuditChange(
            weigh(each.trained), None if each.reference is None else weigh(each.reference)
        )
        for name, each in ways.changes.items()
    }
    changes["size"] = AuditChange(weigh_loss(ways.trained), weigh_loss(ways.reference))
    return msgspec.structs.replace(
        ways, reference=weigh(ways.reference), trained=weigh(ways.trained), changes=changes
    )


def _make_way(
    loss: OfPart, counted: OfPart | None, batches: Sequence[Any], sizes: Sequence[int], micro: int
) -> Way:
    """Return the way in which devices compute these batches.

    Each batch is computed in passes of up to `micro` rows; 0 means a single pass.
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


def _unweighted(way: Way) -> Way:
    return [Piece(each.loss) for each in way]


def _unscaled(loss: Any) -> Any:
    return loss


def _place(error: BaseException) -> str:
    """Return the line of the program where an error arose, in parentheses; "" if unknown."""
    own = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in each.filename
        and not each.filename.startswith(sys.prefix)
        and "evener" not in each.filename
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _compute(loss: OfPart, part: Part) -> Any:
    """Return the loss of a part from a copy of its batch's structure.

    A part is computed more than once, and the program may remove items from its batch.
    """
    own = copy.copy(part)
    own.batch = each_tensor(lambda tensor: tensor, part.batch)
    return loss(own)
