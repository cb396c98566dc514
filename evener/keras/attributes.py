"""Tensors that a model's call stores in attributes, such as `self.z_mean` in a VAE.

A loss may read such tensors. The call on one device (a tower) only stores tensors that were
computed from this device's rows. Therefore the tensors are collected after the call on each device.
They are joined in the order of the rows, and written back before the loss of the whole batch is
computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .compatibility import all_layers, plain_variables
from .part_kinds import ROWS, weigh_part

DEEPEST = 4  # maximum depth of containers within an attribute
LIBRARIES = ("keras.", "tensorflow.", "numpy.")

Leaves = dict[str, Any]  # tensors by name: layer number, attribute and item, as in "3.z_mean/0"


class PlainVariables:
    """Saves and restores the values of a model's `tf.Variable` attributes.

    Keras doesn't track such variables.
    """

    def __init__(self, model: Any) -> None:
        self._before = [(each, tf.identity(each)) for each in plain_variables(model)]

    def restore(self) -> None:
        """Assign the saved values to the variables."""
        for variable, value in self._before:
            variable.assign(value)


class TensorPlace(NamedTuple):
    """An attribute of a model that holds tensors, or an item of a list or dict in an attribute."""

    name: str
    container: Any
    key: Any

    def leaves(self) -> Leaves:
        """Return the tensors in this attribute or item, by name."""
        flat = tf.nest.flatten(self.container[self.key])
        return {f"{self.name}/{place}": leaf for place, leaf in enumerate(flat)}


class CallTensors:
    """Finds the tensors that a model's call stores in attributes, and restores the attributes.

    Create it before the call.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [vars(layer) for layer in (model, *all_layers(model))]
        self._attributes = [_users_attributes(layer) for layer in self._layers]
        self._containers: list[Any] = []
        slots = self._find_places(self._containers)
        self._before = {name: leaf for slot in slots for name, leaf in slot.leaves().items()}
        self._contents = [_copy(container) for container in self._containers]

    def collect(self) -> Leaves:
        """Return the tensors in attributes that are new since this object was created."""
        slots = self._find_places([])
        found = {name: leaf for slot in slots for name, leaf in slot.leaves().items()}
        return {name: leaf for name, leaf in found.items() if self._before.get(name) is not leaf}

    def restore(self) -> None:
        """Restore the attributes, and the lists and dicts in them, to the state before the call."""
        for layer, before in zip(self._layers, self._attributes, strict=True):
            now = _users_attributes(layer)
            for name in {**before, **now}:
                if now.get(name) is before.get(name):
                    continue
                if name in before and (_can_hold(before[name]) or _can_hold(now.get(name))):
                    layer[name] = before[name]
                elif name not in before and any(_find_tensors(layer, name, "", [], 0)):
                    del layer[name]
        for container, content in zip(self._containers, self._contents, strict=True):
            _fill(container, content)

    def write(self, leaves: Leaves) -> None:
        """Store tensors in the model's attributes; the keys of `leaves` name the attributes."""
        for slot in self._find_places([]):
            flat = [leaves.get(name, leaf) for name, leaf in slot.leaves().items()]
            value = tf.nest.pack_sequence_as(slot.container[slot.key], flat)
            slot.container[slot.key] = value

    def _find_places(self, containers: list[Any]) -> list[TensorPlace]:
        """Return all attributes and items in the model's layers that hold tensors.

        Each searched list or dict is appended to `containers`.
        """
        return [
            slot
            for number, layer in enumerate(self._layers)
            for name in _users_attributes(layer)
            for slot in _find_tensors(layer, name, f"{number}.{name}", containers, 0)
        ]


@functools.cache
def list_keras_attributes() -> frozenset[str]:
    """Return the names of the attributes that Keras sets on every model."""
    # an explicit name, so that Keras' counters for automatic names don't change
    return frozenset(vars(keras.Model(name="without_layers")))


def _users_attributes(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in list_keras_attributes()}


def _find_tensors(
    container: Any, key: Any, name: str, containers: list[Any], depth: int
) -> Iterator[TensorPlace]:
    """Yield the places of tensors in an attribute, in containers nested up to 4 deep.

    Each searched list or dict is appended to `containers`.
    """
    value = container[key]
    if isinstance(value, tf.Tensor | tuple):
        flat = tf.nest.flatten(value)
        if flat and all(isinstance(leaf, tf.Tensor) for leaf in flat):
            yield TensorPlace(name, container, key)
        return
    inner = _find_items(value)
    if inner is None or depth == DEEPEST:
        return
    containers.append(inner)
    for inner_key in inner if isinstance(inner, dict) else range(len(inner)):
        yield from _find_tensors(inner, inner_key, f"{name}.{inner_key}", containers, depth + 1)


def _find_items(value: Any) -> Any:
    """Return the list or dict with a value's items, or None for a value without items.

    For a plain object, this is the dict of its attributes.
    """
    if isinstance(value, list | dict):
        return value
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    known = any(kind.__module__.startswith(LIBRARIES) for kind in type(value).__mro__)
    return None if known else vars(value)


def _can_hold(value: Any) -> bool:
    return isinstance(value, tf.Tensor | tuple) or _find_items(value) is not None


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _fill(container: Any, content: Any) -> None:
    """Replace the contents of a list or dict, but keep the container object itself."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            if container.get(key) is not value:
                container[key] = value
        return
    same = len(container) == len(content)
    if not (same and all(one is other for one, other in zip(container, content, strict=True))):
        container[:] = content


def join_tensors(
    tensors: Sequence[Leaves],
    sizes: Sequence[Any],
    parts: Sequence[Any],
    kinds: Mapping[str, str],
    pad: Callable[[Any], Any],
) -> Leaves:
    """Join the tensors that the model's calls for the parts of a batch have stored in attributes.

    - `tensors`: tensors of each part, by name.
    - `sizes`: row counts of the parts.
    - `parts`: these counts as fractions of the batch.
    - `kinds`: by name, whether tensors without rows are averaged or summed (see `weigh_part`).
    - `pad`: pads a tensor before its rows are concatenated.

    Tensors with rows are concatenated. Scalars and tensors named in `kinds` are weighted and added
    up.
    """
    joined = {}
    for name in tensors[0]:
        leaves = [each[name] for each in tensors if name in each]
        if len(leaves) < len(tensors):
            continue
        if name in kinds or leaves[0].shape.rank == 0:
            if leaves[0].dtype.is_floating:
                weights = [weigh_part(kinds.get(name, ROWS), part) for part in parts]
                joined[name] = _add_up(leaves, weights)
        else:
            counted = [_drop_filler(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)]
            joined[name] = tf.concat([pad(each) for each in counted], 0)
    return joined


def _drop_filler(leaf: Any, size: Any) -> Any:
    """Return the tensor's rows; for a device that has only computed a filler row, return no rows.

    `size` is the device's row count without the filler row.
    """
    return leaf[: tf.where(size > 0, tf.shape(leaf, tf.int64)[0], 0)]


def _add_up(leaves: Sequence[Any], weights: Sequence[Any]) -> Any:
    pairs = zip(leaves, weights, strict=True)
    terms = [tf.where(weight > 0, leaf * tf.cast(weight, leaf.dtype), 0) for leaf, weight in pairs]
    return tf.add_n(terms)
