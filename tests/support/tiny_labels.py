"""Tiny labels for transformers' model classes, of every kind that one of them accepts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tests.support.tiny_configs import LABELS
from tests.support.tiny_inputs import Draw, Row

IGNORED = -100


def _tokens(draw: Draw, row: Row) -> Row:
    """Return the input tokens as labels, ignoring those at the start."""
    labels = row["input_ids"].clone()
    labels[..., : int(draw.whole(1, high=4)) + 1] = IGNORED
    return {"labels": labels}


def _masked(draw: Draw, row: Row) -> Row:
    labels = row["input_ids"].clone()
    kept = draw.whole(*labels.shape, high=3) == 0
    kept[..., -1] = True
    return {"labels": torch.where(kept, labels, IGNORED)}


def _token_classes(draw: Draw, row: Row) -> Row:
    labels = draw.whole(*row["input_ids"].shape)
    labels[..., : int(draw.whole(1, high=3))] = IGNORED
    return {"labels": labels}


def _boxes(draw: Draw, row: Row) -> Row:
    count, size = 1 + draw.row % 3, row["pixel_values"].shape[-1]
    boxes = 0.3 + 0.2 * torch.rand(count, 4, generator=draw.random, dtype=torch.float64).to(
        draw.dtype
    )
    made: Row = {"class_labels": draw.whole(count), "boxes": boxes}
    masks = (draw.real(count, size, size) > 0).to(draw.dtype)
    return {"labels": {**made, "masks": masks, "image_id": torch.tensor([draw.row])}}


def _masks(draw: Draw, row: Row) -> Row:
    count, size = 1 + draw.row % 2, row["pixel_values"].shape[-1]
    return {
        "mask_labels": (draw.real(count, size, size) > 0).to(draw.dtype),
        "class_labels": draw.whole(count),
    }


def _span(draw: Draw, row: Row) -> Row:
    size = row["input_ids"].shape[-1] if "input_ids" in row else 5
    return {"start_positions": draw.whole(high=size), "end_positions": draw.whole(high=size)}


def _size(row: Row) -> tuple[int, int]:
    pixels: torch.Tensor = row["pixel_values"]
    return int(pixels.shape[-2]), int(pixels.shape[-1])


LABEL_KINDS: dict[str, Callable[[Draw, Row], Row]] = {
    "none": lambda *_: {},
    "return_loss": lambda *_: {"return_loss": True},
    "class": lambda draw, _: {"labels": draw.whole()},
    "two classes": lambda draw, _: {"labels": draw.whole(high=2)},
    "tokens": _tokens,
    "masked tokens": _masked,
    "token classes": _token_classes,
    "target": lambda draw, _: {"labels": draw.words(3 + draw.row % 4)},
    "span": _span,
    "next sentence": lambda draw, row: {
        **_masked(draw, row),
        "next_sentence_label": draw.whole(high=2),
    },
    "sentence order": lambda draw, row: {
        **_masked(draw, row),
        "sentence_order_label": draw.whole(high=2),
    },
    "map": lambda draw, row: {"labels": draw.whole(*_size(row))},
    "depth": lambda draw, row: {"labels": draw.real(*_size(row)).abs() + 0.1},
    "boxes": _boxes,
    "masks": _masks,
    "figure": lambda draw, _: {"labels": draw.real()},
    "several classes": lambda draw, _: {"labels": draw.whole(LABELS, high=2).to(draw.dtype)},
    "picture": lambda draw, row: {"labels": draw.real(*row["pixel_values"].shape)},
    "mask": lambda draw, row: {"labels": (draw.real(*_size(row)) > 0).to(draw.dtype)},
    "target class": lambda draw, _: {"target_values": draw.whole()},
    "target figure": lambda draw, _: {"target_values": draw.real(draw.find("num_targets", 1))},
}
_BY_NAME = (  # the likeliest labels of a class, by its name
    (r"QuestionAnswering", ("span", "class", "several classes", "target")),
    (r"PreTraining$", ("next sentence", "sentence order", "masked tokens", "none")),
    (r"MaskedLM|LMHead$", ("masked tokens", "tokens")),
    (r"NextSentence", ("two classes",)),
    (r"MultipleChoice", ("two classes",)),
    (r"TokenClassification", ("token classes",)),
    (r"CTC|RNNT|TDT", ("target",)),
    (r"Segmentation", ("map", "masks", "boxes", "mask")),
    (r"Depth", ("depth",)),
    (r"Detection", ("boxes",)),
    (r"CausalLM", ("tokens",)),
    (
        r"Classification|Retrieval|XVector",
        ("class", "target class", "two classes", "several classes"),
    ),
    (r"Regression", ("target figure", "figure")),
    (r"ConditionalGeneration|Seq2Seq|2Seq|Text2Text|SpeechTo", ("target", "tokens")),
)
_OTHERWISE = (
    "return_loss",
    "tokens",
    "target",
    "masked tokens",
    "class",
    "figure",
    "none",
    "picture",
    "map",
    "mask",
)


def label_kinds(model: Any) -> list[str]:
    """Return the kinds of labels that a model may accept, the likeliest first."""
    named = [
        kind
        for pattern, kinds in _BY_NAME
        if re.search(pattern, type(model).__name__)
        for kind in kinds
    ]
    return list(dict.fromkeys((*named, *_OTHERWISE)))
