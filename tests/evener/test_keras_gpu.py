"""A split over two real GPUs has the weights of one; skipped without two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import read_all, start, start_group

skip_without("tensorflow")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(580),
    pytest.mark.skipif(not Path("/dev/nvidia1").exists(), reason="needs two NVIDIA GPUs"),
]

SCRIPT = Path(__file__).parents[1] / "support" / "keras_proofs.py"
SECONDS = 550


def test_two_gpus_learn_what_one_learns(tmp_path: Path) -> None:
    """Weights are equal up to float64 rounding; each GPU computes its own share.

    GPU 1 can train alone.
    """
    (found,) = read_all([start(SCRIPT, "towers on gpus", str(tmp_path))], SECONDS)
    for case in ("adam L2", "momentum one row"):
        assert found[case]["weights"] <= 1e-7
        assert found[case]["logs"] <= 1e-6
    assert {"GPU:0", "GPU:1"} <= set(found["placed"]["Conv2D"])
    assert {"GPU:0", "GPU:1"} <= set(found["placed"]["Conv2DBackpropFilter"])
    assert found["second"]["weights"] <= 1e-7
    assert found["engine of one"] == "solo"


def test_two_processes_with_a_gpu_each_learn_what_one_learns(tmp_path: Path) -> None:
    """NCCL sums gradients, metrics and initial weights.

    The shares are unequal, and the last batch is short.
    """
    gpus = [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)]
    processes = start_group(
        SCRIPT, "multiworker", str(tmp_path), roles=["worker"] * 2, variables=gpus
    )
    first, second = read_all(processes, SECONDS)
    compared = [case for case, seen in first.items() if isinstance(seen, dict) and "logs" in seen]
    assert len(compared) >= 3
    for case in compared:
        assert first[case]["weights"] <= 1e-7, case
        assert first[case]["logs"] <= 1e-6, case
        assert second[case]["learned"] == first[case]["learned"], case
