"""The process table sorts, filters and shows programs' names without letting them control the
terminal.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from evener.devices.types import DENIED, UNSUPPORTED, ProcessSample, value
from evener.tui.view.cells import span_cells
from evener.tui.view.charts import run_time
from evener.tui.view.monitor import (
    PROCESS_COLUMNS,
    PROCESSES,
    ProcessRow,
    empty_process_text,
    identity,
    process_details,
    process_rows,
    process_search_text,
)
from evener.tui.view.table import (
    Order,
    Position,
    chosen_order,
    matches,
    sort_keys,
    sort_rows,
    table_lines,
)


def _shown(script: Any, samples: list[ProcessSample], width: int = 80) -> list[str]:
    rows = process_rows(script.snapshot(processes=tuple(samples)))
    lines, _ = table_lines(PROCESSES, rows, width, 20, Position())
    return [line.text for line in lines]


def test_every_column_sorts_and_unknown_figures_come_last(script: Any) -> None:
    rows = [
        script.process(3, memory_bytes=value(5), cpu_percent=UNSUPPORTED, user="bob"),
        script.process(1, memory_bytes=value(9), cpu_percent=value(1), user="cy"),
        script.process(2, memory_bytes=DENIED, cpu_percent=value(7), user="ada"),
    ]
    found = process_rows(script.snapshot(processes=tuple(rows)))
    order = {
        key: [
            row.sample.pid
            for row in sort_rows(
                PROCESS_COLUMNS, found, chosen_order(PROCESS_COLUMNS, key, Order())
            )
        ]
        for key in sort_keys(PROCESS_COLUMNS)
    }
    assert order["pid"] == [3, 2, 1]
    assert order["memory"] == [1, 3, 2]
    assert order["cpu"] == [2, 1, 3]
    assert order["user"] == [2, 3, 1]


def test_the_same_column_again_reverses_the_order() -> None:
    first = chosen_order(PROCESS_COLUMNS, "time", Order("memory"))
    assert (first.descending, chosen_order(PROCESS_COLUMNS, "time", first).descending) == (
        True,
        False,
    )
    assert not chosen_order(PROCESS_COLUMNS, "user", first).descending


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (-3, ""),
        (7.9, "0:07"),
        (3599, "59:59"),
        (3600, "1h00"),
        (86399, "23h59"),
        (99.97 * 86400, "99d23h"),
    ],
)
def test_a_run_time_takes_six_cells_at_most(seconds: float | None, text: str) -> None:
    assert run_time(seconds) == text


def test_a_filter_takes_every_word_anywhere(script: Any) -> None:
    text = process_search_text(ProcessRow(script.process(4242)))
    assert matches(text, "ADA train")
    assert matches(text, "4242 gpu:0")
    assert matches(text, "")
    assert not matches(text, "ada bert")


def test_eighty_columns_hold_every_figure(script: Any) -> None:
    head, row = _shown(script, [script.process(4242)])
    for title in ("pid", "user", "device", "memory", "SM %", "CPU %", "smp/s", "time", "command"):
        assert title in head
    for figure in ("4242", "ada", "GPU:0", "60G", "87", "103", "115k", "1h00", "python train.py"):
        assert figure in row
    assert len(head) == len(row) == 80


def test_titles_can_be_clicked(script: Any) -> None:
    rows = process_rows(script.snapshot())
    lines, _ = table_lines(PROCESSES, rows, 80, 5, Position())
    actions = {span.action for span in lines[0].spans if span.action}
    assert actions == {f"sort('{key}')" for key in sort_keys(PROCESS_COLUMNS)}


def test_hostile_commands_and_users_are_harmless(script: Any) -> None:
    row = script.process(command="evil\x1b]0;owned\x07 \u202egnp", user="a\x1b[2Jb")
    shown = "\n".join(
        [*_shown(script, [row]), *(line.text for line in process_details(row, "now", 60))]
    )
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown


def test_tokens_and_padding_are_shown_where_rows_have_lengths(script: Any) -> None:
    texts = script.process(tokens_per_second=value(12_345), padding_percent=value(8.4))
    shown, other = (
        " ".join(line.text for line in process_details(row, "now", 60))
        for row in (texts, script.process())
    )
    assert re.search(r"12.345 tokens/s", shown)
    assert "8 % of the computed tokens" in shown
    assert "tokens" not in other


def test_an_empty_list_of_processes_is_explained(script: Any) -> None:
    gpu = script.sample(0)
    slice_ = script.sample(0, device=script.device(0, "AMD EPYC", "cpu"))
    for devices, said in (
        ((gpu,), "No process is on these"),
        ((slice_,), "No training reports"),
        ((gpu, slice_), "is on"),
    ):
        grid = PROCESSES._replace(nothing=empty_process_text(devices))
        lines, _ = table_lines(grid, [], 79, 5, Position(), Order("pid"))
        assert said in lines[1].text
        assert all(span_cells(line.spans) <= 79 for line in lines)


def test_a_pid_that_comes_again_is_another_process(script: Any) -> None:
    assert identity(script.process(7)) != identity(script.process(7, start_time=1.0))
