"""The next step of a search or the reason for its end, in words; and its curves of devices, for drawings and plans."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from evener.plan.layout import Knots
from evener.shares.curves import Curve

from ..types import CurveSketch, Layout, Probe, Problem
from .machine_model import MachineModel

NO_CURVE: tuple[tuple[Knots, int]] = (((), 0),)  # of a device whose curve no plan needs
SKETCHED = 24  # points of a curve for drawing
WHY_SOLO = (
    "a first time",
    "the slope of time and memory",
    "the largest batch that matters, or one on the way to it",
    "what is still in doubt",
)


class Stop(StrEnum):
    """Why a search ended."""

    SETTLED = "Nothing left to measure is expected to change the plan by more than the tolerance."
    TIED = "The leading layouts tie: more turns within the budget would not tell them apart."
    ONLY_ONE = "There is one way to train on these devices, and it was measured."
    BUDGET = "The budget is spent."
    NO_FIT = "No layout of the global batch asked for fits the memory of these devices."
    ROW_TOO_LONG = "A row is longer than any device can hold"
    OUT_OF_MEMORY = "Every device ran out of memory at the smallest batch it was given"
    ALL_LOST = "Every device failed"
    LATE = "The budget was spent before the search had ended."
    INTERRUPTED = "The search was interrupted."
    CUT_OFF = "The run was cut off."


class Decision(msgspec.Struct, frozen=True):
    """The next probes and their purpose; without probes, the reason for the end of the search."""

    probes: tuple[Probe, ...]
    doing: str
    ended: str | None = None


def explain_exploring(probe: Probe, split_before: bool) -> str:
    """The purpose of an exploring probe: every device alone, a real step, or one device while the others are idle."""
    layout = probe.layout
    if layout.length:
        return f"Measures every device alone: what passes of rows of {layout.length} tokens and others cost."
    if layout.costs:
        if probe.stage == "solo":
            return "Measures every device alone: the global batch, assigned by what its rows cost."
        return f"Measures a real step, its rows assigned to {len(layout.active)} devices by what they cost."
    if probe.stage == "solo":
        if layout.in_passes:
            return "Measures devices alone in several passes: what each further pass costs."
        return f"Measures every device alone: {WHY_SOLO[min(probe.turn, 3)]}."
    if probe.stage == "rest":
        why = "it may beat every split" if split_before else "what every split has to beat"
        return f"Measures device {layout.active[0]} alone while the others are idle: {why}."
    first = "what the last ones showed" if split_before else "the fastest that the curves predict"
    return f"Measures a real step split over {len(layout.active)} devices: {first}."


def explain_sharding(probe: Probe) -> str:
    """The purpose of a probe of a sharded training."""
    if probe.stage == "part":
        return f"Measures every device alone on rows of a sharded model: {WHY_SOLO[min(probe.turn, 3)]}."
    return f"Measures a real step of the model in shards over {len(probe.layout.active)} devices."


def sketch_curve(model: MachineModel, position: int) -> CurveSketch:
    """A device's curve, to be drawn."""
    device, curve = model.devices[position], model.alone[position]
    largest = model.bounds.walls[position] or device.memory.ran or None
    points: tuple[tuple[int, float], ...] = ()
    if curve and largest:
        sizes = sorted({max(1, round(largest * n / SKETCHED)) for n in range(SKETCHED + 1)})
        points = tuple((size, curve.seconds(size)) for size in sizes)
    seen = tuple((p.batch, p.seconds) for p in device.alone)
    return CurveSketch(position, points, seen, largest, device.memory.failed)


def plan_curves(model: MachineModel, layout: Layout) -> tuple[tuple[Knots, int], ...]:
    """Each device's curve up to the global batch, and the rows of a pass that surely fit; empty for unused devices."""
    found = list(NO_CURVE * len(layout.shares))
    for i in layout.active:
        curve = model.in_splits[i]
        if curve is not None:
            most = min(model.bounds.safe[i], model.pass_rows[i] or layout.global_batch, layout.global_batch)
            found[i] = _cut_curve(curve, layout.global_batch), max(most, layout.pass_rows[i])
    return tuple(found)


def _cut_curve(curve: Curve, batch: int) -> Knots:
    """The knots below a batch, and the curve there."""
    bends = len(curve.batches) if curve.bent else 1
    knots = [(rows, time) for rows, time in zip(curve.batches[:bends], curve.times, strict=False) if rows < batch - 0.5]
    return tuple((_round(rows), _round(time)) for rows, time in (*knots, (batch, curve.seconds(batch))))


def _round(figure: float) -> float:
    return float(f"{figure:.6g}")


def explain_race(probe: Probe, layouts: int) -> str:
    """A turn of one of the layouts that still run."""
    if probe.stage == "pack":
        return f"Packs {probe.layout.processes} trainings on one device."
    if probe.stage == "knobs":
        return "Measures the winner with other knobs, in turns."
    if probe.stage == "check":
        return "Measures the chosen layout again: the figure that it won by is likely to be too high."
    if layouts == 1:
        return f"Measures the only layout left, turn {probe.turn + 1}."
    return f"Races {layouts} layouts in turns; this is turn {probe.turn + 1}."


def explain_nobody(model: MachineModel) -> str:
    """Why no device can be used, each with its smallest failure."""
    words = [
        f"device {i}: {device.lost or f'out of memory at batch {device.memory.failed}'}"
        for i, device in enumerate(model.devices)
    ]
    rule = Stop.ALL_LOST if all(device.lost for device in model.devices) else Stop.OUT_OF_MEMORY
    return f"{rule.value}: {'; '.join(words)}."


def explain_too_long(problem: Problem) -> str:
    """Why rows of unequal length can't be trained."""
    row = "it" if problem.longest_row < 0 else f"row {problem.longest_row}"
    return f"{Stop.ROW_TOO_LONG.value}: {row} has {problem.lengths[-1]} tokens."
