"""The processes that train one model together, and their sums by NCCL or gRPC.

MultiWorkerMirroredStrategy only joins them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...errors import RequestError
from .early_sums import divide_sums

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
        self._sum = tf.function(lambda tensors: self.sum(tensors), autograph=False, reduce_retracing=True)

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
    """The group of every Split of this process: another strategy would end the sums that a faster process has begun."""
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
