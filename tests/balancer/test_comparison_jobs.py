"""What a requested comparison means on GPUs, and its messages about MPS."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.balancer.jobs import make_comparison_job
from evener.balancer.request import Request


@pytest.fixture
def request_of_two(
    fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Request:
    """Return two GPUs of a scripted driver, without a daemon where programs look for one."""
    fake_nvml(2)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return Request(devices="gpu", workload="synthetic")


def test_a_daemon_is_named_as_processes_share_through_it(
    request_of_two: Request, tmp_path: Path
) -> None:
    """It is recognized by the file in which it keeps its process id."""
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    wanted = make_comparison_job(request_of_two).request.compare
    assert wanted is not None
    assert any("An MPS daemon runs" in note for note in wanted.left_out)
    alone = make_comparison_job(request_of_two, ["solo", "even"]).request.compare
    assert alone is not None
    assert alone.left_out == ()
