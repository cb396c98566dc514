"""Replaces methods of a user's Keras model, so that `fit` and `evaluate` use evener's engine."""

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
    batch_rows,
    batch_samples,
    check_padding,
    count_array_rows,
    is_plain,
    pack_arrays,
    split_for_validation,
)
from .engine import Engine
from .group import check_same_arrays
from .keras_step import from_frame, warn_of_own_loop
from .measure_kinds import wrap_with_measurement
from .own_train_step import OwnTrainStep
from .step_times import StepTimes

ARRAYS = ("x", "y", "sample_weight")


class FitHooks:
    """Replacements for the methods of one Keras model: its steps, `fit`, `evaluate` and saving.

    During `fit`, `batch` is the row count of a step, and `samples` that of an epoch. They are None
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
        # rows of the largest batch that takes one pass on each device
        self._one_pass = (
            max(len(micros), batch_in_one_pass(split.shares, micros)) if micros else None
        )
        self.times = StepTimes()
        self._plain = PlainSteps(engine.model, engine.device)
        self.audit: StepAudit | None = None
        if engine.splits and split.audited:
            self.audit = StepAudit(engine, self._plain, split.strict, self._pass_rows)

    def attach(self) -> None:
        """Replace the model's methods, such as `fit` and `train_step`."""
        model, engine = self.model, self.engine
        for name in ("train_step", "test_step", "predict_step"):
            setattr(model, name, self._make_step(name))
        model.train_step = self._record_rows(model.train_step)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, functools.partial(self._make_function, name))
        for name, method in engine.methods().items():
            setattr(model, name, method)
        model.get_compile_config, model.__reduce__ = self.compile_config, self.reduce
        if engine.splits and model._call_has_training_arg:
            model.call = warn_of_own_loop(model)
        for name in ("save", "save_weights"):
            setattr(model, name, self._time_separately("files", getattr(model, name)))
        model.fit, model.evaluate = self._with_signature("fit"), self._with_signature("evaluate")

    def _make_step(self, name: str) -> Any:
        """Return the function that replaces the model's method `name`, such as `train_step`.

        If the user's class overrides `train_step`, the user's method still runs, and its
        `super().train_step` is the engine's step. Other steps that the class overrides are kept.
        """
        step = getattr(self.engine, name)
        if not (self.engine.splits and overrides(self.model, name)):
            return step
        if name == "train_step":
            return OwnTrainStep(self.model, step)
        return functools.partial(self._run_own_step, name)

    def _record_rows(self, step: Any) -> Any:
        """Wrap a training step, so that its graph records when a batch's rows are available."""
        # XLA has no clock

        @functools.wraps(step)
        def note_and_train(data: Any) -> Any:
            if not self.model.jit_compile:
                self.times.record_arrival(data)
            return step(data)

        return note_and_train

    def _time_separately(self, name: str, method: Any) -> Any:
        """Wrap a method, such as `save`, so that its duration doesn't count as part of a step.

        It counts as the activity `name` instead.
        """

        @functools.wraps(method)
        def call(*given: Any, **words: Any) -> Any:
            with self.times.time_separately(name):
                return method(*given, **words)

        return call

    def _with_signature(self, name: str) -> Any:
        """Return the replacement for `fit` or `evaluate`, with the signature of Keras' method."""
        hook = getattr(self, name)

        @functools.wraps(MethodType(getattr(type(self.model), name), self.model))
        def method(*arguments: Any, **keywords: Any) -> Any:
            with self.engine.sharing_failures():
                return hook(*arguments, **keywords)

        method.hooks = self  # type: ignore[attr-defined]
        return method

    def _run_own_step(self, name: str, data: Any) -> Any:
        """Run the user's own test or predict step on the whole batch, on one device."""
        with self.engine.scope():
            return getattr(type(self.model), name)(self.model, data)

    def _make_function(self, name: str, force: bool = False) -> Any:
        """Create Keras' train, test or predict function, and wrap it.

        This replaces Keras' method `name`, such as `make_train_function`. With `force`, an existing
        function is replaced. Raises RequestError if the engine can't run the model.
        """
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

        At the start of `fit`, the weights are left as they are, because a callback copies them.
        """
        if self._pass_rows is not None:
            check_passes(self.model, self._pass_rows)
        self.engine.check_step()
        if self.model.train_function is None and not self._starts:
            self.engine.share_weights()
        self._starts = False

    def _wrap_function(self, name: str, function: Any) -> Any:
        """Wrap Keras' train, test or predict function, to add the engine's work, audits and timing.

        `name` is the model's attribute for the function, such as "train_function".
        """
        engine = self.engine
        training = name == "train_function"
        self._plain.clear(training)
        if training:
            function = engine.wrap_training(function)
            function = self.times.wrap_steps(function, lambda: self.model.steps_per_execution)
        if training and self.audit is not None:
            self.audit.forget_steps()
            function = self.audit.wrap_training(function)
        tests = name == "test_function" and not overrides(self.model, "test_step")
        if tests:
            function = engine.wrap_tests(function)
        if tests and self.audit is not None:
            function = self.audit.wrap_tests(function)
        if engine.splits and (training or tests):
            audited = self.audit is not None
            function = wrap_with_measurement(engine, self._plain, training, audited, function)
        return self.times.wrap_call(function) if training else function

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """Train as `Model.fit` does, with batches divided among devices.

        The default batch size is the split's global batch.
        """
        self.engine.check_model()
        call = self._bind("fit", arguments, keywords)
        call_arguments = call.arguments
        self.engine.build(call_arguments["x"])
        self.batch, self.samples, self._starts = None, None, True
        self.times.begin()
        if are_arrays(call_arguments["x"]):
            self._fit_arrays(call_arguments)
        else:
            self._fit_dataset(call_arguments)
        call_arguments["callbacks"] = self.engine.begin_fit(call_arguments["callbacks"])
        if self.audit is not None:
            notes = EpochStartCallback(self.audit.begin_epoch)
            call_arguments["callbacks"] = with_callback(
                call_arguments["callbacks"], notes, self.model
            )
        return type(self.model).fit(*call.args, **call.kwargs)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate as `Model.evaluate` does, with batches divided among devices.

        The default batch size is the split's global batch. See `_evaluated_rows` for an exception.
        """
        call = self._bind("evaluate", arguments, keywords)
        call_arguments = call.arguments
        self.engine.build(call_arguments["x"])
        size = call_arguments["batch_size"] or self._evaluated_rows(self.split.global_batch)
        if isinstance(call_arguments["x"], tf.data.Dataset):
            call_arguments["x"] = batch_samples(call_arguments["x"], size, _inputs(self.model))
        elif are_arrays(
            call_arguments["x"]
        ) and "_use_cached_eval_dataset" not in call_arguments.get("kwargs", {}):
            if self.group is None or not size:
                call_arguments["batch_size"] = size
            else:
                call_arguments["x"], steps = self._in_order(
                    pack_arrays(*map(call_arguments.get, ARRAYS)), size
                )
                call_arguments |= {
                    "y": None,
                    "sample_weight": None,
                    "batch_size": None,
                    "steps": call_arguments["steps"] or steps,
                }
        with self.times.time_separately("validation"):
            return type(self.model).evaluate(*call.args, **call.kwargs)

    def compile_config(self) -> Any:
        """Return Keras' compile configuration; warn if `clone_model` is the caller.

        The clone would train on one device only.
        """
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
        """Bind a call's arguments to the signature of Keras' method `name`, with its defaults."""
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

    def _fit_arrays(self, call_arguments: dict[str, Any]) -> None:
        """Replace arrays in the arguments of `fit` with a dataset of batches, in place."""
        # the dataset doesn't pause between epochs; data that only Keras can batch stay as they are
        self.batch = size = check_global_batch(
            call_arguments["batch_size"] or self.split.global_batch or 32, len(self.split.devices)
        )
        if size == self._plan_batch:
            warn_small_data(count_array_rows(call_arguments["x"]), size)
        self._note_batch(size)
        if self.group is None and not is_plain(call_arguments, self.model):
            call_arguments["batch_size"] = size
            return
        if call_arguments["validation_split"]:
            split_for_validation(call_arguments)
        data = pack_arrays(
            call_arguments["x"],
            call_arguments["y"],
            call_arguments["sample_weight"],
            call_arguments["class_weight"],
        )
        arrays = ArrayBatches(data, size, bool(call_arguments["shuffle"]), self.engine.draw_seed())
        call_arguments |= {
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
            [call_arguments[name] for name in ("epochs", "steps_per_epoch", "shuffle")],
        )
        steps = call_arguments["steps_per_epoch"]
        # an execution of several steps must end with an epoch, so the dataset must end there
        ends = self.model.steps_per_execution > 1
        endless = self.group is None or (steps is None and not ends)
        if not ends:
            call_arguments["steps_per_epoch"] = steps or arrays.steps
        self.samples = arrays.rows if steps in (None, arrays.steps) else None
        call_arguments["x"] = self.engine.batches(arrays, endless)
        self._prepare_validation(call_arguments, size)

    def _in_order(self, data: tuple[Any, ...], size: int) -> tuple[Any, int]:
        """Return a dataset of batches in the order of the data, and the number of batches.

        `size` is the batch size.
        """
        arrays = ArrayBatches(data, size)
        check_same_arrays(self.group, data, size, ())
        return self.engine.batches(arrays, endless=False), arrays.steps

    def _fit_dataset(self, call_arguments: dict[str, Any]) -> None:
        """Replace the dataset in the arguments of `fit` with a dataset of batches, in place.

        The model is also checked if rows are assigned to devices by length. Raises RequestError for
        a generator if there are several processes.
        """
        data, name = call_arguments["x"], self.split.engine
        if isinstance(data, tf.data.Dataset):
            size = call_arguments["batch_size"] or self.split.global_batch
            call_arguments |= {
                "x": batch_samples(data, size, _inputs(self.model)),
                "batch_size": None,
            }
            if isinstance(data.element_spec, AssignedArrays):
                check_padding(self.model, next(iter(data)))
            self._note_batch(batch_rows(call_arguments["x"]))
        elif self.group is not None:
            raise RequestError(
                f"engine={name!r} can't fit a generator.", "Give arrays, or split.data(...)."
            )
        self._prepare_validation(call_arguments, self.split.global_batch)

    def _prepare_validation(self, call_arguments: dict[str, Any], size: int | None) -> None:
        """Batch the validation data in the arguments of `fit`, in place.

        `size` is the batch size of the training. An argument `validation_batch_size` takes
        precedence.
        """
        data = call_arguments["validation_data"]
        if data is None:
            return
        size = call_arguments["validation_batch_size"] or self._evaluated_rows(size) or 32
        arrays = isinstance(data, tuple | list)
        call_arguments["validation_batch_size"] = size if arrays else None
        if isinstance(data, tf.data.Dataset):
            call_arguments["validation_data"] = batch_samples(data, size, _inputs(self.model))
        elif arrays and self.group is not None:
            call_arguments["validation_data"], steps = self._in_order(pack_arrays(*data), size)
            call_arguments |= {
                "validation_steps": call_arguments["validation_steps"] or steps,
                "validation_batch_size": None,
            }

    def _evaluated_rows(self, size: int | None) -> int | None:
        """Return the default batch size of validations and evaluations: `size`, as in Keras.

        With passes and a test step of the user's class, it is the largest batch that takes one pass
        on each device, because one device computes such a step on the whole batch.
        """
        return (self._one_pass if overrides(self.model, "test_step") else None) or size

    def _note_batch(self, rows: int | None) -> None:
        if rows is not None and self._plan_batch not in (None, rows):
            warn(
                f"Batches of {rows} samples are trained, not the plan's {self._plan_batch}: "
                f"the learning is exact, but "
                "the plan's shares and samples/s are for its own batch."
            )
            self._plan_batch = None


def _is_clone_model(frame: Any) -> bool:
    """Return whether the stack frame runs Keras' own `clone_model`.

    A user's function may have the same name.
    """
    module = str(frame.f_globals.get("__name__", ""))
    return bool(frame.f_code.co_name == "clone_model" and module.startswith("keras."))


def _inputs(model: Any) -> Any:
    """Return the model's inputs, or None before the model is built."""
    return getattr(model, "inputs", None) if model.built else None
