"""The unchanged PyTorch examples run with small sizes, in forked ranks.

The ranks have evener launch's environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.plan.file import Share, Throughput, make_layout
from tests.support.launched_plan import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(trainer_ranks: Callable[..., list[Any]]) -> Callable[..., str]:
    """Runs an example and returns the output of its first rank: `run(name, *words, world=1)`.

    The examples run in float64.
    """

    def run_example(
        name: str,
        *words: str,
        world: int = 1,
        how: str = "_in_float64",
        given: Sequence[str] = (),
        imports: str = "",
    ) -> str:
        function = f"tests.support.script_ranks.save_printed{how}"
        given = [*given, str(EXAMPLES / name), *words]
        printed: list[str] = trainer_ranks(function, *given, world=world, imports=imports)
        return printed[0]

    return run_example


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan for two slices with 24 + 8 samples per step, the first in three passes."""
    shares = tuple(Share(f"cpu-{i}-of-2", i, "a slice", 0, 0.0) for i in range(2))
    layout = make_layout("split", shares, (24, 8), micros=(10, 8))
    make_plan(layout, throughput=Throughput(960.0, 960.0, 960.0)).save(tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def epochs(text: str) -> list[list[str]]:
    """Return loss and accuracy of each epoch."""
    return re.findall(r"epoch \d+: loss ([\d.]+), accuracy ([\d.]+), [\d,]+ samples/s", text)


def test_training_by_a_plan_learns_what_one_device_learns(
    plan: str, run: Callable[..., str]
) -> None:
    """Ranks of 24 and 8 rows print one process's loss and accuracy, and the plan's speed.

    Their time is over in the first epoch, which both complete. float64 is used because CPUs differ
    in the order of float32 sums.
    """
    name, rows = "torch_train.py", ("--rows", "1000")
    two = run(name, *rows, "--seconds", "0.01", world=2, how="_by_plan", given=[plan])
    (ours,), (expected,) = (
        epochs(two),
        epochs(run(name, "--global-batch", "32", *rows, "--epochs", "1")),
    )
    assert ours == expected
    assert re.search(r"^[\d,]+ samples/s over 1 epochs; the plan says 960$", two, re.MULTILINE)


def test_a_script_goes_on_from_its_checkpoint(
    plan: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    """After 100 of 128 steps on one device, two devices continue the epoch, and train another."""
    layout = make_layout("solo", (Share("cpu-0-of-2", 0, "a slice", 0, 0.0),), (32,))
    make_plan(layout).save(tmp_path / "solo.toml")
    words = ("--checkpoint", str(tmp_path / "a.pt"), "--every", "100")
    one = run("torch_resume.py", "--plan", str(tmp_path / "solo.toml"), *words, "--epochs", "1")
    two = run("torch_resume.py", "--plan", plan, *words, "--epochs", "2", world=2)
    said = re.findall(r"^epoch (\d): loss (0\.\d+) on (\d) devices$", one + two, re.MULTILINE)
    assert [(epoch, devices) for epoch, _, devices in said] == [("0", "1"), ("0", "2"), ("1", "2")]
    assert said[1][1] == said[0][1]


def test_the_recurrent_experiment_gives_its_table(run: Callable[..., str]) -> None:
    """One device and two unequal ones have the same accuracies, up to one in the last digit.

    The script uses float32. The two ranks, which it would start by torchrun, are forked.
    """
    words = [
        "--units",
        "8",
        "--layers",
        "1",
        "--dense",
        "8",
        "--epochs",
        "2",
        "--batches",
        "256",
        "--seeds",
        "2",
    ]
    name, imports = "torch_gru_digits.py", "sklearn.model_selection"
    column = run(name, "--column", *words, how="", world=2, imports=imports)
    table, said = run(
        name, *words, how="_beside_launched", given=[column], imports=imports
    ).splitlines()[-2:]
    cells = table.strip("|").split("|")
    assert cells[:2] == ["2", "256"]
    for one, two in zip(cells[2:4], cells[5:7], strict=True):
        assert float(two[:4]) == pytest.approx(float(one[:4]), abs=0.0101)
    assert re.fullmatch(r"0\.\d\d \(0\.\d\d–0\.\d\d\)", cells[2])
    assert said.startswith("Batch 256")
    assert said.count("is inside") == 2
