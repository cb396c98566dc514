"""The PyTorch examples run as they stand, by evener launch, with small sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.plan import Share, Throughput, make_layout
from tests.support.launched_plan import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# A gloo thread that lets go of its last tensors while Python ends aborts the rank: seldom, on a busy machine, and known
# (github.com/pytorch/pytorch/issues/190489).
ABORTS = "terminate called without an active exception"


def run(folder: Path, *words: str) -> str:
    """What a Python process prints, on CPUs; once more if PyTorch aborted at its end."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "EVENER_LIVE_DIR": str(folder / "live"), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *words], env={**os.environ, **variables}, capture_output=True, text=True, timeout=270
        )
        if ABORTS not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan for two slices, 24 + 8 samples a step, the first one's in three passes."""
    shares = tuple(Share(f"cpu-{i}-of-2", i, "a slice", 0, 0.0) for i in range(2))
    layout = make_layout("split", shares, (24, 8), micros=(10, 8))
    make_plan(layout, throughput=Throughput(960.0, 960.0, 960.0)).save(tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def epochs(text: str) -> list[list[str]]:
    """Loss and accuracy of each epoch."""
    return re.findall(r"epoch \d+: loss ([\d.]+), accuracy ([\d.]+), [\d,]+ samples/s", text)


def test_training_by_a_plan_learns_what_one_device_learns(plan: str, tmp_path: Path) -> None:
    """Two ranks of 24 and 8 print the loss and accuracy of one process on batches of 32, and the plan's figure.

    Their time is over in the first epoch, which both of them end.
    """
    script, rows = str(EXAMPLES / "torch_train.py"), ("--rows", "1000")
    two = run(tmp_path, "-m", "evener", "launch", plan, script, *rows, "--seconds", "0.01")
    (ours,), (expected,) = epochs(two), epochs(run(tmp_path, script, "--global-batch", "32", *rows, "--epochs", "1"))
    assert [float(figure) for figure in ours] == pytest.approx([float(figure) for figure in expected], abs=2e-3)
    assert re.search(r"^[\d,]+ samples/s over 1 epochs; the plan says 960$", two, re.MULTILINE)


def test_a_script_goes_on_from_its_checkpoint(plan: str, tmp_path: Path) -> None:
    """128 steps an epoch and a checkpoint after 100 of them: what is left of the first one, and the second."""
    words = (
        "launch",
        plan,
        str(EXAMPLES / "torch_resume.py"),
        "--checkpoint",
        str(tmp_path / "a.pt"),
        "--every",
        "100",
    )
    one = run(tmp_path, "-m", "evener", *words, "--epochs", "1")
    two = run(tmp_path, "-m", "evener", *words, "--epochs", "2").splitlines()
    assert one.splitlines() == two[:1]
    assert re.fullmatch(r"epoch 1: loss 0\.\d+ on 2 devices", two[1])


def test_the_recurrent_experiment_gives_its_table(tmp_path: Path) -> None:
    """One device and two unequal ones have the same accuracies, to the digit shown."""
    words = ["--units", "8", "--layers", "1", "--dense", "8", "--epochs", "2", "--batches", "256", "--seeds", "2"]
    table, said = run(tmp_path, str(EXAMPLES / "torch_gru_digits.py"), *words).splitlines()[-2:]
    cells = table.strip("|").split("|")
    assert cells[:2] == ["2", "256"]
    assert cells[2:4] == cells[5:7]
    assert re.fullmatch(r"0\.\d\d \(0\.\d\d–0\.\d\d\)", cells[2])
    assert said.startswith("Batch 256")
    assert said.count("is inside") == 2
