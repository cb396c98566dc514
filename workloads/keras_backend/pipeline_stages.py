"""A model as stages on named devices: each stage's gradient is computed where the stage itself was.

One tape over the whole model would leave the backward operations wherever TensorFlow's placer likes; a tape for each
stage, chained by hand, keeps them at home, so that a placement moves exactly the bytes that it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Tensor = Any  # tf.Tensor; TensorFlow is not typed
Variable = Any  # tf.Variable


@dataclass(frozen=True)
class Stage:
    """Some operations of the model: `call` maps a tensor to a tensor on `device`, using `variables`."""

    device: str
    call: Callable[[Tensor], Tensor]
    variables: tuple[Variable, ...] = ()


class StagedPass:
    """A forward pass through a chain of stages, and the backward pass through it."""

    def __init__(self, stages: Sequence[Stage], inputs: Tensor) -> None:
        self._steps: list[tuple[Stage, Any, Tensor, Tensor]] = []
        for stage in stages:
            with tf.device(stage.device), tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(list(stage.variables))
                if inputs.dtype.is_floating:
                    tape.watch(inputs)
                output = stage.call(inputs)
            self._steps.append((stage, tape, inputs, output))
            inputs = output
        self.output = inputs

    def gradients(self, of_output: Tensor) -> Iterator[tuple[Variable, Tensor]]:
        """Each variable with its gradient, last stage first, given the gradient of the output."""
        for stage, tape, inputs, output in reversed(self._steps):
            with tf.device(stage.device):
                to_inputs = inputs.dtype.is_floating
                sources = [*([inputs] if to_inputs else []), *stage.variables]
                found = tape.gradient(output, sources, output_gradients=of_output)
            if to_inputs:
                of_output = found.pop(0)
            yield from zip(stage.variables, found, strict=True)


def added(pairs: Sequence[tuple[Variable, Tensor]], variables: Sequence[Variable]) -> list[Tensor]:
    """The gradient of each variable: the sum of its parts, on the variable's own device."""
    parts: dict[Any, list[Tensor]] = {variable.ref(): [] for variable in variables}
    for variable, gradient in pairs:
        parts[variable.ref()].append(gradient)
    totals = []
    for variable in variables:
        with tf.device(variable.device):
            totals.append(tf.add_n(parts[variable.ref()]))
    return totals
