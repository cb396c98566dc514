"""What exploration measures next, by what is known of the devices: they say what is known, the
stages what to try.
"""

from __future__ import annotations

from ..types import Probe
from .budget import Budget
from .rows import RowDevices
from .solo_stage import SoloStage
from .split_stage import SplitStage
from .text_stage import TextStage
from .texts import TextDevices


def explore(
    devices: RowDevices | TextDevices, budget: Budget, with_splits: bool
) -> tuple[Probe, ...]:
    """The next batches of devices alone, else the next split or device at rest; empty when nothing
    is wanted or affordable.
    """
    if isinstance(devices, TextDevices):
        return TextStage(devices, budget, with_splits).next_probes()
    alone = SoloStage(devices, budget).next_probes()
    if alone:
        return alone
    probe = SplitStage(devices, budget, with_splits).next_probe()
    return (probe,) if probe else ()
