"""Towers: one process, one graph, each device computes its rows; the loss is computed once, on the whole batch.

Each device runs the model on its own copy of the weights and hands its outputs to the first one, which computes loss
and metrics as on a single device; the loss' gradient goes back to each device by its rows, and the weights' gradients
are summed. So every loss, mask, weight, clip and accumulation is what it is on one device. Only layers that look across
the rows of a batch (BatchNormalization) see their device's rows alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from evener.keras_split.cut import Cut
from evener.keras_split.refusals import warn_added
from evener.keras_split.rows import Tensors, count, head, join, piece


class Tower(NamedTuple):
    """What came of one device's rows."""

    outputs: Tensors
    losses: list[Any]  # of activity regularizers and add_loss: means over the device's rows
    moved: dict[int, Any]  # position among non_trainable_variables -> its new value
    copies: list[Any]  # the device's copy of the trainable weights
    tape: Any
    part: Any  # rows / rows of the batch


class Towers:
    """Train, evaluate and predict steps of a model over several local devices."""

    name = "towers"

    def __init__(self, model: Any, devices: Sequence[str], cut: Cut) -> None:
        self.model = model
        self.devices = tuple(devices)
        self.cut = cut

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """What `keras.Model.train_step` does, with the rows spread over the devices."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        return self.train_on_pieces(self.pieces(x), count(x), x, y, weight)

    def train_on_pieces(
        self, pieces: list[tuple[Tensors, Any]], rows: Any, x: Any, y: Any, weight: Any
    ) -> dict[str, Any]:
        """The step on rows that are cut already: for each device its piece and how many of its rows count."""
        model = self.model
        towers = self._run(pieces, rows, training=True)
        with tf.device(self.devices[0]):
            with tf.GradientTape() as tape:
                for tower in towers:
                    tape.watch(_floats(tower.outputs) + tower.losses)
                outputs = join([tower.outputs for tower in towers])
                loss = self._loss(x, y, outputs, weight, towers, training=True)
                scaled = model.optimizer.scale_loss(loss)
            gradients = self._gradients(tape, scaled, towers)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
            self._settle(towers)
            return self._report(loss, rows, x, y, outputs, weight)

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """What `keras.Model.test_step` does, with the rows spread over the devices."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        rows = count(x)
        towers = self._run(self.pieces(x), rows, training=False)
        with tf.device(self.devices[0]):
            outputs = join([tower.outputs for tower in towers])
            loss = self._loss(x, y, outputs, weight, towers, training=False)
            return self._report(loss, rows, x, y, outputs, weight)

    def predict_step(self, data: Tensors) -> Tensors:
        """The model's outputs for the whole batch, in its order."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        towers = self._run(self.pieces(x), count(x), training=False)
        with tf.device(self.devices[0]):
            return join([tower.outputs for tower in towers])

    def pieces(self, x: Tensors) -> list[tuple[Tensors, Any]]:
        """Each device's rows, cut on the host so that only they travel, and how many of them count."""
        with tf.device("CPU:0"):
            edges = self.cut.bounds(count(x))
            return [(piece(x, start, stop), stop - start) for start, stop in pairwise(edges)]

    def _run(self, pieces: list[tuple[Tensors, Any]], rows: Any, training: bool) -> list[Tower]:
        if not self.model.built:
            self.model(pieces[0][0], training=False)
        towers: list[Tower] = []
        seeds: dict[int, Any] = {}
        for device, (part, size) in zip(self.devices, pieces, strict=True):
            with tf.device(device):
                towers.append(self._tower(part, size, rows, training, seeds))
        return towers

    def _tower(self, part: Tensors, size: Any, rows: Any, training: bool, seeds: dict[int, Any]) -> Tower:
        """Run the model on one device's rows; `seeds` goes on to the next, so that no two draw the same numbers."""
        model = self.model
        copies = [tf.identity(variable) for variable in model.trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(copies)
            outputs, losses, moved = self._call(copies, part, training, seeds)
            warn_added(model, len(losses))
            outputs = head(outputs, size)
        states = model.non_trainable_variables
        seeds.update({i: new for i, new in moved.items() if not _is_float(states[i])})
        share = tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
        return Tower(outputs, losses, moved, copies, tape, share)

    def _call(self, copies: list[Any], part: Tensors, training: bool, seeds: dict[int, Any]) -> tuple[Any, ...]:
        """The model on these weights: outputs, losses of its own, and the states it moved, all as tensors."""
        model = self.model
        states = model.non_trainable_variables
        mapping = [
            *zip(model.trainable_variables, copies, strict=True),
            *((states[i], new) for i, new in seeds.items()),
        ]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = model(part, training=training) if _takes(model.call, "training") else model(part)
            losses = self._own_losses()
        moved = {}
        for i, state in enumerate(states):
            new = scope.get_current_value(state)
            if new is not None and new is not seeds.get(i):
                moved[i] = new
        return outputs, losses, moved

    def _own_losses(self) -> list[Any]:
        """The model's losses less the weights' regularizers, which stand last and count once, not once per device."""
        losses = list(self.model.losses)
        return losses[: len(losses) - count_regularizers(self.model)]

    def _loss(self, x: Any, y: Any, outputs: Any, weight: Any, towers: list[Tower], training: bool) -> Any:
        """The model's loss on the whole batch; losses that arose inside the model are averaged over devices by rows."""
        model = self.model
        keywords = {"training": training} if _takes(model.compute_loss, "training") else {}
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, **keywords)
        for tower in towers:
            for own in tower.losses:
                loss += tf.cast(own, loss.dtype) * tf.cast(tower.part, loss.dtype)
        return loss

    def _gradients(self, tape: Any, scaled: Any, towers: list[Tower]) -> list[Any]:
        weights = self.model.trainable_weights
        heads = [_floats(tower.outputs) + tower.losses for tower in towers]
        flows, direct = tape.gradient(scaled, (heads, list(weights)))
        parts = [direct]
        for device, tower, targets, flow in zip(self.devices, towers, heads, flows, strict=True):
            with tf.device(device):
                flow = [tf.zeros_like(t) if f is None else f for t, f in zip(targets, flow, strict=True)]
                parts.append(tower.tape.gradient(targets, tower.copies, output_gradients=flow))
        return [_sum(each) for each in zip(*parts, strict=True)]

    def _settle(self, towers: list[Tower]) -> None:
        """Give the model the states that the towers moved: averages by rows, and the last of the seeds."""
        for i, state in enumerate(self.model.non_trainable_variables):
            moved = [(tower.part, tower.moved[i]) for tower in towers if i in tower.moved]
            if moved and _is_float(state):
                state.assign(tf.add_n([tf.cast(part, new.dtype) * new for part, new in moved]))
            elif moved:
                state.assign(moved[-1][1])

    def _report(self, loss: Any, rows: Any, x: Any, y: Any, outputs: Any, weight: Any) -> dict[str, Any]:
        for metric in self.model.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=rows)
        logs: dict[str, Any] = self.model.compute_metrics(x, y, outputs, sample_weight=weight)
        return logs


def count_regularizers(model: Any) -> int:
    """How many of `model.losses` come from regularized weights."""
    return sum(1 for weight in model.trainable_weights if getattr(weight, "regularizer", None) is not None)


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_float(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


def _floats(outputs: Tensors) -> list[Any]:
    return [tensor for tensor in keras.tree.flatten(outputs) if tensor.dtype.is_floating]


def _sum(gradients: Sequence[Any]) -> Any:
    """The sum of what is there; sparse gradients are strung together, as TensorFlow means them to be."""
    known = [gradient for gradient in gradients if gradient is not None]
    if not known:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in known):
        values = tf.concat([gradient.values for gradient in known], 0)
        indices = tf.concat([gradient.indices for gradient in known], 0)
        return tf.IndexedSlices(values, indices, known[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in known])
