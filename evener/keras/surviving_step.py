"""A training step that continues if memory runs out in a gradient-accumulation pass.

The step has two graphs. The first runs the passes. The second sums the results over the processes,
and updates the weights.

If memory runs out in the first graph, variables are restored, and the graph runs again with more
passes. Meanwhile, the other processes wait in the all-reduces of the second graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ..errors import DeviceError
from ..training.passes import PassLimit
from ..training.retreat import Retreat, says_out_of_memory
from .attributes import PlainVariables
from .compatibility import list_normalizations, plain_variables
from .keras_step import OwnRows, Tensors, count_rows, open_rows
from .passes import DevicePasses, PassSums, StateUpdate
from .sparse_gradients import make_spec

TOO_LONG = "larger than max"  # gRPC reports messages that are too long as ResourceExhausted


class SurvivingStep:
    """Training step that computes this process's rows in passes, and retries if memory runs out.

    `limit` has the maximum rows per pass, which is halved for a retry. If it is None, an error is
    raised at once. `report_retry` is called for each retry.
    """

    def __init__(
        self, engine: Any, limit: PassLimit | None, report_retry: Callable[[Retreat], None]
    ) -> None:
        self._engine, self._limit, self._report_retry = engine, limit, report_retry
        # minimum rows per pass; batch normalization needs two
        self._least = 1 + any(
            normalization.trainable for normalization in list_normalizations(engine.model)
        )
        self._spec: Any = None  # type of the batches for which the graphs were traced
        self._compute: Any = None
        self._finish: Any = None
        self._states: list[Any] = []  # states that a pass may change
        self._updated: list[tuple[Any, str]] = []  # states that passes return, and their kinds
        self._reached: list[int] = []  # indices of the trainable weights with a gradient

    def __call__(self, batches: Any) -> Any:
        """Train on the next batch, and return the logs.

        Raises DeviceError if memory runs out in the weight update, or 20 times in a row with the
        smallest passes.
        """
        data = next(iter(batches))
        self._trace_graphs(getattr(batches, "element_spec", None), data)
        before = [tf.convert_to_tensor(state) for state in self._states]
        began = tf.timestamp()
        result = self._run_with_retries(data, before)
        try:
            return self._finish(data, before, began, *result)
        except Exception as error:
            if not is_out_of_memory(error) or self._limit is None:
                raise
            group = self._engine.group
            raise DeviceError(
                f"Rank {group.rank} ran out of memory when it updated the weights: "
                f"{describe_memory(group.device)}.",
                (
                    "Train on from the last checkpoint, with a smaller model or optimizer, or a "
                    "plan without this device."
                ),
            ) from None

    def _run_with_retries(self, data: Tensors, before: list[Any]) -> Any:
        """Run the passes; if memory runs out, restore the variables and try smaller passes.

        `before` has the variables' values from before the step.
        """
        cut, rank, limit = self._engine.cut, self._engine.group.rank, self._limit
        size = cut.sizes(int(data.rows if isinstance(data, OwnRows) else count_rows(data)))[rank]
        most = (cut.micros or cut.weights)[rank]
        if limit is None:
            return self._compute(data, tf.constant(-(-size // most), tf.int64))
        limit.begin_batch()
        while True:
            passes = limit.count(size, most, self._least)
            try:
                result = self._compute(data, tf.constant(passes, tf.int64))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                limit.complete()
                return result
            self._retreat(limit, -(-size // passes), before)

    def _retreat(self, limit: PassLimit, rows: int, before: list[Any]) -> None:
        began = time.monotonic()
        for state, value in zip(self._states, before, strict=True):
            state.assign(value)
        limit.count_failure(rows, self._least, describe_memory(self._engine.group.device))
        smaller = limit.halve(rows, self._least)
        self._report_retry(Retreat(limit.step, rows, smaller, time.monotonic() - began, 0))

    def _trace_graphs(self, spec: Any, data: Tensors) -> None:
        """Trace both graphs of the step for this type of batch, unless they are already traced.

        If `spec` is None, the type of the batch `data` is used, with any number of rows.
        """
        spec = tf.nest.map_structure(open_rows, data) if spec is None else spec
        if spec == self._spec:
            return
        number = tf.TensorSpec([], tf.int64)
        self._compute = tf.function(self._run_passes, autograph=False).get_concrete_function(
            spec, number
        )
        self._states = list_states(self._engine.model)
        before = [tf.TensorSpec(state.shape, state.dtype) for state in self._states]
        result = tf.nest.map_structure(make_spec, self._compute.structured_outputs)
        finish = tf.function(self._finish_step, autograph=False)
        self._finish = finish.get_concrete_function(
            spec, before, tf.TensorSpec([], tf.float64), *result
        )
        self._spec = spec

    def run_in_graph(self, data: Tensors) -> dict[str, Any]:
        """Run the passes and the weight update in a graph that is being traced, without retries."""
        self._states = list_states(self._engine.model)
        before = [tf.convert_to_tensor(state) for state in self._states]
        own = self._engine.own_rows(data)
        passes = self._engine.cut.passes(self._engine.group.rank, own.size)
        return self._finish_step(data, before, tf.timestamp(), *self._run_passes(data, passes))

    def _run_passes(self, data: Tensors, passes: Any) -> tuple[Any, ...]:
        engine = self._engine
        own = engine.own_rows(data)
        batch = keras.utils.unpack_x_y_sample_weight(own.data)
        device, variables = engine.group.device, PlainVariables(engine.model)
        found = DevicePasses(
            engine.model, engine.kinds[True], device, 0, batch, own.size, own.rows, variables
        ).run(passes)
        self._updated = [(update.state, update.kind) for update in found.updates]
        self._reached = [
            place for place, gradient in enumerate(found.gradients) if gradient is not None
        ]
        gradients = [found.gradients[place] for place in self._reached]
        return found.outputs, found.loss, gradients, [update.value for update in found.updates]

    def _finish_step(
        self,
        data: Tensors,
        before: list[Any],
        began: Any,
        outputs: Tensors,
        loss: Any,
        gradients: Any,
        values: Any,
    ) -> dict[str, Any]:
        by_place = dict(zip(self._reached, gradients, strict=True))
        every = [by_place.get(place) for place in range(len(self._engine.model.trainable_weights))]
        pairs = zip(self._updated, values, strict=True)
        updates = [StateUpdate(state, value, kind) for (state, kind), value in pairs]
        states = dict(zip(map(id, self._states), before, strict=True))
        logs: dict[str, Any] = self._engine.finish_passes(
            data, states, began, PassSums(outputs, loss, every, updates)
        )
        return logs


def list_states(model: Any) -> list[Any]:
    """Return the variables that a training step may change, except for weights."""
    every = [
        *model.non_trainable_variables,
        *model.metrics_variables,
        *plain_variables(model),
    ]
    return list({id(each): each for each in every}.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether TensorFlow's error means that memory ran out."""
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return TOO_LONG not in str(error)
    return isinstance(
        error, tf.errors.InternalError | tf.errors.UnknownError
    ) and says_out_of_memory(str(error))


def describe_memory(device: str) -> str:
    """Return a phrase for error messages that says how much of the device's memory is used."""
    if not device.startswith("GPU"):
        return "the memory of this machine's CPU"
    held = tf.config.experimental.get_memory_info(device)
    return "the training holds {:.1f} GiB, at most {:.1f}".format(
        *(held[each] / 2**30 for each in ("current", "peak"))
    )
