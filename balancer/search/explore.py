"""Chooses the next measurement of exploration, from a model of the machine."""

from __future__ import annotations

from ..types import Probe
from .budget import Budget
from .rows import RowPolicy
from .solo_stage import SoloStage
from .split_stage import SplitStage
from .text_stage import TextStage
from .texts import TextPolicy


def explore(policy: RowPolicy | TextPolicy, budget: Budget, with_splits: bool) -> tuple[Probe, ...]:
    """Return the next probes, to be run at the same time.

    They are a round in which each device runs alone, if such a round is worth its time. Otherwise,
    the result is a single probe: of a split (only if `with_splits`), or of one device while the
    others are idle. It is empty if no measurement is worth its time or fits the budget.
    """
    if isinstance(policy, TextPolicy):
        return TextStage(policy.machine, budget, with_splits).next_probes()
    alone = SoloStage(policy.predictions, budget).next_probes()
    if alone:
        return alone
    probe = SplitStage(policy.predictions, budget, with_splits).next_probe()
    return (probe,) if probe else ()
