"""A training's last minutes: its samples/s against the plan's, and those of each of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample

from .cells import Line, text_lines
from .charts import nice_ceiling
from .figures import samples_rate, short, watts
from .graphs import Graph, draw_graphs
from .marks import Marks
from .monitor import History
from .trainings import TrainingRow

LEAST_WIDTH, LEAST_HEIGHT = 40, 5  # of a graph
GOOD_HEIGHT = 8  # from which they are stacked, for longer histories
Values = tuple[float | None, ...]


def training_graph_lines(
    row: TrainingRow, samples: Sequence[DeviceSample], history: History, width: int, height: int, marks: Marks
) -> tuple[Line, ...]:
    """The graphs of a training, as many as fit, or why there are none."""
    devices = {rank.device for rank in row.ranks}
    keys = {sample.device.label: sample.device.key for sample in samples if sample.device.label in devices}
    most = max(1, width // LEAST_WIDTH)
    if not keys:
        why = "The monitor sees none of its devices." if any(devices) else "The training names no device."
        return text_lines(why, width, 1, "dim")[:height]
    graphs = _choose(row, keys, history, width, most * (height // LEAST_HEIGHT))
    if not graphs:
        return ()
    columns = next((count for count in range(1, most) if -(-len(graphs) // count) * GOOD_HEIGHT <= height), most)
    return draw_graphs(graphs, width, height, min(columns, len(graphs)), marks)


def _choose(row: TrainingRow, keys: Mapping[str, str], history: History, ticks: int, most: int) -> list[Graph]:
    """The whole training, then each of its devices if there is room for all, then their power."""
    speeds = [history(key, "samples_per_second", ticks) for key in keys.values()]
    top = nice_ceiling(_highest(speeds))
    whole = [] if row.missing_ranks else [_whole(row, _add(speeds))]
    each = [
        Graph(label, samples_rate(_newest(values)), values, top, short(top), "speed")
        for label, values in zip(keys, speeds, strict=True)
    ]
    power = [_power(_add([history(key, "power_watts", ticks) for key in keys.values()]))] if row.watts else []
    every = [*whole, *(each if len(each) > 1 or not whole else ()), *power]
    return every if len(every) <= most else [*whole, *power][:most]


def _power(values: Values) -> Graph:
    top = nice_ceiling(_highest([values]))
    return Graph("power", watts(_newest(values)), values, top, watts(top), "power")


def _whole(row: TrainingRow, values: Values) -> Graph:
    """All devices together; the top is the plan's figure unless it was faster."""
    plan, highest = row.plan_samples_per_second, _highest([values])
    if plan >= highest > 0:
        return Graph("all devices", samples_rate(row.samples_per_second), values, plan, f"plan {rate(plan)}", "accent")
    top = nice_ceiling(highest)
    return Graph("all devices", samples_rate(row.samples_per_second), values, top, short(top), "accent")


def _add(histories: Sequence[Values]) -> Values:
    """Tick by tick, where every device has a value."""
    return tuple(None if None in tick else sum(filter(None, tick)) for tick in zip(*histories, strict=True))


def _newest(values: Values) -> float:
    return (values[-1] if values else None) or 0.0


def _highest(histories: Sequence[Values]) -> float:
    return max((value for values in histories for value in values if value is not None), default=0.0)
