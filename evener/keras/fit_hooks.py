"""Replaces methods of a user's Keras model so that `fit` and `evaluate` use evener's engine."""

from __future__ import annotations

import functools
import inspect
import traceback
from types import MethodType
from typing import Any

import keras
import tensorflow as tf

from ..errors import RequestError
from ..plan.check import check_global_batch
from ..shares.whole_rows import batch_in_one_pass, largest_pass
from .audit import StepAudit
from .audit_step import PlainSteps
from .callbacks import EpochStartCallback, with_callback
from .compatibility import check_passes, overrides, warn, warn_small_data
from .data import (
    ArrayBatches,
    AssignedArrays,
    are_arrays,
    array_rows,
    batch_rows,
    batch_samples,
    check_padding,
    is_plain,
    pack_arrays,
    split_for_validation,
)
from .engine import Engine
from .group import check_same_arrays
from .keras_step import from_frame, warn_of_own_loop
from .measure_kinds import measure_first
from .own_train_step import OwnTrainStep
from .step_times import StepTimes

ARRAYS = ("x", "y", "sample_weight")


class FitHooks:
    """Replacements for methods of one Keras model: its steps, `fit`, `evaluate` and saving.

    During `fit`, `batch` is the row count of a step and `samples` the row count of an epoch; None
    if unknown.
    """

    def __init__(self, engine: Engine, split: Any) -> None:
        self.engine = engine
        self.model = engine.model
        self.split = split
        self.group: Any = engine.group
        self.batch: int | None = None
        self.samples: int | None = None
        # None after a warning about a different batch size
        self._plan_batch = split.global_batch if split.plan else None
        self._starts = False  # True from the start of a fit until its train function is made
        micros = split.cut.micros
        # rows of the largest pass; None without passes
        self._pass_rows = largest_pass(split.shares, micros) if micros else None
        # rows of the largest batch to evaluate in one pass on each device
        self._evaluated = (
            max(len(micros), batch_in_one_pass(split.shares, micros)) if micros else None
        )
        self.times = StepTimes()
        self._plain = PlainSteps(engine.model, engine.device)
        self.audit: StepAudit | None = None
        if engine.splits and split.audited:
            self.audit = StepAudit(engine, self._plain, split.strict, self._pass_rows)

    def attach(self) -> None:
        """Replace the model's methods, such as `fit` and `train_step`, by the methods here."""
        model, engine = self.model, self.engine
        for name in ("train_step", "test_step", "predict_step"):
            setattr(model, name, self._step_of(name))
        model.train_step = self._noted(model.train_step)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, functools.partial(self._make_function, name))
        for name, method in engine.methods().items():
            setattr(model, name, method)
        model.get_compile_config, model.__reduce__ = self.compile_config, self.reduce
        if engine.splits and model._call_has_training_arg:
            model.call = warn_of_own_loop(model)
        for name in ("save", "save_weights"):
            setattr(model, name, self._timed("files", getattr(model, name)))
        model.fit, model.evaluate = self._with_signature("fit"), self._with_signature("evaluate")

    def _step_of(self, name: str) -> Any:
        """Return the function that replaces the model's method `name`, such as `train_step`.

        A `train_step` of the user's class is run around the engine's step; other steps of the
        user's class are kept.
        """
        # a user's `train_step` runs around the engine's step, other steps of the user run unchanged
        step = getattr(self.engine, name)
        if not (self.engine.splits and overrides(self.model, name)):
            return step
        if name == "train_step":
            return OwnTrainStep(self.model, step)
        return functools.partial(self._own_step, name)

    def _noted(self, step: Any) -> Any:
        """Wrap a training step so that its graph records when a batch's rows are available."""
        # XLA has no clock

        @functools.wraps(step)
        def note_and_train(data: Any) -> Any:
            if not self.model.jit_compile:
                self.times.note_rows(data)
            return step(data)

        return note_and_train

    def _timed(self, name: str, method: Any) -> Any:
        """Wrap a method, such as `save`, so that its duration doesn't count as part of a step."""
        # otherwise the duration would count as time between two steps

        @functools.wraps(method)
        def call(*given: Any, **words: Any) -> Any:
            with self.times.apart(name):
                return method(*given, **words)

        return call

    def _with_signature(self, name: str) -> Any:
        """Return the replacement of `fit` or `evaluate`, with the signature of Keras' method."""
        hook = getattr(self, name)

        @functools.wraps(MethodType(getattr(type(self.model), name), self.model))
        def method(*arguments: Any, **keywords: Any) -> Any:
            with self.engine.sharing_failures():
                return hook(*arguments, **keywords)

        method.hooks = self  # type: ignore[attr-defined]
        return method

    def _own_step(self, name: str, data: Any) -> Any:
        """Run the user's own test or predict step on the whole batch, on one device."""
        # The device that holds the weights computes the step.
        with self.engine.scope():
            return getattr(type(self.model), name)(self.model, data)

    def _make_function(self, name: str, force: bool = False) -> Any:
        """Replace Keras' `make_train_function` and its like: make the function, then wrap it.

        Raises RequestError if the engine can't run the model.
        """
        # `name` is Keras' method, such as "make_train_function". With `force`, an existing function
        # is replaced.
        model = self.model
        if name == "make_train_function":
            self._prepare_training()
        elif name == "make_test_function":
            self.engine.check_test_step()
            if model.test_function is None:
                self.engine.share_weights()
        if model.jit_compile and (self.engine.splits or not self.engine.device.endswith(":0")):
            model.jit_compile = False
        function = name.removeprefix("make_")
        before = getattr(model, function)
        made = getattr(type(model), name)(model, force)
        if getattr(model, function) is not before:
            setattr(model, function, self._wrap_function(function, getattr(model, function)))
        return made

    def _prepare_training(self) -> None:
        """Check that the engine can train the model, and make weights equal in all processes.

        At the start of `fit`, a callback copies the weights instead.
        """
        # at the start of a `fit`, callbacks share the weights
        if self._pass_rows is not None:
            check_passes(self.model, self._pass_rows)
        self.engine.check_step()
        if self.model.train_function is None and not self._starts:
            self.engine.share_weights()
        self._starts = False

    def _wrap_function(self, name: str, function: Any) -> Any:
        """Wrap Keras' train, test or predict function with the engine's work, audits and timing."""
        # `name` is the model's attribute for the train, test or predict function, such as
        # "train_function".
        engine = self.engine
        training = name == "train_function"
        self._plain.clear(training)
        if training:
            function = engine.around_training(function)
            function = self.times.around_steps(function, lambda: self.model.steps_per_execution)
        if training and self.audit is not None:
            self.audit.begin_anew()
            function = self.audit.before_steps(function)
        tests = name == "test_function" and not overrides(self.model, "test_step")
        if tests:
            function = engine.around_tests(function)
        if tests and self.audit is not None:
            function = self.audit.before_tests(function)
        if engine.splits and (training or tests):
            audited = self.audit is not None
            function = measure_first(engine, self._plain, training, audited, function)
        return self.times.around_call(function) if training else function

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """Train as `Model.fit` does, with batches divided among devices.

        The default batch size is the split's global batch.
        """
        self.engine.check_model()
        call = self._bind("fit", arguments, keywords)
        chosen = call.arguments
        self.engine.build(chosen["x"])
        self.batch, self.samples, self._starts = None, None, True
        self.times.begin()
        if are_arrays(chosen["x"]):
            self._fit_arrays(chosen)
        else:
            self._fit_dataset(chosen)
        chosen["callbacks"] = self.engine.begin_fit(chosen["callbacks"])
        if self.audit is not None:
            notes = EpochStartCallback(self.audit.begin_epoch)
            chosen["callbacks"] = with_callback(chosen["callbacks"], notes, self.model)
        return type(self.model).fit(*call.args, **call.kwargs)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate as `Model.evaluate` does, with batches divided among devices.

        The default batch size is the split's global batch or, with passes, the largest batch that
        every device can evaluate in one pass.
        """
        call = self._bind("evaluate", arguments, keywords)
        chosen = call.arguments
        self.engine.build(chosen["x"])
        size = chosen["batch_size"] or self._evaluated or self.split.global_batch
        if isinstance(chosen["x"], tf.data.Dataset):
            chosen["x"] = batch_samples(chosen["x"], size, _inputs(self.model))
        elif are_arrays(chosen["x"]) and "_use_cached_eval_dataset" not in chosen.get("kwargs", {}):
            if self.group is None or not size:
                chosen["batch_size"] = size
            else:
                chosen["x"], steps = self._in_order(pack_arrays(*map(chosen.get, ARRAYS)), size)
                chosen |= {
                    "y": None,
                    "sample_weight": None,
                    "batch_size": None,
                    "steps": chosen["steps"] or steps,
                }
        with self.times.apart("validation"):
            return type(self.model).evaluate(*call.args, **call.kwargs)

    def compile_config(self) -> Any:
        """Return Keras' compile configuration, and warn if `clone_model` asks for it.

        A clone would train on one device only.
        """
        # a clone isn't split
        if any(_is_clone_model(frame) for frame, _ in traceback.walk_stack(None)):
            self._warn_of_copy()
        return type(self.model).get_compile_config(self.model)

    def reduce(self) -> Any:
        """Pickle the model without evener's replacements, and warn that the copy isn't split."""
        self._warn_of_copy()
        kind: Any = type(self.model)
        return kind.__reduce__(self.model)

    def _warn_of_copy(self) -> None:
        warn(
            f"A copy of {self.model.name} trains on one device: pass the copy to "
            f"split.model() to split it too."
        )

    def _bind(self, name: str, arguments: Any, keywords: Any) -> inspect.BoundArguments:
        """Bind a call's arguments to the signature of Keras' method, with defaults filled in."""
        call = inspect.signature(getattr(type(self.model), name)).bind(
            self.model, *arguments, **keywords
        )
        shuffle = call.arguments.get("shuffle")
        call.apply_defaults()
        for part in {"x", "y", "sample_weight", "validation_data"} & call.arguments.keys():
            call.arguments[part] = keras.tree.map_structure(from_frame, call.arguments[part])
        if shuffle is None and isinstance(call.arguments["x"], tf.data.Dataset) and name == "fit":
            # by default Keras shuffles, then warns that a dataset ignores the argument
            call.arguments["shuffle"] = False
        return call

    def _fit_arrays(self, chosen: dict[str, Any]) -> None:
        """Replace the arrays in the arguments of `fit` by a dataset of batches, in place."""
        # the dataset doesn't pause between epochs; data that only Keras can batch stay as they are
        self.batch = size = check_global_batch(
            chosen["batch_size"] or self.split.global_batch or 32, len(self.split.devices)
        )
        if size == self._plan_batch:
            warn_small_data(array_rows(chosen["x"]), size)
        self._note_batch(size)
        if self.group is None and not is_plain(chosen, self.model):
            chosen["batch_size"] = size
            return
        if chosen["validation_split"]:
            split_for_validation(chosen)
        data = pack_arrays(
            chosen["x"], chosen["y"], chosen["sample_weight"], chosen["class_weight"]
        )
        arrays = ArrayBatches(data, size, bool(chosen["shuffle"]), self.engine.draw_seed())
        chosen |= {
            "y": None,
            "sample_weight": None,
            "class_weight": None,
            "batch_size": None,
            "shuffle": False,
        }
        check_same_arrays(
            self.group,
            data,
            size,
            [chosen[name] for name in ("epochs", "steps_per_epoch", "shuffle")],
        )
        steps = chosen["steps_per_epoch"]
        # an execution of several steps must end with an epoch, so the dataset must end there
        ends = self.model.steps_per_execution > 1
        endless = self.group is None or (steps is None and not ends)
        if not ends:
            chosen["steps_per_epoch"] = steps or arrays.steps
        self.samples = arrays.rows if steps in (None, arrays.steps) else None
        chosen["x"] = self.engine.batches(arrays, endless)
        self._prepare_validation(chosen, size)

    def _in_order(self, data: tuple[Any, ...], size: int) -> tuple[Any, int]:
        """Return a dataset of unshuffled batches, and their number."""
        arrays = ArrayBatches(data, size)
        check_same_arrays(self.group, data, size, ())
        return self.engine.batches(arrays, endless=False), arrays.steps

    def _fit_dataset(self, chosen: dict[str, Any]) -> None:
        """Batch the dataset in the arguments of `fit`, and check it, in place.

        Raises RequestError for a generator if there are several processes.
        """
        # `chosen` has the arguments of `fit`, which are changed.
        data, name = chosen["x"], self.split.engine
        if isinstance(data, tf.data.Dataset):
            size = chosen["batch_size"] or self.split.global_batch
            chosen |= {"x": batch_samples(data, size, _inputs(self.model)), "batch_size": None}
            if isinstance(data.element_spec, AssignedArrays):
                check_padding(self.model, next(iter(data)))
            self._note_batch(batch_rows(chosen["x"]))
        elif self.group is not None:
            raise RequestError(
                f"engine={name!r} can't fit a generator.", "Give arrays, or split.data(...)."
            )
        self._prepare_validation(chosen, self.split.global_batch)

    def _prepare_validation(self, chosen: dict[str, Any], size: int | None) -> None:
        """Batch the validation data in the arguments of `fit`, in place."""
        # `chosen` has the arguments of `fit`, which are changed. `size` is the default batch size
        # for a split without passes. An argument `validation_batch_size` takes precedence.
        data = chosen["validation_data"]
        if data is None:
            return
        size = chosen["validation_batch_size"] or self._evaluated or size or 32
        arrays = isinstance(data, tuple | list)
        chosen["validation_batch_size"] = size if arrays else None
        if isinstance(data, tf.data.Dataset):
            chosen["validation_data"] = batch_samples(data, size, _inputs(self.model))
        elif arrays and self.group is not None:
            chosen["validation_data"], steps = self._in_order(pack_arrays(*data), size)
            chosen |= {
                "validation_steps": chosen["validation_steps"] or steps,
                "validation_batch_size": None,
            }

    def _note_batch(self, rows: int | None) -> None:
        if rows is not None and self._plan_batch not in (None, rows):
            warn(
                f"Batches of {rows} samples are trained, not the plan's {self._plan_batch}: "
                f"the learning is exact, but "
                "the plan's shares and samples/s are for its own batch."
            )
            self._plan_batch = None


def _is_clone_model(frame: Any) -> bool:
    """Return whether the frame runs Keras' `clone_model`."""
    # A user's function may have the same name.
    module = str(frame.f_globals.get("__name__", ""))
    return bool(frame.f_code.co_name == "clone_model" and module.startswith("keras."))


def _inputs(model: Any) -> Any:
    """Return the model's inputs, or None before it is built."""
    return getattr(model, "inputs", None) if model.built else None
