"""A search as a story, and its results.

They are phases, the best so far, the log as text, the result, two compared runs, and text in the
terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.events import Finished, ProbeStarted
from evener.balancer.journal import ObservationEntry
from evener.balancer.number_format import rate
from evener.balancer.request import Request
from evener.balancer.result.sentences import write_verdict
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.session_state import SessionState, advance
from evener.balancer.store.runs import load_run
from evener.balancer.types import Probe, Stage, Timed, layout_of, solo
from evener.balancer.verdict import Recommendation
from evener.tui.screens.dialogs import DetailsDialog
from evener.tui.text.closing import closing_lines
from evener.tui.view.balance_lines import verdict_head
from evener.tui.view.cells import Line, span_cells
from evener.tui.view.result_panel import BAR_SIGN, KeyHint, result_lines
from evener.tui.view.run_differences import compare_runs, difference_lines
from evener.tui.view.runs import plan_lines, run_page
from evener.tui.view.search_log import log_rows, probe_lines
from evener.tui.view.search_story import best_over_time, current_phase, story_lines
from tests.support.pilots import open_form, open_runs, text, until

PAIR = "sim:gtx1080ti,gtx1080"


def _after(events: Sequence[Any], count: int | None = None) -> SessionState:
    state = SessionState()
    for event in events[:count]:
        state = advance(state, event)
    return state


def _text(lines: Sequence[Line]) -> str:
    return "\n".join(row.text for row in lines)


def _search(request: Request) -> str:
    session = Session(open_run(request))
    try:
        assert list(session.events())
        return session.run_id
    finally:
        session.close()


def test_each_phase_is_marked_and_what_is_measured_is_named(events: Any) -> None:
    """Done, running or still to come; with the reason and the time left."""
    split = advance(
        _after(events, 8), ProbeStarted(Probe(layout_of((820, 568)), Stage.SPLIT, 4.0), 18.0)
    )
    said = _text(story_lines(split, 100))
    assert "✓ alone" in said
    assert "● split" in said
    assert "○ check" in said
    assert "Now: 820 + 568 rows on SIM:0 + SIM:1, together" in said
    assert "left" in said.splitlines()[0]
    assert current_phase(split) == "split"


def test_a_pause_says_what_still_runs(events: Any) -> None:
    running = msgspec.structs.replace(_after(events, 3), paused=True)
    assert "Pausing: SIM:0 finishes its probe" in _text(story_lines(running, 100))
    idle = msgspec.structs.replace(running, running=())
    assert "Paused" in _text(story_lines(idle, 100))


def test_a_fault_takes_the_place_of_the_story(events: Any) -> None:
    failed = msgspec.structs.replace(_after(events, 4), fault="No layout ran.", remedy="Wait.")
    assert _text(story_lines(failed, 80)).strip() == "No layout ran. Wait."


@given(st.lists(st.tuples(st.integers(1, 512), st.booleans(), st.floats(1, 1e6)), max_size=30))
def test_the_best_so_far_only_rises_and_ends_at_the_fastest(
    drawn: list[tuple[int, bool, float]],
) -> None:
    entries = []
    for place, (rows, together, speed) in enumerate(drawn):
        layout = layout_of((rows, rows)) if together else solo(2, 0, rows)
        seconds = layout.global_batch / speed
        probe = Probe(layout, Stage.SPLIT if together else Stage.SOLO, 1.0, place)
        none = (None, None)
        seen = Timed(probe, seconds, seconds, seconds, 9, none, none, 0.1, 1.0)
        entries.append(ObservationEntry(seen, float(place)))
    state = SessionState(devices=("A", "B"), seen=tuple(entries), probes=len(entries))
    speeds = [each.samples_per_second for each in best_over_time(state)]
    assert speeds == sorted(set(speeds))
    measured = [entry.seen.samples_per_second for entry in entries]  # type: ignore[union-attr]
    assert max(speeds, default=0.0) == max(measured, default=0.0)
    assert [row.number for row in log_rows(state)] == list(range(len(drawn), 0, -1))


def test_the_log_says_what_is_news(events: Any) -> None:
    """A gain over the previous batch, the fastest so far, what ran out of memory; nothing about
    slower ones.
    """
    rows = {row.number: row for row in log_rows(_after(events))}
    assert rows[3].news == "+97 % over 64 rows"
    assert rows[5].news == "the fastest so far, +58 %"
    assert rows[6].news == ""
    failed_line = _text(probe_lines(rows[4], 80))
    assert "out of memory" in failed_line
    assert "1310 rows" in failed_line
    split = _text(probe_lines(rows[5], 80))
    assert "820 rows" in split
    assert "568 rows" in split
    assert "2 127 samples/s" in split


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_has_words(events: Any, stage: Stage) -> None:
    probe = Probe(layout_of((8, 8)), stage, 1.0)
    seen = msgspec.structs.replace(events[7].seen, probe=probe)
    state = advance(_after(events, 1), msgspec.structs.replace(events[7], seen=seen))
    assert _text(probe_lines(log_rows(state)[0], 80))
    assert story_lines(state, 80)


@pytest.mark.parametrize("width", [24, 40, 78, 118, 198])
@pytest.mark.parametrize("height", [1, 3, 8, 30])
def test_a_result_keeps_to_its_size_and_its_keys_stay(events: Any, width: int, height: int) -> None:
    keys = [KeyHint("e", "write"), KeyHint("w", "report")]
    lines = result_lines(_after(events), width, height, keys)
    assert len(lines) <= height
    assert all(span_cells(row.spans) <= width for row in lines)
    assert "e write" in lines[-1].text


def test_the_longest_bar_is_the_fastest(events: Any) -> None:
    """Bars stand for samples/s, and each gain is over its own row."""
    rows = [row for row in result_lines(_after(events), 100, 30, ()) if BAR_SIGN in row.text]
    _, even, alone = rows
    lengths = [row.text.count(BAR_SIGN) for row in rows]
    assert lengths[1] / lengths[0] == pytest.approx(1801 / 2127, abs=0.03)
    assert lengths[2] / lengths[0] == pytest.approx(1346 / 2127, abs=0.03)
    assert "plan +18.1 %" in even.text
    assert "plan +58.0 %" in alone.text


def test_leaving_says_the_verdict_the_plan_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search recommends its plan; simulated cards can't train."""
    run = _search(Request(devices=PAIR))
    said = "\n".join(closing_lines(run, "", None))
    assert "826 + 571 on SIM:0 + SIM:1" in said
    assert "evener export" not in said
    assert f"evener balance --resume {run}" in said
    found = load_run(run)
    assert found.end is not None
    assert found.end.found is not None
    verdict = msgspec.structs.replace(found.end.found, simulated=False)
    end = msgspec.structs.replace(found.end, found=verdict)
    real = msgspec.structs.replace(found, end=end)
    monkeypatch.setattr("evener.tui.text.closing.runs.load_run", lambda _: real)
    assert f"evener export {run} -o plan.toml" in "\n".join(closing_lines(run, "", None))
    written = "\n".join(closing_lines(run, "mine.toml", None))
    assert "plan written to mine.toml" in written
    assert "evener export" not in written


