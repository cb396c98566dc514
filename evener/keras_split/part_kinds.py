"""A model's measured kinds of losses and states, and what an engine refuses for them before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import RequestError
from .compatibility import NO_PASSES, TOWERS

ROWS, SUM, SAME = "rows", "sum", "same"
COUNTS = ("steps", "labels", "weights")  # units beside rows that a loss may be a mean over, counted in each step
OTHER = ""  # none of them
_ALONE = "Leave that out, or train on one device."


class PartKinds(msgspec.Struct, frozen=True):
    """Relations between parts of a batch and the whole; by default every loss is a mean over rows.

    `loss` and `added` (the losses that layers add) say by what parts add up: ROWS, SUM, one of COUNTS, or OTHER.
    `states` has the same for the changes of states by their place in `model.non_trainable_variables`: ROWS, SUM, SAME.
    """

    loss: str = ROWS
    added: tuple[str, ...] = ()
    states: dict[int, str] = {}
    seen: str = ""  # a sentence on the loss, where it is OTHER
    fault: str = ""  # why no engine can put parts together

    def added_kind(self, place: int) -> str:
        """The way in which an added loss adds up."""
        return self.added[place] if place < len(self.added) else ROWS


def refuse_partial(found: PartKinds, engine: str, in_passes: bool) -> None:
    """Refuse a loss that can't be put together from those of an engine's devices or passes."""
    who = "A plan with passes" if in_passes else f"engine={engine!r}"
    if found.loss == OTHER:
        seen, remedy = found.seen.rstrip("."), f"{TOWERS} {NO_PASSES}" if in_passes else TOWERS
        raise RequestError(f"{who} can't put this loss together. {seen}.", remedy)
    if in_passes and found.loss in COUNTS:
        over = {"steps": "the steps that a mask leaves", "labels": "labels that aren't ignored", "weights": "weights"}
        raise RequestError(
            f"A plan with passes can't weight this loss exactly: it is a mean over {over[found.loss]}, not over rows.",
            NO_PASSES,
        )


def refuse_replicas(found: PartKinds, model: Any, normal: Sequence[str]) -> None:
    """Refuse what a strategy's replicas, which average, get wrong; `normal` are the states of normalization layers."""
    if found.loss != ROWS:
        seen = found.seen or "It isn't a mean over rows."
        raise RequestError(f"engine='mirrored' can't weight this loss exactly. {seen}", TOWERS)
    if any(kind != ROWS for kind in found.added):
        raise RequestError(f"engine='mirrored' can't weight a loss that a layer of {model.name} adds as a sum.", TOWERS)
    for place, kind in found.states.items():
        path = model.non_trainable_variables[place].path
        if kind != SAME and path not in normal:
            raise RequestError(
                f"A call of the model assigns {path} by the rows of its batch, which engine='mirrored' can't add up.",
                TOWERS,
            )


def refuse_everywhere(found: PartKinds, model: Any) -> None:
    """Refuse what no engine computes as one device does."""
    if found.fault:
        raise RequestError(found.fault, "Train it on one device.")
    if OTHER in found.added:
        raise RequestError(
            f"A layer of {model.name} adds a loss that is neither a mean nor a sum over rows.",
            "Compute it in the model's loss, with engine='towers', or train on one device.",
        )
    for place, kind in found.states.items():
        if kind == OTHER:
            path = model.non_trainable_variables[place].path
            raise RequestError(
                f"A call of the model assigns {path}, and what the parts of a batch make of it isn't what the whole "
                "makes of it.",
                _ALONE,
            )
