"""The engine `multiworker`: one process per device, which computes its own rows of each batch.

Gradients are summed over the processes (all-reduce). Clipping, loss scaling and gradient
accumulation act on the whole batch's gradient, because model and optimizer are outside TensorFlow's
strategy.

Outputs are sent together with the gradients. Each process then updates its metrics with the whole
batch, so any metric is exact. If the outputs are too large, each process updates its metrics with
its own rows, and the changes of the metrics' variables are summed.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any

import keras
import tensorflow as tf

from ..errors import DeviceError, RequestError
from ..live.reporter import DeviceTimes, sum_up
from ..shares.divisions import Cut
from ..training.passes import PassLimit
from ..training.retreat import Retreat, print_line
from .attributes import CallTensors
from .callbacks import group_callbacks, save_by_renaming
from .compatibility import (
    check_step,
    check_test_step,
    check_workers,
    list_normalizations,
    overrides,
    warn,
)
from .data import ArrayBatches, batch_samples
from .engine import Steps, draw_number
from .forward_passes import ForwardPasses
from .group import (
    BatchDigests,
    Group,
    digest_batch,
    refuse_other_data,
)
from .instances import replaced
from .keras_step import (
    OwnRows,
    PartLoss,
    Tensors,
    apply_gradients,
    build_model,
    call_model,
    compute_loss_contribution,
    count_rows,
    cut_rows,
    pad_rows,
    scale_loss,
    split_losses,
    take_rows,
    update_metrics,
)
from .part_kinds import COUNTS, PartKinds, count_units, list_mean_losses, weigh_part
from .passes import (
    PassSums,
    StateUpdate,
    assign_updates,
    find_state_kinds,
    sums_changes,
    weigh_change,
)
from .rebalancing import GroupRebalancer, WorkTimes
from .sparse_gradients import SharedGradients, drop_filler_slices, fill_gradients, merge_slices
from .surviving_step import SurvivingStep, describe_memory, is_out_of_memory


class Workers:
    """Engine for several processes, each of which computes its own rows of every batch.

    `rebalancing` changes the shares during training, or is None. `device` is the name of this
    process's device in messages.
    """

    name = "multiworker"
    splits = True

    def __init__(
        self,
        model: Any,
        cut: Cut,
        group: Group,
        rebalancing: GroupRebalancer | None = None,
        device: str = "",
    ) -> None:
        self.model = model
        self.cut = cut
        self.group: Any = group
        self.device = group.device
        # [True] for training, [False] for evaluation
        self.kinds: defaultdict[bool, PartKinds] = defaultdict(PartKinds)
        self.times = WorkTimes(group.rank, group.size)
        self.rebalancing = rebalancing
        # None: the training fails if memory runs out
        self.limit: PassLimit | None = PassLimit(group.rank)
        self._named = device
        self.unchecked = True  # True until the first batch's data are compared
        with tf.device("CPU:0"):
            # if above 0, a rank whose labels differ from rank 0's; the same for inputs
            self._other, self._other_inputs = (
                tf.Variable(tf.zeros([], tf.int64), trainable=False) for _ in range(2)
            )
            # True if labels differ between rows in some batch of this epoch
            self._labels_vary = tf.Variable(False, trainable=False)

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing, because each process has one device."""
        return nullcontext()

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that reports an exception to the other processes."""
        shared: AbstractContextManager[None] = self.group.failures.reporting()
        return shared

    def check_model(self) -> None:
        """Raise RequestError if the model isn't compiled or has stateful layers."""
        check_step(self.model)

    def check_step(self) -> None:
        """Raise RequestError if the model can't train in several processes."""
        check_workers(self.model)

    def check_test_step(self) -> None:
        """Raise RequestError if the user's class overrides `test_step`."""
        check_test_step(self.model)

    def has_loss_per_part(self, training: bool) -> bool:
        """Return True, because each process computes the loss of its own rows."""
        return True

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return functions that replace methods of the model, by the methods' names.

        The methods save files, and train or test on one batch.
        """
        # the processes can share weights only if they exist before the first batch
        model, rank = self.model, self.group.rank
        return {
            "train_on_batch": functools.partial(self._on_batch, "train_on_batch"),
            "test_on_batch": functools.partial(self._on_batch, "test_on_batch"),
            "save": functools.partial(save_by_renaming, rank, model.save),
            "save_weights": functools.partial(save_by_renaming, rank, model.save_weights),
        }

    def _on_batch(self, name: str, x: Any, *arguments: Any, **keywords: Any) -> Any:
        """Create the model's weights if needed, and run Keras' `train_on_batch` or `test_on_batch`.

        `name` is the method to run.
        """
        with self.sharing_failures():
            self.build(x)
            return getattr(type(self.model), name)(self.model, x, *arguments, **keywords)

    def build(self, x: Any) -> None:
        """Create the model's weights from the first rows of `x`, unless the model is already built.

        The processes can share the weights only if they exist.
        """
        if self.model.built:
            return
        if isinstance(x, tf.data.Dataset):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(batch_samples(x, 1).take(1))))
        elif isinstance(x, keras.utils.PyDataset):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(x[0])
        build_model(self.model, keras.tree.map_structure(_take_first_rows, x))

    def batches(self, arrays: ArrayBatches, endless: bool) -> Any:
        """Return a dataset of this process's rows, or of global batches.

        It has global batches if shares can change, or if the user's class overrides `train_step` or
        `compute_metrics`, because then all rows are needed.
        """
        asks = overrides(self.model, "compute_metrics") or overrides(self.model, "train_step")
        if asks or self.rebalancing is not None:
            return arrays.global_batches(endless)
        return arrays.own_rows(self.cut, self.group.rank, endless)

    def draw_seed(self) -> int:
        """Return a random seed that the first process draws and sends to all others.

        Every process has to call this.
        """
        drawn = tf.constant(draw_number() if self.group.rank == 0 else 0, tf.int64)
        return int(self.group.sum_now([drawn])[0])

    def begin_fit(self, callbacks: Any) -> list[Any]:
        """Return the callbacks that `fit` uses in this process.

        Also make the processes check after the first batch that they have the same data. Every
        process has to call this.
        """
        self.unchecked = True
        self._forget_data()
        return group_callbacks(callbacks, self, self.share_weights)

    def share_weights(self) -> None:
        """Copy weights and optimizer state from the first process to all.

        Every process has to call this.
        """
        model = self.model
        model.optimizer.build(model.trainable_variables)
        variables = [*model.weights, *model.optimizer.variables]
        self.group.share_weights([variable.value for variable in variables])

    def device_times(self) -> Sequence[DeviceTimes]:
        """Return how long each device worked and waited in the latest steps.

        The result is empty before the first step.
        """
        steps, rank = self.times.read(), self.group.rank
        found = []
        for other in range(self.group.size):
            own = [step.own_work_s[other] for step in steps]
            ends = [step.own_work_s[rank] + step.met_s for step in steps]
            waiting = [max(0.0, end - work) for end, work in zip(ends, own, strict=True)]
            found.append(sum_up(own, waiting))
        return found if steps else ()

    def predict_step(self, data: Tensors) -> Tensors:
        """Run the model's own predict step on all rows."""
        return type(self.model).predict_step(self.model, data)

    def wrap_training(self, run: Steps) -> Steps:
        """Wrap Keras' train function, to retry if memory runs out and to change shares if needed.

        After the first step, the wrapper also checks that all processes have the same data. Without
        passes, running out of memory raises DeviceError.
        """
        step = run
        if self.cut.in_passes and not overrides(self.model, "train_step"):
            step = SurvivingStep(self, self.limit, self.report_retry)

        def train_and_check(iterator: Any) -> Any:
            try:
                logs = self._run_one_by_one(step, iterator)
            except tf.errors.ResourceExhaustedError as error:
                if self.limit is None or not is_out_of_memory(error):
                    raise
                raise DeviceError(
                    f"Rank {self.group.rank} ran out of memory with "
                    f"{self.cut.weights[self.group.rank]} rows at once:"
                    f" {describe_memory(self.group.device)}.",
                    (
                        "A share that takes passes would have gone on in smaller ones: set its "
                        "micro in the plan."
                    ),
                ) from None
            if self.unchecked:
                self.unchecked = False
                self.check_data()
                self._warn_of_inputs()
            if self.rebalancing is not None:
                self.rebalancing.after_steps(self.model.steps_per_execution, self.times)
            return logs

        return train_and_check

    def wrap_tests(self, run: Steps) -> Steps:
        """Wrap Keras' test function so that it runs its steps one at a time, not in one graph."""
        return functools.partial(self._run_one_by_one, run)

    def _run_one_by_one(self, run: Steps, batches: Any) -> Any:
        """Run the steps of one call of Keras' train or test function one at a time.

        Keras would run them as a loop in one graph. Returns the logs of the last step. Raises
        StopIteration if there is no batch left.
        """
        # Keras would run the steps as a loop in one graph, whose all-reduces TensorFlow would
        # confuse
        steps = self.model.steps_per_execution
        if steps == 1:
            return run(batches)
        logs = None
        for batch in islice(batches, steps):
            logs = run([batch])
        if logs is None:
            raise StopIteration
        return logs

    def _forget_data(self) -> None:
        self._other_inputs.assign(0)
        self._labels_vary.assign(False)

    def check_data(self, epoch_ends: bool = False) -> None:
        """Raise RequestError in every process if the processes have different batches.

        Labels are compared, or inputs if there are none. With `epoch_ends`, inputs are compared too
        if the epoch's labels were too uniform to show a difference.
        """
        other = int(self._other)
        if epoch_ends and not other and not bool(self._labels_vary):
            other = int(self._other_inputs)
        self._other.assign(0)
        if epoch_ends:
            self._forget_data()
        refuse_other_data(other)

    def _warn_of_inputs(self) -> None:
        if int(self._other_inputs) and not bool(self._labels_vary):
            warn(
                "The processes have other inputs in their first batch, and its labels are all "
                "equal, so evener can't see whether their rows are the same: if the dataset is"
                " shuffled, give shuffle a seed."
            )

    def report_retry(self, retreat: Retreat) -> None:
        """Print that a pass ran out of memory and is retried with fewer rows."""
        print_line(retreat.describe(self._named or self.group.device))

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Train on a batch, and return the logs."""
        if self.cut.in_passes:
            return SurvivingStep(self, None, self.report_retry).run_in_graph(data)
        own = self.own_rows(data)
        digest = _digest(data)
        began = self.times.read_time([own.size])
        metrics = self._metrics(own, True)
        return self._finish_step(own, digest, began, metrics, *self._compute_own_rows(own))

    def finish_passes(
        self, data: Tensors, before: dict[int, Any], began: Any, result: PassSums
    ) -> dict[str, Any]:
        """Exchange the results of this process's passes with the others, and update the weights.

        `before` has the values of non-trainable variables from before the step, by id; `began` is
        the step's start as Unix time. Returns the logs. Every process has to call this.
        """
        own = self.own_rows(data)
        digest = _digest(data)
        metrics = self._metrics(own, True, before)
        assign_updates(
            [(1.0, [update for update in result.updates if not sums_changes(update.kind)])]
        )
        shared = [update for update in result.updates if sums_changes(update.kind)]
        starts = [tf.convert_to_tensor(update.state) for update in shared]
        return self._finish_step(
            own, digest, began, metrics, result._replace(updates=shared), starts
        )

    def _finish_step(
        self,
        own: OwnRows,
        digest: Any,
        began: Any,
        metrics: StepMetrics,
        result: PassSums,
        starts: list[Any],
    ) -> dict[str, Any]:
        """Exchange results with the other processes; update weights, variables and metrics.

        - `own`, `result`: this process's rows, and the results for them.
        - `digest`: hashes of the batch.
        - `began`: the step's start as Unix time.
        - `starts`: for each variable in `result.updates`, its value before the step.

        Returns the logs. Every process has to call this.
        """
        part = _compute_batch_fraction(own)
        changes = [
            (start, weigh_change(update, start, part))
            for update, start in zip(result.updates, starts, strict=True)
        ]
        sent = metrics.list_own(*_select_own_rows(own, result.outputs))
        summed, loss = self._sum_and_update(began, result, changes, own, digest, sent)
        return metrics.finish(summed, loss, *keras.utils.unpack_x_y_sample_weight(own.whole))

    def _compute_own_rows(self, own: OwnRows) -> tuple[PassSums, list[Any]]:
        """Compute the loss and the gradients of this process's rows.

        Returns the results, and the earlier values of those variables whose changes are summed over
        all processes.
        """
        model = self.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(own.data)
        states = [(state, kind, tf.identity(state)) for state, kind in self._list_shared_states()]
        with tf.GradientTape() as tape, use_global_statistics(model, self.group, own.size):
            outputs = call_model(model, x, True)
            losses = list(model.losses)
            loss = self._compute_own_loss((x, y, outputs, weight), losses, True, own)
            scaled = scale_loss(model, loss.trained)
        gradients = tape.gradient(scaled, list(model.trainable_weights))
        gradients = [drop_filler_slices(gradient, own.size) for gradient in gradients]
        updates = [
            StateUpdate(state, tf.convert_to_tensor(state), kind) for state, kind, _ in states
        ]
        return PassSums(take_rows(outputs, own.size), loss.logged, gradients, updates), [
            start for *_, start in states
        ]

    def _list_shared_states(self) -> list[tuple[Any, str]]:
        """Return the non-trainable variables whose changes are summed over all processes.

        Each is paired with the rule for combining its values.
        """
        found, states = self.kinds[True], self.model.non_trainable_variables
        kinds = find_state_kinds(self.model, found)
        every = [(states[place], kinds[id(states[place])]) for place in found.states]
        return [(state, kind) for state, kind in every if sums_changes(kind)]

    def _compute_own_loss(
        self, batch: tuple[Any, ...], losses: list[Any], training: bool, own: OwnRows
    ) -> PartLoss:
        """Return how much this process's rows contribute to the loss of the whole batch.

        `batch` is (x, y, outputs, weight) of these rows, and `losses` are those that layers added,
        then the regularizers' losses. Every process has to call this.
        """
        found, part = self.kinds[training], _compute_batch_fraction(own)
        main = weigh_part(found.loss, part)
        if found.loss in COUNTS:
            counted = count_units(self.model, *batch[1:])[found.loss] * tf.cast(
                own.size > 0, tf.float64
            )
            main = tf.math.divide_no_nan(counted, self.group.sum([counted])[0])
        return compute_loss_contribution(self.model, found, losses, batch, training, (part, main))

    def _sum_and_update(
        self,
        began: Any,
        result: PassSums,
        changes: list[Any],
        own: OwnRows,
        digest: Any,
        sent: list[Any],
    ) -> tuple[list[Any], Any]:
        """Sum gradients, changes of variables and the loss over all processes; update the weights.

        `changes` has a pair for each variable in `result.updates`: the value before the step, and
        the change by this process's rows. `sent` are tensors that the metrics need. Returns the
        sums of `sent`, and the whole batch's loss. Every process has to call this.
        """
        gradients = result.gradients
        if tf.executing_eagerly():
            gradients = fill_gradients(self.model, self.group, gradients)
        shared = SharedGradients(gradients)
        added = [each for _, each in changes]
        ready = self.times.read_time([*shared.values, *added, result.loss])
        tensors = [*sent, result.loss, *added, *shared.prepare(self.group)]
        sums = iter(
            self._sum_results_and_times(tensors, own, digest, (began, ready), result.loss.dtype)
        )
        summed = list(islice(sums, len(sent)))
        loss = next(sums)
        for update, (start, _) in zip(result.updates, changes, strict=True):
            update.state.assign(start + next(sums))
        joined = shared.join(list(sums))
        apply_gradients(self.model, merge_slices(joined, self.kinds[True].merged))
        return summed, loss

    def _sum_results_and_times(
        self,
        tensors: list[Any],
        own: OwnRows,
        digest: BatchDigests | None,
        times: tuple[Any, Any],
        kind: Any,
    ) -> list[Any]:
        """Sum tensors over all processes, and exchange step times and hashes of the batch.

        `times` are the Unix times at which this process's step began and its tensors were ready.
        `kind` is the dtype for the exchange of times and hashes. Every process has to call this.
        """
        # compute times and batch digests travel in the same collective
        began, ready = times
        labels = 0 if digest is None else digest.labels
        inputs = 0 if digest is None else digest.inputs
        by_process = [
            self.times.place_at_rank(each, kind) for each in (ready - began, labels, inputs)
        ]
        # summed separately, because it waits for a clock
        times_and_digests = tf.concat(by_process, 0)
        sums: list[Any]
        *sums, times_and_digests = self.group.sum([*tensors, times_and_digests], separate=1)
        work_of_each, labels, inputs = tf.split(times_and_digests, 3)
        self.times.store(own.rows, work_of_each, self.times.read_time(sums) - ready)
        if digest is not None:
            self._note_data(digest, labels, inputs)
        return sums

    def _note_data(self, digest: BatchDigests, labels: Any, inputs: Any) -> None:
        """Compare hashes between the processes, and record if any process has different data.

        `labels` and `inputs` are vectors with the hashes of all processes' labels and inputs.
        """
        for other, seen in ((self._other, labels), (self._other_inputs, inputs)):
            other.assign(tf.maximum(other, tf.argmax(tf.cast(seen != seen[0], tf.int32))))
        self._labels_vary.assign(tf.logical_or(self._labels_vary, digest.labels_vary))

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Evaluate a batch, and return the logs."""
        own = self.own_rows(data)
        metrics = self._metrics(own, False)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(own.data)
        outputs, losses = self._evaluate_own_rows(x, own.size)
        loss = self._compute_own_loss((x, y, outputs, weight), losses, False, own).logged
        sent = metrics.list_own(*_select_own_rows(own, take_rows(outputs, own.size)))
        *summed, loss = self.group.sum([*sent, loss])
        return metrics.finish(summed, loss, *keras.utils.unpack_x_y_sample_weight(own.whole))

    def _evaluate_own_rows(self, x: Tensors, size: Any) -> tuple[Tensors, list[Any]]:
        """Return the outputs of this process's rows, and the losses of layers and regularizers.

        With a plan in passes, the rows are computed in passes.
        """
        model, rank = self.model, self.group.rank
        if not self.cut.in_passes or tf.executing_eagerly():
            return call_model(model, x, False), list(model.losses)
        left = CallTensors(model)
        found = ForwardPasses(model, self.kinds[False], left).run(
            self.device, 0, x, size, self.cut.passes(rank, size)
        )
        assign_updates([(1.0, found.updates)])
        left.write(found.attributes)
        _, regularizers = split_losses(model, list(model.losses))
        return found.outputs, [*found.losses, *regularizers]

    def _metrics(
        self, own: OwnRows, training: bool, before: Mapping[int, Any] | None = None
    ) -> StepMetrics:
        with tf.device("CPU:0"):
            place = self.cut.bounds(own.rows)[self.group.rank], own.size, own.rows
        return StepMetrics(self.model, self.kinds[training], *place, before or {})

    def own_rows(self, data: Tensors) -> OwnRows:
        """Return this process's rows of a batch."""
        if isinstance(data, OwnRows):
            return data
        with tf.device("CPU:0"):
            rows = count_rows(data)
            if not tf.executing_eagerly():
                # if the shape is known to be empty, Keras returns an empty loss
                rows = tf.compat.v1.placeholder_with_default(rows, [])
            start, stop = self.cut.bounds(rows)[self.group.rank : self.group.rank + 2]
            return OwnRows(cut_rows(data, start, stop), stop - start, rows, data)


