"""Puts an engine's steps into a Keras model, and gives its `fit` and `evaluate` data in the form the engine needs.

The steps are set on the instance, not by a subclass, so that the model is saved under its own class.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from evener.errors import RequestError
from evener.keras_split.compatibility import check_compiled, check_step, check_test_step
from evener.keras_split.data import Feed, fold_weights, given, length
from evener.keras_split.engines.keras_step import overrides
from evener.plan_check import check_global_batch

if TYPE_CHECKING:
    from evener.keras_split.split import Split


class Fitting:
    """A model, the engine that steps it, and the check that comes before its first step."""

    def __init__(self, split: Split, model: Any, engine: Any, check: Callable[[], None]) -> None:
        self.split = split
        self.model = model
        self.engine = engine
        self.check = check
        self.batch: int | None = None  # samples of a step of the fit that runs, where it feeds arrays
        self._is_fit = False  # a fit begins

    def attach(self) -> None:
        """Put the engine's steps in the place of the model's own."""
        model = self.model
        for name in ("train_step", "test_step", "predict_step"):
            if name != "train_step" and overrides(model, name):
                setattr(model, name, partial(self._own_step, name))
            elif hasattr(self.engine, name):
                setattr(model, name, getattr(self.engine, name))
        if hasattr(self.engine, "metrics_result"):
            model.get_metrics_result = self.engine.metrics_result
        model.make_train_function = self.make_train_function
        model.make_test_function = self.make_test_function
        model.make_predict_function = self.make_predict_function
        if self.split.group is not None:
            model.train_on_batch = self.train_on_batch
        if self.split.strategy is not None:
            model.predict_on_batch = self.predict_on_batch
        model.fit = self.fit
        model.evaluate = self.evaluate

    def _own_step(self, name: str, data: Any) -> Any:
        """A step of the user's own: on the whole batch, on the device that has the weights."""
        device = self.split.devices[0] if self.split.strategy is None and self.split.group is None else None
        with tf.device(device):
            return getattr(type(self.model), name)(self.model, data)

    def make_train_function(self, force: bool = False) -> Any:
        """As Keras does, after refusing what the engine can't train; XLA would draw the whole step onto one device."""
        self.check()
        self._without_xla()
        if self.split.group is not None and (self._is_fit or self.model.train_function is None):
            self._share_weights()
        self._is_fit = False
        return type(self.model).make_train_function(self.model, force)

    def make_test_function(self, force: bool = False) -> Any:
        """As Keras does, without XLA."""
        if self.split.engine in ("mirrored", "multiworker"):
            check_test_step(self.model, self.split.engine)
        self._without_xla()
        return type(self.model).make_test_function(self.model, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """As Keras does, without XLA."""
        self._without_xla()
        return type(self.model).make_predict_function(self.model, force)

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """`keras.Model.fit`; the batch size is the split's global batch unless said."""
        (check_compiled if self.split.engine == "solo" else check_step)(self.model)
        own = type(self.model).fit
        call = inspect.signature(own).bind(self.model, *arguments, **keywords)
        call.apply_defaults()
        chosen = call.arguments
        self._build(chosen["x"])
        self.batch, self._is_fit = None, True
        if _is_arrays(chosen["x"]):
            self._fit_arrays(chosen)
        elif self.split.engine == "mirrored":
            self._fit_dataset(chosen)
        elif self.split.engine == "multiworker" and not isinstance(chosen["x"], tf.data.Dataset):
            raise RequestError("engine='multiworker' can't fit a generator.", "Give arrays, or split.data(...).")
        return own(*call.args, **call.kwargs)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """`keras.Model.evaluate`; the batch size is the split's global batch unless said."""
        own = type(self.model).evaluate
        call = inspect.signature(own).bind(self.model, *arguments, **keywords)
        call.apply_defaults()
        chosen = call.arguments
        if _is_arrays(chosen["x"]) and "_use_cached_eval_dataset" not in chosen.get("kwargs", {}):
            size = chosen["batch_size"] or self.split.global_batch
            if self.split.engine in ("towers", "solo") or not size:
                chosen["batch_size"] = size
            else:
                data = given(chosen["x"], chosen["y"], chosen["sample_weight"])
                chosen["steps"] = chosen["steps"] or math.ceil(length(data) / size)
                chosen |= {"x": self._fed(data, size), "y": None, "sample_weight": None, "batch_size": None}
        return own(*call.args, **call.kwargs)

    def train_on_batch(self, x: Any, *arguments: Any, **keywords: Any) -> Any:
        """As Keras does, on weights that are there and the same in every process."""
        self._build(x)
        return type(self.model).train_on_batch(self.model, x, *arguments, **keywords)

    def predict_on_batch(self, x: Any) -> Any:
        """As Keras does on one device; under a strategy it would predict the whole batch on each replica."""
        return self.model.predict(x, batch_size=length(x), verbose=0)

    def _fit_arrays(self, chosen: dict[str, Any]) -> None:
        """Feed arrays epoch after epoch without a pause; what only Keras' own feeding knows is left to it."""
        size = check_global_batch(chosen["batch_size"] or self.split.global_batch or 32, len(self.split.devices))
        self.batch = size
        if self.split.engine in ("towers", "solo"):
            if not _plain(chosen, self.model):
                chosen["batch_size"] = size
                return
        else:
            _refuse_validation_split(chosen, self.split.engine)
        weight = fold_weights(chosen["y"], chosen["sample_weight"], chosen["class_weight"])
        feed = Feed(given(chosen["x"], chosen["y"], weight), size, bool(chosen["shuffle"]), self._seed())
        chosen |= {"y": None, "sample_weight": None, "class_weight": None, "batch_size": None, "shuffle": False}
        chosen["steps_per_epoch"] = chosen["steps_per_epoch"] or feed.steps
        chosen["x"] = self.split.batches(feed, endless=True)
        self._feed_validation(chosen, size)

    def _fed(self, data: tuple[Any, ...], size: int) -> Any:
        """What is evaluated: in its order."""
        return self.split.batches(Feed(data, size), endless=self.split.engine == "mirrored")

    def _seed(self) -> int:
        """Of the order of epochs: by `keras.utils.set_random_seed`; in a group, the first process'."""
        with tf.device("CPU:0"):
            drawn = tf.random.uniform([], maxval=1 << 31, dtype=tf.int64)
        group = self.split.group
        if group is not None:
            (drawn,) = group.sum_now([drawn if group.rank == 0 else tf.zeros_like(drawn)])
        return int(drawn)

    def _fit_dataset(self, chosen: dict[str, Any]) -> None:
        """Deal a dataset of whole batches to the replicas."""
        data = chosen["x"]
        if isinstance(data, tf.distribute.DistributedDataset):
            raise RequestError("This dataset is distributed already.", "Give split.data(...), or arrays.")
        if not isinstance(data, tf.data.Dataset):
            raise RequestError("engine='mirrored' can't fit a generator.", "Give arrays, or a tf.data.Dataset.")
        if chosen["class_weight"] is not None:
            raise RequestError(
                "engine='mirrored' can't weight a dataset's classes.", "Give split.data(class_weight=...)."
            )
        steps = chosen["steps_per_epoch"]
        if steps is None:
            steps = int(data.cardinality())
            if steps < 0:
                raise RequestError("The dataset's length isn't known.", "Give steps_per_epoch.")
            data = data.repeat()
        chosen |= {"x": self.split.deal(data), "steps_per_epoch": steps}
        self._feed_validation(chosen, self.split.global_batch)

    def _feed_validation(self, chosen: dict[str, Any], size: int | None) -> None:
        """Validation data in batches of as many rows, in the engine's form."""
        held = chosen["validation_data"]
        if held is None:
            return
        size = chosen["validation_batch_size"] or size or 32
        chosen["validation_batch_size"] = size if isinstance(held, tuple | list) else None
        if self.split.engine in ("towers", "solo"):
            return
        if isinstance(held, tuple | list):
            data = given(*held, *[None] * (3 - len(held)))
            chosen["validation_steps"] = chosen["validation_steps"] or math.ceil(length(data) / size)
            chosen |= {"validation_data": self._fed(data, size), "validation_batch_size": None}
        elif self.split.engine == "mirrored" and isinstance(held, tf.data.Dataset):
            steps = chosen["validation_steps"] or int(held.cardinality())
            if steps < 0:
                raise RequestError("The validation data's length isn't known.", "Give validation_steps.")
            chosen |= {"validation_data": self.split.deal(held.repeat()), "validation_steps": steps}

    def _without_xla(self) -> None:
        if self.model.jit_compile and self.split.engine != "mirrored" and not getattr(self.engine, "xla", False):
            self.model.jit_compile = False

    def _build(self, x: Any) -> None:
        """Make the weights of a model that waits for its first batch, so that a group can share them before it."""
        if self.split.group is None or self.model.built:
            return
        if isinstance(x, tf.data.Dataset):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(x.take(1))))
        self.model(keras.tree.map_structure(lambda array: tf.convert_to_tensor(array[:1]), x), training=False)

    def _share_weights(self) -> None:
        """Start every process from the first one's weights and optimizer."""
        model = self.model
        model.optimizer.build(model.trainable_variables)
        self.split.required_group.share_weights([w.value for w in (*model.weights, *model.optimizer.variables)])


def _is_arrays(x: Any) -> bool:
    return all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in tf.nest.flatten(x)) and not isinstance(
        x, tf.data.Dataset | tf.distribute.DistributedDataset
    )


def _plain(chosen: dict[str, Any], model: Any) -> bool:
    """Dense arrays, fed whole epochs at a time, a step at a time."""
    held = [leaf for key in ("x", "y", "sample_weight") for leaf in tf.nest.flatten(chosen[key]) if leaf is not None]
    weighted = chosen["sample_weight"] is not None or chosen["class_weight"] is not None
    return (
        all(isinstance(leaf, np.ndarray | tf.Tensor) and leaf.dtype != object for leaf in held)
        and isinstance(chosen["shuffle"], bool)
        and not (weighted and tf.nest.is_nested(chosen["y"]))
        and not chosen["validation_split"]
        and chosen["steps_per_epoch"] is None
        and model.steps_per_execution == 1
    )


def _refuse_validation_split(chosen: dict[str, Any], engine: str) -> None:
    if chosen["validation_split"]:
        raise RequestError(
            f"engine={engine!r} can't take validation_split.", "Give validation_data, or use engine='towers'."
        )
