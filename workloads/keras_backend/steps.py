"""Training steps of a Keras model, with the shares and passes of a probe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import keras
import tensorflow as tf

from evener.errors import RequestError
from evener.keras.keras_step import OwnRows, count_rows, join_rows
from evener.keras.rebalancing import ChangingCut
from evener.keras.split import Split
from evener.keras.step_times import StepTimes
from evener.keras.towers import Towers

from ..protocol import WorkerSetup

TrainStep = Callable[[Any, Any], Any]  # (model, batch) -> logs


class KerasSteps:
    """Runs a model's training steps on one device, on several, or in a group of processes.

    `placed_step` is the train step of a model whose layers are on several devices. Raises
    `RequestError` if XLA is requested for several devices, which it doesn't support.
    """

    def __init__(self, setup: WorkerSetup, placed_step: TrainStep | None = None) -> None:
        self.setup = setup
        self._placed_step = placed_step
        self._devices = setup.peers if setup.world > 1 else setup.devices
        several = len(self._devices) > 1
        if setup.xla and several:
            raise RequestError(
                "XLA can't compile a step over several devices.", "Leave --xla out for a split."
            )
        if setup.world > 1:
            workers = {
                "cluster": {"worker": list(setup.peers)},
                "task": {"type": "worker", "index": setup.rank},
            }
            os.environ["TF_CONFIG"] = json.dumps(workers)
        if placed_step:
            self.engine = "placed"
        elif setup.world > 1:
            self.engine = "multiworker"
        else:
            self.engine = "towers" if several else "solo"
        # by devices, and by whether shares have several passes
        self._made: dict[tuple[tuple[str, ...], bool], tuple[Split, Any, StepTimes]] = {}
        self.split = self._make_split(self._devices, [1] * len(self._devices), ())

    def _make_split(
        self, devices: tuple[str, ...], shares: Sequence[int], micro: Sequence[int]
    ) -> Split:
        if self.engine == "placed":
            return Split(devices=devices[:1])
        engine = "towers" if micro else "auto"
        if len(self._devices) > 1:
            engine = self.engine
        split = Split(devices=devices, engine=engine)
        split.survives = False  # a probe has to find out what fits
        split.audited = False  # a probe measures only steps
        if split.engine != "solo":
            split.cut = ChangingCut(shares, micro)
        return split

    def attach(self, model: Any) -> None:
        """Set the model to train.

        In a group, every process has to call this. All then start with the weights of the first
        one.
        """
        self.model = model
        model.jit_compile = self.setup.xla
        self._use_split(self._devices, in_passes=False)

    def _use_split(self, devices: tuple[str, ...], in_passes: bool) -> None:
        """Switch to the train function for these devices, and create it if it doesn't exist yet.

        `in_passes` says whether it has to support gradient accumulation.
        """
        model = self.model
        split = self.split
        if (devices, in_passes) not in self._made:
            split.model(model)
            if self._placed_step is not None:
                model.train_step = partial(self._placed_step, model)
            model.make_train_function(force=True)
            # `fit` would inspect the first batch, but towers have it in pieces
            if self.setup.input == "device":
                if self.engine == "towers":
                    model.train_step = partial(train_on_pieces, Towers(model, devices, split.cut))
                type(model).make_train_function(model, force=True)
            self._made[devices, in_passes] = split, model.train_function, model.fit.hooks.times
        self.split, model.train_function, self.times = self._made[devices, in_passes]

    def set_shares(self, shares: Sequence[int], micro: Sequence[int]) -> None:
        """Change the shares and passes of the next steps.

        There has to be a share for each device. A device with a share of 0 is left out. Raises
        `RequestError` if this process would have no rows, or if the setup doesn't allow passes.
        """
        self._check(shares, micro)
        if self._placed_step:
            return
        devices = tuple(name for name, share in zip(self._devices, shares, strict=True) if share)
        sizes = [[rows for rows in each if rows] for each in (shares, micro)]
        if (devices, bool(micro)) not in self._made:
            self.split = self._make_split(devices, *sizes)
        self._use_split(devices, bool(micro))
        if isinstance(self.split.cut, ChangingCut):
            self.split.cut.change(*sizes)

    def _check(self, shares: Sequence[int], micro: Sequence[int]) -> None:
        setup = self.setup
        if micro and (self._placed_step or setup.xla or setup.input == "device"):
            raise RequestError(
                "Placements, XLA and --input device take no passes.", "Give --micro off."
            )
        if not self._placed_step and (
            len(shares) != len(self._devices) or not any(self.own_sizes(shares))
        ):
            raise RequestError(
                f"Rank {setup.rank} can't step with the shares {tuple(shares)}.",
                "Give one for each device; in a group, each process needs one above 0.",
            )

    def own_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the numbers of rows that this process's devices compute, leaving out zeros.

        `sizes` has the rows of all devices. If the layers are placed on several devices, the result
        only has the sum of `sizes`.
        """
        if self._placed_step is not None:
            return [sum(sizes)]
        setup = self.setup
        own = sizes[setup.rank : setup.rank + 1] if setup.world > 1 else sizes
        return [size for size in own if size]

    def send(self, batch: Any, shares: Sequence[int]) -> Any:
        """Copy a batch to the devices, in the form that the train function expects.

        If one process computes on several devices, the first device gets the labels of all rows.
        """
        own = self.own_sizes(shares)
        if self.engine == "towers":
            x, y = batch
            edges = zip(self.split.devices, pairwise([0, *accumulate(own)]), strict=True)
            pieces = [_put(slice_rows(x, *edge), tf.device(device)) for device, edge in edges]
            return [*pieces, _put(y, self.split.scope())]
        sent = _put(batch, self.split.scope())
        if self.engine != "multiworker":
            return sent
        rows = tf.constant(sum(shares), tf.int64)
        whole = keras.tree.map_structure(
            lambda each: tf.gather(each, tf.range(rows) % own[0]), sent
        )  # for metrics
        return OwnRows(sent, tf.constant(own[0], tf.int64), rows, whole)


def train_on_pieces(towers: Towers, batch: Sequence[Any]) -> Any:
    """Train for one step on a batch that is already divided among the devices.

    `towers` computes the step. `batch` has the inputs of each device, and then the labels of all
    rows.
    """
    *pieces, y = batch
    sizes = [count_rows(piece) for piece in pieces]
    return towers.train_on_pieces(
        list(zip(pieces, sizes, strict=True)), tf.add_n(sizes), join_rows(pieces), y, None
    )


def slice_rows(data: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` to `stop` of every array in a nested structure."""
    return keras.tree.map_structure(lambda array: array[start:stop], data)


def _put(data: Any, scope: AbstractContextManager[Any]) -> Any:
    """Copy the arrays of a nested structure to the device of a scope, such as `tf.device(...)`."""
    # through tensors in host memory
    with tf.device("CPU:0"):
        loaded = keras.tree.map_structure(tf.convert_to_tensor, data)
    with scope:
        return keras.tree.map_structure(tf.identity, loaded)
