"""The table of a search's devices, with their activity, best speed and largest batch."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.number_format import STATE_ONLY, duration, percent, rate
from evener.balancer.session_state import (
    SessionState,
    best_solo,
    chosen_layout,
    largest_pass_run,
    own_speed,
    smallest_out_of_memory,
)
from evener.devices.types import DeviceSample

from ..text.stages import STAGE_WORDS
from ..text.summaries import share_text
from .cells import Mark, Span, Tone, cells, cut, device_tone, pad, span_cells
from .charts import bar
from .devices import DEVICE_COLUMNS, DeviceRow, short_name
from .table import Column, Grid

ALONE_CELLS = 14  # cells of a device's best throughput, without the bar
LEAST_BAR = 8
LONG_SECONDS = 2.0  # seconds after which a phase shows how long it has lasted


class SearchDeviceRow:
    """A device of a search.

    - `running`: the probe that uses it now, or None.
    - `sample`: its reading, or None in a replay.
    """

    def __init__(
        self, state: SessionState, device: int, sample: DeviceSample | None = None
    ) -> None:
        self.state = state
        self.device = device
        self.sample = sample
        self.running = next(
            (each for each in state.running if device in each.probe.layout.active), None
        )


def _name(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
    label = row.state.devices[row.device]
    given = row.state.names[row.device] if row.device < len(row.state.names) else ""
    room = width - cells(label) - 3
    name = short_name(given)
    if cells(name) > room:
        name = name.removeprefix("GTX ").removeprefix("RTX ")
    return (
        Span(f"{Mark.BLOCK} ", device_tone(row.device)),
        Span(label, "strong"),
        Span(f" {cut(name, max(0, room))}" if room > 3 else "", "dim"),
    )


def _shows_probes(row: SearchDeviceRow) -> bool:
    """Return whether to show the columns about running probes."""
    # They are shown while the search runs, and after it failed. A finished search has no running
    # probes.
    return bool(row.state.fault) or not row.state.ended


def _is_sampled(row: SearchDeviceRow) -> bool:
    return row.sample is not None and _shows_probes(row)


def _doing(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
    running = row.running
    if running is None:
        words = f"{Mark.FAILED} failed" if row.state.fault else f"{Mark.WAITING} waits"
        return (Span(words, "dim"),)
    since = f" {duration(running.phase_seconds)}" if running.phase_seconds >= LONG_SECONDS else ""
    stage = STAGE_WORDS[running.probe.stage]
    forms = (f"{stage}: {running.phase}{since}", f"{running.phase}{since}", running.phase)
    words = next((form for form in forms if len(form) + 2 <= width), stage)
    return Span(f"{Mark.RUNNING} ", "speed"), Span(words)


def _monitor_column(
    key: str, widths: tuple[int, ...], min_table_width: int = 0
) -> Column[SearchDeviceRow]:
    """Return a column that shows a metric in the same way as the table of the Monitor screen.

    It is hidden in tables of fewer than `min_table_width` cells, and in a replay.
    """

    def draw(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
        return (
            (Span(Mark.NONE, "dim"),)
            if row.sample is None
            else column.draw(DeviceRow(row.sample), width)
        )

    column = next(column for column in DEVICE_COLUMNS if column.key == key)
    return Column(key, column.titles, widths, draw, needs=min_table_width, there=_is_sampled)


def _batch(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
    if row.running is None:
        return (Span(""),)
    layout, device = row.running.probe.layout, row.device
    if not layout.shares[device]:
        return (Span(STATE_ONLY if cells(STATE_ONLY) <= width else "state", "dim"),)
    share = str(layout.shares[device])
    passes = (
        f"{layout.passes(device)}×{layout.pass_rows[device]}"
        if layout.passes(device) > 1
        else share
    )
    return (Span(passes if cells(passes) <= width else share),)


def _speed(row: SearchDeviceRow, _width: int) -> tuple[Span, ...]:
    running = row.running
    if running is None or running.samples_per_second is None:
        return (Span(""),)
    return (Span(rate(own_speed(running, row.device)), "speed"),)


def _interval(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
    running = row.running
    if running is None or running.relative_interval is None:
        return (Span(""),)
    settled: Tone = "good" if running.relative_interval <= 0.01 else "text"
    # in ASCII, ± becomes +- and takes the blank's cell too
    text = f" ±{percent(running.relative_interval, 1)}"
    rounder = f" ±{percent(running.relative_interval)}"
    return (Span(text if cells(text) <= width else rounder, settled),)


def _draw_best_alone(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
    """Draw a device's best speed alone, in samples/s, and the rows per step that reached it.

    If there is room, a bar comes first, which is full for the fastest device.
    """
    spans = _alone_spans(row.state, row.device)
    if span_cells(spans) > width:
        return spans[:1]
    every = range(len(row.state.devices))
    widest = max(span_cells(_alone_spans(row.state, device)) for device in every)
    room = width - max(widest, ALONE_CELLS) - 1
    solo = best_solo(row.state, row.device)
    if room < LEAST_BAR or solo is None:
        return spans
    found = [best_solo(row.state, device) for device in every]
    top = max(each.samples_per_second for each in found if each is not None)
    drawn = bar(solo.samples_per_second / top, room, device_tone(row.device))
    return (*drawn, *pad(spans, width - room, "right"))


def _alone_spans(state: SessionState, device: int) -> tuple[Span, ...]:
    """Return a device's best speed alone, in samples/s, and the rows per step that reached it."""
    solo = best_solo(state, device)
    if solo is None:
        return (Span(Mark.NONE, "dim"),)
    share = share_text(solo.probe.layout, device)
    return Span(rate(solo.samples_per_second), "strong"), Span(f" at {share}", "dim")


