"""Multiworker: a process per device; each computes its own rows, and gradients are summed by NCCL or gRPC.

MultiWorkerMirroredStrategy only joins the processes. Model and optimizer live outside it, so that clipping, loss
scaling and accumulation act on the gradient of the whole batch, as on one device.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from evener.errors import RequestError
from evener.keras_split.batch_bounds import Cut
from evener.keras_split.engines.early_sums import divide_sums
from evener.keras_split.engines.keras_step import call_model, main_part, part_of_loss, update_metrics
from evener.keras_split.engines.layer_state import StateUpdate, adds_up, assign_updates, change, kinds_of_states
from evener.keras_split.engines.passes import DevicePasses
from evener.keras_split.loss_kinds import count_all
from evener.keras_split.nested_rows import OwnRows, Tensors, count_rows, cut_rows, take_rows
from evener.keras_split.part_kinds import COUNTS, PartKinds
from evener.keras_split.rebalancing import GroupRebalancer
from evener.keras_split.work_times import WorkTimes
from evener.live import Details

GROUP_KEY = 10_000  # of the collectives here; the strategy numbers its own from 1
KINDS = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)  # that TensorFlow can sum so
LARGEST_KEY = (1 << 31) - 1


class Group:
    """The processes that step together. Make it before TensorFlow's first operation in the process."""

    def __init__(self, peers: Sequence[str], rank: int) -> None:
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": list(peers)}, "task": {"type": "worker", "index": rank}}
        )
        self.rank = rank
        self.size = len(peers)
        self.name = hashlib.blake2b(",".join(peers).encode(), digest_size=8).hexdigest()  # the same in all of them
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication())
        if self.strategy.num_replicas_in_sync != self.size:
            raise RequestError(
                f"{self.size} processes see {self.strategy.num_replicas_in_sync} devices between them.",
                "Show each process one GPU, by CUDA_VISIBLE_DEVICES.",
            )
        self.device, self._way = ("GPU:0", "nccl") if _has_gpu() else ("CPU:0", "auto")
        with tf.device(self.device):
            self._order = tf.Variable(
                0.0, trainable=False
            )  # collectives that take it start in the same order in every process
        self._sum = tf.function(self.sum, autograph=False, reduce_retracing=True)

    def sum(self, tensors: Sequence[Any], apart: int = 0) -> list[Any]:
        """Each tensor summed over the processes; every process calls it with tensors of the same shapes.

        Give first what is ready first: of many bytes, most are summed while the last ones are still computed, and
        nothing waits for the last `apart`.
        """
        sums = list(tensors)
        sizes = [(tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors]
        kinds = [tensor.dtype for tensor in tensors]
        for places in divide_sums(list(zip(sizes, kinds, strict=True)), apart):
            with tf.device(self.device):
                total = self._reduce(tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0))
                parts = tf.split(total, [tf.size(tensors[i]) for i in places], num=len(places))
            for i, part in zip(places, parts, strict=True):
                sums[i] = tf.reshape(part, tf.shape(tensors[i]))
        return sums

    def _reduce(self, flat: Any) -> Any:
        """A vector summed over the processes.

        The key follows from type and length, so that the processes agree on each only once. The strategy's own sums
        take a new key every time, and each costs a request to the first process: 1.2 to 1.7 ms a sum on two H200,
        not 0.6.
        """
        with tf.device("CPU:0"):
            number = tf.size(flat, tf.int64) * len(KINDS) + KINDS.index(flat.dtype)
            key = tf.cast(number % LARGEST_KEY, tf.int32)
        return tf.raw_ops.CollectiveReduceV2(
            input=flat,
            group_size=self.size,
            group_key=GROUP_KEY,
            instance_key=key,
            ordering_token=[self._order.handle],
            merge_op="Add",
            final_op="Id",
            communication_hint=self._way,
        )

    def share_weights(self, variables: Sequence[Any]) -> None:
        """Give every process the first one's values."""
        own = [tf.convert_to_tensor(variable) for variable in variables]
        values = self.sum_now([value if self.rank == 0 else tf.zeros_like(value) for value in own])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def share_text(self, text: bytes, rank: int) -> bytes:
        """The text that the process of this rank has, in every process."""
        mine = text if rank == self.rank else b""
        (length,) = self.sum_now([tf.constant([len(mine)])])
        codes = list(mine) or [0] * int(length[0])
        return bytes(self.sum_now([tf.constant(codes)])[0].numpy().tolist())

    def sum_now(self, tensors: Sequence[Any]) -> list[Any]:
        """`sum` outside any graph."""
        return list(self._sum(list(tensors))) if tensors else []


