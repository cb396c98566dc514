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

# left minus right sides of comparisons, by line of user code, in the form of find_line
Margins = dict[str, list[Any]]


def list_decisions(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the comparisons in the user's code whose results have a fixed shape.

    Results with more than 4096 elements are left out, and so are comparisons with a result for each
    row, because a row has the same result in a part of a batch as in the whole batch. Each item is
    a pair: the comparison's line of code, and its operation in the graph.
    """
    # Parts of a batch decide comparisons with one result per row as the whole batch does.
    for operation in graph.get_operations():
        if operation.type not in COMPARISONS:
            continue
        shape = operation.outputs[0].shape
        fixed = shape.is_fully_defined() and shape.num_elements() <= MOST_NUMBERS
        line = find_line(operation) if fixed else ""
        if line:
            yield line, operation


def find_line(operation: Any) -> str:
    """Return the line of user code that created the operation, such as "train.py, line 12".

    Inside Keras' models, the result is the operation's name; elsewhere in Keras and in evener, it
    is "".
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
    """Adds offsets to the left sides of comparisons in a traced step, to change their results."""

    def __init__(self) -> None:
        self._offsets: dict[str, list[Any]] = {}

    def insert(self, line: str, operation: Any) -> None:
        """Add an offset, which is 0 at first, to the left side of a comparison.

        `line` is the line of the user's code with the comparison.
        """
        left = operation.inputs[0]
        shape = operation.outputs[0].shape
        offsets = self._offsets.setdefault(line, [])
        number = len(offsets)
        offsets.append(np.zeros(shape, left.dtype.as_numpy_dtype))
        offset = operation.graph.capture_call_time_value(
            lambda: tf.constant(self._offsets[line][number]), tf.TensorSpec(shape, left.dtype)
        )
        operation._update_input(0, left + offset)

    def assign(self, line: str, offsets: Sequence[Any]) -> None:
        """Set the offsets, one for each comparison in `line`, a line of the user's code.

        Each offset is added to the left side of its comparison.
        """
        pairs = zip(self._offsets[line], offsets, strict=True)
        self._offsets[line] = [offset.astype(before.dtype) for before, offset in pairs]

    def clear(self) -> None:
        """Set all offsets to 0, so that the comparisons have their original results again."""
        for every in self._offsets.values():
            every[:] = [np.zeros_like(each) for each in every]


def find_distances(whole: Margins, parts: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return how far the margins of a batch's parts are from those of the whole batch.

    Margins are left minus right sides of comparisons, by line of code. Only lines with a difference
    are included.
    """
    found = {}
    for line, margins in whole.items():
        far = [_find_largest_distance(margin, parts.get(line, ())) for margin in margins]
        if any(np.any(each) for each in far):
            found[line] = far
    return found


def _find_largest_distance(margin: Any, others: Sequence[Any]) -> Any:
    """Return the largest distance between `margin` and any of the others, elementwise."""
    distances = [np.abs(other - margin) for other in others if other.shape == margin.shape]
    farthest = np.max(distances, axis=0) if distances else np.zeros_like(margin)
    # distances within rounding count as 0
    return np.where(farthest > ROUNDING * (1 + np.abs(margin)), farthest, 0.0)


def force_both_sides(margins: Sequence[Any], distances: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield offsets that make left sides of comparisons larger than right sides, then smaller.

    The offsets are added to the left sides. `margins` are the left minus the right sides, and
    `distances` come from `find_distances`. A comparison with distance 0 isn't changed.
    """
    for side in (0.5, -0.5):
        yield [
            np.where(distance > 0, side * distance - margin, 0.0)
            for margin, distance in zip(margins, distances, strict=True)
        ]