def _digest(data: Tensors) -> BatchDigests | None:
    """Return hashes of a batch, or None if the batch can't differ between processes."""
    # `OwnRows` come from a batch that is the same in all processes
    return None if isinstance(data, OwnRows) else digest_batch(data)


def _compute_batch_fraction(own: OwnRows) -> Any:
    """Return this process's row count as a fraction of the batch; a filler row doesn't count."""
    return tf.cast(own.size, tf.float64) / tf.cast(own.rows, tf.float64)


def _select_own_rows(own: OwnRows, outputs: Tensors) -> tuple[Any, ...]:
    """Return inputs, labels, outputs and weights of this process's rows.

    Only the inputs may have a filler row.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(own.data)
    return x, take_rows(y, own.size), outputs, take_rows(weight, own.size)


FEW_ROWS = 8  # the number of rows from which the weights of a model are created


def _take_first_rows(array: Any) -> Any:
    """Return the first 8 rows of an array as a tensor; sparse and ragged tensors aren't cut."""
    if isinstance(array, tf.SparseTensor | tf.RaggedTensor):
        return array
    return tf.convert_to_tensor(array[:FEW_ROWS])


LARGEST_ROW = 1 << 16  # outputs with more bytes per row aren't sent


class StepMetrics:
    """Metrics of a training step whose rows are computed by several processes.

    Outputs are gathered, so that every process updates its metrics with the whole batch. If a row's
    outputs are larger than 64 KiB, each process updates its metrics with its own rows, and the
    changes of the metrics' variables are summed. Create the object before the model is called,
    because it reads the metrics' earlier values.
    """

    def __init__(
        self,
        model: Any,
        kinds: PartKinds,
        start: Any,
        size: Any,
        rows: Any,
        before: Mapping[int, Any],
    ) -> None:
        self._model = model
        self._place = start, size, rows
        # the losses of single outputs
        self._losses = list_mean_losses(model, kinds)
        own = [model._loss_tracker, model._compile_metrics, *self._losses]
        found = _read_variables(
            metric for metric in model.metrics if not any(metric is each for each in own)
        )
        self._gaining = [(state, before.get(id(state), value)) for state, value in found]
        self._outputs: Tensors = ()

    def list_own(self, x: Any, y: Any, outputs: Tensors, weight: Any) -> list[Any]:
        """Return this process's tensors for the metrics, to be summed over all processes.

        They are the outputs or the changes of the metrics' variables, followed by the tracked
        losses.
        """
        model, (start, size, rows) = self._model, self._place
        if model._compile_metrics is not None or overrides(model, "compute_metrics"):
            if _measure_row_bytes(outputs) <= LARGEST_ROW:
                self._outputs = outputs
            else:
                self._count_own(x, y, outputs, weight)
        sent = [pad_rows(leaf, start, rows) for leaf in _list_tensors(self._outputs)]
        added = [
            tf.where(size > 0, state - before, tf.zeros_like(before))
            for state, before in self._gaining
        ]
        part = tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
        losses = [
            tf.where(size > 0, tf.cast(part, loss.dtype) * loss, 0)
            for _, loss in _read_variables(self._losses)
        ]
        return [*sent, *added, *losses]

    def _count_own(self, *batch: Any) -> None:
        count = tf.function(lambda: self._model.compute_metrics(*batch), autograph=False)
        count.get_concrete_function()  # creates states without counting
        self._gaining += _read_variables([self._model._compile_metrics])
        self._model.compute_metrics(*batch)

    def finish(self, sums: Sequence[Any], loss: Any, x: Any, y: Any, weight: Any) -> dict[str, Any]:
        """Update the metrics with the tensors summed over all processes, and return the logs."""
        left = iter(sums)
        sent = [next(left) for _ in _list_tensors(self._outputs)]
        for state, before in self._gaining:
            state.assign(before + next(left))
        for state, _ in _read_variables(self._losses):
            state.assign(next(left))
        if sent:
            return update_metrics(
                self._model,
                loss,
                self._place[2],
                x,
                y,
                _restore_structure(self._outputs, sent),
                weight,
            )
        self._model._loss_tracker.update_state(loss, sample_weight=self._place[2])
        return dict(self._model.get_metrics_result())


