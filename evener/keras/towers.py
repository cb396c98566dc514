"""The engine `towers`: one process trains a model on several devices, in one graph.

Each device runs the model on its own rows, with a copy of the weights (a tower). The first device
gets all outputs, and computes the loss and the metrics of the whole batch. Each device then gets
the loss's gradient for its outputs, and computes gradients of the weights, which are summed.

Therefore losses, masks, sample weights, clipping and gradient accumulation are the same as on one
device. Only layers that combine the rows of a batch (BatchNormalization) see just their device's
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ..errors import RequestError
from .attributes import CallTensors, Leaves, PlainVariables, join_tensors
from .compatibility import check_step, check_towers
from .data import AssignedArrays, cut_pieces, pad_steps
from .engine import OneProcess
from .forward_passes import ForwardPasses
from .keras_step import (
    Tensors,
    apply_gradients,
    call_on_copies,
    compute_keras_loss,
    count_rows,
    cut_rows,
    find_logits,
    join_rows,
    scale_loss,
    take_rows,
    update_metrics,
    weigh_added,
)
from .passes import DevicePasses, PassSums, StateUpdate, StepStates, assign_updates
from .sparse_gradients import merge_slices


class Tower(NamedTuple):
    """Results of the model's forward pass on the rows of one device."""

    outputs: Tensors
    losses: list[Any]  # losses from activity regularizers and add_loss
    updates: list[StateUpdate]
    copies: list[Any]  # the device's copy of the trainable weights
    tape: Any
    size: Any  # number of rows that count
    part: Any  # rows that count / rows of the batch
    attributes: Leaves  # tensors that the call stored in attributes

    def heads(self) -> list[Any]:
        """Return the tensors of this device from which the batch's loss is computed.

        The loss's gradients with respect to these tensors are sent back to the device.
        """
        logits = [find_logits(leaf) for leaf in keras.tree.flatten(self.outputs)]
        every = [
            *_floats(self.outputs),
            *(logit for logit in logits if logit is not None),
            *self.losses,
            *_floats(list(self.attributes.values())),
        ]
        return list({id(each): each for each in every}.values())


