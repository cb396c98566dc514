"""Runs on real GPUs, replayed: the same observations give the same plan and verdict as there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from evener.balancer import journal
from evener.balancer.statistics import relative_half_width
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Stage, Timed
from evener.plan.file import parse_plan, to_json, to_toml
from evener.plan.layout import Knots, PlanLayout
from evener.shares.curves import Curve

RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.jsonl"))


def test_there_are_recordings() -> None:
    """With an empty folder, the tests below would check nothing."""
    assert len(RECORDED) >= 5


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_replays_to_its_plan(path: Path) -> None:
    """Layout, throughput and duration follow from the observations alone.

    Curves are equally near to the measurements.
    """
    record = journal.read(path)
    assert record.ended is not None
    found = runs.recover(record)
    recorded = parse_plan(to_json(record.ended.plan)).layout
    for position, (now, then) in enumerate(
        zip(found.plan.layout.share, recorded.share, strict=True)
    ):
        if then.curve:  # older plans have none
            assert now.most == then.most
            assert _off(record, position, now.curve) <= _off(record, position, then.curve) + 0.01
    rate = record.ended.plan.throughput.samples_per_second
    layout, recorded = _without_curves(found.plan.layout), _without_curves(recorded)
    # 5 % are no reason for more
    fewer = recorded.kind == "pack" and layout.processes < recorded.processes
    if fewer:
        recorded = msgspec.structs.replace(
            recorded, processes=layout.processes, placement=layout.placement
        )
    assert layout == recorded
    assert found.plan.throughput.samples_per_second == pytest.approx(
        rate, rel=0.06 if fewer else 0.01
    )
    assert found.plan.search.probes == record.ended.plan.search.probes
    assert found.plan.search.out_of_memory == record.ended.plan.search.out_of_memory
    assert parse_plan(to_toml(found.plan)) == found.plan


def _without_curves(layout: PlanLayout) -> PlanLayout:
    """Return the layout without the curves fitted to its measurements."""
    shares = tuple(msgspec.structs.replace(share, curve=(), most=0) for share in layout.share)
    return msgspec.structs.replace(layout, share=shares)


def _off(record: journal.JournalContents, position: int, curve: Knots) -> float:
    """Return the largest error of a curve against the device's times alone that are
    known to 1 %.
    """
    times = [
        (one.probe.layout.global_batch, one.step_seconds)
        for one in (entry.seen for entry in record.seen)
        if isinstance(one, Timed)
        and one.probe.stage == Stage.SOLO
        and one.probe.layout.active == (position,)
        if not one.probe.layout.in_passes and relative_half_width(one.throughput) < 0.01
    ]
    found = Curve(tuple(batch for batch, _ in curve), tuple(time for _, time in curve), 0.0)
    return max((abs(found.seconds(batch) / seconds - 1) for batch, seconds in times), default=0.0)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_chosen_layout_is_within_the_tolerance_of_all_that_was_measured(path: Path) -> None:
    """Except for the winner's curse, nothing that ran was clearly faster than the chosen layout."""
    record = journal.read(path)
    assert record.ended is not None
    chosen = record.ended.plan.throughput.samples_per_second
    timed = [entry.seen for entry in record.seen if isinstance(entry.seen, Timed)]
    # those only show costs
    fastest = max(one.samples_per_second for one in timed if not one.probe.layout.length)
    assert chosen >= fastest * (1 - record.header.request.tolerance - 0.02)


@pytest.mark.parametrize(
    "path", [path for path in RECORDED if "8GiB-5GiB" in path.stem], ids=lambda path: path.stem
)
def test_memory_caps_are_met_with_few_runs_out_of_memory(path: Path) -> None:
    """With 8 GiB and 5 GiB, no device ran out more than twice, and none in the race.

    The plan ran on both.
    """
    record = journal.read(path)
    full = [seen.seen for seen in record.seen if isinstance(seen.seen, OutOfMemory)]
    assert all(sum(device in seen.devices for seen in full) <= 2 for device in (0, 1))
    assert not [seen for seen in full if seen.probe.stage == Stage.RACE]
    assert record.ended is not None
    assert len(record.ended.plan.layout.active) == 2


def test_some_ran_out_of_memory_and_were_met_by_a_retreat() -> None:
    """These are real errors of a framework.

    The plan's passes have fewer samples than what ran out of memory on the same device.
    """
    found = 0
    for record in map(journal.read, RECORDED):
        assert record.ended is not None
        for seen in (entry.seen for entry in record.seen):
            if isinstance(seen, OutOfMemory):
                found += 1
                shares = record.ended.plan.layout.share
                assert all(
                    (shares[i].micro or shares[i].batch) < seen.probe.layout.pass_rows[i]
                    for i in seen.devices
                )
    assert found >= 2
