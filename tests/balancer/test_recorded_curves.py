"""Searches on machines built from measurements of real GPUs end near the best of their curves."""

from __future__ import annotations

import pytest

from evener.balancer import journal
from evener.balancer.types import Stage, Timed
from tests.support import recorded_machines as recorded

RECORDS = recorded.records()
CURVES = recorded.curves(RECORDS.values())
# in addition to the tolerance: curves have few points, and each step has half a per cent of noise
NOISE_COSTS = 0.03


@pytest.mark.parametrize(("name", "seed"), [(name, i % 2) for i, name in enumerate(RECORDS)])
def test_the_search_ends_near_the_best_of_the_recorded_curves(name: str, seed: int) -> None:
    """It ends within a little more than the requested tolerance on every recorded machine."""
    record = RECORDS[name]
    found = recorded.search(record, recorded.machine(record, CURVES), seed)
    assert found.regret <= record.header.request.tolerance + NOISE_COSTS


def test_a_recorded_machine_gives_back_what_was_measured() -> None:
    """At a batch that only one journal timed, its step takes as long as in that journal."""
    (name,) = [name for name in RECORDS if name.endswith("keras_maxer-60percent-strategy")]
    made = recorded.machine(RECORDS[name], CURVES)
    alone = {
        entry.seen.probe.layout.shares: entry.seen.step_seconds
        for entry in journal.read(recorded.RECORDED / f"{name}.jsonl").seen
        if isinstance(entry.seen, Timed) and entry.seen.probe.stage == Stage.SOLO
    }
    (far,) = [shares for shares in alone if shares[1] == 0 and shares[0] > 5000]
    assert made.devices[0].seconds(far[0]) == pytest.approx(alone[far], rel=0.01)