def communication() -> Any:
    """NCCL between GPUs: by default TensorFlow sums over gRPC, a second for the gradients of 79 M parameters."""
    ways = tf.distribute.experimental.CommunicationImplementation
    way = ways.NCCL if _has_gpu() else ways.AUTO
    return tf.distribute.experimental.CommunicationOptions(implementation=way)


def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def group_from_environment() -> Group | None:
    """The group that TF_CONFIG describes, if it has more than one process that trains."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        peers, rank = _read_cluster(json.loads(text))
    except (ValueError, AttributeError, TypeError):
        raise RequestError("TF_CONFIG can't be read.", "It is JSON with cluster.worker and task.index.") from None
    return _join_group(tuple(peers), rank) if len(peers) > 1 else None


@functools.cache
def _join_group(peers: tuple[str, ...], rank: int) -> Group:
    """The same for each Split of the process: another strategy would end the sums that a faster process has begun."""
    return Group(peers, rank)


def _read_cluster(config: Any) -> tuple[list[str], int]:
    """The addresses of the processes that train, the chief first as TensorFlow counts them, and this one's rank."""
    cluster, task = config.get("cluster", {}), config.get("task", {})
    chiefs, workers = list(cluster.get("chief", [])), list(cluster.get("worker", []))
    kind, index = task.get("type", "worker"), int(task.get("index", 0))
    members = {"chief": chiefs, "worker": workers}
    if chiefs + workers and index not in range(len(members.get(kind, []))):
        raise RequestError(
            f"TF_CONFIG makes this process {kind} {index}, but its cluster has {len(chiefs)} chiefs and "
            f"{len(workers)} workers.",
            "Start the script only where task is one of them.",
        )
    return chiefs + workers, index + (len(chiefs) if kind == "worker" else 0)


