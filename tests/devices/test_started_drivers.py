"""Whether a process has started a device's driver, which no fork survives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evener.devices.backend import Backend, Discovery
from evener.devices.nvidia.backend import NvidiaGpus
from evener.devices.types import Source
from tests.support.fake_cuda import make_cuda_library
from tests.support.python_path import python_path

ASKS = """
import ctypes, sys
from evener.devices.nvidia.backend import NvidiaGpus
if sys.argv[1:]:
    ctypes.CDLL(sys.argv[1])
print(NvidiaGpus().has_started_driver(["/dev/nvidiactl", "/dev/nvidia-uvm"]))
"""


class CardsWithoutFiles(Backend):
    kind = "toy"

    def open_source(self, found: Discovery) -> Source:
        raise AssertionError


class Cards(CardsWithoutFiles):
    driver_files = ("/dev/toy",)


def test_a_makers_open_files_mean_that_its_driver_started() -> None:
    assert Cards().has_started_driver(["/tmp/log", "/dev/toy0"])
    assert not Cards().has_started_driver(["/tmp/log"])
    assert not CardsWithoutFiles().has_started_driver(["/dev/toy0"])


@pytest.mark.parametrize(("status", "expected"), [(0, True), (100, True), (3, False)])
def test_cuda_says_itself_whether_it_started(tmp_path: Path, status: int, expected: bool) -> None:
    """NVML opens the same files; CUDA answers 3 until it was started, and 100 without a GPU."""
    assert ask(str(make_cuda_library(tmp_path, status))) is expected


def test_cuda_has_not_started_if_its_library_is_not_loaded() -> None:
    assert not ask()
    assert not NvidiaGpus().has_started_driver([])


def ask(*words: str) -> bool:
    """Return the answer of a process that has loaded a library, if one is given."""
    ran = subprocess.run(
        [sys.executable, "-c", ASKS, *words],
        env={"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip() == "True"
