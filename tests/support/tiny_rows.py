"""Tiny rows for any of transformers' model classes, and a collate function for them."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from tests.support.tiny_inputs import Draw, Row, by_kind
from tests.support.tiny_labels import IGNORED, LABEL_KINDS

# padding values that aren't 0
PADDED = {"labels": IGNORED, "mc_labels": IGNORED}
CONSTANT = {"return_loss", "interpolate_pos_encoding"}


class UnfitError(Exception):
    """The rows have names that the model's forward doesn't accept."""


class Recipe(msgspec.Struct, frozen=True):
    """Which inputs and labels the rows of a class have."""

    inputs: str
    labels: str
    dtype: str = "float64"  # float64, widened (see tiny_models) or float32
    even: bool = False  # all rows have the same length


class Rows(Dataset[Row]):
    """The rows that a recipe describes."""

    def __init__(self, model: Any, recipe: Recipe, rows: int) -> None:
        dtype, names = (
            torch.float32 if recipe.dtype == "float32" else torch.float64,
            set(inspect.signature(type(model).forward).parameters),
        )
        self.recipe, self.rows = recipe, list[Row]()
        for number in range(rows):
            draw = Draw(model, number, dtype, recipe.even)
            row = by_kind(recipe.inputs)(draw)
            row |= LABEL_KINDS[recipe.labels](draw, row)
            if not set(row) <= names | {"return_loss"} or (
                "return_loss" in row and "return_loss" not in names
            ):
                raise UnfitError
            self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Row:
        return self.rows[row]


def collate(rows: list[Row]) -> Row:
    """Combine rows into a batch, and pad each name to its longest value."""
    return {name: _stack(name, [row[name] for row in rows]) for name in rows[0]}


def _stack(name: str, values: list[Any]) -> Any:
    if name in CONSTANT:
        return values[0]
    if isinstance(values[0], dict) or name in ("mask_labels", "class_labels"):
        return values
    if values[0].ndim and len({value.shape for value in values}) > 1:
        return _pad(values, PADDED.get(name, 0))
    return torch.stack(values)


def _pad(values: list[torch.Tensor], filled: int) -> torch.Tensor:
    """Pad and stack values to the largest size in each dimension."""
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    made = values[0].new_full((len(values), *shape), filled)
    for place, value in zip(made, values, strict=True):
        place[tuple(slice(size) for size in value.shape)] = value
    return made
