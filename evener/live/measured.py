"""Convert the ranks' records to the measurements from which bottlenecks are found."""

from __future__ import annotations

from ..training.step_limits import MeasuredRank
from ..training.step_sums import StepSums
from .files import LiveDevice, LiveRecord


def recent_sums(record: LiveRecord, live: LiveDevice) -> StepSums:
    """Return the total times of a device's recent steps.

    If a record has no totals, its median times are returned as if they were the totals of one step.
    """
    # Without medians either, the sums are empty. The record's sums are the whole process's, not
    # those of one of several devices.
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
        # the optimizer, and everything that the medians leave out
        undivided_s=max(0.0, record.step_s - known_s),
        between_s=record.between_s,
    )


def measure_rank(
    record: LiveRecord, live: LiveDevice, name: str, sums: StepSums, micro: int, starved: float
) -> MeasuredRank:
    """Return the measurements of a device from which `judge_training` finds bottlenecks.

    - `record`, `live`: the rank's record, and its entry for the device.
    - `name`: the device's name for messages.
    - `sums`: total times of the device's steps.
    - `micro`: its rows per pass.
    - `starved`: the fraction of time in which its threads waited for a CPU core.
    """
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