def _draw_largest_batch(row: SearchDeviceRow, width: int) -> tuple[Span, ...]:
    """Draw the largest batch that fits in memory, and the smallest one that doesn't."""
    # The numbers are never truncated. If the chosen layout cuts the device's share into several
    # passes, the share and the number of passes follow if there is room.
    forms = _memory_forms(_largest_that_fits(row), smallest_out_of_memory(row.state, row.device))
    chosen = chosen_layout(row.state)
    if chosen is not None and chosen.passes(row.device) > 1:
        passes = f"{chosen.shares[row.device]} in {chosen.passes(row.device)} passes"
        with_passes = [(*form, Span(f", {passes}")) for form in forms]
        forms = [*with_passes, (Span(passes),), *forms]
    return next((form for form in forms if span_cells(form) <= width), forms[-1])


def _largest_that_fits(row: SearchDeviceRow) -> str:
    """Return the largest batch that fits in memory, or "" if it is unknown.

    A prediction is marked with "~".
    """
    ran = largest_pass_run(row.state, row.device)
    curves = row.state.belief.curves if row.state.belief else ()
    sketch = next((curve for curve in curves if curve.device == row.device), None)
    if sketch is None or sketch.largest_batch is None or not ran:
        return ""
    predicted = "~" if sketch.largest_batch > ran else ""
    return f"{predicted}{sketch.largest_batch}"


def _memory_forms(largest: str, failed_batch: int | None) -> list[tuple[Span, ...]]:
    """Return several wordings for the largest batch that fits in memory, longest first.

    `failed_batch` is the smallest batch that ran out of memory, or None.
    """
    if failed_batch is None:
        return [(Span(f"fits {largest}") if largest else Span(Mark.NONE, "dim"),)]
    failed_span = Span(f"{Mark.WALL}{failed_batch}", "bad")
    fits = Span(f"fits {largest}, " if largest else "")
    return [
        (fits, Span(f"{failed_batch} not", "bad")),
        (Span(largest), failed_span),
        (failed_span,),
    ]


SEARCH_DEVICES: Grid[SearchDeviceRow] = Grid(
    (
        Column("device", ("device",), (8, 8, 15, 22), _name, "left", most=34),
        Column("doing", ("doing",), (8, 18, 26), _doing, "left", needs=69, there=_shows_probes),
        _monitor_column("util", (4, 6, 14)),
        _monitor_column("temperature", (3, 5), 45),
        _monitor_column("memory", (7, 11, 20), 100),
        Column("batch", ("batch",), (6,), _batch, needs=41, there=_shows_probes),
        Column("speed", ("samples/s", "smp/s"), (7, 9), _speed, there=_shows_probes),
        Column("interval", ("interval", "known"), (7, 8), _interval, needs=77, there=_shows_probes),
        Column(
            "alone", ("best alone", "alone"), (ALONE_CELLS,), _draw_best_alone, needs=60, most=80
        ),
        Column("fits", ("largest batch", "largest"), (11, 18, 24), _draw_largest_batch, "left"),
    )
)


def search_device_rows(
    state: SessionState, samples: Sequence[DeviceSample | None] = ()
) -> list[SearchDeviceRow]:
    """Return a row for each device of the search, with its reading if there is one.

    `samples` has the readings in the same order as the devices. It is empty in a replay.
    """
    return [
        SearchDeviceRow(state, device, *samples[device : device + 1])
        for device in range(len(state.devices))
    ]
