"""A short training before a search measures the noise scale, in a child of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from evener.balancer.intake import take_in
from evener.balancer.request import Request
from evener.balancer.trials import learn
from evener.errors import NoLayoutError, RequestError
from evener.tui.cli.main import run
from tests.support.frameworks import skip_without

skip_without("torch")

SCRIPT = """
import torch


def build(data=True):
    torch.manual_seed(1)
    inputs, module = torch.randn(2048, 20), torch.nn.Linear(20, 1)
    targets = inputs @ torch.randn(20, 1) + 2 * torch.randn(2048, 1)
    last = torch.utils.data.TensorDataset(inputs, targets) if data else (lambda rows: (torch.randn(rows, 20),) * 2)
    return module, torch.optim.SGD(module.parameters(), 0.0), torch.nn.MSELoss(), last
"""  # noqa: E501


ENDLESS = """
import os, pathlib, time


def build():
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_a_child_trains_at_the_own_batch_and_measures(own_folder: Path) -> None:
    """At weights that stay, (noise / signal) of 2 * error * inputs: 20 * 4 * (|w|^2 + 4) / (4 *
    |w|^2), about 25.
    """
    (own_folder / "train.py").write_text(SCRIPT)
    asked = Request(devices="cpu/1", workload="train.py:build", framework="torch", own_batch=64)
    learned = learn(take_in(asked), 2.0)
    assert learned.own_batch == 64
    assert learned.noise_scale is not None
    assert 15 < learned.noise_scale.rows < 40
    with pytest.raises(
        NoLayoutError, match=r"The training failed: CPU:0, measuring: .*say nothing about learning"
    ):
        learn(take_in(msgspec.structs.replace(asked, settings={"data": False})), 0.5)


def test_what_cannot_learn_is_refused_before_anything_starts() -> None:
    with pytest.raises(RequestError, match="synthetic here isn't one"):
        learn(take_in(Request(devices="cpu/1", workload="synthetic", framework="none")), 3.0)
    with pytest.raises(RequestError, match="isn't one"):
        learn(take_in(Request(devices="sim:gtx1080")), 3.0)


@pytest.mark.parametrize("option", ["--dry-run", "--resume"])
def test_what_makes_no_new_search_is_refused_before_it_trains(
    option: str, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "train.py").write_text("raise SystemExit('it was trained')\n")
    options = [
        "-d",
        "cpu/1",
        "-w",
        "train.py:build",
        "--framework",
        "torch",
        "--learn",
        "9s",
        option,
    ]
    assert run(["balance", *options, *["last"] * (option == "--resume")]) == 2
    assert f"--learn and {option} can't be combined" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)]
)
def test_a_signal_ends_its_child_too(
    number: int, send: Callable[[int, int], None], own_folder: Path
) -> None:
    """Ctrl-C reaches both."""
    (own_folder / "train.py").write_text(ENDLESS)
    options = ["-d", "cpu/1", "-w", "train.py:build", "--framework", "torch", "--learn", "60s"]
    command = [sys.executable, "-m", "evener", "balance", *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stderr is not None
        deadline = time.monotonic() + 60
        while not (written := own_folder / "pid").exists() or not written.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = psutil.Process(int(written.read_text()))
        send(parent.pid, number)
        _, alive = psutil.wait_procs([child], timeout=30)
        for process in alive:
            process.kill()
        assert not alive
        assert "Traceback" not in parent.stderr.read()
    assert parent.returncode in (-signal.SIGTERM, 130)
