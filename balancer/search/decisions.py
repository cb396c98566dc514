"""Write the sentences that explain a search's next probe, or why it ended."""

from __future__ import annotations

from ..statistics import relative_half_width
from ..types import End, Layout, Probe, Problem, Result, Stage, Stop
from .machine_model import MachineModel
from .model.evidence import CLEAR
from .ranking import UNCLEAR

WHY_SOLO = (
    "a first time",
    "the slope of time and memory",
    "the largest batch that matters, or one on the way to it",
    "what is still in doubt",
)


def explain_probe(problem: Problem, probe: Probe, had_split: bool, layout_count: int) -> str:
    """Return a sentence for users that says what a probe measures and why.

    - `problem`: the search's input, for the devices' labels.
    - `had_split`: whether a step over several devices was measured before.
    - `layout_count`: the number of layouts in the final comparison.
    """
    layout, devices = probe.layout, len(probe.layout.active)
    match probe.stage:
        case Stage.SOLO:
            return f"Measures every device alone: {_explain_solo(probe)}."
        case Stage.SPLIT:
            return _explain_split(layout, had_split)
        case Stage.PART:
            return (
                f"Measures every device alone on rows of a sharded model: "
                f"{WHY_SOLO[min(probe.turn, 3)]}."
            )
        case Stage.SHARD:
            return f"Measures a real step of the model in shards over {devices} devices."
        case Stage.REST:
            why = "it may beat every split" if had_split else "what every split has to beat"
            label = problem.label(layout.active[0])
            return f"Measures {label} alone while the others are idle: {why}."
        case Stage.PACK:
            return f"Packs {layout.processes} trainings on one device."
        case Stage.KNOBS:
            return "Measures the winner with other knobs, in turns."
        case Stage.CHECK:
            return "Measures the chosen layout again: the rate that it won by is probably too high."
    if layout_count == 1:
        return f"Measures the only layout left, turn {probe.turn + 1}."
    return f"Races {layout_count} layouts in turns; this is turn {probe.turn + 1}."


def _explain_solo(probe: Probe) -> str:
    """Return the purpose of a probe of single devices, as a phrase for users."""
    layout = probe.layout
    if layout.length:
        return f"what passes of rows of {layout.length} tokens and others cost"
    if layout.costs:
        return "the global batch, assigned by what its rows cost"
    return WHY_SOLO[min(probe.turn, len(WHY_SOLO) - 1)]


def _explain_split(layout: Layout, had_split: bool) -> str:
    """Return a sentence for users about a probe that times a step over several devices."""
    devices = len(layout.active)
    if layout.costs:
        return f"Measures a real step, its rows assigned to {devices} devices by what they cost."
    why = "what the last ones showed" if had_split else "the fastest that the curves predict"
    return f"Measures a real step split over {devices} devices: {why}."


def explain_no_device(model: MachineModel) -> End:
    """Return why the search ended, if no device is usable.

    The detail gives the reason for each device.
    """
    words = []
    for i, device in enumerate(model.devices):
        label = model.problem.label(i)
        why = device.lost or f"out of memory at batch {device.memory.smallest_failed}"
        # a failure usually begins with the labels of its devices
        words.append(why if label in why else f"{label}: {why}")
    rule = Stop.ALL_LOST if all(device.lost for device in model.devices) else Stop.OUT_OF_MEMORY
    return End(rule, "; ".join(words))


def find_doubt(model: MachineModel, chosen: Result) -> str:
    """Return a reason to doubt that the chosen layout is the best; "" if there is none.

    Call it when no further measurement is expected to change the choice. A reason is a measured
    speed that disagrees with the predicted one, or a device that ran out of memory so often that
    its limit is uncertain.
    """
    # In 4,740 hard searches, 1.3 % of the plans without a doubt were more than 3 % off, and 12 % of
    # the plans with a doubt.
    layout, rate = chosen.layout, chosen.throughput
    if not layout.traits.by_shares or layout.traits.sharded or layout.knobs:
        return ""
    predicted = model.predicted_rate(layout)
    off = predicted / rate.value - 1 if predicted and rate.value else 0.0
    if abs(off) > max(UNCLEAR, CLEAR * relative_half_width(rate)):
        more = "more" if off > 0 else "less"
        return (
            f"its devices' times for other shares promise {abs(off) * 100:.0f} % {more} samples/s"
        )
    for i in layout.active:
        memory = model.devices[i].memory
        if (
            memory.failure_count > 1
            and memory.smallest_failed is not None
            and memory.smallest_failed < 2 * layout.pass_rows[i]
        ):
            return (
                f"{model.problem.label(i)} ran out of memory {memory.failure_count} times, and may "
                f"hold more rows than it has"
            )
    return ""


def explain_too_long(problem: Problem) -> End:
    """Return why the search ended, if no device can hold the longest row."""
    row = "it" if problem.longest_row < 0 else f"row {problem.longest_row}"
    return End(Stop.ROW_TOO_LONG, f"{row} has {problem.lengths[-1]} tokens")
