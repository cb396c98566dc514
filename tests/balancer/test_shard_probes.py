"""A real model that no CPU slice holds under its cap: it is planned in shards, and trains by the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evener.balancer.search import budget
from evener.plan.file import load_plan
from evener.tui.cli.main import run
from tests.support.cores import two_cores
from tests.support.frameworks import skip_without
from tests.support.quick_probes import QUICK

skip_without("torch")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cores_of_one_user")]
BYTES = 16 * 72 * (8 * 256 * 256 + 5 * 256)  # parameters, gradients and AdamW's state


@two_cores
def test_a_model_that_no_slice_holds_is_planned_and_trained_in_shards(
    own_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "BASE_SECONDS", QUICK)
    script = str(Path(__file__).parents[1] / "support" / "shard_workload.py")
    devices = "cpu/2:0@430MiB,cpu/2:1@370MiB"
    words = ["--workload", f"{script}:build", "--framework", "torch", "--max-global-batch", "16", "--budget", "60s"]
    code = run(["balance", "-d", devices, *words, "--export", "plan.toml"])
    said = capfd.readouterr()
    assert code == 0, said.err
    layout = load_plan("plan.toml").layout
    assert layout.kind == "shard"
    assert sum(layout.states) == pytest.approx(1.0)
    assert layout.states[0] > layout.states[1], "the slice that may hold more"
    for share, limit in zip(layout.share, (430, 370), strict=True):
        assert share.state * BYTES < limit << 20
    assert run(["launch", "plan.toml", script]) == 0
    said = capfd.readouterr()
    held = dict(re.findall(r"rank (\d) held (\d+)", said.err))
    assert [int(held[str(rank)]) / (BYTES / 4) for rank in range(2)] == pytest.approx(layout.states, abs=0.01)
