"""Observations of journals up to 0.1 in today's stages."""

from __future__ import annotations

import msgspec
import pytest

from evener.balancer.types import (
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    solo,
    upgrade_observation,
    upgrade_probe,
)

SPLIT, ALONE = Layout("split", (8, 8)), solo(2, 0, 8)
XLA = msgspec.structs.replace(SPLIT, knobs=("xla",))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Probe(ALONE, Stage.SPLIT, 4.0, 0), Probe(ALONE, Stage.REST, 4.0, 0)),
        (Probe(SPLIT, Stage.SPLIT, 4.0, 0), Probe(SPLIT, Stage.SPLIT, 4.0, 0)),
        (Probe(ALONE, Stage.SOLO, 4.0, 2), Probe(ALONE, Stage.SOLO, 4.0, 2)),
        (Probe(SPLIT, Stage.RACE, 4.0, 999), Probe(SPLIT, Stage.RACE, 4.0, 999)),
        (Probe(SPLIT, Stage.RACE, 4.0, 1000), Probe(SPLIT, Stage.KNOBS, 4.0, 0)),
        (Probe(XLA, Stage.RACE, 4.0, 1002), Probe(XLA, Stage.KNOBS, 4.0, 2)),
        (
            Probe(Layout("pack", (8, 0), 2), Stage.PACK, 2.0, 0),
            Probe(Layout("pack", (8, 0), 2), Stage.PACK, 2.0, 0),
        ),
        (Probe(SPLIT, Stage.SOLO, 4.0, 1000), Probe(SPLIT, Stage.SOLO, 4.0, 1000)),
    ],
)
def test_a_probe_is_in_the_stage_that_it_has_today(old: Probe, new: Probe) -> None:
    """One device with the others idle was a split; other knobs were turns of the race
    from 1000 on.
    """
    assert upgrade_probe(old) == new
    assert upgrade_probe(new) == new


def test_an_observation_keeps_all_but_its_stage() -> None:
    old, new = Probe(ALONE, Stage.SPLIT, 4.0), Probe(ALONE, Stage.REST, 4.0)
    for seen in (
        Timed(old, 0.1, 0.09, 0.11, 9, (1, None), (0.1, None), 0.2, 3.0),
        OutOfMemory(old, (0,), "full", 1.0),
        Failed(old, "exit", "gone", (0,), 1.0),
    ):
        found: Observation = upgrade_observation(seen)
        assert found == msgspec.structs.replace(seen, probe=new)
        assert upgrade_observation(found) is found
