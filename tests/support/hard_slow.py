"""Families of hard machines whose steps take seconds, like those of large models.

A family's docstring has the ranges it draws from. A budget of 120 s has time for about ten such
steps.
"""

from __future__ import annotations

import random

from evener.devices.machine import Sync
from tests.support.machine_drafts import Draft, Part, log_uniform

SHORTEST_STEP_MS = 2_000.0
LONGEST_STEP_MS = 12_000.0  # ms of one card's step with all rows that fit


def flat(chance: random.Random, draft: Draft) -> None:
    """A step takes 2 to 12 s with any number of rows, of which 30 to 400 fit; 1 to 4 cards."""
    for part in _cards(chance, draft):
        level = chance.uniform(SHORTEST_STEP_MS, LONGEST_STEP_MS)
        part.curve = ((1, level), (2 * part.most, level))


def line(chance: random.Random, draft: Draft) -> None:
    """A step with the 30 to 400 rows that fit takes 2 to 12 s, of which 5 to 60 % are fixed."""
    fixed_part = chance.uniform(0.05, 0.6)
    for part in _cards(chance, draft):
        longest = chance.uniform(SHORTEST_STEP_MS, LONGEST_STEP_MS)
        fixed = longest * fixed_part
        slope = (longest - fixed) / part.most
        part.curve = ((1, fixed + slope), (2 * part.most, fixed + 2 * slope * part.most))


def knee(chance: random.Random, draft: Draft) -> None:
    """A step takes 2 to 8 s up to 20 to 80 % of the rows that fit, and up to 12 s with all."""
    for part in _cards(chance, draft):
        level = chance.uniform(SHORTEST_STEP_MS, LONGEST_STEP_MS * 2 / 3)
        longest = chance.uniform(level, LONGEST_STEP_MS)
        bend = max(2, round(part.most * chance.uniform(0.2, 0.8)))
        slope = (longest - level) / max(1, part.most - bend)
        part.curve = ((1, level), (bend, level), (bend + 10_000, level + 10_000 * slope))


def loads(chance: random.Random, draft: Draft) -> None:
    """Starts take 20 s, because a model is loaded; steps with the 8 to 100 rows that fit take 1 to
    5 s.
    """
    draft.ask["start"] = 20.0
    draft.ask["budget"] = chance.choice((120.0, 180.0, 300.0))
    fixed_part = chance.uniform(0.05, 0.6)
    for part in _cards(chance, draft, (8, 100)):
        longest = chance.uniform(1_000, 5_000)
        fixed = longest * fixed_part
        slope = (longest - fixed) / part.most
        part.curve = ((1, fixed + slope), (2 * part.most, fixed + 2 * slope * part.most))


def _cards(
    chance: random.Random, draft: Draft, rows: tuple[float, float] = (30, 400)
) -> list[Part]:
    """Return one to four cards for a large model, which takes a third to nine tenths of their
    memory.
    """
    base_mib = chance.uniform(3_000, 18_000)
    most = [round(log_uniform(chance, *rows)) for _ in range(chance.randint(1, 4))]
    state_part = chance.uniform(0.33, 0.9)
    each_mib = base_mib * (1 / state_part - 1) / max(most)
    draft.parts = [
        Part(0, 0, fits, base_mib, each_mib, chance.choice((0.002, 0.005, 0.01, 0.02)))
        for fits in most
    ]
    draft.sync = Sync(log_uniform(chance, 10, 600), log_uniform(chance, 5, 200))
    return draft.parts
