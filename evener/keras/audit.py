"""Audits: check that training with shares gives the gradients that one device would give.

Some training steps are audited. Before such a step, a few rows of its batch are computed twice, in
graphs that leave the model unchanged: once by Keras' own step on one device, and once by evener's
engine, which divides the rows into shares and gradient-accumulation passes. Then the gradients of
both are compared.

`evener/training/audit.py` decides when to audit, which differences exceed rounding, and whether to
warn or to raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from ..errors import RequestError
from ..shares.divisions import Cut
from ..training.audit import (
    EARLY,
    FLOORS,
    LOSS,
    REPEATS,
    SAFETY,
    Action,
    Audits,
    GradientDifference,
    LikelyCause,
    Sketch,
    compare,
    describe,
    find_unequal,
    floor,
)
from .audit_step import (
    PlainSteps,
    StepResult,
    StepVariable,
    TracedStep,
    computes_in_half,
    list_states,
    replace_zeros,
)
from .compatibility import (
    NO_PASSES,
    TOWERS,
    list_normalization_states,
    overrides,
    plain_variables,
    warn,
)
from .data import AssignedArrays
from .decisions import find_distances, force_both_sides
from .engine import Engine
from .first_batch import peek, read_triple
from .instances import replaced
from .keras_step import OwnRows, Tensors, count_rows, cut_rows, open_rows, pad_rows
from .part_kinds import OTHER
from .passes import is_seed
from .user_errors import find_users_line, first_line

FEW = 8  # number of rows audited in a late step, if the batch has that many
MOST = 32  # maximum number of rows audited in each of the first EARLY steps
ROUNDING = {"bfloat16": 8e-3, "float16": 1e-3}  # relative rounding error of the numbers in a repeat
FINEST_ROUNDING = 2e-7  # float64 models often compute something in float32
FIGURES_DIFFER = 1e-5  # relative difference of logged values that causes a warning
# Relative to the largest output, because different kernels add in a different order.
OUTPUTS_DIFFER = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2}
STATES_DIFFER = 1e-3  # relative to a state's change; float32 convolutions round that much
HOST = "CPU:0"

ALONE = "Train it on one device."
LEFT_OUT = "Leave that out, or train on one device."
IN_MODEL = LikelyCause(
    "The loss is computed on the whole batch: so it is the model that looks at the other rows of a"
    " part, counts calls, or leaves something for the loss where only the last part's is found, as"
    " in a global",
    "Keep what the loss reads in attributes of the model or its layers, compute what looks at all"
    " rows in the loss, or train on one device.",
)
IN_PARTS = LikelyCause(
    "The loss of a batch isn't the mean of its parts' losses, or a row's output depends on the"
    " other rows",
    "",
)


class StepPair(NamedTuple):
    """A step that is traced twice: as Keras runs it on one device, and as the engine runs it."""

    plain: TracedStep
    engine: TracedStep


class Finding(msgspec.Struct):
    """A difference that an audit has found, with an error message and a remedy for the user."""

    difference: GradientDifference
    message: str
    remedy: str = ""  # empty: the usual remedy


class StepAudit:
    """Checks on a few rows that an engine trains and evaluates as Keras does on one device.

    Gradients, losses, outputs and non-trainable variables are compared. `pass_rows` is the row
    count of the largest gradient-accumulation pass, or None without passes. In `strict` training, a
    difference raises an error.
    """

    def __init__(
        self, engine: Engine, plain: PlainSteps, strict: bool, pass_rows: int | None
    ) -> None:
        self._engine = engine
        self._plain = plain
        self._model = engine.model
        self._group: Any = engine.group
        self._most = MOST if pass_rows is None else min(MOST, max(FEW, pass_rows // 2))
        self.audits = Audits(strict=strict)
        self.warnings: list[str] = []  # messages about differences that didn't end the training
        self._traced: dict[Any, StepPair | None] = {}
        self._specs: dict[Any, Any] = {}
        self._compiled = 0
        self._varied: set[Any] = set()  # batch types that were checked for hidden differences
        self._warned: set[str] = set()
        self._moment = ""  # beginning of a message: when the audit took place
        self._trains = True  # True while a training step is audited, False for an evaluation
        self._fails = False  # True if the step can't be run on the rows of this audit
        self._spec: Any = None  # element spec of the last iterator, and its text
        self._spec_text = ""
        self._watched: list[StepVariable] = []  # variables that the step reads and users assign
        self._values: list[bytes] = []  # last known values of these variables
        self._changes = 0  # number of changes of these values
        self._looks = False  # True if the next step begins an epoch, so these values are read again

    def forget_steps(self) -> None:
        """Forget the traced steps, because the user has compiled the model again."""
        self._compiled += 1
        self._traced.clear()
        self._specs.clear()

    def wrap_training(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap Keras' train function `run`, to audit before its steps whenever an audit is due."""

        def run_audited(batches: Any) -> Any:
            steps = self._model.steps_per_execution
            first = None
            if not isinstance(batches, tf.data.Iterator):
                first, batches = peek(batches, steps)
            signature = self._compiled, self._describe_batches(batches, first)
            self._count_changes(begins_epoch=self._looks, is_loop=first is not None)
            due = [self.audits.begin((*signature, self._changes)) for _ in range(steps)]
            if any(due):
                if first is None:
                    first, batches = peek(batches, steps)
                if first is not None and not isinstance(first, AssignedArrays):
                    self.audit_training(first, signature)
            return run(batches)

        return run_audited

    def begin_epoch(self) -> None:
        """Make the next step check whether the user's code has changed variables of the model."""
        self._looks = True

    def _count_changes(self, begins_epoch: bool, is_loop: bool) -> None:
        """Count a change if the user's code has assigned any of the watched variables.

        The variables are checked when an epoch begins. In a loop that the user has written, they
        are also checked before each step, but only if there is a single process.
        """
        if not begins_epoch and not (is_loop and self._group is None):
            return
        self._looks = False
        values = [_to_bytes(each.read()) for each in self._watched]
        if not self._is_true_everywhere(values == self._values):
            self._changes += 1
        self._values = values

    def _watch(self, plain: TracedStep) -> None:
        """Choose the variables in which to look for changes by the user's code, such as callbacks.

        They are small variables that the step reads but doesn't assign. Once one has changed, the
        training is audited again. `plain` is Keras' own step.
        """
        averages = list_normalization_states(self._model, synchronized=None)
        left_out = plain.assigned | {id(state.value.handle) for state in averages}
        self._watched = [
            each for each in list_states(self._model, plain) if each.key not in left_out
        ]
        self._watched = [each for each in self._watched if _is_small(each.handle)]
        self._values = [_to_bytes(each.read()) for each in self._watched]

    def _describe_batches(self, batches: Any, first: Any) -> str:
        """Return the dtypes and shapes of batches as a string.

        If the string changes, another audit is needed.
        """
        if not isinstance(batches, tf.data.Iterator):
            leaves = tf.nest.flatten(first)
            # not the number of rows, unless `batches` is a TensorFlow iterator
            return repr([(np.shape(leaf)[1:], str(getattr(leaf, "dtype", ""))) for leaf in leaves])
        spec = batches.element_spec
        if spec is not self._spec:
            self._spec = spec
            self._spec_text = repr(spec)
        return self._spec_text

    def audit_training(self, batch: Tensors, signature: Any = None) -> None:
        """Audit a training step: compare the engine with Keras on one device, on a few rows.

        The rows are taken from `batch`, and `signature` identifies the type of the batch. A
        difference raises RequestError, or leads to a warning if training may go on (see
        `Audits.decide`). Every process has to call this in the same step.
        """
        self._moment = f"In step {self.audits.step}"
        self._trains = True
        with _plain_float32():
            rows = self._take_rows(batch)
            steps = (
                None if rows is None else self._none_unless_all(self._trace_steps(rows, signature))
            )
            finding = None
            if steps is not None:
                finding, rows = self._find_failure(steps.plain, rows, batch, signature)
                if self._is_true_everywhere(finding is None and not self._fails):
                    finding = self._compare_steps(steps, rows, signature)
        finding = self._share_finding(finding)
        action = self.audits.decide(None if finding is None else finding.difference)
        if finding is None or action not in (Action.REFUSE, Action.WARN):
            return
        if action == Action.REFUSE:
            raise RequestError(finding.message, finding.remedy or self._remedy())
        self.warnings.append(finding.message)
        remedy = finding.remedy or self._remedy()
        warn(f"{finding.message} The training goes on; strict=True would end it. {remedy}")

    def wrap_tests(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap Keras' test function `run`, so that the first batch of an evaluation is audited."""
        is_first = True

        def run_audited(batches: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                first, batches = peek(batches, self._model.steps_per_execution)
                if first is not None and not isinstance(first, AssignedArrays):
                    self._audit_test(first)
            return run(batches)

        return run_audited

    def _audit_test(self, batch: Tensors) -> None:
        """Audit a test step: compare the engine with Keras on one device, on a few rows of `batch`.

        Raises RequestError if the results differ. Every process has to call this.
        """
        self._moment = "In an evaluation"
        self._trains = False
        with _plain_float32():
            rows = self._take_rows(batch)
            steps = None if rows is None else self._none_unless_all(self._trace_tests(rows))
            finding = None
            if steps is not None:
                finding, rows = self._find_failure(steps.plain, rows, batch, "test")
                if self._is_true_everywhere(finding is None and not self._fails):
                    finding = self._compare_tests(steps, rows)
        finding = self._share_finding(finding)
        if finding is not None:
            raise RequestError(finding.message, finding.remedy or self._remedy())

    # ---------------------------------------------------------------- rows and graphs

    def _take_rows(self, batch: Tensors) -> Tensors:
        """Return the first rows of a batch, on which the audit compares the steps.

        All processes get the same rows, or None if they can't exchange their rows.
        """
        with tf.device(HOST):
            triple = read_triple(batch)
            whole = self._count_batch(batch)
            devices = len(self._engine.cut.weights)
            most = self._most if self.audits.step <= EARLY else FEW
            rows = min(whole, max(most, 2 * devices))
            if self._group is None:
                return cut_rows(triple, 0, rows)
            return self._gather_first_rows(triple, isinstance(batch, OwnRows), whole, rows)

    def _gather_first_rows(self, data: Tensors, is_own: bool, whole: int, rows: int) -> Tensors:
        """Return the first `rows` rows of the global batch, gathered from all processes.

        `data` is the global batch, which has `whole` rows, or only this process's rows of it if
        `is_own` is True. If a share has too few rows, the whole batch is returned; if the data
        aren't numbers, the result is None. Every process has to call this.
        """
        cut, rank = self._engine.cut, self._group.rank
        shares = cut.sizes(whole)
        if any(few > own for few, own in zip(cut.sizes(rows), shares, strict=True)):
            rows = whole
        start = 0 if is_own else int(sum(shares[:rank]))
        own = cut_rows(data, start, start + cut.sizes(rows)[rank])
        leaves = [leaf for leaf in tf.nest.flatten(own) if leaf is not None]
        if not all(isinstance(leaf, tf.Tensor) and _is_number(leaf) for leaf in leaves):
            self._warn_once("Rows that aren't plain numbers can't be gathered from processes")
            return None
        gathered = iter(self._gather_leaves(leaves, rows))
        return tf.nest.map_structure(lambda leaf: None if leaf is None else next(gathered), own)

    def _gather_leaves(self, leaves: list[Any], rows: int) -> list[Any]:
        """Gather the first `rows` rows of each tensor from the shares of all processes.

        Every process has to call this.
        """
        cut, rank = self._engine.cut, self._group.rank
        start, size = int(cut.bounds(rows)[rank]), cut.sizes(rows)[rank]
        sent = [_as_number(pad_rows(leaf[:size], start, rows)) for leaf in leaves]
        found = []
        for leaf, summed in zip(leaves, self._group.sum_now(sent), strict=True):
            found.append(tf.reshape(tf.cast(summed, leaf.dtype), [rows, *leaf.shape[1:]]))
        return found

    def _trace_tests(self, rows: Tensors) -> StepPair | None:
        """Trace Keras' own test step and the engine's, or return None if tracing fails."""
        model, spec = self._model, tf.nest.map_structure(open_rows, rows)
        try:
            plain = self._plain.trace(spec, training=False)
            with self._in_small_passes(int(count_rows(rows))):
                steps = StepPair(plain, TracedStep(model, model.test_step, spec))
        except RequestError:
            raise
        except Exception as error:  # whatever the user's program raises
            self._warn_untraced("test step", error)
            return None
        return self._none_if_random(steps)

    def _warn_untraced(self, name: str, error: Exception) -> None:
        self._warn_once(f"the {name} can't be traced{find_users_line(error)}: {first_line(error)}")

    def _none_if_random(self, steps: StepPair | None) -> StepPair | None:
        """Return the steps, or None if one of them draws random numbers without keras.random.

        Such steps can't be compared, and lead to a warning.
        """
        # a row's random numbers depend on the device or pass that computes it
        if steps is not None and any(step.draws for step in steps):
            self._warn_once("it draws random numbers that aren't Keras'; use keras.random")
            return None
        return steps

    def _trace_steps(self, rows: Tensors, signature: Any) -> StepPair | None:
        """Trace Keras' own training step and the engine's, or return None if tracing fails.

        `signature` identifies the type of the batch.
        """
        spec = tf.nest.map_structure(open_rows, rows)
        before = self._specs.get(signature)
        if before is not None:
            spec = tf.nest.map_structure(_open_unequal, before, spec)
        if signature not in self._traced or spec != before:
            self._specs[signature] = spec
            try:
                self._traced[signature] = self._trace_plain_and_engine(rows, spec)
            except RequestError:
                raise
            except Exception as error:  # whatever the user's program raises
                self._traced[signature] = None
                self._warn_untraced("step", error)
        steps = self._traced[signature]
        if steps is not None:
            self._watch(steps.plain)
        return self._none_if_random(steps)

    def _trace_plain_and_engine(self, rows: Tensors, spec: Any) -> StepPair:
        model = self._model
        plain = self._plain.trace(spec, training=True)
        with self._in_small_passes(int(count_rows(rows))):
            return StepPair(plain, TracedStep(model, model.train_step, spec))

    @contextmanager
    def _in_small_passes(self, rows: int) -> Iterator[None]:
        """Context manager in which each device computes its share of `rows` rows in two passes.

        A single row takes one pass. There is no effect if the engine doesn't use passes.
        """
        cut = self._engine.cut
        if not cut.in_passes:
            yield
            return
        micros = [max(1, -(-size // 2)) for size in cut.sizes(rows)]
        with replaced(self._engine, "cut", Cut(cut.weights, cut.floors, micros)):
            yield

    # ---------------------------------------------------------------- comparing

    def _find_failure(
        self, plain: TracedStep, rows: Tensors, batch: Tensors, signature: Any
    ) -> tuple[Finding | None, Tensors]:
        """Check whether the loss of some rows can be computed without the batch's other rows.

        Returns a pair. The first item is a finding if the loss can't be computed, else None. The
        second has the rows on which to compare the steps: `rows`, or the whole `batch` if Keras'
        own step fails on fewer rows.
        """
        self._fails = False
        count, whole = int(count_rows(rows)), self._count_batch(batch)
        error = self._try_step(plain, rows)
        if isinstance(error, Exception):
            if count == whole or not self._needs_all_rows(plain, batch, error):
                self._fails = True
                self._warn_once(f"the step can't be run: {first_line(error)}")
                # even the whole batch can't be computed, so the training step will raise that error
                return None, rows
            if self._engine.has_loss_per_part(self._trains):
                return self._report_incomplete(f"{count} of a batch's {whole} rows", error), rows
            # the engine computes the loss of a whole batch, which needs all rows
            rows, count = read_triple(batch), whole
        if signature in self._varied or self._mixes_rows(signature):
            return None, rows
        for few in self._list_own_passes(rows):
            error = self._run_own_step_on_part(plain, few)
            if isinstance(error, Exception):
                return self._report_incomplete(f"{count_rows(few)} of {count} rows", error), rows
        return self._compare_outputs(plain, rows), rows

    def _mixes_rows(self, signature: Any) -> bool:
        """Return whether the step may mix rows, because the user's model class overrides it.

        The step is `test_step` in an evaluation (`signature` is "test"), and otherwise
        `train_step`.
        """
        # every engine gives an overridden step the whole batch
        return overrides(self._model, "test_step" if signature == "test" else "train_step")

    def _compare_outputs(self, plain: TracedStep, rows: Tensors) -> Finding | None:
        """Check that the model's output for a row doesn't depend on the other rows of the batch.

        Returns a finding if it does, else None.
        """
        few = min(int(count_rows(rows)), FEW)
        first = max(1, 3 * few // 8)
        together = self._run_own_step_on_part(plain, cut_rows(rows, 0, few))
        if isinstance(together, Exception):
            return self._report_incomplete(f"{few} of {count_rows(rows)} rows", together)
        whole = together.outputs
        if few < 2 or not all(len(each) == few for each in whole):
            return None
        # two parts of unequal size, which needn't match the shares, and single rows
        for start, stop in ((0, first), (first, few), *pairwise(range(few + 1))):
            part = self._run_own_step_on_part(plain, cut_rows(rows, start, stop))
            if isinstance(part, Exception):
                if stop - start > 1:
                    return self._report_incomplete(f"{stop - start} of {few} rows", part)
                continue
            for one, other in zip(whole, part.outputs, strict=True):
                if len(other) == stop - start and not self._are_close(one[start:stop], other, one):
                    message = (
                        "a row's output of the model depends on the other rows of its batch, or on"
                        " its place among them."
                    )
                    return Finding(_make_empty_difference(), f"{self._moment}, {message}", ALONE)
        return None

    def _are_close(self, one: Any, other: Any, whole: Any) -> bool:
        """Return whether two outputs of the model are equal except for rounding.

        The allowed error is relative to the largest absolute value in `whole`, which has the
        outputs of all rows. Each row's outputs have been reduced to a few sums.
        """
        kind = computes_in_half(self._model) or keras.config.floatx()
        largest = np.nanmax(np.abs(whole), initial=1e-30)
        near = OUTPUTS_DIFFER.get(kind, OUTPUTS_DIFFER["float32"]) * largest
        return bool(np.allclose(one, other, rtol=0, atol=near, equal_nan=True))

    def _needs_all_rows(self, plain: TracedStep, batch: Tensors, error: Exception) -> bool:
        """Return whether Keras' own step fails on a few rows, but works on the whole batch.

        `error` is the step's error on a few rows.
        """
        if self._group is not None:  # no process has all rows
            return isinstance(error, tf.errors.InvalidArgumentError)
        return not isinstance(self._try_step(plain, read_triple(batch)), Exception)

    def _list_own_passes(self, rows: Tensors) -> Iterator[Tensors]:
        """Yield the audited rows that this process computes, pass by pass."""
        cut, total = self._engine.cut, int(count_rows(rows))
        edges = [int(edge) for edge in cut.bounds(total)]
        for device, (start, stop) in enumerate(pairwise(edges)):
            is_own = self._group is None or device == self._group.rank
            passes = 2 if cut.in_passes and stop - start > 1 else 1  # as in `_in_small_passes`
            middle = stop if passes == 1 else start + (stop - start) // 2
            for first, last in ((start, middle), (middle, stop)):
                if is_own and last > first:
                    yield cut_rows(rows, first, last)

    def _count_batch(self, batch: Tensors) -> int:
        """Return the row count of the global batch."""
        return int(batch.rows if isinstance(batch, OwnRows) else count_rows(read_triple(batch)))

    def _report_incomplete(self, rows_name: str, error: Exception) -> Finding:
        """Return a finding that says that some of the rows can't be computed without the others.

        `rows_name` describes these rows, and `error` is what was raised when they were computed.
        """
        message = f"{self._moment}, {rows_name} can't be computed alone: {first_line(error)}"
        return Finding(_make_empty_difference(), f"{message.rstrip('.')}.", ALONE)

    def _try_step(self, step: TracedStep, rows: Tensors) -> StepResult | Exception:
        """Run a traced step on some rows, and return its result or the exception that it raised."""
        try:
            return step.run(rows, self._list_seeds())
        except Exception as error:  # whatever the user's program raises
            return error

    def _run_own_step_on_part(self, plain: TracedStep, rows: Tensors) -> StepResult | Exception:
        """Run Keras' own step on some of the rows, and return its result or its exception.

        If the step fails and the engine computes the loss on the whole batch, only the model's call
        is run.
        """
        result = self._try_step(plain, rows)
        if not isinstance(result, Exception) or self._engine.has_loss_per_part(self._trains):
            return result
        # the loss may need the whole batch, which the engine computes anyway: take the call alone
        spec = tf.nest.map_structure(open_rows, rows)
        try:
            call = self._plain.trace_call(spec, self._trains)
        except Exception as error:  # whatever the user's program raises
            return error
        return self._try_step(call, rows)

    def _compare_steps(self, steps: StepPair, rows: Tensors, signature: Any) -> Finding | None:
        """Compare Keras' own step with the engine's, and return the first finding, or None.

        The comparison includes gradients, variables across processes, attributes of the model, and
        decisions (comparisons in the user's code).
        """
        found = self._compare_gradients(steps, rows, {}, "")
        unequal = self._compare_ranks(steps.plain)
        found = found or unequal or self._compare_attributes(steps, rows)
        if signature in self._varied:
            return found
        found = found or self._compare_decisions(steps, rows)
        # a new signature: also other values of variables and other labels
        for variant, values, changed in self._list_variants(steps.plain, rows):
            other = self._compare_gradients(steps, changed, values, variant)  # in every process
            found = found or other
        if found is None:
            self._varied.add(signature)
        return found

    def _compare_gradients(
        self,
        steps: StepPair,
        rows: Tensors,
        values: Mapping[int, Any],
        variant: str,
    ) -> Finding | None:
        """Compare Keras' own step with the engine's: their gradients, metrics and variables.

        `values` are temporary values of variables. `variant` describes which values or labels were
        changed for this comparison; it is "" if none were. With a variant, only gradients are
        compared.
        """
        plain, shared = steps
        values = {**self._list_seeds(), **values}
        reference = None
        # an error that is caused by changed values or labels isn't the program's fault
        with suppress(Exception):
            reference = plain.run(rows, values)
        if not self._is_true_everywhere(reference is not None) or reference is None:
            return None
        trained = self._run_engine_step(shared, rows, values)
        if not _is_finite(reference.gradients):
            return None
        difference = self._compare_results(reference, trained, variant)
        if difference is not None:
            repeats = self._repeat_with_rounding_errors(plain, rows, values)
            difference = self._compare_results(reference, trained, variant, repeats)
        if difference is not None:
            return self._find(difference, rows, variant)
        if variant:
            return None
        self._compare_logs(reference, trained)
        return self._compare_states(plain, rows, reference, trained)

    def _compare_tests(self, steps: StepPair, rows: Tensors) -> Finding | None:
        """Compare Keras' own test step with the engine's: their losses, metrics and variables."""
        plain, shared = steps
        seeds = self._list_seeds()
        reference = plain.run(rows, seeds)
        trained = self._run_engine_step(shared, rows, seeds)
        difference = self._compare_results(reference, trained, "")
        if difference is not None:
            repeats = self._repeat_with_rounding_errors(plain, rows, seeds)
            difference = self._compare_results(reference, trained, "", repeats)
        if difference is None:
            self._compare_logs(reference, trained)
            return self._compare_states(plain, rows, reference, trained)
        one, other = difference.losses
        message = (
            f"{self._find_likely_cause(False).why}. {self._moment}, the loss of {count_rows(rows)}"
            f" rows is {one:.6g} at once, and {other:.6g} from parts of {self._name_parts(rows)}."
        )
        return Finding(difference, message)

    def _run_engine_step(
        self, shared: TracedStep, rows: Tensors, values: Mapping[int, Any]
    ) -> StepResult:
        """Run the engine's traced step, `shared`, on a few rows.

        `values` are temporary values of variables. Raises RequestError if the devices' results have
        shapes that can't be joined.
        """
        try:
            return shared.run(rows, values)
        except tf.errors.InvalidArgumentError as error:
            raise RequestError(
                f"{self._moment}, what the model computes of {self._name_parts(rows)} rows can't be"
                f" put together: {first_line(error).rstrip('.')}.",
                ALONE,
            ) from error

    def _find_likely_cause(self, training: bool) -> LikelyCause:
        """Return the likely cause of a gradient difference, for the error message.

        `training` is False for an evaluation.
        """
        return IN_PARTS if self._engine.has_loss_per_part(training) else IN_MODEL

    def _compare_results(
        self,
        reference: StepResult,
        trained: StepResult,
        variant: str,
        repeats: Sequence[StepResult] = (),
    ) -> GradientDifference | None:
        """Compare one device's gradients and loss with the engine's; return None if they agree.

        Losses are compared only if the gradients agree and there is no `variant`. `repeats` are
        further results of one device, computed with random rounding errors; they show how large a
        difference rounding may cause.
        """
        sketches = [repeat.gradients for repeat in repeats]
        found = compare(reference.gradients, trained.gradients, sketches)
        one, other = reference.gradients.loss, trained.gradients.loss
        size = max(abs(one), abs(other))
        if found is not None or variant or not math.isfinite(size) or size == 0.0:
            return found
        # a difference doesn't show in gradients that are 0
        relative = abs(one - other) / size
        noise = max((abs(sketch.loss - one) / size for sketch in sketches), default=0.0)
        allowed = max(floor(computes_in_half(self._model) or "float32"), SAFETY * noise)
        if relative <= allowed:
            return None
        return GradientDifference(LOSS, relative, allowed, abs(one), abs(other), (one, other))

    def _list_seeds(self) -> dict[int, Any]:
        """Return states for the random generators, so that both steps draw the same numbers.

        The dict is indexed by the keys of the generators' variables.
        """
        seeds = [variable for variable in self._model.non_trainable_variables if is_seed(variable)]
        return {
            # the same in all processes, however often they have drawn, and different in each step
            id(seed.value.handle): tf.constant([self.audits.step, number], seed.dtype)
            for number, seed in enumerate(seeds)
        }

    def _repeat_with_rounding_errors(
        self, plain: TracedStep, rows: Tensors, values: Mapping[int, Any]
    ) -> list[StepResult]:
        """Run Keras' own step several times, with random errors in its inputs and weights.

        The errors are as large as rounding errors. The results show how much rounding alone can
        change the gradients.
        """
        weights = {id(each.value.handle) for each in self._model.trainable_variables}
        found = []
        for number in range(REPEATS):
            changed = dict(values)
            for key, variable in plain.variables.items():
                if key in weights:
                    value = values.get(key, variable.read())
                    changed[key] = self._add_rounding_errors(value, number)
            x, *others = rows
            near = tf.nest.map_structure(
                lambda leaf, n=number: self._add_rounding_errors(leaf, n), x
            )
            found.append(plain.run((near, *others), changed))
        return found

    def _add_rounding_errors(self, value: Any, number: int) -> Any:
        """Return the value with a random error in each element, as large as a rounding error.

        `number` selects the random errors.
        """
        if not (isinstance(value, tf.Tensor) and value.dtype.is_floating):
            return value
        kind = self._model.compute_dtype
        amount = ROUNDING.get(kind, ROUNDING.get(value.dtype.name, FINEST_ROUNDING))
        drawn = tf.random.stateless_uniform(tf.shape(value), (number, 9), -1.0, 1.0, tf.float64)
        return tf.cast(tf.cast(value, tf.float64) * (1 + amount * drawn), value.dtype)

    def _compare_logs(self, reference: StepResult, trained: StepResult) -> None:
        """Warn about metrics that differ between Keras' own step and the engine's."""
        for name, one in reference.logs.items():
            other = trained.logs.get(name, one)
            differs = abs(one - other) > FIGURES_DIFFER * max(abs(one), abs(other))
            if differs and name != "loss" and name not in self._warned:
                self._warned.add(name)
                warn(
                    f"The metric {name!r} of the same rows is {one:.6g} on one device and"
                    f" {other:.6g} with shares; what is learned is the same. Give a metric the"
                    f" rows, not their mean."
                )

    def _compare_states(
        self, plain: TracedStep, rows: Tensors, reference: StepResult, trained: StepResult
    ) -> Finding | None:
        """Return a finding if a variable differs between the engine's step and Keras' own step.

        Only non-trainable variables are compared, such as moving averages.
        """
        own = {id(each.value.handle) for each in self._model.non_trainable_variables}
        own |= {id(each.handle) for each in plain_variables(self._model)}
        for variable in list_states(self._model, plain):
            if variable.key not in reference.states and variable.key not in trained.states:
                continue
            before = variable.read()
            one = reference.states.get(variable.key, before)
            other = trained.states.get(variable.key, before)
            if not _states_differ(before, one, other):
                continue
            is_own = variable.key in own
            # a variable of a loss object, for example, counts only if the gradient depends on it
            if not is_own and not self._affects_gradients(plain, rows, variable.key, (one, other)):
                continue
            sizes = _norm(one), _norm(other)
            relative = _distance(one, other)
            difference = GradientDifference(variable.name, relative, 0.0, *sizes, (0.0, 0.0))
            effect = "" if is_own else ", and what is learned depends on it"
            message = (
                f"{self._moment}, the variable {variable.name} differs between all rows at once and"
                f" parts of {self._name_parts(rows)} of them, as shares compute it"
                f" (norms {sizes[0]:.6g} and {sizes[1]:.6g}){effect}."
            )
            return Finding(difference, message, LEFT_OUT)
        return None

    def _compare_attributes(self, steps: StepPair, rows: Tensors) -> Finding | None:
        """Return a finding if plain attributes of the model, such as counters, end up different.

        They are compared after the two steps, in eager mode only.
        """
        # the Python code of a traced step runs only once
        if not self._model.run_eagerly:
            return None
        one, other = (step.attributes for step in steps)
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                message = (
                    f"{self._moment}, the attribute {name} is {one.get(name, 'unchanged')} after"
                    f" all rows at once, and {other.get(name, 'unchanged')} after parts of"
                    f" {self._name_parts(rows)} of them, as shares compute it."
                )
                return Finding(_make_empty_difference(), message, LEFT_OUT)
        return None

    @staticmethod
    def _affects_gradients(
        plain: TracedStep, rows: Tensors, key: int, values: Sequence[Any]
    ) -> bool:
        """Return whether a variable affects the gradients.

        They are computed for two `values` of the variable with this `key`, and compared.
        """
        one, other = (plain.run(rows, {key: value}).gradients for value in values)
        return compare(one, other) is not None

    def _compare_decisions(self, steps: StepPair, rows: Tensors) -> Finding | None:
        """Return a finding if an `if` in the user's code may take a different branch for some rows.

        This is the case if the code compares values that differ for parts of the rows, and the
        gradient depends on the result (see `decisions.py`).
        """
        plain, shared = steps
        whole = plain.run(rows).margins
        if not whole:
            return None
        if self._engine.has_loss_per_part(True):
            every = [plain.run(part).margins for part in self._cut_parts(rows)]
        else:
            every = [shared.run(rows).margins]  # losses see the whole batch in towers
        others = {
            place: [margin for each in every for margin in each.get(place, [])] for place in whole
        }
        # rows that an engine computes separately may take another branch than all rows together
        for place, apart in find_distances(whole, others).items():
            one, other = (
                self._try_shifted(plain, rows, place, offsets)
                for offsets in force_both_sides(whole[place], apart)
            )
            if one is None or other is None:
                continue  # an assertion: who takes the other side ends with its error
            difference = compare(one.gradients, other.gradients)
            if difference is not None:
                message = (
                    f"{self._moment}, {place} decides by a value that differs between parts"
                    f" of {self._name_parts(rows)} of the rows and all rows at once, so"
                    f" parts may decide differently, now or later: the gradient of"
                    f" {difference.name} then differs by {difference.relative:.2g} of its size."
                )
                return Finding(difference, message)
        return None

    @staticmethod
    def _try_shifted(
        plain: TracedStep, rows: Tensors, line: str, offsets: Sequence[Any]
    ) -> StepResult | None:
        """Run the step with offsets that change comparisons in the user's code.

        Returns None if it fails. `line` is the line of code with the comparisons. Each offset is
        added to the left side of one of them.
        """
        try:
            return plain.run_shifted(rows, line, offsets)
        except tf.errors.OpError:
            return None

    def _cut_parts(self, rows: Tensors) -> list[Tensors]:
        """Cut the audited rows into the devices' shares; empty shares are left out."""
        edges = [int(edge) for edge in self._engine.cut.bounds(int(count_rows(rows)))]
        return [cut_rows(rows, start, stop) for start, stop in pairwise(edges) if stop > start]

    def _compare_ranks(self, plain: TracedStep) -> Finding | None:
        """Return a finding if a variable of the model isn't equal in all processes, else None.

        Every process has to call this.
        """
        if self._group is None:
            return None
        weights = {id(variable.value.handle) for variable in self._model.trainable_variables}
        states = {state.key for state in list_states(self._model, plain)}
        chosen = [each for key, each in plain.variables.items() if key in weights or key in states]
        rank, size = self._group.rank, self._group.size
        own = [_summarize(each.read()) for each in chosen]
        sent = [tf.one_hot(rank, size, 1.0, 0.0, dtype=tf.float64)[:, None] * each for each in own]
        gathered = self._group.sum_now(sent)
        every = [
            {
                f"{place} {each.name}": tuple(float(n) for n in values[other])
                for place, (each, values) in enumerate(zip(chosen, gathered, strict=True))
            }
            for other in range(size)
        ]
        found = find_unequal(every)
        if found is None:
            return None
        name, low, high = found[0].partition(" ")[2], *found[1:]
        difference = GradientDifference(name, 1.0, 1e-4, low, high, (math.nan, math.nan))
        message = (
            f"{self._moment}, the variable {name} isn't the same in all processes"
            f" (norms {low:.6g} and {high:.6g}): each has made it of its own rows."
        )
        return Finding(difference, message)

    # ---------------------------------------------------------------- what may be hidden

    def _list_variants(
        self, plain: TracedStep, rows: Tensors
    ) -> Iterator[tuple[str, Mapping[int, Any], Tensors]]:
        """Yield variants of the audited rows, which may reveal a difference that these rows hide.

        A variant has other labels, or nonzero values for variables that are 0. Each is a tuple of a
        description, the variables' values, and the rows.
        """
        values, names = replace_zeros(self._model, plain)
        if values:
            yield f"with {' and '.join(names[:2])} above 0", values, rows
        if not self._engine.has_loss_per_part(True):
            return
        x, y, weight = rows
        for words, change in LABELS.items():
            changed = tf.nest.map_structure(change, y)
            yield f"with {words}", values, (x, changed, weight)
        call = plain.run(rows, self._list_seeds()).call
        others = None if call is None else _change_labels(y, call.outputs)
        if others is not None:
            yield "with other labels in each row", values, (x, others, weight)

    # ---------------------------------------------------------------- agreement and messages

    def _none_unless_all(self, steps: StepPair | None) -> StepPair | None:
        """Return `steps` if every process could trace its steps, else None.

        Every process has to call this.
        """
        return steps if self._is_true_everywhere(steps is not None) else None

    def _is_true_everywhere(self, value: bool) -> bool:
        """Return whether `value` is True in every process.

        Every process has to call this.
        """
        if self._group is None:
            return value
        (failed,) = self._group.sum_now([tf.constant(0.0 if value else 1.0)])
        return bool(failed == 0)

    def _share_finding(self, finding: Finding | None) -> Finding | None:
        """Send the first finding of any process to all processes, so that all react the same way.

        The result is None if no process has a finding. Every process has to call this.
        """
        if self._group is None:
            return finding
        rank, size = self._group.rank, self._group.size
        (found,) = self._group.sum_now([tf.one_hot(rank, size, float(finding is not None), 0.0)])
        if not tf.reduce_any(found > 0):
            return None
        first = int(tf.argmax(found))
        text = b""
        if finding is not None:
            finite = _replace_non_finite(finding.difference)
            text = msgspec.json.encode(Finding(finite, finding.message, finding.remedy))
        return msgspec.json.decode(self._group.share_text(text, first), type=Finding)

    def _find(self, difference: GradientDifference, rows: Tensors, variant: str) -> Finding:
        cut = self._engine.cut
        cause = self._find_likely_cause(True)
        parts = cut.sizes(int(count_rows(rows)))
        message = describe(difference, cause, [size for size in parts if size], self.audits.step)
        if variant:
            message += f" It shows {variant}, as later in a training."
        return Finding(difference, message)

    def _remedy(self) -> str:
        if self._group is not None:
            return f"{TOWERS} {NO_PASSES}" if self._engine.cut.in_passes else TOWERS
        return NO_PASSES if self._engine.cut.in_passes else IN_MODEL.remedy

    def _name_parts(self, rows: Tensors) -> str:
        sizes = self._engine.cut.sizes(int(count_rows(rows)))
        return " and ".join(str(size) for size in sizes if size)

    def _warn_once(self, why: str) -> None:
        """Warn, once for each reason `why`, that the training can't be audited.

        Raises RequestError instead if it is unknown how the losses of a batch's parts combine,
        because then only an audit can show that the gradients are right.
        """
        engine, training = self._engine, self._trains
        if engine.has_loss_per_part(training) and engine.kinds[training].loss == OTHER:
            # the loss isn't the mean or the sum of its parts' losses
            raise RequestError(
                f"The loss of a batch of {self._model.name} isn't the mean or the sum of its parts'"
                f" losses, and gradients can't be audited: {why}.",
                self._remedy(),
            )
        if why not in self._warned:
            self._warned.add(why)
            warn(f"Gradients with shares aren't audited for {self._model.name}: {why}.")


def _is_finite(gradients: Sketch) -> bool:
    return all(math.isfinite(gradients.size(name)) for name in gradients.sums)


@contextmanager
def _plain_float32() -> Iterator[None]:
    """Context manager that turns off TensorFloat-32, which rounds too much for a comparison."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _open_unequal(one: Any, other: Any) -> Any:
    """Merge two tensor specs into one that fits both: axes of unequal length become None."""
    if not isinstance(one, tf.TensorSpec) or one.shape.rank != other.shape.rank:
        return other
    sizes = zip(one.shape, other.shape, strict=True)
    return tf.TensorSpec([a if a == b else None for a, b in sizes], one.dtype)


def _is_number(leaf: Any) -> bool:
    return bool(leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool)


def _as_number(leaf: Any) -> Any:
    return tf.cast(leaf, tf.int64) if leaf.dtype.is_integer or leaf.dtype.is_bool else leaf


def _norm(value: Any) -> float:
    return float(tf.norm(tf.cast(tf.reshape(value, [-1]), tf.float64)))


def _distance(one: Any, other: Any) -> float:
    """Return the norm of the difference of two tensors, relative to the larger of their norms."""
    size = max(_norm(one), _norm(other))
    return _norm(_as_float64(one) - _as_float64(other)) / size if size else 0.0


def _states_differ(before: Any, one: Any, other: Any) -> bool:
    """Return whether a variable has different values after two steps, except for rounding.

    `one` and `other` are these values, and `before` is the value before both steps. The more the
    steps change the value, the larger the difference that is allowed.
    """
    if one.shape != other.shape or not _is_number(one):
        return False
    if not one.dtype.is_floating:
        return bool(tf.reduce_any(one != other))
    start, first, second = map(_as_float64, (before, one, other))
    change = max(_norm(first - start), _norm(second - start))
    size = max(_norm(first), _norm(second))
    rounding = ROUNDING.get(one.dtype.name, FINEST_ROUNDING)
    if one.dtype == tf.float64:
        rounding = FLOORS["float64"]
    return _norm(first - second) > STATES_DIFFER * change + SAFETY * rounding * size


MOST_WATCHED = 16  # maximum number of elements of a variable whose changes are counted


def _is_small(handle: Any) -> bool:
    """Return whether the variable with this handle has at most 16 elements."""
    count = handle._handle_data.shape_and_type[0].shape
    sizes = tf.TensorShape(count).num_elements()
    return sizes is not None and sizes <= MOST_WATCHED


def _to_bytes(value: Any) -> bytes:
    found: bytes = value.numpy().tobytes()
    return found


def _as_float64(value: Any) -> Any:
    return tf.cast(value, tf.float64)


def _summarize(value: Any) -> Any:
    """Return two weighted sums of a tensor's absolute values, to compare it between processes."""
    if not _is_number(value):
        return tf.zeros([2], tf.float64)
    columns = value.shape[-1] if value.shape.rank else 1
    sizes = tf.abs(tf.reshape(tf.cast(value, tf.float64), [-1, columns]))
    of_rows = tf.linspace(tf.constant(0.1, tf.float64), 1.0, tf.shape(sizes)[0])
    of_columns = tf.linspace(tf.constant(1.0, tf.float64), 0.2, columns)
    weighed = tf.reduce_sum(tf.linalg.matvec(sizes, of_columns) * of_rows)
    return tf.stack([tf.reduce_sum(sizes), weighed])


def _make_empty_difference() -> GradientDifference:
    """Return a GradientDifference for a finding that isn't about a single gradient."""
    return GradientDifference("", math.inf, 0.0, math.nan, math.nan, (math.nan, math.nan))


def _replace_non_finite(difference: GradientDifference) -> GradientDifference:
    """Return a GradientDifference without inf and NaN, which JSON can't hold.

    Finite values replace them.
    """
    fields = {
        name: each if math.isfinite(each) else math.copysign(1e300, each)
        for name, each in (
            ("relative", difference.relative),
            ("reference", difference.reference),
            ("trained", difference.trained),
        )
    }
    return msgspec.structs.replace(difference, **fields, losses=(0.0, 0.0))


# ------------------------------------------------------------------ labels of later batches


def _shuffle_labels(y: Any) -> Any:
    """Return the labels in another order, shuffled among the rows."""
    if not isinstance(y, tf.Tensor) or y.shape.rank == 0:
        return y
    order = np.random.default_rng(5).permutation(int(y.shape[0]))
    return tf.gather(y, order)


def _change_labels(y: Any, outputs: Tensors) -> Any:
    """Return other valid labels for each row.

    The result is None unless the model has one tensor of labels for each output.
    """
    labels = keras.tree.flatten(y)
    found = keras.tree.flatten(outputs)
    if len(labels) != len(found) or not all(isinstance(label, tf.Tensor) for label in labels):
        # each output needs one tensor of labels
        return None
    pairs = zip(labels, found, strict=True)
    # classes are shifted, by one more in each row; other values are multiplied by a growing factor
    changed = [tf.cast(_vary_labels(each.numpy(), out), each.dtype) for each, out in pairs]
    return keras.tree.pack_sequence_as(y, changed)


def _vary_labels(y: Any, outputs: Any) -> Any:
    rows = np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1))
    if y.dtype.kind not in "iuf":
        return y
    if y.dtype.kind == "f" and not (y == np.round(y)).all():
        return y * np.linspace(0.1, 2.0, len(y)).reshape(rows.shape)
    classes = int(outputs.shape[-1]) if outputs.shape.rank > 1 else 1
    if y.min() < 0 or y.max() >= max(classes, 2):
        return y
    if y.ndim > 1 and y.shape[-1] == classes > 1:  # one-hot
        return np.take_along_axis(y, (np.arange(classes) - rows) % classes, -1)
    return (y + rows) % max(classes, 2)


def _mark_missing(missing: float, y: Any) -> Any:
    """Replace 40 % of the labels with `missing`, a value that the loss may treat as no label.

    Labels whose dtype can't hold `missing` are returned unchanged.
    """
    if not isinstance(y, tf.Tensor) or not _is_number(y) or y.dtype.is_bool:
        return y
    if not y.dtype.is_floating and not (y.dtype.min < 0 and math.isfinite(missing)):
        return y
    drawn = np.random.default_rng(6).random(tuple(y.shape)) < 0.4
    return tf.where(drawn, tf.cast(missing, y.dtype), y)


LABELS: dict[str, Callable[[Any], Any]] = {
    "labels in another order": _shuffle_labels,
    "labels of -1": lambda y: _mark_missing(-1.0, y),
    "labels that aren't numbers": lambda y: _mark_missing(math.nan, y),
}
