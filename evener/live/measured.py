"""The figures of a rank's report, by which its training is judged."""

from __future__ import annotations

from ..training.step_limits import MeasuredRank
from ..training.step_sums import StepSums
from .files import LiveDevice, LiveRecord


def recent_sums(record: LiveRecord, live: LiveDevice) -> StepSums:
    """A device's last steps; one step of medians where a process reports no sums, or where its
    devices have own work of their own.
    """
    if record.recent.steps and (len(record.devices) <= 1 or not live.own_work_s):
        return record.recent
    if not (record.step_s or live.own_work_s):
        return StepSums()
    known_s = record.input_s + live.own_work_s + live.waiting_s + record.between_s
    return StepSums(
        1,
        input_s=record.input_s,
        own_work_s=live.own_work_s,
        meeting_s=live.waiting_s,
        # the optimizer, and what medians leave out
        undivided_s=max(0.0, record.step_s - known_s),
        between_s=record.between_s,
    )


def measure_rank(
    record: LiveRecord, live: LiveDevice, name: str, sums: StepSums, micro: int, starved: float
) -> MeasuredRank:
    """A rank's figures, with these sums of its steps, and the part of the time without cores."""
    return MeasuredRank(
        name=name,
        share=live.batch,
        sums=sums,
        errors=record.errors if record.recent.steps else StepSums(),
        own_work_s=live.own_work_s,
        waiting_s=live.waiting_s,
        least_waiting_s=live.least_waiting_s or live.waiting_s,
        own_spread=live.own_spread,
        curve=live.curve,
        micro=micro,
        most=live.most,
        behind=record.behind,
        starved=starved,
        framework=record.framework,
    )
