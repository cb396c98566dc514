"""A user's files may be named like evener's packages; only their training script imports them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cores import two_cores
from tests.support.frameworks import skip_without

pytestmark = [pytest.mark.slow, two_cores]

TRAIN = """
import balancer, devices, tui, workloads.model
import torch

def build():
    assert (balancer.MINE, devices.MINE, tui.MINE) == (1, 2, 3)
    model = workloads.model.network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()

def sample_batch(n):
    return torch.zeros(n, 4), torch.zeros(n, 2)
"""
MODEL = """
import torch

def network():
    return torch.nn.Linear(4, 2)
"""
PROBE = ["probe", "--batches", "8", "--repeat", "1", "--steps", "20", "--json"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a train.py and files named like evener's packages."""
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "model.py").write_text(MODEL)
    for number, name in enumerate(("balancer", "devices", "tui"), 1):
        (tmp_path / f"{name}.py").write_text(f"MINE = {number}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_files_named_like_evener_s_packages_are_no_obstacle(project: Path) -> None:
    """The command trains with these files.

    So does `python -m`, which searches the folder first.
    """
    skip_without("torch")
    command = str(Path(sys.executable).with_name("evener"))
    commands = [
        [command, *PROBE, "-d", "cpu/2:0", "--workload", "train.py:build", "--framework", "torch"],
        [sys.executable, "-m", "evener", *PROBE, "-d", "cpu/2:1", "--workload", "synthetic"],
    ]
    running = [
        subprocess.Popen(each, cwd=project, stdout=-1, stderr=-1, text=True) for each in commands
    ]
    for process, (answer, errors) in [
        (process, process.communicate(timeout=200)) for process in running
    ]:
        assert process.returncode == 0, answer + errors
        (run,) = json.loads(answer)["runs"]
        assert run["samples_per_second"] > 0
