"""GPUs whose memory others hold are named before anything is measured on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evener.balancer.jobs import make_job
from evener.balancer.request import Request
from evener.balancer.store.runs import list_runs
from evener.errors import DeviceError
from evener.tui.cli.main import run
from tests.support.fake_nvml import GIB, FakeProcess

TOTAL_BYTES = 140 * GIB  # memory of the scripted driver's GPUs, without what it reserves


@pytest.fixture
def nvml(fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return two idle GPUs."""
    monkeypatch.setattr("evener.devices.discover.SETTLE_SECONDS", 0.0)
    double = fake_nvml(2)
    for gpu in double.gpus:
        gpu.utilization = 0
    return double


def fill(nvml: Any, gpu: int, free_bytes: int, pids: tuple[int, ...] = (41, 42, 43, 44)) -> None:
    """Let other processes leave only `free_bytes` of a GPU."""
    nvml.gpus[gpu].used_bytes = TOTAL_BYTES - free_bytes
    nvml.gpus[gpu].processes = [FakeProcess(pid) for pid in pids]


def resolve_notes(devices: str = "gpu") -> tuple[str, ...]:
    """Return the notes on the devices before a search."""
    return make_job(Request(devices=devices, workload="synthetic", global_batch=1024)).notes


def test_when_every_gpu_is_full_nothing_is_measured(nvml: Any) -> None:
    """Exit code 3, with the processes that hold the memory."""
    fill(nvml, 0, GIB)
    fill(nvml, 1, GIB // 2, pids=())
    with pytest.raises(DeviceError) as fault:
        resolve_notes()
    assert fault.value.exit_code == 3
    assert fault.value.message == (
        "GPU:0 has too little free memory to measure on, 1.0 of 140.0 GiB: other processes "
        "(pid 41, 42, 43, ...) hold "
        "the rest. GPU:1 has too little free memory to measure on, 0.5 of 140.0 GiB: "
        "processes that the driver doesn't "
        "name hold the rest."
    )


def test_the_command_ends_with_exit_code_3_before_it_measures(
    nvml: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints one sentence with a remedy."""
    fill(nvml, 0, GIB)
    fill(nvml, 1, GIB)
    assert run(["balance", "-d", "gpu", "-w", "synthetic", "--global-batch", "1024"]) == 3
    errors = capsys.readouterr().err
    assert "GPU:0 has too little free memory to measure on" in errors
    assert "choose other --devices" in errors
    assert not list_runs()


def test_a_full_gpu_beside_one_with_room_is_a_warning(nvml: Any) -> None:
    """The warning has the pids. If only that GPU is requested, it is refused."""
    fill(nvml, 1, GIB)
    (note,) = (note for note in resolve_notes() if "too little free memory" in note)
    assert note.startswith("GPU:1 ")
    assert "pid 41, 42, 43, ..." in note
    with pytest.raises(DeviceError):
        resolve_notes("gpu:1")


def test_a_gpu_with_enough_room_is_measured(nvml: Any) -> None:
    """Enough is 2 GiB of a large GPU, or the limit in the request."""
    fill(nvml, 0, 2 * GIB)
    fill(nvml, 1, GIB)
    assert not any("too little free memory" in note for note in resolve_notes("gpu:0,gpu:1@1GiB"))


def test_memory_that_is_being_freed_is_waited_for(
    nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has just exited still holds its memory for a moment."""
    fill(nvml, 0, GIB)
    fill(nvml, 1, GIB)
    monkeypatch.setattr("evener.devices.discover.time.sleep", lambda _: fill(nvml, 0, 100 * GIB))
    assert any(note.startswith("GPU:1 has too little") for note in resolve_notes())