class Workers:
    """Train and evaluate steps of one process of a group: on its `OwnRows`, or those of a whole batch."""

    name = "multiworker"

    def __init__(self, model: Any, cut: Cut, group: Group, rebalancing: GroupRebalancer | None = None) -> None:
        self.model = model
        self.cut = cut
        self.group = group
        self.kinds: dict[bool, PartKinds] = {}  # of training, of evaluation
        self.times = WorkTimes(group.rank, group.size)
        self.rebalancing = rebalancing

    def after_steps(self, train: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Keras' function that trains some steps, with what comes after them."""
        if self.rebalancing is None:
            return train
        rebalance = functools.partial(self.rebalancing.after_steps, self.model.steps_per_execution, self.times)

        def train_and_rebalance(iterator: Any) -> Any:
            logs = train(iterator)
            rebalance()
            return logs

        return train_and_rebalance

    def describe(self, promised: float) -> Details:
        """What the monitor shows of this process; `promised` are the plan's samples/s."""
        own, waiting, step, spread = self.times.summarize()
        group, changes = self.group, tuple(self.rebalancing.changes) if self.rebalancing else ()
        times = ((own, waiting),)
        return Details(group.name, group.rank, group.size, promised, step, spread, 0.0, times, changes)

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Like `keras.Model.train_step`, on own rows; the update is that of the whole batch."""
        data, size, rows = self.own_rows(data)
        return self.train_on_rows(data, size, rows)

    def train_on_rows(self, data: Tensors, size: Any, rows: Any) -> dict[str, Any]:
        """The step on rows that are cut already; `size` of them count, of `rows` in the whole batch."""
        model, began = self.model, self.times.now([size])
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        if self.cut.in_passes:
            passes = DevicePasses(model, self._found(True), self.group.device, 0, (x, y, weight), size, rows)
            own = passes.run(self.cut.passes(self.group.rank, size))
            assign_updates([(1.0, [update for update in own.updates if not adds_up(update)])])
            changed = [(update, tf.convert_to_tensor(update.state)) for update in own.updates if adds_up(update)]
            gradients, loss, outputs = own.gradients, own.loss, own.outputs
        else:
            starts = self._starts_of_states()
            with tf.GradientTape() as tape:
                outputs = call_model(model, x, True)
                loss = self._part_of_loss((x, y, outputs, weight), True, size, rows)
                scaled = model.optimizer.scale_loss(loss)
            gradients, outputs = tape.gradient(scaled, list(model.trainable_weights)), take_rows(outputs, size)
            changed = [(StateUpdate(state, tf.convert_to_tensor(state), kind), at) for state, kind, at in starts]
        part = tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
        states = [(update.state, start, change(update, start, part)) for update, start in changed]
        y, weight = take_rows(y, size), take_rows(weight, size)
        return self._apply(began, gradients, loss, states, rows, x, y, outputs, weight)

    def _found(self, training: bool) -> PartKinds:
        return self.kinds.get(training) or PartKinds()

    def _starts_of_states(self) -> list[tuple[Any, str, Any]]:
        """States that a call assigns and all processes' rows change, with how they add up and their values so far."""
        found, states = self._found(True), self.model.non_trainable_variables
        kinds = kinds_of_states(self.model, found)
        every = [(states[place], kinds[id(states[place])]) for place in found.states]
        return [(state, kind, tf.identity(state)) for state, kind in every if adds_up(StateUpdate(state, None, kind))]

    def _part_of_loss(self, batch: tuple[Any, ...], training: bool, size: Any, rows: Any) -> Any:
        """What own rows, of which `size` count, add to the loss of the whole batch."""
        found, part = self._found(training), tf.cast(size, tf.float64) / tf.cast(rows, tf.float64)
        main = main_part(found.loss, part)
        if found.loss in COUNTS:
            own = count_all(self.model, *batch[1:])[found.loss] * tf.cast(size > 0, tf.float64)
            main = tf.math.divide_no_nan(own, self.group.sum([own])[0])
        return part_of_loss(self.model, found, self.model.losses, batch, training, (part, main))

    def _apply(
        self, began: Any, gradients: list[Any], loss: Any, states: list[tuple[Any, ...]], rows: Any, *batch: Any
    ) -> dict[str, Any]:
        """Sum over the processes, update weights and states; `batch` is own x, y, outputs and weight, for the metrics.

        `states` have their values before the step, and what own rows add.
        """
        reached = {place: tf.convert_to_tensor(each) for place, each in enumerate(gradients) if each is not None}
        changes = [change for *_, change in states]
        ready = self.times.now([*reached.values(), *changes, loss])
        own = self.times.spread(ready - began, loss.dtype)
        ordered = [loss, *changes, *reversed(reached.values())]  # a backward pass has the last layer's first
        loss, *sums, own_works = self.group.sum([*ordered, own], apart=1)  # which need not wait for a clock
        self.times.note(rows, began, ready, own_works)
        for (state, start, _), total in zip(states, sums, strict=False):
            state.assign(start + total)
        reached = dict(zip(reached, reversed(sums[len(states) :]), strict=True))
        if gradients:
            every = [reached.get(place) for place in range(len(gradients))]
            self.model.optimizer.apply_gradients(zip(every, self.model.trainable_weights, strict=True))
        return update_metrics(self.model, loss, rows, *batch)

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Like `keras.Model.test_step`, on own rows."""
        data, size, rows = self.own_rows(data)
        model = self.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs = call_model(model, x, False)
        (loss,) = self.group.sum([self._part_of_loss((x, y, outputs, weight), False, size, rows)])
        outputs, y, weight = (take_rows(each, size) for each in (outputs, y, weight))
        return update_metrics(model, loss, rows, x, y, outputs, weight)

    def own_rows(self, data: Tensors) -> OwnRows:
        """This process' rows of a whole batch, how many of them count, and the batch's rows."""
        if isinstance(data, OwnRows):
            return data
        with tf.device("CPU:0"):
            # of a shape that is known to be empty, Keras makes an empty loss instead of a number
            rows = tf.compat.v1.placeholder_with_default(count_rows(data), [])
            start, stop = self.cut.bounds(rows)[self.group.rank : self.group.rank + 2]
            return OwnRows(cut_rows(data, start, stop), stop - start, rows)

    def metrics_result(self) -> dict[str, Any]:
        """The model's metrics; at the end of an epoch or evaluation, summed over the processes first."""
        if tf.executing_eagerly():
            own_rows = [metric for metric in self.model.metrics if metric is not self.model._loss_tracker]
            states = [state for metric in own_rows for state in metric.variables]
            for state, total in zip(states, self.group.sum_now([tf.convert_to_tensor(s) for s in states]), strict=True):
                state.assign(total)
        logs: dict[str, Any] = type(self.model).get_metrics_result(self.model)
        return logs
