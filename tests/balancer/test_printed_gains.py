"""Figures of the verdict: who divides two printed rates gets the printed gain, or reads that it is
a paired one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from evener.balancer import journal
from evener.balancer.store import runs
from evener.plan.file import parse_plan, to_json
from tests.support.printed_gains import find_faults, find_summary_faults
from tests.support.search_outcomes import draw_outcome

RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_gains_of_recorded_runs_follow_from_their_rates(path: Path) -> None:
    record = journal.read(path)
    found = runs.recover(record)
    labels = [device.label for device in record.header.devices]
    assert not list(find_faults(found.plan, found.verdict, labels))
    assert record.ended is not None
    assert not list(find_summary_faults(parse_plan(to_json(record.ended.plan)), labels))


@pytest.mark.parametrize(("seed", "searches"), [(0, 60)])
def test_gains_of_simulated_searches_follow_from_their_rates(seed: int, searches: int) -> None:
    """Random devices, noise, fixed and free batches, time that runs out."""
    chance = random.Random(seed)
    for _ in range(searches):
        found, labels = draw_outcome(chance)
        assert not list(find_faults(found.plan, found.verdict, labels)), found.verdict
