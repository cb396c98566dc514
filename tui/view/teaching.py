"""Help on empty screens: first steps, and an explanation of how a search works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cells import Line, Span, cells, line, text_lines

BETWEEN_CELLS = 3  # cells between the longest command and the descriptions


class Step(NamedTuple):
    """A key or command, and what it does. Clicking it runs `action`, unless that is ""."""

    does: str
    words: str
    action: str = ""


class Lesson(NamedTuple):
    """What an empty table shows: a text, and keys and commands that a new user can start with."""

    nothing: str
    steps: tuple[Step, ...] = ()


BALANCE = Step("2", "find the fastest split of these devices", "app.show('balance')")
TRAINING_STEPS = (
    Step("evener run -- python train.py", "train your script unchanged, balanced"),
    Step("evener launch plan.toml train.py", "train with a plan"),
    BALANCE,
    Step("evener demo", "no GPU: watch two simulated cards"),
)
NO_TRAINING = Lesson("No training reports here.", TRAINING_STEPS)
NO_PROCESS = Lesson("No process is on these devices.", TRAINING_STEPS)
NO_RUN = Lesson(
    "No runs yet: a search keeps everything that it measures.",
    (
        BALANCE,
        Step("evener balance -w train.py:build", "the same in a terminal"),
        Step("evener demo", "no GPU: watch two simulated cards"),
    ),
)


PHASES_IN_WORDS = (
    ("alone", "each device alone, with growing batches, until memory is full or it gets no faster"),
    ("split", "real steps over several devices: what the exchange of gradients costs"),
    ("race", "the fastest layouts in turns, beside equal shares and the best device alone"),
    ("check", "the winner once more"),
)
SEARCH_WORDS = (
    "What these steps train isn't kept. p pauses and x stops it, and the best plan so far is kept; "
    "the search goes on while you look at another screen."
)


def search_lesson(width: int, height: int) -> tuple[Line, ...]:
    """Return an explanation of how a search works, or no lines if there is no room for it."""
    rows = [line(Span(" What a search does", "title"))]
    for number, (phase, words) in enumerate(PHASES_IN_WORDS, start=1):
        before = f"  {number} {phase:<7}"
        first, *others = text_lines(words, width - len(before), 3, "dim", 0)
        rows.append(line(Span(before, "text"), *first.spans))
        rows += [line(Span(" " * len(before)), *each.spans) for each in others]
    rows += text_lines(SEARCH_WORDS, width - 1, 4, "dim", 2)
    return (Line(), *rows) if len(rows) < height else ()


def lesson_lines(lesson: Lesson, width: int, height: int) -> tuple[Line, ...]:
    """Draw a lesson as a centred list, or as sentences if there is little room."""
    block = _block(lesson.steps)
    widest = max((cells(each.text) for each in block), default=0)
    if not block or width < widest + 2 or height < len(block) + 2:
        return _sentences(lesson, width, height)
    left = (width - widest) // 2
    title = line(Span(" " * left), Span(lesson.nothing, "strong"))
    above = (height - len(block) - 2) // 3
    rows = [Line((Span(" " * left), *each.spans)) for each in block]
    return (*[Line()] * above, title, Line(), *rows)


def _block(steps: Sequence[Step]) -> list[Line]:
    """Return a line for each key or command, with the descriptions aligned."""
    longest = max((cells(step.does) for step in steps), default=0)
    rows = []
    for step in steps:
        gap = " " * (longest - cells(step.does) + BETWEEN_CELLS)
        rows.append(line(Span(step.does, "key", step.action), Span(gap), Span(step.words, "dim")))
    return rows


def _sentences(lesson: Lesson, width: int, height: int) -> tuple[Line, ...]:
    """Return the lesson's steps as sentences, as many as fit."""
    text, shown = lesson.nothing, text_lines(lesson.nothing, width, height, "dim")
    for step in lesson.steps:
        text += f" {step.does}: {step.words}."
        if len(text_lines(text, width, height + 1)) > height:
            break
        shown = text_lines(text, width, height, "dim")
    return shown
