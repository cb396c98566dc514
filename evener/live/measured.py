"""Find the metrics in a rank's report that show what limits the training run's speed."""

from __future__ import annotations

from ..training.step_limits import MeasuredRank
from ..training.step_sums import StepSums
from .files import LiveDevice, LiveRecord


def recent_sums(record: LiveRecord, live: LiveDevice) -> StepSums:
    """Return the sums of a device's times over its last steps.

    `live` is the device's entry in `record`. Without sums in the record, its medians count as one
    step.
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
    """Return a rank's metrics, which show what limits its speed.

    - `record`: the process's record.
    - `live`: the device's entry in it.
    - `name`: the name to show.
    - `sums`: the rank's times, summed over its steps by activity.
    - `micro`: number of rows per pass.
    - `starved`: fraction of time in which the rank's threads waited for CPU cores.
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
