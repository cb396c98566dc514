"""Invents trainings: the times of each rank's steps, and the records that they would leave."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from evener.live.files import Doing, LiveDevice, Training
from evener.live.reporter import middle, spread, sum_up
from evener.training.step_sums import StepSums
from tests.support.trainings import AT_SECONDS

STEPS = 25


class Habit(msgspec.Struct, frozen=True):
    """How a rank spends a step, in ms; `silence` is for how long its next record has
    been overdue.
    """

    own: float = 100
    input: float = 0
    before: float = 0  # of the optimizer's step, after the backward pass
    update: float = 2
    after: float = 0  # after the optimizer's step, before the next batch
    noise: float = 0  # of own work: standard deviation / mean
    rows: int = 512
    silence: float = 0  # seconds
    doing: Doing = ""  # what it does during the silence
    batch: int = 0
    disk: float = 0.5  # seconds between two records
    old: bool = False  # it writes records in the first version's format


def make_training(
    habits: Sequence[Habit], exchange: float = 1, seed: int = 0
) -> tuple[Training, ...]:
    """Return the newest record of each rank after some steps.

    All ranks finish each sum of gradients at the same time.
    """
    draw = random.Random(seed)
    free = [0.0] * len(habits)  # when each rank asks for its next batch
    steps: list[list[tuple[float, ...]]] = [[] for _ in habits]
    for _ in range(STEPS):
        own = [each.own * max(0.2, draw.gauss(1, each.noise)) for each in habits]
        ready = [at + each.input + work for at, each, work in zip(free, habits, own, strict=True)]
        left = max(ready) + exchange if len(habits) > 1 else ready[0]
        for rank, each in enumerate(habits):
            ended = left + each.before + each.update + each.after
            steps[rank].append(
                (
                    own[rank],
                    left - ready[rank],
                    each.input,
                    each.before + each.after,
                    ended - free[rank],
                    each.update,
                )
            )
            free[rank] = ended
    return tuple(_record(rank, each, steps[rank], len(habits)) for rank, each in enumerate(habits))


def _record(rank: int, habit: Habit, steps: Sequence[tuple[float, ...]], world: int) -> Training:
    own, waiting, inputs, between, step, update = (
        [value / 1e3 for value in each] for each in zip(*steps, strict=True)
    )
    step_s = middle(step)
    times = sum_up(own, waiting if world > 1 else ())
    live = LiveDevice(
        f"gpu-{rank}", rank, habit.rows, habit.rows / step_s, habit.rows, **times._asdict()
    )
    due_at = AT_SECONDS - habit.silence if habit.silence else AT_SECONDS + 0.2
    facts: dict[str, Any] = {
        "step_s": step_s,
        "step_spread": spread(step),
        "input_s": middle(inputs),
    }
    facts |= {
        "between_s": middle(between),
        "training": "t",
        "rank": rank,
        "world": world,
        "pid": 4000 + rank,
    }
    if not habit.old:
        recent = StepSums(
            len(steps),
            input_s=sum(inputs),
            own_work_s=sum(own),
            meeting_s=sum(waiting) if world > 1 else 0.0,
            update_s=sum(update),
            between_s=sum(between),
        )
        facts |= {"due_at": due_at, "doing": habit.doing, "batch": habit.batch, "recent": recent}
    return Training(
        "torch", "train.py", live.samples_per_second, STEPS, due_at - habit.disk, (live,), **facts
    )
