"""The processes that train one Keras model together, and sums over them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ..errors import RequestError
from ..plan.file import Share
from ..shares.divisions import divide_sums
from ..training.launched import find_host, launched_device
from ..training.share_order import RankInfo, check_agreement, check_share_indices
from .data import count_array_rows
from .group_failures import GroupFailures

GROUP_KEY = 10_000  # group key of these collectives; the strategy numbers its own keys from 1
# types that TensorFlow can sum this way, also on GPUs
KINDS = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64)
NARROW = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.uint64)
WIDER = dict.fromkeys(NARROW, tf.int64)  # the type that stands in for a narrow one in sums
LARGEST_KEY = (1 << 31) - 1


class Group:
    """The processes that train together under `MultiWorkerMirroredStrategy`, one device each.

    `peers` are the addresses of all processes, and `rank` is the index of this process. Create it
    before TensorFlow's first operation. Raises RequestError unless there are as many devices as
    processes.
    """

    def __init__(self, peers: Sequence[str], rank: int) -> None:
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": list(peers)}, "task": {"type": "worker", "index": rank}}
        )
        self.rank = rank
        self.size = len(peers)
        self.failures = GroupFailures(rank, len(peers))
        self.name = hashlib.blake2b(
            ",".join(peers).encode(), digest_size=8
        ).hexdigest()  # the same in all processes
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if self.strategy.num_replicas_in_sync != self.size:
            raise RequestError(
                f"{self.size} processes see {self.strategy.num_replicas_in_sync} devices "
                f"between them.",
                "Show each process one GPU, by CUDA_VISIBLE_DEVICES.",
            )
        # TensorFlow sums between GPUs over gRPC unless NCCL is named
        has_gpu = tf.config.list_physical_devices("GPU")
        self.device, self._way = ("GPU:0", "nccl") if has_gpu else ("CPU:0", "auto")
        with tf.device(self.device):
            # collectives with this token start in the same order in every process
            self._order = tf.Variable(0.0, trainable=False)
        self._sum = tf.function(
            lambda tensors: self.sum(tensors), autograph=False, reduce_retracing=True
        )

    def sum(self, tensors: Sequence[Any], separate: int = 0) -> list[Any]:
        """Return each tensor's sum over all processes, in as few all-reduces as possible.

        List tensors in the order in which they are computed. The last `separate` tensors are summed
        in an all-reduce of their own, so that no other sum waits for them. Every process has to
        call this, with tensors of the same shapes.
        """
        if tf.executing_eagerly():
            return self.sum_now(tensors)
        given = tensors
        tensors = sums = [
            tf.cast(tensor, WIDER.get(tensor.dtype, tensor.dtype)) for tensor in given
        ]
        sizes = [(tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors]
        kinds = [tensor.dtype for tensor in tensors]
        for places in divide_sums(list(zip(sizes, kinds, strict=True)), separate):
            with tf.device(self.device):
                total = self._all_reduce(
                    tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0)
                )
                parts = tf.split(total, [tf.size(tensors[i]) for i in places], num=len(places))
            for i, part in zip(places, parts, strict=True):
                sums[i] = tf.cast(tf.reshape(part, tf.shape(tensors[i])), given[i].dtype)
        return sums

    def _all_reduce(self, flat: Any) -> Any:
        """Sum a flat tensor over all processes; on GPUs, NCCL is used.

        Every process has to call this, with a tensor of the same length.
        """
        # The key depends on type and length only, so the processes agree on each key only once. The
        # strategy's own all-reduce uses a new key every time, and each new key costs a request to
        # the first process: a sum on two H200 took 1.2 to 1.7 ms with it, and 0.6 ms with this one.
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
        """Copy the first process's values to the variables of all processes.

        Every process has to call this.
        """
        own = [tf.convert_to_tensor(variable) for variable in variables]
        values = self.sum_now([value if self.rank == 0 else tf.zeros_like(value) for value in own])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def share_text(self, text: bytes, rank: int) -> bytes:
        """Return on every process the bytes that process `rank` passes as `text`.

        Every process has to call this.
        """
        mine = text if rank == self.rank else b""
        (length,) = self.sum_now([tf.constant([len(mine)])])
        codes = list(mine) or [0] * int(length[0])
        return bytes(self.sum_now([tf.constant(codes)])[0].numpy().tolist())

    def sum_now(self, tensors: Sequence[Any]) -> list[Any]:
        """Return each tensor's sum over all processes, in eager mode.

        Every process has to call this, with tensors of the same shapes.
        """
        # traced for each set of types and shapes on purpose, without TensorFlow's warning
        given = list(tensors)
        return list(self._sum.get_concrete_function(given)(given)) if given else []


def group_from_environment() -> Group | None:
    """Return the group of processes that TF_CONFIG describes, or None for a single process.

    TF_CONFIG is an environment variable. Raises RequestError if it can't be parsed.
    """
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        peers, rank = _read_cluster(json.loads(text))
    except (ValueError, AttributeError, TypeError):
        raise RequestError(
            "TF_CONFIG can't be read.", "It is JSON with cluster.worker and task.index."
        ) from None
    return _join_group(tuple(peers), rank) if len(peers) > 1 else None


@functools.cache
def _join_group(peers: tuple[str, ...], rank: int) -> Group:
    """Return this process's Group, which is created only once per set of addresses."""
    # a second strategy would abort all-reduces that a faster process has already started
    return Group(peers, rank)


