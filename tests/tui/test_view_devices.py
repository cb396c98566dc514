"""The device table shows every metric at every width, and the reason if there is no value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.devices.types import (
    DENIED,
    LOST,
    UNSUPPORTED,
    Device,
    DeviceSample,
    Reading,
    State,
    value,
)
from evener.tui.cli.monitor import snapshot_text
from evener.tui.view.cells import span_cells
from evener.tui.view.devices import DEVICE_COLUMNS, DEVICES, DeviceRow, reason_letters, short_name
from evener.tui.view.monitor import arrange, device_details, host_line, note_lines
from evener.tui.view.table import Position
from tests.support.tables import device_lines

READINGS = [
    field.name
    for field in msgspec.structs.fields(DeviceSample)
    if isinstance(field.default, Reading)
]
STATES = st.one_of(
    st.just(UNSUPPORTED),
    st.just(DENIED),
    st.just(LOST),
    st.floats(0, 1e13).map(value),
    st.floats(0, 1e13).map(lambda number: Reading(State.STALE, number, 12.0)),
)


def _device(index: int = 0) -> Device:
    return Device(f"gpu-{index}", index, "NVIDIA GeForce GTX 1080 Ti", "gpu", None)


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(READINGS, STATES)), st.integers(1, 260))
def test_any_readings_fill_the_columns_exactly(readings: dict[str, Any], width: int) -> None:
    sample = DeviceSample(device=_device(), throttle_reasons=("power cap", "thermal"), **readings)
    lines, _ = device_lines([DeviceRow(sample)], width, 5, Position())
    assert span_cells(lines[0].spans) <= max(width, 80)
    assert [span_cells(line.spans) for line in lines] == [span_cells(lines[0].spans)] * len(lines)


def test_no_metric_is_missing_in_eighty_columns(script: Any) -> None:
    """Columns get narrower, not fewer: each number of the row is found."""
    lines, _ = device_lines([DeviceRow(script.sample(1), (1.0, 2.0), ())], 80, 5, Position())
    assert [line.text for line in lines] == [
        " device name     util  SM  TC  DR  memory  °C power/W  MHz thr% link smp/s  hist",
        "▸ GPU:1 H200       92  86  84  14  63/140  62 631/700 1980 12P   13G  109k    ▄█",
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_sixteen_devices_keep_every_column(script: Any, width: int) -> None:
    widths = DEVICES.widths(width, [DeviceRow(script.sample(), work=(1.0, 1.0))])
    assert set(widths) == {column.key for column in DEVICE_COLUMNS}
    assert sum(widths.values()) + len(widths) <= width
    rows = [DeviceRow(script.sample(index)) for index in range(16)]
    lines, _ = device_lines(rows, width, 17, Position(15))
    assert len(lines) == 17
    assert "GPU:15" in lines[-1].text


def test_rows_scroll_with_the_cursor(script: Any) -> None:
    rows = [DeviceRow(script.sample(index)) for index in range(16)]
    lines, top = device_lines(rows, 80, 5, Position(9))
    assert top == 6
    assert [line.text.split()[0] for line in lines[1:]] == ["GPU:6", "GPU:7", "GPU:8", "▸"]


def test_a_missing_value_is_never_a_zero() -> None:
    """Every state without a value is shown, in the row and as text in the details."""
    readings: dict[str, Any] = dict.fromkeys(READINGS, UNSUPPORTED) | {
        "power_watts": DENIED,
        "temperature_celsius": LOST,
        "utilization_percent": Reading(State.STALE, 62.0, 9.0),
    }
    sample = DeviceSample(device=_device(), **readings)
    row = device_lines([DeviceRow(sample)], 120, 3)[0][1].text
    assert "0" not in row.replace("GPU:0", "").replace("1080", "")
    assert "denied" in row
    assert "lost" in row
    assert "~62" in row
    details = "\n".join(line.text for line in device_details(sample, 70))
    assert "Not reported by this device: SM busy" in details
    assert details.count("reported") == 1
    assert "denied to this user" in details
    assert "62 % (stale: 9.0 s old)" in details


def test_what_no_device_reports_has_no_column_and_the_others_its_room(script: Any) -> None:
    """One device that may report it, or did, is enough. On a CPU slice, eight columns
    are hidden.
    """
    full, bare = script.sample(0), DeviceSample(device=script.device(1))
    cores = msgspec.structs.replace(
        bare, utilization_percent=value(97), memory_used_bytes=value(2**30)
    )

    def head(*samples: DeviceSample) -> list[str]:
        return device_lines([DeviceRow(each) for each in samples], 160, 5)[0][0].text.split()

    assert head(cores) == ["device", "name", "utilisation", "memory", "samples/s", "history"]
    assert head(full) == head(cores, full) == head(full, cores)
    assert {"SM", "tensor", "DRAM", "temp", "power", "clock", "throttled,", "links"} <= set(
        head(full)
    )
    assert "temp" in head(msgspec.structs.replace(cores, temperature_celsius=DENIED))
    narrow = device_lines([DeviceRow(cores)], 80, 5)[0]
    assert "samples/s" in narrow[0].text
    assert "1.0" in narrow[1].text


def test_a_stale_figure_that_does_not_fit_keeps_its_mark_not_its_digits(script: Any) -> None:
    sample = script.sample(0, sm_percent=Reading(State.STALE, 111.0, 9.0))
    row = device_lines([DeviceRow(sample)], 80, 3)[0][1].text
    assert "~" in row
    assert "111" not in row


def test_a_lost_device_tells_what_happened_in_place_of_figures(script: Any) -> None:
    lost: dict[str, Any] = dict.fromkeys(READINGS, LOST)
    sample = DeviceSample(device=script.device(3), note="GPU is lost: XID 79; reset it.", **lost)
    row = device_lines([DeviceRow(sample)], 80, 3)[0][1]
    assert row.text.startswith(" !GPU:3 H200")
    assert "GPU is lost: XID 79; reset it." in row.text
    assert any(span.tone == "bad" for span in row.spans)


def test_an_event_shows_in_the_row(script: Any) -> None:
    row = device_lines([DeviceRow(script.sample(events=("XID 31",)))], 80, 3)[0][1].text
    assert "!GPU:0" in row


def test_history_is_samples_per_second_or_else_utilisation(script: Any) -> None:
    fast = device_lines([DeviceRow(script.sample(), (50.0, 100.0), (1.0, 1.0))], 80, 3)[0][1]
    idle = device_lines([DeviceRow(script.sample(), (None, None), (50.0, 100.0))], 80, 3)[0][1]
    assert (fast.spans[-1].tone, fast.text[-2:]) == ("speed", "▄█")
    assert (idle.spans[-1].tone, idle.text[-2:]) == ("accent", "▄█")


def test_names_lose_their_maker() -> None:
    assert short_name("NVIDIA GeForce GTX 1080 Ti") == "GTX 1080 Ti"
    assert short_name("NVIDIA H200") == "H200"
    assert "\x1b" not in short_name("evil\x1b[2Jname")


def test_reasons_become_letters() -> None:
    assert reason_letters(("power cap", "SW thermal slowdown", "power brake"), 3) == "PT"
    assert reason_letters(("power cap", "thermal"), 1) == "P"


@given(st.integers(1, 300), st.integers(0, 100), st.sampled_from([0, 2]), st.integers(0, 64))
def test_panels_never_take_more_rows_than_there_are(
    width: int, height: int, frame: int, devices: int
) -> None:
    listed, graphs, processes = arrange(width, height, frame, devices).values()
    assert listed + graphs + processes <= max(1, height)
    assert min(listed, 1 + graphs, 1 + processes) >= 1


def test_small_terminals_keep_all_devices_and_some_processes() -> None:
    assert arrange(80, 21, 0, 8)["#devices"] == 9
    assert tuple(arrange(80, 21, 0, 16).values()) == (17, 0, 4)


def test_a_small_terminal_with_few_devices_has_graphs() -> None:
    listed, graphs, processes = arrange(80, 21, 0, 2).values()
    assert listed == 3
    assert graphs >= 6
    assert processes >= 3
    assert arrange(80, 21, 0, 2, processes=20)["#processes"] >= 5


def test_a_large_terminal_gives_its_rows_to_the_graphs() -> None:
    """It does so also with few devices: their processes get the rows that they need."""
    listed, graphs, processes = arrange(200, 57, 2, 8, processes=8).values()
    assert (listed, processes) == (11, 11)
    assert graphs == 57 - 22
    assert arrange(200, 57, 2, 1, processes=1)["#graphs"] == 34, "no taller than can be read"


def test_every_device_has_a_graph_before_more_processes_are_listed() -> None:
    rows = arrange(120, 37, 2, 8, processes=30)
    assert rows["#graphs"] == 8 * 2 + 2 + 2
    assert rows["#processes"] == 37 - 11 - 20


def test_devices_are_summed_up_as_far_as_there_is_room(script: Any) -> None:
    """Samples/s come first. One device needs no sum."""
    shown = host_line(script.snapshot(2), 200).text
    for words in ("2 devices", "224 864 samples/s", "95 % busy", "1271 W", "125/280 G"):
        assert words in shown
    narrow = host_line(script.snapshot(2), 115).text
    assert "224 864 samples/s" in narrow
    assert "G" not in narrow.partition("2 devices")[2]
    assert "devices" not in host_line(script.snapshot(2), 80).text
    assert "devices" not in host_line(script.snapshot(1), 200).text


def test_the_host_line_shows_figures_and_state(script: Any) -> None:
    shown = host_line(script.snapshot(), 120, "paused").text
    assert "41 % of 32 cores" in shown
    assert "62/256 GiB" in shown
    assert shown.endswith("paused ")


def test_the_first_note_shows_and_the_others_are_counted() -> None:
    assert [line.text for line in note_lines(("No driver.", "b"), 60)] == [
        " ! No driver. (+1: see help)"
    ]
    assert note_lines((), 60) == ()
    long = "No NVIDIA driver is here. So the CPU is used: CPU:0, CPU:1, with one core each." * 2
    text = " ".join(line.text.strip(" !") for line in note_lines((long,), 80))
    assert text == long, "no word is cut"


def test_plain_text_has_no_colour_unless_asked(script: Any) -> None:
    snapshot = script.snapshot(notes=("Bad\x1b[31m note",))
    text = snapshot_text(snapshot, 120, colour=False)
    assert "\x1b" not in text
    coloured = snapshot_text(snapshot, 120, colour=True)
    assert "\x1b[32m" in coloured
    assert "\x1b[31m" not in coloured
