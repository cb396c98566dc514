"""The process table sorts, filters and shows what programs call themselves without letting them steer the terminal."""

from __future__ import annotations

from typing import Any

from evener.devices.types import DENIED, UNSUPPORTED, value
from evener.tui.view.cells import span_cells
from evener.tui.view.details import process_details
from evener.tui.view.marks import UNICODE
from evener.tui.view.processes import (
    SORT_KEYS,
    Order,
    arrange,
    descending_first,
    identity,
    matches,
    nothing_there,
    process_lines,
)
from evener.tui.view.table import Position


def _shown(rows: Any, width: int = 80) -> list[str]:
    lines, _ = process_lines(rows, width, 20, UNICODE, Position(), Order(action="screen.sort('{}')"))
    return [line.text for line in lines]


def test_every_column_sorts_and_unknown_figures_come_last(script: Any) -> None:
    rows = [
        script.process(3, memory_bytes=value(5), cpu_percent=UNSUPPORTED, user="bob"),
        script.process(1, memory_bytes=value(9), cpu_percent=value(1), user="cy"),
        script.process(2, memory_bytes=DENIED, cpu_percent=value(7), user="ada"),
    ]
    order = {key: [row.pid for row in arrange(rows, Order(key, descending_first(key)))] for key in SORT_KEYS}
    assert order["pid"] == [1, 2, 3]
    assert order["memory"] == [1, 3, 2]
    assert order["cpu"] == [2, 1, 3]
    assert order["user"] == [2, 3, 1]


def test_a_filter_takes_every_word_anywhere(script: Any) -> None:
    row = script.process(4242)
    assert matches(row, "ADA train")
    assert matches(row, "4242 gpu:0")
    assert matches(row, "")
    assert not matches(row, "ada bert")


def test_eighty_columns_hold_every_figure(script: Any) -> None:
    head, row = _shown([script.process(4242)])
    assert (
        head == "     pid user     device memory▼  SM %  CPU % smp/s  command".replace("smp/s ", " smp/s")
        or "memory▼" in head
    )
    for figure in ("4242", "ada", "GPU:0", "60G", "87", "103", "115 000", "python train.py"):
        assert figure in row
    assert len(head) == len(row) == 80


def test_titles_can_be_clicked(script: Any) -> None:
    lines, _ = process_lines([script.process()], 80, 5, UNICODE, Position(), Order("pid", False, "screen.sort('{}')"))
    actions = {span.action for span in lines[0].spans if span.action}
    assert actions == {f"screen.sort('{key}')" for key in SORT_KEYS}


def test_hostile_commands_and_users_are_harmless(script: Any) -> None:
    row = script.process(command="evil\x1b]0;owned\x07 \u202egnp", user="a\x1b[2Jb")
    shown = "\n".join([*_shown([row]), *(line.text for line in process_details(row, "now", 60))])
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown


def test_no_process_is_said(script: Any) -> None:
    gpu = script.sample(0)
    slice_ = script.sample(0, device=script.device(0, "AMD EPYC", "cpu"))
    for devices, said in (((gpu,), "No process is on these"), ((slice_,), "reports itself"), ((gpu, slice_), "is on")):
        nothing = nothing_there(devices)
        lines, _ = process_lines([], 79, 5, UNICODE, Position(), Order("pid"), nothing)
        assert said in lines[1].text
        assert all(span_cells(line.spans) <= 79 for line in lines)


def test_a_pid_that_comes_again_is_another_process(script: Any) -> None:
    assert identity(script.process(7)) != identity(script.process(7, start_time=1.0))
