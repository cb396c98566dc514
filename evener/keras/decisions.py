"""Find decisions in the user's code: comparisons whose result depends on all rows of a batch.

An example is an `if` that compares a batch's mean confidence with a threshold. A part of the batch
has another mean, so it may take a different branch from the whole batch. Most batches don't reveal
this, because the means of the batch and of its parts lie on the same side of the threshold.

Therefore an audit compares the margins (left minus right side) of the batch and of its parts. If
they differ, it forces the decision to each side and compares the gradients of both branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

COMPARISONS = ("Greater", "GreaterEqual", "Less", "LessEqual")
MOST_NUMBERS = 4096  # maximum number of elements in a comparison
ROUNDING = 1e-6  # relative rounding error of a margin
OWN = f"{Path(__file__).parent}/"
TENSORFLOW = f"{Path(tf.__file__).parent}/"
KERAS = f"{Path(keras.__file__).parent}/src/"
# called by users and by Keras
CALLED = tuple(f"{KERAS}{each}/" for each in ("ops", "backend", "utils"))

# left minus right sides of comparisons, by place: a line of user code, in the form of find_place
Margins = dict[str, list[Any]]


def list_decisions(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the comparisons in the user's code whose result doesn't have an entry for each row.

    Each is yielded as a pair: the line of code, and the graph's operation.
    """
    # Parts of a batch decide comparisons with one result per row as the whole batch does.
    for operation in graph.get_operations():
        if operation.type not in COMPARISONS:
            continue
        shape = operation.outputs[0].shape
        fixed = shape.is_fully_defined() and shape.num_elements() <= MOST_NUMBERS
        place = find_place(operation) if fixed else ""
        if place:
            yield place, operation


def find_place(operation: Any) -> str:
    """Return the line of user code that made the operation, such as "train.py, line 12".

    Inside Keras' models, it is the operation's name; elsewhere in Keras or in evener, "".
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
    """Return the left side minus the right side of a comparison, as a tensor."""
    left, right = operation.inputs
    return tf.cast(left, tf.float64) - tf.cast(right, tf.float64)


class Shifts:
    """Changes the results of comparisons in a traced step by adding to their left sides."""

    def __init__(self) -> None:
        self._amounts: dict[str, list[Any]] = {}

    def insert(self, place: str, operation: Any) -> None:
        """Insert an amount, at first 0, that is added to the left side of a comparison."""
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
        """Set the amounts of the comparisons at `place`, a line of the user's code."""
        pairs = zip(self._amounts[place], amounts, strict=True)
        self._amounts[place] = [amount.astype(before.dtype) for before, amount in pairs]

    def clear(self) -> None:
        """Set all amounts to 0, so that the comparisons have their own results again."""
        for every in self._amounts.values():
            every[:] = [np.zeros_like(each) for each in every]


def find_apart(whole: Margins, others: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return how far the margins of a batch's parts are from those of the whole batch.

    Margins are left minus right sides of comparisons. Only lines of code with a difference are
    included.
    """
    found = {}
    for place, margins in whole.items():
        far = [_farthest(margin, others.get(place, ())) for margin in margins]
        if any(np.any(each) for each in far):
            found[place] = far
    return found


def _farthest(margin: Any, others: Sequence[Any]) -> Any:
    """Return the largest distance between `margin` and any of the others, elementwise."""
    distances = [np.abs(other - margin) for other in others if other.shape == margin.shape]
    farthest = np.max(distances, axis=0) if distances else np.zeros_like(margin)
    # distances within rounding count as 0
    return np.where(farthest > ROUNDING * (1 + np.abs(margin)), farthest, 0.0)


def both_sides(margins: Sequence[Any], apart: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield amounts that make all comparisons true, then amounts that make them false.

    `apart` has the distances from `find_apart`; a comparison with distance 0 isn't changed.
    """
    for side in (0.5, -0.5):
        yield [
            np.where(distance > 0, side * distance - margin, 0.0)
            for margin, distance in zip(margins, apart, strict=True)
        ]
