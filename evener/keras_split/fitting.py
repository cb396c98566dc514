"""Puts an engine's steps into a Keras model, and gives its `fit` and `evaluate` data in the form the engine needs.

The steps are set on the instance, not by a subclass, so that the model is saved under its own class.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from evener.errors import RequestError
from evener.fit import check_global_batch
from evener.keras_split.data import length
from evener.keras_split.mirrored import distribute
from evener.keras_split.refusals import check_compiled

if TYPE_CHECKING:
    from evener.keras_split.split import Split


class Fitting:
    """A model, the engine that steps it, and the check that comes before its first step."""

    def __init__(self, split: Split, model: Any, engine: Any, check: Callable[[], None]) -> None:
        self.split = split
        self.model = model
        self.engine = engine
        self.check = check

    def attach(self) -> None:
        """Put the engine's steps in the place of the model's own."""
        model = self.model
        for name in ("train_step", "test_step", "predict_step"):
            if hasattr(self.engine, name):
                setattr(model, name, getattr(self.engine, name))
        if hasattr(self.engine, "metrics_result"):
            model.get_metrics_result = self.engine.metrics_result
        model.make_train_function = self.make_train_function
        model.make_test_function = self.make_test_function
        model.make_predict_function = self.make_predict_function
        model.fit = self.fit
        model.evaluate = self.evaluate

    def make_train_function(self, force: bool = False) -> Any:
        """As Keras does, after refusing what the engine can't train; XLA would draw the whole step onto one device."""
        self.check()
        self._without_xla()
        if self.split.group is not None:
            self._share_weights()
        return type(self.model).make_train_function(self.model, force)

    def make_test_function(self, force: bool = False) -> Any:
        """As Keras does, without XLA."""
        self._without_xla()
        return type(self.model).make_test_function(self.model, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """As Keras does, without XLA."""
        self._without_xla()
        return type(self.model).make_predict_function(self.model, force)

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """`keras.Model.fit`; the batch size is the split's global batch unless said."""
        check_compiled(self.model)
        own = type(self.model).fit
        call = inspect.signature(own).bind(self.model, *arguments, **keywords)
        call.apply_defaults()
        chosen = call.arguments
        self._build(chosen["x"])
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
            if self.split.engine == "mirrored" and size:
                data = self.split.data(chosen["x"], chosen["y"], chosen["sample_weight"], batch_size=size)
                chosen["steps"] = chosen["steps"] or math.ceil(length(chosen["x"]) / size)
                chosen |= {"x": self._dealt(data), "y": None, "sample_weight": None, "batch_size": None}
            else:
                chosen["batch_size"] = size
        return own(*call.args, **call.kwargs)

    def _fit_arrays(self, chosen: dict[str, Any]) -> None:
        size = chosen["batch_size"] or self.split.global_batch or 32
        check_global_batch(size, len(self.split.devices))
        if self.split.engine in ("towers", "solo"):
            chosen["batch_size"] = size
            return
        _refuse_validation_split(chosen, self.split.engine)
        rows = length(chosen["x"])
        data = self.split.data(
            chosen["x"],
            chosen["y"],
            chosen["sample_weight"],
            class_weight=chosen["class_weight"],
            batch_size=size,
            shuffle=bool(chosen["shuffle"]),
        )
        chosen |= {"y": None, "sample_weight": None, "class_weight": None, "batch_size": None, "shuffle": False}
        chosen["x"] = data
        if self.split.engine == "mirrored":
            chosen["x"] = self._dealt(data.repeat())
            chosen["steps_per_epoch"] = chosen["steps_per_epoch"] or math.ceil(rows / size)
            self._deal_validation(chosen, size)
        else:
            self._batch_validation(chosen, size)

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
        chosen |= {"x": self._dealt(data), "steps_per_epoch": steps}
        self._deal_validation(chosen, self.split.global_batch)

    def _deal_validation(self, chosen: dict[str, Any], size: int | None) -> None:
        given = chosen["validation_data"]
        if given is None:
            return
        size = chosen["validation_batch_size"] or size
        if isinstance(given, tf.data.Dataset):
            steps, data = int(given.cardinality()), given
        else:
            steps, data = math.ceil(length(given[0]) / (size or 32)), self.split.data(*given, batch_size=size or 32)
        if chosen["validation_steps"] is None and steps < 0:
            raise RequestError("The validation data's length isn't known.", "Give validation_steps.")
        chosen["validation_steps"] = chosen["validation_steps"] or steps
        chosen["validation_data"] = self._dealt(data.repeat())
        chosen["validation_batch_size"] = None

    def _batch_validation(self, chosen: dict[str, Any], size: int) -> None:
        given = chosen["validation_data"]
        if given is not None and not isinstance(given, tf.data.Dataset):
            chosen["validation_data"] = self.split.data(*given, batch_size=chosen["validation_batch_size"] or size)
            chosen["validation_batch_size"] = None

    def _dealt(self, data: Any) -> Any:
        return distribute(self.split.strategy, data, self.split.cut)

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


def _refuse_validation_split(chosen: dict[str, Any], engine: str) -> None:
    if chosen["validation_split"]:
        raise RequestError(
            f"engine={engine!r} can't take validation_split.", "Give validation_data, or use engine='towers'."
        )
