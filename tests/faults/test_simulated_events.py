"""Events on simulated devices at the session's time: taken memory, heat, loss.

All are reported in the plan.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.balancer import journal
from evener.balancer.events import Event, Finished, Observed, ProbeStarted
from evener.balancer.request import Request
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Stage
from evener.devices.simulated import parse_machine
from evener.errors import RequestError
from tests.support.whole_sessions import finish

MACHINE = """
[sync]
base_ms = 5.0
[[device]]
name = "One"
memory_mib = 8000
memory_base_mib = 500.0
memory_per_sample_mib = 8.0
noise = 0.003
curve = [[64, 60.0], [512, 300.0]]
[[device]]
name = "Two"
memory_mib = 8000
memory_base_mib = 500.0
memory_per_sample_mib = 8.0
noise = 0.003
curve = [[64, 80.0], [512, 450.0]]
[[event]]
device = 1
"""
ROOM = (8000 - 500) // 8


def searched(folder: Path, event: str, resume: str | None = None) -> tuple[Finished, list[Event]]:
    """Run a whole search on the machine, without tolerance, so that it fills the memory."""
    machine = folder / "machine.toml"
    machine.write_text(MACHINE + event)
    return finish(Request(devices=f"sim:{machine}", tolerance=0.0), resume)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5])
def test_memory_that_is_taken_midway_is_left_to_its_holder(tmp_path: Path, part: float) -> None:
    """The plan fits the remaining memory after few failures.

    The memory is taken at moments from before the first solo probe until a split has raced.
    """
    free, _ = searched(tmp_path, "at_seconds = 1e9")
    finished, events = searched(
        tmp_path, f"at_seconds = {part * free.at_seconds}\nmemory_taken_mib = 5000.0"
    )
    batches = finished.plan.layout.batches
    assert free.plan.layout.batches[1] * 8 + 500 > 3000, "it would not fit"
    assert batches[1] * 8 + 500 <= 3000
    assert batches[0]
    ran_out = [e for e in events if isinstance(e, Observed) and isinstance(e.seen, OutOfMemory)]
    assert len(ran_out) <= 3
    assert any(
        "SIM:1: other processes hold 4.88 GiB of its memory" in warning
        for warning in finished.plan.warnings
    )
    assert finished.found is not None
    assert [one.device for one in finished.found.taken_memory] == ["SIM:1"]


def test_a_device_that_holds_itself_back_is_doubted(tmp_path: Path) -> None:
    """A device throttled from the first split on is doubted; a warning says to measure again."""
    _, events = searched(tmp_path, "at_seconds = 1e9")
    split = next(
        e.at_seconds for e in events if isinstance(e, ProbeStarted) and e.probe.stage == Stage.SPLIT
    )
    finished, _ = searched(tmp_path, f"at_seconds = {split}\nslowed = 0.3")
    (said,) = [warning for warning in finished.plan.warnings if "held back" in warning]
    assert said.startswith("SIM:1: ")
    assert "measure again" in said
    assert finished.found is not None
    assert ("throttled", "SIM:1") in [(one.code, one.device) for one in finished.found.doubts]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.6])
def test_a_device_that_is_lost_midway_has_no_part(tmp_path: Path, part: float) -> None:
    """The device is lost at its first probe, during one, or after a split raced with it."""
    free, _ = searched(tmp_path, "at_seconds = 1e9")
    finished, _ = searched(tmp_path, f"at_seconds = {part * free.at_seconds}\nlost = true")
    assert finished.plan.layout.batches[0]
    assert finished.plan.layout.batches[1] == 0
    assert any("SIM:1" in warning and "left out" in warning for warning in finished.plan.warnings)


@pytest.mark.parametrize(
    "event",
    [
        "at_seconds = 25.0\nmemory_taken_mib = 5000.0",
        "at_seconds = 9.0\nuntil_seconds = 11.0\nlost = true",
    ],
)
def test_a_run_that_was_cut_off_anywhere_comes_to_the_same_plan(tmp_path: Path, event: str) -> None:
    """Events follow the session's clock, with which a resumed run continues."""
    whole, _ = searched(tmp_path, event)
    path = runs.journal_path(runs.find("last"))
    lines = path.read_bytes().splitlines(keepends=True)
    assert journal.read(path).seen
    for kept in range(2, len(lines), 5):
        path.write_bytes(b"".join(lines[:kept]))
        again, _ = searched(tmp_path, event, "last")
        assert again.plan == whole.plan


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ("at_seconds = -1.0", "at_seconds"),
        ("at_seconds = 5.0\nuntil_seconds = 5.0", "before it begins"),
        ("at_seconds = 5.0\nslowed = 1.0", "slowed"),
        ("at_seconds = 5.0\nmemory_taken_mib = -3.0", "memory_taken_mib"),
        ("at_seconds = nan", "at_seconds"),
        ("at_seconds = 1.0\nuntil_seconds = nan", "before it begins"),
        ("at_seconds = 1.0\nwhat = 1", "what"),
        ("", "at_seconds"),
    ],
)
def test_an_event_that_can_not_be_meant_is_named(event: str, fault: str) -> None:
    """The error names the key, like all errors in a machine file."""
    with pytest.raises(RequestError, match=fault) as seen:
        parse_machine((MACHINE + event).encode())
    assert "event 0" in str(seen.value)
    with pytest.raises(RequestError, match="device"):
        parse_machine((MACHINE + "at_seconds = 1.0").replace("device = 1", "device = 2").encode())