class Towers(OneProcess):
    """Engine in which one process trains a model on several devices.

    Each device computes the outputs of its rows. The loss of the whole batch is computed from all
    outputs on the first device. If the plan divides a share into gradient-accumulation passes, each
    pass has its own loss instead.
    """

    name = "towers"

    def check_model(self) -> None:
        """Raise RequestError if the model isn't compiled or has stateful layers."""
        check_step(self.model)

    def check_step(self) -> None:
        """Raise RequestError if the model can't train on several devices in one process."""
        check_towers(self.model)

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Train on a batch, and return the logs."""
        assigned, (x, y, weight) = _unpack_batch(data)
        if self.cut.in_passes:
            return self._train_in_passes(x, y, weight)
        return self.train_on_pieces(self.pieces(x, assigned), count_rows(x), x, y, weight, assigned)

    def _train_in_passes(self, x: Any, y: Any, weight: Any) -> dict[str, Any]:
        """Train on a batch whose rows each device computes in gradient-accumulation passes."""
        # each pass has its own loss: the whole batch's outputs aren't known before its backward
        # pass
        model, rows = self.model, count_rows(x)
        pieces, variables = self.pieces((x, y, weight)), PlainVariables(model)
        if not model.built:
            model(pieces[0][0][0], training=False)
        sums: list[PassSums] = []
        for number, (device, (part, size)) in enumerate(zip(self.devices, pieces, strict=True)):
            with tf.device(device):
                passes = DevicePasses(
                    model, self.kinds[True], device, number, part, size, rows, variables
                )
                sums.append(passes.run(self.cut.passes(number, size)))
        with tf.device(self.devices[0]):
            parts = [tf.cast(size, tf.float64) / tf.cast(rows, tf.float64) for _, size in pieces]
            assign_updates([(part, each.updates) for part, each in zip(parts, sums, strict=True)])
            every = zip(*(each.gradients for each in sums), strict=True)
            self._apply([_sum_gradients(each) for each in every])
            loss = tf.add_n([each.loss for each in sums])
            return update_metrics(
                model, loss, rows, x, y, join_rows([each.outputs for each in sums]), weight
            )

    def train_on_pieces(
        self,
        pieces: list[tuple[Tensors, Any]],
        rows: Any,
        x: Any,
        y: Any,
        weight: Any,
        assigned: AssignedArrays | None = None,
    ) -> dict[str, Any]:
        """Train on a batch that was cut into the devices' parts, and return the logs.

        `pieces` are pairs of a device's inputs and their row count; `rows`, `x`, `y` and `weight`
        belong to the whole batch. `assigned` says how rows were assigned to devices by length, or
        is None.
        """
        model, left = self.model, CallTensors(self.model)
        towers = self._run(pieces, rows, True, left)
        with tf.device(self.devices[0]):
            with tf.GradientTape() as tape:
                for tower in towers:
                    tape.watch(tower.heads())
                outputs = _join_outputs(towers, x, assigned)
                left.write(self._join_attributes(towers, x, assigned, training=True))
                loss = self._compute_whole_loss(x, y, outputs, weight, towers, training=True)
                scaled = scale_loss(model, loss)
            self._apply(self._gradients(tape, scaled, towers) if model.trainable_weights else [])
            return update_metrics(model, loss, rows, x, y, outputs, weight)

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Evaluate a batch, and return the logs."""
        assigned, (x, y, weight) = _unpack_batch(data)
        rows, left = count_rows(x), CallTensors(self.model)
        towers = self._run(self.pieces(x, assigned), rows, False, left)
        with tf.device(self.devices[0]):
            outputs = _join_outputs(towers, x, assigned)
            left.write(self._join_attributes(towers, x, assigned, training=False))
            loss = self._compute_whole_loss(x, y, outputs, weight, towers, training=False)
            return update_metrics(self.model, loss, rows, x, y, outputs, weight)

    def predict_step(self, data: Tensors) -> Tensors:
        """Compute and return the outputs of a batch.

        Raises RequestError if its rows are assigned to devices by length.
        """
        assigned, (x, _, _) = _unpack_batch(data)
        if assigned is not None:
            raise RequestError(
                "Rows assigned by length come in the order of the devices, not in that of the "
                "data.",
                "Predict on split.data without lengths, or on the arrays.",
            )
        left = CallTensors(self.model)
        towers = self._run(self.pieces(x), count_rows(x), False, left)
        with tf.device(self.devices[0]):
            return _join_outputs(towers, x, None)

    def pieces(
        self, x: Tensors, assigned: AssignedArrays | None = None
    ) -> list[tuple[Tensors, Any]]:
        """Cut a batch's inputs into the devices' parts, and return each with its row count.

        `assigned` says how rows were assigned to devices by length, or is None.
        """
        # cut on the host, so that only a device's own rows are sent to it
        if assigned is not None:
            return cut_pieces(x, assigned)
        with tf.device("CPU:0"):
            edges = self.cut.bounds(count_rows(x))
            return [(cut_rows(x, start, stop), stop - start) for start, stop in pairwise(edges)]

    def _run(
        self, pieces: list[tuple[Tensors, Any]], rows: Any, training: bool, left: CallTensors
    ) -> list[Tower]:
        if not self.model.built:
            self.model(pieces[0][0], training=False)
        if self.cut.in_passes and not training and not tf.executing_eagerly():
            return self._evaluate_in_passes(pieces, rows, left)
        towers: list[Tower] = []
        states = StepStates(self.model, self.kinds[training])
        variables = PlainVariables(self.model)
        for number, (device, (part, size)) in enumerate(zip(self.devices, pieces, strict=True)):
            if number:
                left.restore()
                variables.restore()
            with tf.device(device):
                starts = states.starts(number, resets_metrics=False)
                tower = self._run_on_device(part, size, rows, training, states, starts)
                towers.append(tower._replace(attributes=left.collect()))
        with tf.device(self.devices[0]):
            assign_updates([(tower.part, tower.updates) for tower in towers])
        return towers

    def _evaluate_in_passes(
        self, pieces: list[tuple[Tensors, Any]], rows: Any, left: CallTensors
    ) -> list[Tower]:
        """Run the model forward on the rows of each device, in passes of the plan's rows."""
        forward = ForwardPasses(self.model, self.kinds[False], left)
        towers = []
        for number, (device, (part, size)) in enumerate(zip(self.devices, pieces, strict=True)):
            found = forward.run(device, number, part, size, self.cut.passes(number, size))
            with tf.device(device):
                outputs = take_rows(found.outputs, size)
                share = tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
            towers.append(
                Tower(outputs, found.losses, found.updates, [], None, size, share, found.attributes)
            )
        with tf.device(self.devices[0]):
            assign_updates([(tower.part, tower.updates) for tower in towers])
        return towers

    def _run_on_device(
        self,
        part: Tensors,
        size: Any,
        rows: Any,
        training: bool,
        states: StepStates,
        starts: list[Any],
    ) -> Tower:
        """Run the model's forward pass on the rows of one device.

        `part` has these rows, and `size` is their number without filler rows. `rows` is the row
        count of the whole batch. `starts` has the variables with their values before the call.
        """
        model = self.model
        copies = [tf.identity(variable) for variable in model.trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(copies)
            # regularizers count once instead of once per device
            outputs, losses, _, scope = call_on_copies(model, part, training, copies, starts)
            outputs = take_rows(outputs, size)
        share = tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
        updates = states.collect_updates(scope, starts, size)
        return Tower(outputs, losses, updates, copies, tape, size, share, {})

    def _join_attributes(
        self, towers: Sequence[Tower], x: Tensors, assigned: AssignedArrays | None, training: bool
    ) -> Leaves:
        """Join the tensors that the model's call has stored in attributes on each device.

        Their rows are in the order of `x`.
        """
        every = [tower.attributes for tower in towers]
        sizes, parts = [tower.size for tower in towers], [tower.part for tower in towers]
        kinds = self.kinds[training].attributes
        pad = (lambda leaf: leaf) if assigned is None else (lambda leaf: pad_steps(leaf, x))
        return join_tensors(every, sizes, parts, kinds, pad)

    def _compute_whole_loss(
        self, x: Any, y: Any, outputs: Any, weight: Any, towers: list[Tower], training: bool
    ) -> Any:
        """Return the loss of the whole batch, including losses that layers add.

        `outputs` are the joined outputs of all devices.
        """
        model, found = self.model, self.kinds[training]
        added = [
            tf.add_n(
                [
                    weigh_added(found.added_kind(place), o, t.part, o.dtype)
                    for t, o in zip(towers, own, strict=True)
                ]
            )
            for place, own in enumerate(zip(*(tower.losses for tower in towers), strict=True))
        ]
        return compute_keras_loss(
            model, [*added, *model.losses] if added else [], x, y, outputs, weight, training
        )

    def _apply(self, gradients: Sequence[Any]) -> None:
        """Update the weights with the gradients of the whole batch."""
        apply_gradients(self.model, merge_slices(gradients, self.kinds[True].merged))

    def _gradients(self, tape: Any, scaled: Any, towers: list[Tower]) -> list[Any]:
        weights = self.model.trainable_weights
        heads = [tower.heads() for tower in towers]
        flows, direct = tape.gradient(scaled, (heads, list(weights)))
        parts = [direct]
        for device, tower, targets, flow in zip(self.devices, towers, heads, flows, strict=True):
            with tf.device(device):
                reached = [
                    (target, each)
                    for target, each in zip(targets, flow, strict=True)
                    if each is not None
                ]
                if reached:
                    targets, flow = map(list, zip(*reached, strict=True))
                    parts.append(tower.tape.gradient(targets, tower.copies, output_gradients=flow))
        return [_sum_gradients(each) for each in zip(*parts, strict=True)]


def _unpack_batch(data: Tensors) -> tuple[AssignedArrays | None, tuple[Any, Any, Any]]:
    """Return how a batch's rows were assigned to devices by length, and (inputs, labels, weights).

    The first item is None if rows weren't assigned by length.
    """
    assigned = data if isinstance(data, AssignedArrays) else None
    return assigned, keras.utils.unpack_x_y_sample_weight(
        data if assigned is None else assigned.data
    )


def _join_outputs(towers: Sequence[Tower], x: Tensors, assigned: AssignedArrays | None) -> Tensors:
    """Concatenate the outputs of all devices.

    If rows were assigned by length, outputs were trimmed, and are padded first. Raises RequestError
    if padding would count in losses that layers add.
    """
    if assigned is None:
        return join_rows([tower.outputs for tower in towers])
    if any(tower.losses for tower in towers):
        raise RequestError(
            "The model adds losses of its layers' outputs, which count padding.",
            "Leave activity_regularizer and add_loss out, or train without lengths.",
        )
    return join_rows([pad_steps(tower.outputs, x) for tower in towers])


def _floats(outputs: Tensors) -> list[Any]:
    return [
        tensor
        for tensor in keras.tree.flatten(outputs)
        if tensor.dtype.is_floating or tensor.dtype.is_complex
    ]


def _sum_gradients(gradients: Sequence[Any]) -> Any:
    """Return the sum of all devices' gradients for one weight; None counts as zero.

    Sparse gradients are concatenated, as in TensorFlow. The result is None if all gradients are
    None.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        values = tf.concat([gradient.values for gradient in present], 0)
        indices = tf.concat([gradient.indices for gradient in present], 0)
        return tf.IndexedSlices(values, indices, present[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in present])
