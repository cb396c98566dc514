"""What a comparison that was asked for means on GPUs: modes of packing, and what is said of MPS."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.balancer.intake import take_in_comparison
from evener.balancer.request import Request
from evener.devices.nvidia.mps import PROGRAM


@pytest.fixture
def request_of_two(fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Request:
    """Two GPUs of a scripted driver, nothing of NVIDIA's on the path, no daemon where programs look for one."""
    fake_nvml(2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return Request(devices="gpu", workload="synthetic")


def test_mps_without_its_program_is_left_out_in_words(request_of_two: Request) -> None:
    wanted = take_in_comparison(request_of_two, mps=True).request.compare
    assert wanted is not None
    assert wanted.pack_modes == ("",)
    assert any("--mps was left out" in note and PROGRAM in note for note in wanted.left_out)


def test_mps_is_a_mode_of_its_own_where_its_program_is(request_of_two: Request, tmp_path: Path) -> None:
    (tmp_path / PROGRAM).write_text("#!/bin/sh\n")
    (tmp_path / PROGRAM).chmod(0o755)
    wanted = take_in_comparison(request_of_two, mps=True).request.compare
    assert wanted is not None
    assert wanted.pack_modes == ("", "mps")
    assert wanted.left_out == ()


def test_somebody_elses_daemon_is_told_as_plain_processes_share_through_it(
    request_of_two: Request, tmp_path: Path
) -> None:
    """It is known by the file that it keeps its process id in."""
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    wanted = take_in_comparison(request_of_two).request.compare
    assert wanted is not None
    assert any("MPS daemon is already running" in note for note in wanted.left_out)
    alone = take_in_comparison(request_of_two, ["solo", "even"]).request.compare
    assert alone is not None
    assert alone.left_out == ()