def _read_cluster(config: Any) -> tuple[list[str], int]:
    """Return the addresses of all processes, and this process's rank.

    `config` is the content of TF_CONFIG. Raises RequestError if this process isn't in the cluster.
    """
    # the chief comes first, as in TensorFlow
    cluster, task = config.get("cluster", {}), config.get("task", {})
    chiefs, workers = list(cluster.get("chief", [])), list(cluster.get("worker", []))
    kind, index = task.get("type", "worker"), int(task.get("index", 0))
    members = {"chief": chiefs, "worker": workers}
    if chiefs + workers and index not in range(len(members.get(kind, []))):
        raise RequestError(
            f"TF_CONFIG makes this process {kind} {index}, but its cluster has {len(chiefs)} "
            f"chiefs and "
            f"{len(workers)} workers.",
            "Start the script only where task is one of them.",
        )
    return chiefs + workers, index + (len(chiefs) if kind == "worker" else 0)


def order_by_device(active: Sequence[Share], group: Group) -> tuple[int, ...]:
    """Return for each process, by rank, the index of its share in the plan's active shares.

    Processes are matched by device and host. If none matches, rank 0 gets the first share, and so
    on. Every process has to call this. Raises PlanError if a share has no process or several.
    """
    host = find_host(share.host for share in active)
    device = launched_device() or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = [
        i for i, share in enumerate(active) if share.device == device and host in ("", share.host)
    ]
    places = [0.0] * group.size
    places[group.rank] = own[0] + 1.0 if len(own) == 1 else 0.0
    (summed,) = group.sum_now([tf.constant(places)])
    found = [int(place) - 1 for place in summed]
    if max(found) < 0:
        return tuple(range(group.size))
    return check_share_indices(active, [None if place < 0 else place for place in found])


def check_options(options: Mapping[str, bool], group: Group) -> None:
    """Raise RequestError if the processes have different options.

    Every process has to call this.
    """
    own = [tf.one_hot(group.rank, group.size, float(value), 0.0) for value in options.values()]
    values_by_rank = [each.numpy() for each in group.sum_now(own)]
    check_agreement(
        [
            RankInfo(
                "",
                "",
                options={
                    name: bool(each[rank])
                    for name, each in zip(options, values_by_rank, strict=True)
                },
            )
            for rank in range(group.size)
        ]
    )


FEW = 64  # maximum number of elements per row; with larger rows, each step hashes only row 0
MOST = 251  # number of different digests; every float type represents them exactly


def digest(leaves: Sequence[Any], limit: int = MOST) -> Any:
    """Return a hash of the tensors, as an integer below `limit`."""
    parts = [tf.io.serialize_tensor(leaf) for leaf in leaves]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts), limit)


class BatchDigests(NamedTuple):
    """Hashes of a batch, which processes compare to check that they have the same data."""

    labels: Any  # digest of the labels, or of the inputs if there are no labels
    inputs: Any  # digest of the inputs, which every process may augment at random
    labels_vary: Any  # True if labels differ between rows, so that they distinguish rows


def digest_batch(data: Any) -> BatchDigests:
    """Return hashes of a batch's labels and inputs."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    with tf.device("CPU:0"):
        inputs = _digest_rows(x)
        if y is None:
            return BatchDigests(inputs, inputs, tf.constant(False))
        vary = [tf.reduce_any(leaf != leaf[:1]) for leaf in _leaves(y)]
        return BatchDigests(_digest_rows(y), inputs, tf.reduce_any(tf.stack(vary)))


def _digest_rows(data: Any) -> Any:
    """Return a hash of a batch's tensors; if rows are large, only the first row is hashed."""
    return digest(
        [
            leaf if (leaf.shape[1:].num_elements() or FEW + 1) <= FEW else leaf[:1]
            for leaf in _leaves(data)
        ]
    )


def _leaves(data: Any) -> list[Any]:
    return list(tf.nest.flatten(data, expand_composites=True))


def check_same_arrays(group: Any, data: Any, size: int, settings: Sequence[Any]) -> None:
    """Raise RequestError if the processes have different data or settings for `fit`.

    The rows of the first batch (`size` rows), row counts and settings are compared. Every process
    has to call this. Without a group (None), nothing is checked.
    """
    if group is None:
        return
    rows = tf.nest.flatten(
        [array[:size] for array in keras.tree.flatten(data)], expand_composites=True
    )
    own = digest(
        [
            *map(tf.convert_to_tensor, rows),
            tf.constant(repr([size, count_array_rows(data), *settings])),
        ],
        1 << 20,
    )
    (found,) = group.sum_now([tf.one_hot(group.rank, group.size, tf.cast(own, tf.float32), 0.0)])
    refuse_other_data(int(tf.argmax(tf.cast(found != found[0], tf.int32))))


def refuse_other_data(rank: int) -> None:
    """Raise RequestError with the message that process `rank` has different data from process 0.

    Do nothing if `rank` is 0, which means that all processes have the same data.
    """
    if rank:
        raise RequestError(
            f"Rank {rank} has other rows in a batch than rank 0, or batches them otherwise.",
            (
                "Give every process the same data in the same order, as split.data(...) does: "
                "each takes its own rows."
            ),
        )
