"""Compare training runs with the throughput that their plan predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec

from evener.live.journal import (
    ChangeEntry,
    RecordedTraining,
    RetreatEntry,
    SpeedEntry,
    StartEntry,
    TrainingEntry,
)
from evener.plan.file import Plan

from ..number_format import percent

SHORT = 0.05  # a training is slow if it is slower than the plan by more than this fraction
WORTH_NAMING = 0.05  # a cause is named if it takes at least this fraction of a step
SAME = 1e-6  # relative difference between two rates of one plan


class Trained(msgspec.Struct, frozen=True):
    """Speed of the training runs that used a plan, compared with the throughput that it predicted.

    The throughput, and the reasons why training was slow, are from the newest run.
    """

    trainings: int
    samples_per_second: float  # median
    part: float  # samples/s as a fraction of the plan's
    why: tuple[str, ...] = ()  # why it was slow, according to its journal

    @property
    def falls_short(self) -> bool:
        """Whether training is over 5 % slower than its plan predicted."""
        return self.part < 1 - SHORT

    def write_reason(self) -> str:
        """Return why training is slower than predicted.

        If the newest run's journal shows no reason, the result says that the reason isn't known.
        """
        return "; ".join(self.why) or "why isn't known from its journal"


def find_trained(plan: Plan, trainings: Iterable[RecordedTraining]) -> Trained | None:
    """Return the speed of the training runs that used a plan, or None if no run used it.

    `trainings` are sorted from the newest run to the oldest.
    """
    parts = [_by_plan(plan, training) for training in trainings]
    parts = list(filter(_speeds, parts))
    if not parts:
        return None
    reached = median(each.samples_per_second for each in _speeds(parts[0]))
    promised = plan.throughput.samples_per_second
    return Trained(len(parts), reached, reached / promised, tuple(_explain_slowness(parts[0])))


def _by_plan(plan: Plan, training: RecordedTraining) -> list[TrainingEntry]:
    """Return the part of a training run's journal that was written while it used this plan."""
    entries: list[TrainingEntry] = []
    follows = False
    for entry in training.entries:
        if isinstance(entry, StartEntry):
            follows = _is_start_of(plan, entry)
        if follows:
            entries.append(entry)
    return entries


def _is_start_of(plan: Plan, start: StartEntry) -> bool:
    promised = plan.throughput.samples_per_second
    same_speed = abs(start.plan_samples_per_second - promised) <= SAME * promised
    return bool(promised) and same_speed and start.plan_created == plan.created


def _speeds(entries: Sequence[TrainingEntry]) -> list[SpeedEntry]:
    return [
        entry for entry in entries if isinstance(entry, SpeedEntry) and entry.samples_per_second
    ]


def _explain_slowness(entries: Sequence[TrainingEntry]) -> Iterator[str]:
    """Yield the reasons why a training run was slow that can be seen in its journal."""
    speeds = [each for each in _speeds(entries) if each.step_s]
    for name, words in (
        ("input_s", "its first device waited for input in {part} of a step"),
        ("waiting_s", "its first device waited for the others in {part} of a step"),
        ("between_s", "its host was busy between steps for {part} of a step"),
    ):
        spent = [getattr(speed, name) / speed.step_s for speed in speeds]
        if spent and median(spent) >= WORTH_NAMING:
            yield words.format(part=percent(median(spent)))
    changes = [entry.change for entry in entries if isinstance(entry, ChangeEntry)]
    if changes:
        yield f"its shares became {'+'.join(map(str, changes[-1].after))}, as {changes[-1].reason}"
    retreats = sum(isinstance(entry, RetreatEntry) for entry in entries)
    if retreats:
        yield f"{retreats} of its passes ran out of memory and were computed again"
