"""Choose which devices and layouts to measure before the final comparison."""

from __future__ import annotations

from ..types import Probe
from .budget import Budget
from .rows import RowPolicy
from .solo_stage import SoloStage
from .split_stage import SplitStage
from .text_stage import TextStage
from .texts import TextPolicy


def explore(policy: RowPolicy | TextPolicy, budget: Budget, with_splits: bool) -> tuple[Probe, ...]:
    """Return the next probes that would improve the predicted speeds.

    Single devices are measured first. If `with_splits` is set, steps over several devices follow.
    Empty if no probe is worth its time.
    """
    if isinstance(policy, TextPolicy):
        return TextStage(policy.machine, budget, with_splits).next_probes()
    alone = SoloStage(policy.predictions, budget).next_probes()
    if alone:
        return alone
    probe = SplitStage(policy.predictions, budget, with_splits).next_probe()
    return (probe,) if probe else ()
