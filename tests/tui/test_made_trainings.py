"""A table of invented trainings, and exactly what the Trainings screen must say about each."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from evener.devices.types import value
from evener.tui.view.training_lines import training_lines
from evener.tui.view.trainings import TrainingRow, join_trainings
from tests.support.made_trainings import Habit, make_training
from tests.support.tables import rank_table
from tests.support.trainings import AT_SECONDS


class Made(NamedTuple):
    """A training and its causes in order. `advice` is True if other shares would help."""

    habits: tuple[Habit, ...]
    says: tuple[str, ...] = ()
    advice: bool = False
    exchange: float = 1
    bars: tuple[str, ...] = ()  # in place of ranks' bars


def _pair(first: Habit, second: Habit, *says: str, **others: Any) -> Made:
    return Made((first, second), says, **others)


def _all(habit: Habit, *says: str, world: int = 2, **others: Any) -> Made:
    return Made((habit,) * world, says, **others)


EVEN = Habit()
STUCK: dict[str, Any] = {"silence": 42.0, "batch": 26}
TABLE = {
    "nothing is wrong": _all(EVEN),
    "an optimizer that takes long is no pause": _all(
        Habit(update=60), "The optimizer's step takes 60 ms of a step, 37 %."
    ),
    "slow data everywhere": _all(Habit(input=60), "Input takes 60 ms of a step, 37 %."),
    "slow data on one rank": _pair(
        EVEN,
        Habit(input=36),
        "GPU:1 waits for data for 36 ms of a step, 26 %; the others wait for it.",
    ),
    "slow data where it is hidden by another rank's work": _pair(
        Habit(input=30),
        Habit(own=150),
        "GPU:1 takes 150 ms for its share; others wait up to 20 ms for it.",
        advice=True,
    ),
    "slow data beside more work on another rank": _pair(
        Habit(input=70),
        Habit(own=150),
        "GPU:0 waits for data for 70 ms of a step, 40 %; the others wait for it.",
    ),
    "more own work on one rank": _pair(
        EVEN,
        Habit(own=150),
        "GPU:1 takes 150 ms for its share; others wait up to 50 ms for it.",
        advice=True,
    ),
    "a pause before the optimizer's step": _all(
        Habit(before=30),
        "Work between steps takes 30 ms, 23 % of the time, for example in logging or clipping.",
    ),
    "a pause after it": _all(
        Habit(after=30),
        "Work between steps takes 30 ms, 23 % of the time, for example in logging or clipping.",
    ),
    "a pause before the optimizer's step on one rank": _pair(
        EVEN,
        Habit(before=30),
        "GPU:1's work between steps takes 30 ms, 23 % of the time, for example in logging or"
        " clipping; the others wait for it.",
    ),
    "a pause after it on one rank": _pair(
        Habit(after=30),
        EVEN,
        "GPU:0's work between steps takes 30 ms, 23 % of the time, for example in logging or"
        " clipping; the others wait for it.",
    ),
    "an exchange that no computation overlaps": _all(
        EVEN,
        "The exchange of gradients takes 40 ms that computing doesn't hide.",
        world=4,
        exchange=40,
    ),
    "an exchange that is hidden": _all(EVEN, exchange=5),
    "an exchange beside more own work": _pair(
        EVEN,
        Habit(own=150),
        "GPU:1 takes 150 ms for its share; others wait up to 50 ms for it.",
        "The exchange of gradients takes 40 ms that computing doesn't hide.",
        advice=True,
        exchange=40,
    ),
    "an exchange beside slow data": _pair(
        Habit(input=27),
        EVEN,
        "GPU:0 waits for data for 27 ms of a step, 17 %; the others wait for it.",
        "The exchange of gradients takes 30 ms that computing doesn't hide.",
        exchange=30,
    ),
    "noise": _all(Habit(noise=0.15)),
    "noise on eight ranks": _all(Habit(noise=0.15), world=8),
    "noise beside more own work": _pair(
        Habit(noise=0.1),
        Habit(own=180, noise=0.1),
        "GPU:1 takes ",
        advice=True,
    ),
    "a slow disk, with 30 s between records": _all(Habit(disk=30)),
    "a slow disk, and a rank that is stopped": _pair(
        Habit(disk=30, doing="sum", **STUCK),
        Habit(disk=30, silence=42),
        "GPU:1 has been silent for 42 s: stopped, or gone; the others wait for it.",
        bars=("waiting in the all-reduce for 42 s", "silent for 42 s"),
    ),
    "evaluation on all ranks": _all(
        Habit(doing="between steps", **STUCK),
        "All ranks have been between steps for 42 s, perhaps in an evaluation or a checkpoint.",
        bars=("between steps for 42 s", "between steps for 42 s"),
    ),
    "evaluation on one rank": _pair(
        Habit(doing="between steps", silence=42, batch=25),
        Habit(doing="sum", **STUCK),
        (
            "GPU:0 has been between steps for 42 s, perhaps in an evaluation or a checkpoint; the "
            "others wait for it."
        ),
        bars=("between steps for 42 s", "waiting in the all-reduce for 42 s"),
    ),
    "a rank that hangs": _pair(
        Habit(doing="sum", **STUCK),
        Habit(doing="own work", **STUCK),
        "GPU:1 has been in own work for 42 s; the others wait for it.",
        bars=("waiting in the all-reduce for 42 s", "in own work for 42 s"),
    ),
    "a rank whose data hang": _pair(
        Habit(doing="sum", **STUCK),
        Habit(doing="input", silence=42, batch=25),
        "GPU:1 has been waiting for data for 42 s; the others wait for it.",
    ),
    "a network that hangs": _all(
        Habit(doing="sum", **STUCK),
        "All ranks have been waiting in the all-reduce for 42 s.",
        world=4,
    ),
    "a rank that is stopped among four": Made(
        (*[Habit(doing="sum", **STUCK)] * 3, Habit(silence=42)),
        ("GPU:3 has been silent for 42 s: stopped, or gone; the others wait for it.",),
    ),
    "a process alone that evaluates": Made(
        (Habit(doing="between steps", **STUCK),),
        ("GPU:0 has been between steps for 42 s, perhaps in an evaluation or a checkpoint.",),
    ),
    "a process alone that pauses": Made(
        (Habit(after=50),),
        ("Work between steps takes 50 ms, 33 % of the time, for example in logging or clipping.",),
    ),
    "records of the first version": _pair(
        Habit(old=True),
        Habit(old=True, silence=42),
        "GPU:1 has been silent for 42 s.",
        bars=("", "silent for 42 s"),
    ),
    "a rank that waits for one whose record isn't due yet": _pair(
        Habit(doing="sum", **STUCK),
        Habit(disk=30),
        "GPU:0 has been waiting in the all-reduce for 42 s; where the others are isn't known yet.",
    ),
    "a record that is due soon": _all(Habit(silence=4)),
}


def _join(script: Any, made: Made, seed: int = 0) -> TrainingRow:
    snapshot = script.snapshot(
        reports=make_training(made.habits, made.exchange, seed), processes=()
    )
    quiet = tuple(
        msgspec.structs.replace(each, throttled_percent=value(0)) for each in snapshot.devices
    )
    (row,) = join_trainings(msgspec.structs.replace(snapshot, devices=quiet, at_seconds=AT_SECONDS))
    return row


@pytest.mark.parametrize("name", TABLE)
def test_what_the_screen_shows_of_a_training(script: Any, name: str) -> None:
    made = TABLE[name]
    row = _join(script, made)
    said = [cause.text for cause in row.causes]
    assert len(said) == len(made.says), said
    assert all(text.startswith(words) for text, words in zip(said, made.says, strict=True)), said
    assert (row.advice is not None) == made.advice
    shown = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 400))
    assert all(words in shown for words in made.says)
    ranks = [line.text for line in rank_table(row, 160, 20)[0][1:]]
    assert all(words in rank for words, rank in zip(made.bars, ranks, strict=bool(made.bars)))


def test_ranks_that_report_make_the_total(script: Any) -> None:
    """Ranks on a slow disk are included; ranks that wait for a stopped rank aren't."""
    slow = _join(script, TABLE["a slow disk, with 30 s between records"])
    assert slow.samples_per_second == pytest.approx(2 * 512 / slow.step_s)
    assert _join(script, TABLE["a slow disk, and a rank that is stopped"]).samples_per_second == 0


@pytest.mark.parametrize("name", ["noise", "noise on eight ranks"])
def test_noise_alone_is_hardly_ever_taken_for_a_cause(script: Any, name: str) -> None:
    wrong = sum(bool(_join(script, TABLE[name], seed).causes) for seed in range(100))
    assert wrong <= 2


def test_advice_says_how_certain_it_is(script: Any) -> None:
    row = _join(script, TABLE["noise beside more own work"])
    assert row.advice is not None
    assert 0 < row.advice.error < row.advice.gain
    text = "\n".join(line.text for line in training_lines(row, AT_SECONDS, 200))
    assert f"± {100 * row.advice.error:.0f} %" in text
