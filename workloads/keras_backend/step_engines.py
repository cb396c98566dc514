"""The engines of a Keras step at a place: one device, towers, or a process of a group.

Each engine has a `Split` of evener's, so a step is the train function that `fit` runs, on its batches.
With `--input device` the same step is traced for arguments that lie in the devices' memory already.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, cycle, pairwise
from typing import Any

import keras
import tensorflow as tf

from evener.errors import RequestError
from evener.keras_split.compatibility import check_passes
from evener.keras_split.keras_step import OwnRows
from evener.keras_split.multiworker import Workers
from evener.keras_split.rebalancing import ChangingCut
from evener.keras_split.split import Split
from evener.keras_split.towers import Towers

from ..protocol import Place


class SingleDeviceEngine:
    """An engine of one device, by Keras' own train step."""

    name = "solo"

    def __init__(self, place: Place) -> None:
        self.place = place
        self.devices: tuple[str, ...] = place.devices
        self._function: Any = None
        self._other: tuple[Split, Any] | None = None  # with passes if the present one is without: its train function

    @cached_property
    def split(self) -> Split:
        """The split that distributes the training; making it starts TensorFlow, so the place is configured before."""
        return Split(devices=self.devices[:1])

    def scope(self) -> Any:
        """The scope in which the model is made."""
        return self.split.scope()

    def attach(self, model: Any, sample: Any) -> None:
        """Make the model train so, by one trace for any number of rows."""
        self.model = model
        model.jit_compile = self.place.xla
        self._distribute()
        model.make_train_function()
        signature = [_specs(part) for part in self.cut(sample, ((0, 1), (1, 2))[: len(self.devices)])]
        xla = self.place.xla or None
        self._function = tf.function(self.train, input_signature=signature, jit_compile=xla, autograph=False)

    def train(self, batch: Any) -> Any:
        """The traced step."""
        with tf.device(self.devices[0]):
            return type(self.model).train_step(self.model, batch)

    def _distribute(self) -> None:
        """Put the split's steps into the model."""
        self.split.model(self.model)
        if self.split.engine == "solo":
            self.model.train_step = self.train

    def _move(self, shares: Sequence[int], micro: Sequence[int]) -> None:
        """Cut by other shares from now on, both in the steps and in what feeds them."""
        if bool(micro) != self.split.cut.in_passes:
            if micro:
                check_passes(self.model, max(micro))
            self._switch()
        if isinstance(self.split.cut, ChangingCut):
            self.split.cut.change(*([rows for rows in sizes if rows] for sizes in (shares, micro)))

    def _switch(self) -> None:
        """Step in passes instead of one, or the other way round; each is traced once."""
        model = self.model
        before = self.split, model.train_function
        self.split, model.train_function = self._other or (self._split_in_passes(), None)
        self._other = before
        self._distribute()
        model.make_train_function()

    def _split_in_passes(self) -> Split:
        if self.place.xla:
            raise RequestError("XLA can't compile a step in passes.", "Leave --xla out, or give --micro off.")
        if self.place.input == "device":
            raise RequestError(
                "Passes take their rows from host memory, as a training does.", "Leave --input device out."
            )
        split = copy.copy(self.split)
        even = [1] * len(split.cut.weights)
        split.cut = ChangingCut(even, even)
        if split.engine == "solo":
            split.engine = "towers"
        return split

    def spans(self, shares: tuple[int, ...], micro: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
        """The rows of each own device, counted from the first that this process makes."""
        own = [share for share in shares if share]
        if len(own) != 1:
            raise RequestError(f"One device can't take the shares {shares}.", "Give it one share above 0.")
        self._move(shares, micro)
        return ((0, own[0]),)

    def cut(self, batch: Any, spans: Sequence[tuple[int, int]]) -> list[Any]:
        """The arguments of one step, as arrays on the host."""
        return [slice_rows(batch, *spans[0])]

    def send(self, parts: list[Any]) -> list[Any]:
        """Send each device its part; the first also gets what is beyond the parts, as the labels of towers are."""
        sent = []
        for device, part in zip(cycle(self.devices), parts, strict=False):
            with tf.device("CPU:0"):
                loaded = keras.tree.map_structure(tf.convert_to_tensor, part)
            with tf.device(device):
                sent.append(keras.tree.map_structure(tf.identity, loaded))
        return sent

    def step(self, parts: list[Any]) -> Any:
        """Run the traced step."""
        with tf.device(self.devices[0]):
            return self._function(*parts)


class TowersEngine(SingleDeviceEngine):
    """Several devices of this process as towers; one that has no share is left out."""

    name = "towers"

    @cached_property
    def split(self) -> Split:
        """Over the devices that take part."""
        return self._over(self.devices)

    def attach(self, model: Any, sample: Any) -> None:
        """Check the model, and trace for the devices that take part."""
        self.model, self._sample = model, sample
        self._attach(self.split)

    def _over(self, devices: tuple[str, ...]) -> Split:
        split = Split(devices=devices, engine="towers")
        split.cut = ChangingCut([1] * len(devices))
        return split

    def spans(self, shares: tuple[int, ...], micro: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
        """The rows of each device that takes part; another set of devices needs another trace."""
        if len(shares) != len(self.place.devices):
            raise RequestError(f"{len(shares)} shares for {len(self.place.devices)} devices.", "Give one for each.")
        active = tuple(name for name, share in zip(self.place.devices, shares, strict=True) if share)
        if active != self.devices:
            self._attach(self._over(active))
        self._move(shares, micro)
        return tuple(pairwise([0, *accumulate(share for share in shares if share)]))

    def train(self, *batch: Any) -> Any:
        """The traced step on a piece for each device and the labels of all."""
        *pieces, y = batch
        sizes = [_count(part) for part in pieces]
        rows = tf.add_n(sizes)
        x = keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *pieces)
        return self._towers.train_on_pieces(list(zip(pieces, sizes, strict=True)), rows, x, y, None)

    def cut(self, batch: Any, spans: Sequence[tuple[int, int]]) -> list[Any]:
        """A piece of x for each device, and the whole of y, as the loss is computed in one place."""
        x, y = batch
        return [*(slice_rows(x, *span) for span in spans), slice_rows(y, 0, spans[-1][1])]

    def step(self, parts: list[Any]) -> Any:
        """Run the traced step."""
        return self._function(*parts)

    def _attach(self, split: Split) -> None:
        self.split, self.devices, self._other = split, split.devices, None
        self._distribute()
        self.model.make_train_function(force=True)
        self._towers = Towers(self.model, self.devices, split.cut)
        x, y = self._sample
        signature = [*(_specs(x) for _ in self.devices), _specs(y)]
        self._function = tf.function(self.train, input_signature=signature, autograph=False)


class MultiworkerEngine(SingleDeviceEngine):
    """An engine of one process in a group: it computes the rows of this process."""

    name = "multiworker"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        workers = {"cluster": {"worker": list(place.peers)}, "task": {"type": "worker", "index": place.rank}}
        os.environ["TF_CONFIG"] = json.dumps(workers)
        self._all_rows = 0

    @cached_property
    def split(self) -> Split:
        """A process for each device."""
        split = Split(devices=self.place.peers, engine="multiworker")
        split.survives = False  # a probe finds what fits
        split.cut = ChangingCut([1] * self.place.world)
        return split

    def attach(self, model: Any, sample: Any) -> None:
        """Check the model, start from the first rank's weights, and trace once."""
        model.jit_compile = False
        self.model = model
        self._distribute()
        model.make_train_function()
        self._workers = Workers(model, self.split.cut, self.split.required_group)
        signature = [_specs(sample), tf.TensorSpec([], tf.int64)]
        self._function = tf.function(self._run, input_signature=signature, autograph=False)

    def _run(self, batch: Any, rows: Any) -> Any:
        count = _count(batch)
        whole = keras.tree.map_structure(
            lambda each: tf.gather(each, tf.range(rows) % count), batch
        )  # as many, for metrics
        return self._workers.train_on_rows(OwnRows(batch, count, rows, whole))

    def spans(self, shares: tuple[int, ...], micro: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
        """Own rows; the other ranks make theirs."""
        if len(shares) != self.place.world or not shares[self.place.rank]:
            raise RequestError(
                f"Rank {self.place.rank} can't step with the shares {shares}.",
                "Each process of a group needs a share above 0; start the group without the others.",
            )
        self._all_rows = sum(shares)
        self._move(shares, micro)
        return ((0, shares[self.place.rank]),)

    def step(self, parts: list[Any]) -> Any:
        """Run the traced step."""
        return self._function(*parts, tf.constant(self._all_rows, tf.int64))


def choose_engine(place: Place) -> SingleDeviceEngine:
    """The engine for the place's devices; RequestError for what TensorFlow can't do there."""
    split = place.world > 1 or len(place.devices) > 1
    if split and place.xla:
        raise RequestError("XLA can't compile a step over several devices.", "Leave --xla out for a split.")
    if place.world > 1:
        return MultiworkerEngine(place)
    if len(place.devices) == 1:
        return SingleDeviceEngine(place)
    return TowersEngine(place)


def slice_rows(data: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of nested arrays."""
    return keras.tree.map_structure(lambda array: array[start:stop], data)


def _count(data: Any) -> Any:
    return tf.shape(keras.tree.flatten(data)[0], out_type=tf.int64)[0]


def _specs(data: Any) -> Any:
    return keras.tree.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), data)
