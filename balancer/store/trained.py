"""What trainings by a plan have reached, by their journals, and what kept them from more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec

from evener.live.journal import (
    ChangeEntry,
    RetreatEntry,
    SpeedEntry,
    StartEntry,
    TrainingEntry,
    TrainingRecord,
)
from evener.plan.file import Plan

from ..number_format import percent

SHORT = 0.05  # of the plan's samples/s, from which a training falls short
WORTH_NAMING = 0.05  # of a step, from which what it was spent on is named
SAME = 1e-6  # between two figures of one plan, relative


class Trained(msgspec.Struct, frozen=True):
    """The trainings by a plan that kept a journal; the figures are of the last one."""

    trainings: int
    samples_per_second: float  # median
    part: float  # of the plan's samples/s
    why: tuple[str, ...] = ()  # it fell short, as far as its journal says

    @property
    def falls_short(self) -> bool:
        """True if the last one was over 5 % slower than the plan says."""
        return self.part < 1 - SHORT

    def write_reason(self) -> str:
        """Why it falls short, as the end of a sentence, or that this isn't known."""
        return "; ".join(self.why) or "why isn't known from its journal"


def find_trained(plan: Plan, trainings: Iterable[TrainingRecord]) -> Trained | None:
    """What trainings, the last one first, have reached by this plan; None if none has trained by it
    for long enough.
    """
    parts = [_by_plan(plan, each) for each in trainings]
    parts = list(filter(_speeds, parts))
    if not parts:
        return None
    reached = median(each.samples_per_second for each in _speeds(parts[0]))
    promised = plan.throughput.samples_per_second
    return Trained(len(parts), reached, reached / promised, tuple(_explain(parts[0])))


def _by_plan(plan: Plan, training: TrainingRecord) -> list[TrainingEntry]:
    """The entries of a training from its starts by this plan: with all of its devices, at its
    global batch.
    """
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
    same_figure = abs(start.plan_samples_per_second - promised) <= SAME * promised
    return bool(promised) and same_figure and start.plan_created == plan.created


def _speeds(entries: Sequence[TrainingEntry]) -> list[SpeedEntry]:
    return [each for each in entries if isinstance(each, SpeedEntry) and each.samples_per_second]


def _explain(entries: Sequence[TrainingEntry]) -> Iterator[str]:
    """What a training's steps were spent on besides computing, and what happened to it."""
    speeds = [each for each in _speeds(entries) if each.step_s]
    for name, words in (
        ("input_s", "its first device waited for input in {part} of a step"),
        ("waiting_s", "its first device waited for the others in {part} of a step"),
        ("between_s", "its host was busy between steps for {part} of a step"),
    ):
        spent = [getattr(each, name) / each.step_s for each in speeds]
        if spent and median(spent) >= WORTH_NAMING:
            yield words.format(part=percent(median(spent)))
    changes = [each.change for each in entries if isinstance(each, ChangeEntry)]
    if changes:
        yield f"its shares became {'+'.join(map(str, changes[-1].after))}, as {changes[-1].reason}"
    retreats = sum(isinstance(each, RetreatEntry) for each in entries)
    if retreats:
        yield f"{retreats} of its passes ran out of memory and were computed again"
