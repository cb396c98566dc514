"""GPUs that others keep busy are named when a session begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evener.devices.discover import discover, find_others


def notes() -> tuple[str, ...]:
    """Return the notes on all GPUs of the scripted driver."""
    return find_others(discover("gpu", environ={}).devices)[1]


def test_a_gpu_that_works_for_others_is_reported_with_their_pids(
    fake_nvml: Callable[..., Any],
) -> None:
    """The idle GPU, and one with a desktop on it, aren't named."""
    nvml = fake_nvml(gpus=3)
    nvml.gpus[0].utilization, nvml.gpus[2].utilization = 0, 15
    process = type("Process", (), {"used_bytes": 1, "sm_percent": 9, "graphics": False})
    nvml.gpus[1].processes = [process() for _ in range(4)]
    for pid, each in enumerate(nvml.gpus[1].processes):
        each.pid = 40 + pid
    (said,) = notes()
    assert said.startswith(
        "GPU:1 was busy 95 % of the time with others' work (pid 40, 41, 42, ...) when this began"
    )


def test_if_the_driver_names_no_processes_the_load_is_reported_alone(
    fake_nvml: Callable[..., Any],
) -> None:
    """This happens in a container with its own process ids, or after a process has just ended."""
    fake_nvml(gpus=1)
    (said,) = notes()
    assert said.startswith(
        "GPU:0 was busy 95 % of the time with work of no named process when this began"
    )


def test_a_gpu_without_a_load_reading_is_not_reported(fake_nvml: Callable[..., Any]) -> None:
    """Instances of a GPU report none. A GPU that can't be read doesn't affect the other."""
    nvml = fake_nvml(gpus=2)
    nvml.fail("nvmlDeviceGetUtilizationRates", nvml.NVML_ERROR_NOT_SUPPORTED, gpu=0)
    (said,) = notes()
    assert said.startswith("GPU:1")


def test_a_driver_that_went_away_is_no_error(fake_nvml: Callable[..., Any]) -> None:
    """The session's first reading reports it."""
    nvml = fake_nvml(gpus=1)
    devices = discover("gpu", environ={}).devices
    nvml.unload()
    assert find_others(devices) == ((), ())
