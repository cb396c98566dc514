"""The unchanged Keras examples run with small sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.plan.file import Share, Throughput, make_layout
from tests.support.frameworks import skip_without
from tests.support.launched_plan import make_plan

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_recurrent_experiment_gives_its_table(keras_ranks: Callable[..., list[Any]]) -> None:
    """In float64, one device and two have the same accuracies to the three printed digits."""
    words = [
        "--units",
        "4",
        "--layers",
        "1",
        "--dense",
        "8",
        "--epochs",
        "2",
        "--sizes",
        "512",
        "--seeds",
        "1",
    ]
    script = str(EXAMPLES / "keras_gru_digits.py")
    (printed,) = keras_ranks("tests.support.script_ranks.run_keras_in_float64", script, *words)
    *_, row, _, verdict = printed.splitlines()
    cells = row.strip("|").split("|")
    assert cells[:2] == ["2", "512"]
    for one, two in zip(cells[2:4], cells[5:7], strict=True):
        assert float(two.split()[0]) == pytest.approx(float(one.split()[0]), abs=0.0011)
    assert verdict.startswith("Batch 512, two devices against 1 seeds of one: accuracy")


def test_training_by_a_plan_reaches_its_steps(
    keras_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Under evener launch, training makes as many steps as the plan's speed gives.

    There is one process per slice, with several passes.
    """
    shares = tuple(Share(f"cpu-{i}-of-2", i, "a slice", 0, 0.0) for i in range(2))
    layout = make_layout("split", shares, (20, 12), micros=(7, 12), engine="multiworker")
    promise = Throughput(960.0, 960.0, 960.0)
    plan = make_plan(layout, workload="keras_mnist", framework="tensorflow", throughput=promise)
    plan.save(tmp_path / "plan.toml")
    words = [str(EXAMPLES / "keras_train.py"), "--seconds", "1", "--rows", "640"]
    run = "tests.support.script_ranks.run_keras_by_plan"
    text, other = keras_ranks(run, str(tmp_path / "plan.toml"), *words, roles=("worker", "worker"))
    assert "Shares 20, 12: 32 samples a step." in text
    assert re.search(r"samples/s over 30 steps; the plan says 960", text)
    assert "Engine multiworker" in text
    assert other == ""
