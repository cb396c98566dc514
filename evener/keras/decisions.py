"""Decisions in the graph of a step: comparisons of figures that aren't one for each row, as of the
mean confidence of a batch with a threshold.

Such a figure is another one for parts of a batch, so a part may take the other branch than the
whole. Most batches don't show that, as their figure and those of their parts lie on one side. An
audit looks at the figures instead, and at what is learned on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

COMPARISONS = ("Greater", "GreaterEqual", "Less", "LessEqual")
MOST_NUMBERS = 4096  # that one comparison may have
ROUNDING = 1e-6  # of a figure
OWN = f"{Path(__file__).parent}/"
TENSORFLOW = f"{Path(tf.__file__).parent}/"
KERAS = f"{Path(keras.__file__).parent}/src/"
CALLED = tuple(f"{KERAS}{each}/" for each in ("ops", "backend", "utils"))  # by users and by Keras

Margins = dict[str, list[Any]]  # left less right side of comparisons, by where they are


def list_decisions(graph: Any) -> Iterator[tuple[str, Any]]:
    """The comparisons of users' code in a graph, each with its place; not those of each row."""
    for operation in graph.get_operations():
        if operation.type not in COMPARISONS:
            continue
        shape = operation.outputs[0].shape
        fixed = shape.is_fully_defined() and shape.num_elements() <= MOST_NUMBERS
        place = find_place(operation) if fixed else ""
        if place:
            yield place, operation


def find_place(operation: Any) -> str:
    """The line of a user's code that made an operation, such as `train.py, line 3`; "" for what is
    Keras' own.

    An operation of a functional model has no line: its name tells it.
    """
    for frame in reversed(operation.traceback):
        path = frame.filename
        if path.startswith((TENSORFLOW, *CALLED)):
            continue
        if path.startswith(f"{KERAS}models/"):
            return "/".join(operation.name.split("/")[-2:])
        if path.startswith((KERAS, OWN)):
            return ""
        return f"{Path(path).name}, line {frame.lineno}"
    return ""


def read_margin(operation: Any) -> Any:
    """The left side of a comparison less the right one."""
    left, right = operation.inputs
    return tf.cast(left, tf.float64) - tf.cast(right, tf.float64)


class Shifts:
    """Amounts that are added to the left sides of a graph's comparisons: 0 but where `assign` has
    given others.
    """

    def __init__(self) -> None:
        self._amounts: dict[str, list[Any]] = {}

    def insert(self, place: str, operation: Any) -> None:
        """Add an amount to a comparison of the graph that is being traced."""
        left = operation.inputs[0]
        shape = operation.outputs[0].shape
        amounts = self._amounts.setdefault(place, [])
        number = len(amounts)
        amounts.append(np.zeros(shape, left.dtype.as_numpy_dtype))
        amount = operation.graph.capture_call_time_value(
            lambda: tf.constant(self._amounts[place][number]), tf.TensorSpec(shape, left.dtype)
        )
        operation._update_input(0, left + amount)

    def assign(self, place: str, amounts: Sequence[Any]) -> None:
        """Give the comparisons of a place these amounts."""
        pairs = zip(self._amounts[place], amounts, strict=True)
        self._amounts[place] = [amount.astype(before.dtype) for before, amount in pairs]

    def clear(self) -> None:
        """Make all of them 0."""
        for every in self._amounts.values():
            every[:] = [np.zeros_like(each) for each in every]


def find_apart(whole: Margins, others: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """By place, how far the figures of parts of a batch are from those of the whole, if they are.

    `others` has all margins of a place that parts have.
    """
    found = {}
    for place, margins in whole.items():
        far = [_farthest(margin, others.get(place, ())) for margin in margins]
        if any(np.any(each) for each in far):
            found[place] = far
    return found


def _farthest(margin: Any, others: Sequence[Any]) -> Any:
    """The largest distances from a margin; those that are rounding are 0."""
    distances = [np.abs(other - margin) for other in others if other.shape == margin.shape]
    farthest = np.max(distances, axis=0) if distances else np.zeros_like(margin)
    return np.where(farthest > ROUNDING * (1 + np.abs(margin)), farthest, 0.0)


def both_sides(margins: Sequence[Any], apart: Sequence[Any]) -> Iterator[list[Any]]:
    """Amounts that bring margins to one side of 0, and to the other: half of the distance to those
    of parts. A margin that all parts have stays.
    """
    for side in (0.5, -0.5):
        yield [
            np.where(distance > 0, side * distance - margin, 0.0)
            for margin, distance in zip(margins, apart, strict=True)
        ]