def test_leaving_after_a_run_that_is_gone_says_so() -> None:
    assert "no run" in closing_lines("20200101-000000-aaaa", "", None)[0].lower()


def test_two_runs_are_compared_by_what_differs() -> None:
    one = load_run(_search(Request(devices=PAIR, global_batch=256)))
    other = load_run(_search(Request(devices=PAIR, global_batch=1024)))
    facts = {each.name: each for each in compare_runs(one, other)}
    assert facts["global batch"].before == "256"
    assert facts["global batch"].change == "+300 %"
    assert one.plan is not None
    assert other.plan is not None
    gain = other.plan.throughput.samples_per_second / one.plan.throughput.samples_per_second - 1
    assert facts["samples/s"].change == f"+{gain * 100:.0f} %"
    said = _text(difference_lines(one, other, 78))
    assert "workload" not in said, "what is the same isn't listed"
    header = msgspec.structs.replace(other.header, workload="/tmp/cnn.py:build")
    foreign = msgspec.structs.replace(
        other, record=msgspec.structs.replace(other.record, header=header)
    )
    assert "Other workload" in _text(difference_lines(one, foreign, 78))
    assert "alike" in _text(difference_lines(one, one, 78))


async def test_a_result_is_read_whole_on_a_small_terminal(
    app_of: Any, events: Any, session_of: Any
) -> None:
    """Enter opens it, and a measurement too. Nothing is cut."""
    end = events[-1]
    assert isinstance(end, Finished)
    story = "A long story about what was found and why. " * 30
    long = msgspec.structs.replace(end, verdict=f"{story}The last word.")
    app = app_of(session_maker=lambda _: session_of([*events[:-1], long]))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_form(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.balance.ended, "the result")
        await until(pilot, lambda: app.screen.focused.id == "result", "the focus")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "the page")
        await until(pilot, lambda: "Every measurement" in app.screen.query_one("Text").text, "it")
        page = app.screen.query_one("Text").text
        assert "The last word." in page
        assert "equal shares: 1 801 samples/s" in page
        await pilot.press("escape")
        app.screen.query_one("#log").focus()
        await pilot.press("j", "enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "the measurement")
        assert "Probe 5" in app.screen.query_one("Text").text


async def test_runs_are_compared_in_the_app_with_six_keys(app_of: Any) -> None:
    """The keys 3, Space and down show the differences. Enter opens a run as a page."""
    app = app_of()
    for rows in (256, 1024):
        await asyncio.to_thread(_search, Request(devices=PAIR, global_batch=rows))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_runs(pilot, 2)
        first = app.screen.chosen_run
        await pilot.press("space")
        await until(pilot, lambda: app.screen.query_one("#differences").display, "the differences")
        assert "global batch" in text(app, "#differences")
        assert app.screen.chosen_run != first
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsDialog), "the whole run")
        await until(pilot, lambda: "Every measurement" in app.screen.query_one("Text").text, "it")


