"""Past runs in a list: names and ratios whole at every width, repetitions shown once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from evener.balancer.events import Finished
from evener.balancer.journal import Header, JournalContents
from evener.balancer.request import Request
from evener.balancer.store.runs import RunSummary, StoredRun
from evener.tui.text.formatting import cut_path
from evener.tui.text.summaries import brief_devices
from evener.tui.view import runs
from evener.tui.view.cells import span_cells
from evener.tui.view.runs import RUN_COLUMNS, plan_lines, run_search_text
from evener.tui.view.table import Grid, Order, Position, matches, sort_rows, table_lines

RUN = RunSummary(
    "20261121-145431-fb1d",
    "2026-11-21T14:54:31Z",
    ("GPU:0", "GPU:1"),
    "keras_maxer",
    "finished",
    12,
    158_012.0,
    (0.591, 0.409),
)


@pytest.mark.parametrize("width", [80, 100, 118, 200])
def test_a_run_is_shown_whole(width: int) -> None:
    """The panel has its id, which other commands need, its devices, throughput and ratios."""
    lines, _ = table_lines(Grid(RUN_COLUMNS), (RUN,), width, 5, Position())
    row = lines[1].text
    assert len(row) <= width
    for text in ("20261121-145431-fb1d", "keras_maxer", "finished", "158 012"):
        assert text in row
    assert "GPU:0,1" in row or "GPU:0, GPU:1" in row
    assert "0.59:0.41" in row or "0.591 : 0.409" in row
    assert ("2026-11-21 14:54:31" in row) == (width >= 110)


def test_runs_are_sorted_and_filtered() -> None:
    """The filter searches the contents of the table."""
    slow = replace(RUN, run="20261120-1", samples_per_second=9.0, workload="keras_gru")
    failed = replace(
        RUN, run="20261122-1", state="failed", samples_per_second=None, trouble="RuntimeError: no"
    )
    found = (failed, RUN, slow)

    def shown(order: Order, words: str = "") -> list[str]:
        kept = [row for row in found if matches(run_search_text(row), words)]
        return [row.run for row in sort_rows(RUN_COLUMNS, kept, order)]

    assert shown(Order("run")) == [failed.run, RUN.run, slow.run]
    assert shown(Order("speed")) == [RUN.run, slow.run, failed.run]
    assert shown(Order("run"), "GRU") == [slow.run]
    assert shown(Order("run"), "failed") == [failed.run]


def test_a_run_says_in_which_state_it_is(script: Any, plan: Any) -> None:
    """A failed run shows why, without advice to finish it."""
    for changed, words in (
        (
            {"state": "failed", "trouble": "RuntimeError: boom in train.py, line 3."},
            "boom in train.py, line 3.",
        ),
        ({"state": "running"}, "Running, after 0 measurements; there is no plan yet."),
        ({"state": "stopped"}, "Stopped after 0 measurements; there is no plan yet."),
    ):
        rows = [row.text for row in plan_lines(replace(_run(script, None), **changed), 90, 20)]
        assert any(words in row for row in rows), rows
    rows = [row.text for row in plan_lines(replace(_run(script, plan), state="stopped"), 90, 20)]
    assert any("Stopped after 0 measurements." in row for row in rows)


def test_devices_of_several_kinds_keep_their_kinds() -> None:
    """Only repetitions are shortened."""
    assert brief_devices(("GPU:0", "GPU:2", "GPU:3")) == "GPU:0,2,3"
    assert brief_devices(("GPU:0", "CPU:0")) == "GPU:0, CPU:0"
    assert brief_devices(()) == ""


def test_a_training_lists_its_cards_and_no_probes() -> None:
    """It has product names, and measured nothing itself."""
    assert (
        brief_devices(("NVIDIA H200", "NVIDIA H200", "NVIDIA T4")) == "2 × NVIDIA H200, NVIDIA T4"
    )
    cards = ("NVIDIA H200",) * 2
    training = replace(RUN, kind="training", devices=cards, probes=0)
    row = table_lines(Grid(RUN_COLUMNS), (training,), 200, 5, Position())[0][1].text
    assert "2 × NVIDIA H200" in row
    assert " 0 " not in row


@example("0/", 3)
@given(st.text(min_size=1), st.integers(2, 60))
def test_a_path_is_cut_in_front(name: str, most: int) -> None:
    """Its end says which file it is."""
    path = f"/home/ada/{name}"
    shown = cut_path(path, most)
    assert len(shown) <= most
    assert shown == path or (shown[0] == "…" and path.endswith(shown[1:]))


def _run(script: Any, plan: Any) -> StoredRun:
    devices = (script.device(0), script.device(1))
    header = Header(
        "20261121-145431-fb1d",
        "2026-11-21T14:54:31Z",
        Request(),
        devices,
        "keras_maxer",
        "tensorflow",
        "1",
    )
    end = (
        Finished(plan, (), "Split 820 and 568: 18 % faster than equal shares.", False, 47.0)
        if plan
        else None
    )
    return StoredRun(JournalContents(header, (), 0), end, "finished" if plan else "stopped")


def test_next_to_another_a_plan_has_no_bars_where_rows_are_few(script: Any, plan: Any) -> None:
    """Measurements have priority over bars, and nothing is cut in the middle."""
    low = [row.text.rstrip() for row in plan_lines(_run(script, plan), 39, 14)]
    high = [row.text.rstrip() for row in plan_lines(_run(script, plan), 39, 40)]
    assert any(
        row.startswith(" sum of each alone") and row.endswith(" 94 % of it") for row in low[:14]
    )
    assert any("18 % faster" in row for row in low[:17])
    assert not any(row.startswith(" ━") for row in low)
    assert sum(row.startswith(" ━") for row in high) == 4
    assert " tensorflow, float32; 6 probes, 1 out" in low, "which goes on in the next row"
    assert all(span_cells(row.spans) <= 39 for row in plan_lines(_run(script, plan), 39, 14))


def test_a_run_without_a_plan_says_so_in_a_narrow_panel(script: Any) -> None:
    """It says whether the run is over or in progress."""
    rows = [row.text for row in plan_lines(_run(script, None), 30, 9)]
    assert rows[1:] == [" Stopped after 0", " measurements; there is no", " plan yet."]


@pytest.mark.parametrize(
    ("width", "shown"), [(23, "◌ keras_maxer"), (13, "◌ keras_maxer"), (8, "◌ keras…")]
)
def test_a_simulated_run_has_a_mark_at_every_width(width: int, shown: str) -> None:
    """Its name is cut, the mark isn't. A run on real devices has none."""
    run = replace(RUN, workload="keras_maxer", devices=("SIM:0",))
    assert "".join(span.text for span in runs._draw_workload(run, width)) == shown
    assert "".join(span.text for span in runs._draw_workload(RUN, 23)) == "keras_maxer"
