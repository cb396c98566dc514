"""A split over two real GPUs learns what one learns; left out where there aren't two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(580),
    pytest.mark.skipif(not Path("/dev/nvidia1").exists(), reason="needs two NVIDIA GPUs"),
]

SCRIPT = Path(__file__).parents[1] / "support" / "keras_proofs.py"


def prove(engine: str, folder: Path) -> Any:
    """What the proofs of an engine print."""
    command = [sys.executable, str(SCRIPT), f"{engine} on gpus", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("engine", ["towers", "mirrored"])
def test_two_gpus_learn_what_one_learns(engine: str, tmp_path: Path) -> None:
    """Within what GPUs' own order of sums leaves of float64; each does its own heavy work; GPU 1 can train alone."""
    found = prove(engine, tmp_path)
    for case in ("adam L2", "momentum one row"):
        assert found[case]["weights"] <= 1e-7
        assert found[case]["logs"] <= 1e-6
    if engine == "towers":
        assert {"GPU:0", "GPU:1"} <= set(found["placed"]["Conv2D"])
        assert {"GPU:0", "GPU:1"} <= set(found["placed"]["Conv2DBackpropFilter"])
        assert found["second"]["weights"] <= 1e-7
        assert found["engine of one"] == "solo"


def test_two_processes_with_a_gpu_each_learn_what_one_learns(tmp_path: Path) -> None:
    """Gradients, metrics and first weights summed by NCCL, in uneven shares, with a short last batch."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    for door in doors:
        door.close()
    processes = []
    for rank in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        variables = {"TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": str(rank), "NCCL_DEBUG": "VERSION"}
        command = [sys.executable, str(SCRIPT), "multiworker", str(tmp_path)]
        environment = {**os.environ, **variables}
        processes.append(subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment))
    for process in processes:
        output, errors = process.communicate(timeout=550)
        assert process.returncode == 0, errors[-3000:]
        found = json.loads(output[output.index("{") :])
        for case in ("adam L2", "clipnorm", "momentum one row", "accumulation", "dataset"):
            assert found[case]["weights"] <= 1e-7
            assert found[case]["logs"] <= 1e-6
