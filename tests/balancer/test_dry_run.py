"""A dry run predicts a search on simulated devices, and reports failures in one sentence."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from evener.balancer.events import ProbeProgress
from evener.balancer.jobs import make_job
from evener.balancer.request import Request
from evener.balancer.store import runs
from evener.balancer.trials import DryRunResult, ProbeLength, dry_run, repeat_probe
from evener.balancer.types import solo
from evener.devices.simulated import catalogue
from evener.errors import NoLayoutError
from evener.tui.cli.main import run
from tests.support.cores import two_cores

PAIR = Request(devices="sim:gtx1080ti,gtx1080")
REAL = Request(devices="cpu/2", workload="synthetic", framework="none", settings={"base_ms": 1.0})


def dry_run_request(request: Request) -> DryRunResult:
    """Return the result of a dry run, which makes no run."""
    result = dry_run(make_job(request), lambda _: None, threading.Event())
    assert result is not None
    assert not runs.list_runs()
    return result


@pytest.mark.parametrize("batch", [None, 1000])
def test_the_batches_that_it_says_are_those_of_the_search(batch: int | None) -> None:
    """They agree within 5 % on simulated devices."""
    request = msgspec.structs.replace(PAIR, global_batch=batch)
    result = dry_run_request(request)
    machine = catalogue(["gtx1080ti", "gtx1080"])
    for position, device in enumerate(result.devices):
        fits = device.largest_batch
        assert fits is not None
        assert machine.memory_bytes(position, round(0.95 * fits)) <= machine.usable_memory_bytes(
            position
        )
        assert machine.memory_bytes(position, round(1.05 * fits)) > machine.usable_memory_bytes(
            position
        )
    assert [size for size, _ in result.steps] == [8, 64]


@two_cores
def test_one_real_child_builds_and_steps_and_a_failure_is_a_one_line_error() -> None:
    """Only the first device is used. The message names the workload's exception."""
    phases: list[ProbeProgress] = []
    result = dry_run(make_job(REAL), phases.append, threading.Event())
    assert result is not None
    assert result.start_seconds > 0
    assert {one.probe.layout.shares for one in phases} == {(8,), (64,)}
    assert {"building", "measuring"} <= {one.phase for one in phases}
    broken = msgspec.structs.replace(REAL, settings={"fail": "raise"})
    with pytest.raises(
        NoLayoutError, match=r"asked to raise at step 0 of 8 samples \(traceback in .*\)\. "
    ) as fault:
        dry_run_request(broken)
    errors = Path(fault.value.message.partition("(traceback in ")[2].removesuffix(")."))
    assert "in step\n" in errors.read_text()
    errors.write_text("those of the measurement before")
    with (
        pytest.raises(NoLayoutError),
        repeat_probe(
            make_job(broken), solo(2, 0, 8), 1, ProbeLength(0.2), threading.Event()
        ) as turns,
    ):
        next(turns)
    assert errors.read_text().startswith(
        "CPU:0, warming up: ValueError: synthetic was asked to raise"
    )
    stop = threading.Event()
    stop.set()
    assert dry_run(make_job(REAL), lambda _: None, stop) is None


@two_cores
def test_a_workload_that_hangs_ends_with_the_budget() -> None:
    """The message says where it was."""
    hanging = msgspec.structs.replace(REAL, settings={"fail": "hang"}, budget_seconds=1.5)
    with pytest.raises(
        NoLayoutError, match=r"The first steps of synthetic had not ended after [\d.]+ s on CPU:0"
    ):
        dry_run_request(hanging)


def test_the_command_prints_a_row_for_each_device_and_makes_no_plan(
    capsys: pytest.CaptureFixture[str], own_folder: object
) -> None:
    """The row says what fits. Options that need a plan are refused."""
    assert run(["balance", "-d", "sim:gtx1080ti,gtx1080", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "SIM:1   GTX 1080     7.93 GiB   about 694 samples" in out
    assert "A search takes at most 2 min" in out
    assert run(["balance", "-d", "sim:gtx1080ti", "--dry-run", "--export", "plan.toml"]) == 2
    assert "--dry-run makes no plan" in capsys.readouterr().err
    assert not runs.list_runs()


def test_a_model_that_simulated_devices_do_not_run_is_not_named_as_if_they_had(
    capsys: pytest.CaptureFixture[str], own_folder: Path, tmp_path: Path
) -> None:
    """A user's model that would never return gets a plan there, whose first warning says why."""
    (tmp_path / "hangs.py").write_text("def build():\n    while True:\n        pass\n")
    own = ["-d", "sim:gtx1080ti,gtx1080", "-w", f"{tmp_path}/hangs.py:build"]
    assert run(["balance", *own, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "hangs.py:build was not run: simulated devices have" in out
    assert "A simulated model was stepped on SIM:0" in out
    assert run(["balance", *own]) == 0
    captured = capsys.readouterr()
    assert "hangs.py:build was not run" in captured.out
    assert runs.load_run("last").header.notes[0].endswith("a model of their own.")
