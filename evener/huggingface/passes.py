"""The weights of the passes in a Trainer's optimizer step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import torch

from .dealt_rows import PassList
from .gathering import Gathering
from .loss import ITEMS, ROWS, TrainerLoss, has_ignored


class Pass(msgspec.Struct, frozen=True):
    """One pass of this rank: its rows that count, the weight of its loss in its global batch's, and its place."""

    rows: int
    weight: Any
    first: bool
    last: bool  # of its global batch
    ends: bool = True  # False for a piece of a pass, if others follow


def weigh_passes(
    loss: TrainerLoss,
    passes: list[Any],
    sizes: list[tuple[int, ...]],
    totals: list[int],
    items: Any,
    gathering: Gathering,
    device: torch.device,
) -> tuple[list[float], Any, bool]:
    """The weight of each pass, the items of all ranks, and whether any rank has labels that are ignored.

    `sizes` are this rank's rows in the passes of each global batch, `totals` those of all ranks.
    """
    rows = [own for step in sizes for own in step]
    if loss.mean_over == ROWS:
        weights = [own / total for step, total in zip(sizes, totals, strict=True) for own in step]
    else:
        weights = [float(own > 0) for own in rows]
    by_labels = loss.mean_over not in (ITEMS, ROWS)
    if items is None and not by_labels and loss.certain:
        return weights, items, False
    counts = [loss.count(each) * (own > 0) if by_labels else 0.0 for each, own in zip(passes, rows, strict=True)]
    firsts = [sum(map(len, sizes[:step])) for step in range(len(sizes) + 1)]
    steps = [sum(counts[first:stop]) for first, stop in pairwise(firsts)]
    ignored = not loss.certain and any(map(has_ignored, passes))
    own = torch.tensor([float(items or 0.0), float(ignored), *steps], dtype=torch.float64, device=device)
    total, seen, *each = gathering.add_up(own)
    if by_labels:
        spread = [sum_ for sum_, step in zip(each, sizes, strict=True) for _ in step]
        weights = [count / (sum_ or 1.0) for count, sum_ in zip(counts, spread, strict=True)]
    return (
        weights,
        None if items is None else torch.tensor(total, device=device).to(torch.as_tensor(items).dtype),
        bool(seen),
    )


def weigh_loss(loss: Any, factor: float, model: Any) -> Any:
    """The loss times its factor; 0 for one that doesn't count, even where it is NaN."""
    if factor == 0.0 and not torch.isfinite(loss):
        return sum((each * 0).sum() for each in model.parameters() if each.requires_grad)
    return loss if factor == 1.0 else loss * factor


def list_passes(inputs: Any) -> list[Any]:
    """The passes that a batch was divided into; the batch itself if it is one pass."""
    return inputs if isinstance(inputs, PassList) else [inputs]


def count_tokens(trainer: Any, inputs: Any) -> int:
    """Tokens of a pass: all of them, or those that the attention mask has where padding isn't counted."""
    name = getattr(trainer.model, "main_input_name", "input_ids")
    if name not in inputs:
        return 0
    if trainer.args.include_num_input_tokens_seen == "non_padding" and "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    return int(inputs[name].numel())