def test_a_result_begins_with_its_figure_and_the_advice_and_says_each_once() -> None:
    run = load_run(_search(Request(devices=PAIR)))
    assert run.end is not None
    assert run.end.found is not None
    state = msgspec.structs.replace(
        SessionState(devices=("SIM:0", "SIM:1")), finished=run.end, ended=True
    )
    figure, advice, *rows = [row.text.strip() for row in result_lines(state, 198, 40, ())]
    assert figure.startswith(write_verdict(run.end.found).rate)
    assert "826 + 571 on SIM:0 + SIM:1" in figure
    assert advice == "Use the plan's unequal shares."
    assert not any("826 + 571" in row or "Use the plan" in row for row in rows)


def test_an_advice_other_than_the_fastest_layout_stands_before_it() -> None:
    run = load_run(_search(Request(devices=PAIR)))
    assert run.end is not None
    found = run.end.found
    assert found is not None
    again = msgspec.structs.replace(
        found, recommendation=Recommendation("measure_again", (), (), "", "uncertain")
    )
    end = msgspec.structs.replace(run.end, found=again)
    first, second, *_ = [row.text.strip() for row in verdict_head(end, 198)]
    assert first.startswith("Measure again before you decide")
    assert second.startswith(write_verdict(again).rate)


def test_the_page_of_a_result_says_each_gain_once() -> None:
    """The headline has it. The list of rivals has samples/s and layouts."""
    run = load_run(_search(Request(devices=PAIR)))
    page = _text(run_page(run, 100))
    assert "+20 % over equal shares" in page
    listed = page.partition("Compared with")[2].partition("Every measurement")[0]
    assert "equal shares: 1 801 samples/s" in " ".join(listed.split())
    assert "the plan gains" not in listed


def test_the_rows_below_a_plan_have_its_measurements() -> None:
    """They have as many as fit, the newest first. A small panel has only the plan."""
    run = load_run(_search(Request(devices=PAIR)))
    plan = plan_lines(run, 100, 0)
    for height in (len(plan), len(plan) + 4):
        assert len(plan_lines(run, 100, height)) == len(plan)
    rows = plan_lines(run, 100, 200)
    newest = run.record.seen[-1].seen
    assert isinstance(newest, Timed)
    assert rate(newest.samples_per_second) in _text(rows[-len(run.record.seen) :])
    assert len(plan_lines(run, 100, len(rows) - 3)) == len(rows) - 3
