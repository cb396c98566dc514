"""Exploration's next measurement, based on the model of the machine and its predictions."""

from __future__ import annotations

from ..types import Probe
from .budget import Budget
from .rows import RowPolicy
from .solo_stage import SoloStage
from .split_stage import SplitStage
from .text_stage import TextStage
from .texts import TextPolicy


def explore(policy: RowPolicy | TextPolicy, budget: Budget, with_splits: bool) -> tuple[Probe, ...]:
    """Return the next probes of devices alone or, if there are none, of a split.

    A probe of one device with the others idle may replace that of a split. Return an empty tuple if
    no measurement is worth its time, or if none fits the budget.
    """
    if isinstance(policy, TextPolicy):
        return TextStage(policy.machine, budget, with_splits).next_probes()
    alone = SoloStage(policy.predictions, budget).next_probes()
    if alone:
        return alone
    probe = SplitStage(policy.predictions, budget, with_splits).next_probe()
    return (probe,) if probe else ()
