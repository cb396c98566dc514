"""Empty lists say how to begin, untruncated at any size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.tui.view.cells import span_cells
from evener.tui.view.teaching import (
    NO_PROCESS,
    NO_RUN,
    NO_TRAINING,
    Lesson,
    lesson_lines,
    search_lesson,
)
from tests.support.pilots import text, until

LESSONS = (NO_PROCESS, NO_RUN, NO_TRAINING)


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_way_to_begin_is_there_at_80_columns(lesson: Lesson) -> None:
    rows = [row.text for row in lesson_lines(lesson, 78, 12)]
    shown = "\n".join(rows)
    assert lesson.nothing in shown
    for step in lesson.steps:
        assert any(step.does in row and step.words in row for row in rows), step


@given(st.sampled_from(LESSONS), st.integers(30, 220), st.integers(1, 50))
def test_nothing_is_cut_at_any_size(lesson: Lesson, width: int, height: int) -> None:
    """A step without room is left out."""
    lines = lesson_lines(lesson, width, height)
    assert len(lines) <= height
    assert all(span_cells(row.spans) <= width for row in lines)
    shown = " ".join(" ".join(row.text for row in lines).split())
    if len(lines) > 1:
        assert shown.startswith(lesson.nothing)
    assert not any("…" in row.text for row in lines[1:])
    for step in lesson.steps:
        assert (step.does in shown) == (step.words in shown)


@given(st.integers(40, 220), st.integers(0, 40))
def test_what_a_search_does_is_there_whole_or_not_at_all(width: int, height: int) -> None:
    lines = search_lesson(width, height)
    assert len(lines) <= height
    assert all(span_cells(row.spans) <= width for row in lines)
    assert not lines or "another screen" in " ".join(" ".join(row.text for row in lines).split())


async def test_a_screen_without_rows_offers_nothing_that_needs_one(app_of: Any) -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "No runs yet" in text(app, "#runs"), "the empty list")
        await until(pilot, lambda: "Enter" not in text(app, "#keys"), "the keys")
        assert "Compare" not in text(app, "#keys")
        assert app.screen.query_one("#runs").size.height > 18


async def test_a_read_only_form_has_no_start(app_of: Any) -> None:
    app = app_of(readonly=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "[x] GPU:1" in text(app, "#pick-devices"), "the form")
        assert not app.screen.query_one("#start").display
        assert "Start" not in text(app, "#keys")