def _read_variables(metrics: Any) -> list[tuple[Any, Any]]:
    """Return (variable, value) pairs for all variables of some metrics."""
    return [
        (state, tf.convert_to_tensor(state)) for metric in metrics for state in metric.variables
    ]


def _measure_row_bytes(outputs: Tensors) -> float:
    """Return the size of one row of the outputs in bytes; inf if the outputs can't be gathered."""
    # for example, if their size is unknown
    total = 0.0
    for leaf in keras.tree.flatten(outputs):
        kind = leaf.dtype
        known = isinstance(leaf, tf.Tensor) and (
            kind.is_floating or kind.is_integer or kind.is_bool
        )
        total += (leaf.shape[1:].num_elements() or math.inf) * kind.size if known else math.inf
    return total


def _list_tensors(outputs: Tensors) -> list[Any]:
    """Return a flat list of a model's output tensors, followed by the masks that Keras attaches."""
    found: list[Any] = keras.tree.flatten(outputs)
    return found + [
        mask for leaf in found if (mask := getattr(leaf, "_keras_mask", None)) is not None
    ]


def _restore_structure(outputs: Tensors, leaves: Sequence[Any]) -> Tensors:
    """Return gathered tensors and masks in the structure of `outputs`.

    `leaves` is a flat list: first the tensors, then the masks of those that have one.
    """
    left = iter(leaves)
    own = keras.tree.flatten(outputs)
    found = [tf.ensure_shape(next(left), [None, *leaf.shape[1:]]) for leaf in own]
    for leaf, whole in zip(own, found, strict=True):
        if getattr(leaf, "_keras_mask", None) is not None:
            whole._keras_mask = next(left)
    return keras.tree.pack_sequence_as(outputs, found)


@contextmanager
def use_global_statistics(model: Any, group: Group, size: Any) -> Iterator[None]:
    """Context manager in which synchronized batch normalization uses the rows of all processes.

    `size` is this process's row count.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def sum_all(*own: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        return group.sum(own), lambda *flows: group.sum(flows)

    def find_moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if mask is not None:
            raise RequestError(
                f"{layer.name} can't synchronize statistics of masked steps.", "Leave the mask out."
            )
        counts = tf.cast(size > 0, inputs.dtype)  # a filler row doesn't count
        moments = (tf.ones_like(inputs), inputs, tf.square(inputs))
        rows, total, squares = sum_all(
            *(counts * tf.reduce_sum(moment, layer._reduction_axes) for moment in moments)
        )
        mean = total / rows
        return mean, tf.maximum(squares / rows - tf.square(mean), 0.0)

    with ExitStack() as whole:
        for layer in list_normalizations(model, synchronized=True):
            moments = functools.partial(find_moments, layer)
            whole.enter_context(replaced(layer, "_moments", moments))
        yield
