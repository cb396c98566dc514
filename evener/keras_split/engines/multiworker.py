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
from evener.keras_split.engines.group_metrics import StepMetrics
from evener.keras_split.engines.keras_step import apply_gradients, call_model, main_part, part_of_loss, scale_loss
from evener.keras_split.engines.layer_state import StateUpdate, adds_up, assign_updates, change, kinds_of_states
from evener.keras_split.engines.passes import DevicePasses, PassSums
from evener.keras_split.loss_kinds import count_all
from evener.keras_split.nested_rows import OwnRows, Tensors, count_rows, cut_rows, take_rows
from evener.keras_split.part_kinds import COUNTS, PartKinds
from evener.keras_split.rebalancing import GroupRebalancer
from evener.keras_split.same_data import digest_labels, refuse_other
from evener.keras_split.work_times import WorkTimes
from evener.live import Details

GROUP_KEY = 10_000  # of the collectives here; the strategy numbers its own from 1
KINDS = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)  # that TensorFlow can sum so
WIDER = dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64), tf.int64)  # for others
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
        given = tensors
        tensors = sums = [tf.cast(tensor, WIDER.get(tensor.dtype, tensor.dtype)) for tensor in given]
        sizes = [(tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors]
        kinds = [tensor.dtype for tensor in tensors]
        for places in divide_sums(list(zip(sizes, kinds, strict=True)), apart):
            with tf.device(self.device):
                total = self._reduce(tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0))
                parts = tf.split(total, [tf.size(tensors[i]) for i in places], num=len(places))
            for i, part in zip(places, parts, strict=True):
                sums[i] = tf.cast(tf.reshape(part, tf.shape(tensors[i])), given[i].dtype)
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
        given = list(tensors)  # traced for each kind of sums, which is no fault that TensorFlow should warn of
        return list(self._sum.get_concrete_function(given)(given)) if given else []


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
        self.unchecked = True  # a training begins
        with tf.device("CPU:0"):
            self._other = tf.Variable(tf.zeros([], tf.int64), trainable=False)  # a rank with other data, if above 0

    def after_steps(self, train: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Keras' function that trains some steps, with what comes after them."""

        def train_and_look(iterator: Any) -> Any:
            logs = train(iterator)
            if self.unchecked:
                self.unchecked = False
                self.check_data()
            if self.rebalancing is not None:
                self.rebalancing.after_steps(self.model.steps_per_execution, self.times)
            return logs

        return train_and_look

    def check_data(self) -> None:
        """RequestError, in every process, if they have trained on unequal batches."""
        other = int(self._other)
        self._other.assign(0)
        refuse_other(other)

    def describe(self, promised: float) -> Details:
        """What the monitor shows of this process; `promised` are the plan's samples/s."""
        work, step, spread = self.times.summarize()
        group, changes = self.group, tuple(self.rebalancing.changes) if self.rebalancing else ()
        return Details(group.name, group.rank, group.size, promised, step, spread, 0.0, (work,), changes)

    def train_step(self, data: Tensors) -> dict[str, Any]:
        """Like `keras.Model.train_step`, on own rows; the update is that of the whole batch."""
        return self.train_on_rows(self.own_rows(data), None if isinstance(data, OwnRows) else digest_labels(data))

    def train_on_rows(self, own: OwnRows, digest: Any = None) -> dict[str, Any]:
        """The step on rows that are cut already; with the digest of the whole batch, where that may not be the same."""
        began, metrics = self.times.now([own.size]), self._metrics(own)
        result, starts = (self._run_passes if self.cut.in_passes else self._run)(own)
        part = _part(own)
        changes = [(start, change(each, start, part)) for each, start in zip(result.updates, starts, strict=True)]
        sent = metrics.own(*_own_batch(own, result.outputs))
        summed, loss = self._apply(began, result, changes, own, digest, sent)
        return metrics.finish(summed, loss, *keras.utils.unpack_x_y_sample_weight(own.whole))

    def _run(self, own: OwnRows) -> tuple[PassSums, list[Any]]:
        """Forward and backward on own rows; of states that all processes' rows change, the values so far too."""
        model = self.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(own.data)
        states = [(state, kind, tf.identity(state)) for state, kind in self._shared_states()]
        with tf.GradientTape() as tape:
            outputs = call_model(model, x, True)
            loss = self._part_of_loss((x, y, outputs, weight), True, own)
            scaled = scale_loss(model, loss)
        gradients = tape.gradient(scaled, list(model.trainable_weights))
        updates = [StateUpdate(state, tf.convert_to_tensor(state), kind) for state, kind, _ in states]
        return PassSums(take_rows(outputs, own.size), loss, gradients, updates), [start for *_, start in states]

    def _run_passes(self, own: OwnRows) -> tuple[PassSums, list[Any]]:
        """The same in passes."""
        data = keras.utils.unpack_x_y_sample_weight(own.data)
        passes = DevicePasses(self.model, self._found(True), self.group.device, 0, data, own.size, own.rows)
        result = passes.run(self.cut.passes(self.group.rank, own.size))
        assign_updates([(1.0, [update for update in result.updates if not adds_up(update.kind)])])
        shared = [update for update in result.updates if adds_up(update.kind)]
        return result._replace(updates=shared), [tf.convert_to_tensor(update.state) for update in shared]

    def _found(self, training: bool) -> PartKinds:
        return self.kinds.get(training) or PartKinds()

    def _shared_states(self) -> list[tuple[Any, str]]:
        """States that a call assigns and all processes' rows change, with how they add up."""
        found, states = self._found(True), self.model.non_trainable_variables
        kinds = kinds_of_states(self.model, found)
        every = [(states[place], kinds[id(states[place])]) for place in found.states]
        return [(state, kind) for state, kind in every if adds_up(kind)]

    def _part_of_loss(self, batch: tuple[Any, ...], training: bool, own: OwnRows) -> Any:
        """What own rows add to the loss of the whole batch."""
        found, part = self._found(training), _part(own)
        main = main_part(found.loss, part)
        if found.loss in COUNTS:
            counted = count_all(self.model, *batch[1:])[found.loss] * tf.cast(own.size > 0, tf.float64)
            main = tf.math.divide_no_nan(counted, self.group.sum([counted])[0])
        return part_of_loss(self.model, found, self.model.losses, batch, training, (part, main))

    def _apply(
        self, began: Any, result: PassSums, changes: list[Any], own: OwnRows, digest: Any, sent: list[Any]
    ) -> tuple[list[Any], Any]:
        """Sum over the processes, update weights and states; the sums of what is `sent` for the metrics, and the loss.

        `changes` are (value before the step, what own rows add) of each state in `result.updates`.
        """
        loss, kind = result.loss, result.loss.dtype
        reached = {i: tf.convert_to_tensor(each) for i, each in enumerate(result.gradients) if each is not None}
        added = [each for _, each in changes]
        ready = self.times.now([*reached.values(), *added, loss])
        work, seen = (self.times.spread(each, kind) for each in (ready - began, 0 if digest is None else digest))
        ordered = [*sent, loss, *added, *reversed(reached.values())]  # a backward pass has the last layer's first
        *sums, both = self.group.sum([*ordered, tf.concat([work, seen], 0)], apart=1)  # which need not wait for a clock
        self._note(own, began, ready, both, digest)
        left = iter(sums)
        summed, loss = [next(left) for _ in sent], next(left)
        for update, (start, _) in zip(result.updates, changes, strict=True):
            update.state.assign(start + next(left))
        reached = dict(zip(reversed(reached), left, strict=True))
        apply_gradients(self.model, [reached.get(place) for place in range(len(result.gradients))])
        return summed, loss

    def _note(self, own: OwnRows, began: Any, ready: Any, both: Any, digest: Any) -> None:
        """Keep every process' own work, and whose batch is another one than the first process has."""
        work, seen = tf.split(both, 2)
        self.times.note(own.rows, began, ready, work)
        if digest is not None:
            self._other.assign(tf.maximum(self._other, tf.argmax(tf.cast(seen != seen[0], tf.int32))))

    def test_step(self, data: Tensors) -> dict[str, Any]:
        """Like `keras.Model.test_step`, on own rows."""
        own = self.own_rows(data)
        metrics = self._metrics(own)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(own.data)
        outputs = call_model(self.model, x, False)
        loss = self._part_of_loss((x, y, outputs, weight), False, own)
        sent = metrics.own(*_own_batch(own, take_rows(outputs, own.size)))
        *summed, loss = self.group.sum([*sent, loss])
        return metrics.finish(summed, loss, *keras.utils.unpack_x_y_sample_weight(own.whole))

    def _metrics(self, own: OwnRows) -> StepMetrics:
        with tf.device("CPU:0"):
            return StepMetrics(self.model, self.cut.bounds(own.rows)[self.group.rank], own.size, own.rows)

    def own_rows(self, data: Tensors) -> OwnRows:
        """This process' rows of a whole batch, how many of them count, and the batch's rows."""
        if isinstance(data, OwnRows):
            return data
        with tf.device("CPU:0"):
            # of a shape that is known to be empty, Keras makes an empty loss instead of a number
            rows = tf.compat.v1.placeholder_with_default(count_rows(data), [])
            start, stop = self.cut.bounds(rows)[self.group.rank : self.group.rank + 2]
            return OwnRows(cut_rows(data, start, stop), stop - start, rows, data)


def _part(own: OwnRows) -> Any:
    """Own rows that count / rows of the batch."""
    return tf.cast(own.size, tf.float64) / tf.cast(own.rows, tf.float64)


def _own_batch(own: OwnRows, outputs: Tensors) -> tuple[Any, ...]:
    """(x, y, outputs, weight) of own rows, but for x only those that count."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(own.data)
    return x, take_rows(y, own.size), outputs, take_rows(weight, own.size)
